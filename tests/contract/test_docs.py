"""The docs are true: their code runs, their queries bind, their links and commands exist."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import create_autospec

import click
import pytest

from rollstream.cli import cli
from rollstream.schemas.topics import topics
from rollstream.trainers import SampleGroup, SampleReader
from tests.contract.checkout import FOLDERS, ROOT
from tests.unit.trainers.samples import make_group

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
README = (ROOT / "README.md").read_text("utf-8")


def _blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_readme_shows_picture_commands_and_code_by_line_40() -> None:
    """A newcomer has seen the idea, both commands and the code on the first screen."""
    first_screen = "\n".join(README.splitlines()[:40])

    assert "▶" in first_screen
    assert "make demo" in first_screen
    assert "make test" in first_screen
    assert len(_blocks(first_screen, "python")) == 1


@pytest.fixture
def gateway() -> Iterator[tuple[str, list[tuple[str, dict[str, object]]]]]:
    """A stand-in for the gateway that remembers what it was sent; its address and the requests."""
    seen: list[tuple[str, dict[str, object]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            seen.append((self.path, body))
            if self.path == "/rollouts":
                base = f"http://127.0.0.1:{server.server_port}/r/r-1/a/0"
                names = {"rollout_id": "r-1", "attempt": 0, "group_id": body["group_id"]}
                self._answer(201, {**names, "base_url": f"{base}/v1", "api_key": "rs-key"})
            elif self.path.endswith("/v1/chat/completions"):
                message = {"role": "assistant", "content": "42"}
                choice = {"index": 0, "finish_reason": "stop", "message": message}
                answer = {
                    "id": "c-1",
                    "object": "chat.completion",
                    "created": 0,
                    "model": "policy",
                    "choices": [choice],
                }
                self._answer(200, answer)
            else:
                self._answer(200, {})

        def _answer(self, status: int, body: dict[str, object]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", seen
    server.shutdown()
    thread.join()
    server.server_close()


def test_readme_first_code_runs(gateway: tuple[str, list[tuple[str, dict[str, object]]]]) -> None:
    """The dozen lines open four rollouts of one group, call the model in each, and finish them."""
    address, seen = gateway
    code = _blocks(README, "python")[0].replace("http://127.0.0.1:8600", address)

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)

    assert done.returncode == 0, done.stderr
    turn = ["/rollouts", "/r/r-1/a/0/v1/chat/completions", "/r/r-1/a/0/finish"]
    assert [path for path, _ in seen] == turn * 4
    assert len({body["group_id"] for path, body in seen if path == "/rollouts"}) == 1
    finished = next(body for path, body in seen if path.endswith("/finish"))
    assert (finished["status"], finished["outcome"]) == ("succeeded", {"reward": 1.0})


def test_readme_trainer_code_calls_the_reader_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's lines pass arguments that `SampleReader` and its methods take, and record every step."""
    reader = create_autospec(SampleReader)
    reader.return_value.__enter__.return_value = reader.return_value
    *samples, built = make_group("g")
    reader.return_value.next_groups.return_value = [SampleGroup(built, tuple(samples))]  # type: ignore[arg-type]
    monkeypatch.setattr("rollstream.trainers.SampleReader", reader)

    exec(_blocks(README, "python")[1], {})

    assert reader.return_value.record_step.call_count == 100


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_in_the_docs_compiles_and_its_imports_exist(page: Path) -> None:
    """No snippet names something that was renamed."""
    for block in _blocks(page.read_text("utf-8"), "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rollstream"):
                module = importlib.import_module(str(node.module))
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


def test_queries_in_the_readme_run(tmp_path: Path) -> None:
    """Every query names tables and columns that a sink makes, and ClickHouse accepts it."""
    queries = [q.strip() for block in _blocks(README, "sql") for q in block.split(";\n") if q.strip()]
    code = (
        "import json, sys; from rollstream.sinks.connect import connect\n"
        f"client = connect('chdb://{tmp_path}/clickhouse')\n"
        "for query in json.load(sys.stdin): client.query(query)"
    )

    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(queries),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )

    assert len(queries) >= 4
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    """A relative link names a file of the checkout."""
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text("utf-8"))

    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_the_docs_exist(page: Path) -> None:
    """Every `rollstream ...` and `make ...` in the docs names a command or target."""
    text = page.read_text("utf-8")
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))

    assert set(re.findall(r"\bmake ([a-z]+)\b(?=[`\s])", "\n".join(_commands(text)))) - targets == set()
    for line in _commands(text):
        for words in re.findall(r"(?:^|`)rollstream((?: [a-z]+)+)", line):
            _find(words.split())


def _commands(text: str) -> list[str]:
    """What is written as code: inline, and in shell blocks."""
    inline = re.findall(r"`[^`\n]+`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    return [*inline, *(line for block in _blocks(text, "sh") for line in block.splitlines())]


def _find(words: list[str]) -> None:
    command: click.Command = cli
    for word in words:
        if not isinstance(command, click.Group):
            return  # arguments
        assert word in command.commands, words
        command = command.commands[word]


def test_readme_lists_every_command() -> None:
    """The table of commands is complete but for maintainers' own."""
    shown = set(re.findall(r"`rollstream ([a-z]+)", README))

    assert set(cli.commands) == shown


def test_readme_lists_every_folder() -> None:
    """The table names each package folder."""
    section = README.partition("## Folders")[2].partition("\n## ")[0]
    shown = set(re.findall(r"^\| `([a-z]+)/`", section, re.MULTILINE))

    assert set(FOLDERS) <= shown
    assert [name for name in shown if not (ROOT / name).is_dir()] == []


def test_architecture_names_every_topic_and_its_records() -> None:
    """The table of topics agrees with the topic files."""
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    table: dict[str, list[str]] = {}
    for nouns, records in re.findall(
        r"^\| ([a-z, -]+) \| ((?:[A-Z][A-Za-z]+(?:, then |, )?)+) \|$", text, re.MULTILINE
    ):
        found = re.split(r", then |, ", records)
        split = nouns.split(", ")
        for index, noun in enumerate(split):
            table[noun] = found if len(split) == 1 else [found[index]]

    expected = {
        topic.noun: ["".join(part.capitalize() for part in name.split("_")) for name in topic.records]
        for topic in topics().values()
    }
    assert expected == table
