"""The command line, without a broker."""

from __future__ import annotations

import subprocess
import sys

from click.testing import CliRunner

from rollstream.cli import cli
from rollstream.schemas.topics import topics


def test_topics_list_names_every_topic() -> None:
    """Each topic has a line with its key and owner."""
    result = CliRunner().invoke(cli, ["topics", "list"])

    assert result.exit_code == 0
    assert all(topic.name() in result.output for topic in topics().values())


def test_schemas_write_leaves_unchanged_records_alone(tmp_path) -> None:
    """A first write makes version 1 of everything; a second one writes nothing."""
    first = CliRunner().invoke(cli, ["schemas", "write", str(tmp_path)])
    second = CliRunner().invoke(cli, ["schemas", "write", str(tmp_path)])

    assert "wrote model_call.v1.avsc" in first.output
    assert second.output == ""


def test_our_errors_are_one_line_and_exit_code_two() -> None:
    """A wrong setting ends the command with a sentence, not with a traceback."""
    done = subprocess.run(
        [sys.executable, "-m", "rollstream", "topics", "list"],
        env={"ROLLSTREAM_KAFKA__PARTITIONS": "0"},
        capture_output=True,
        text=True,
    )

    assert done.returncode == 2
    assert done.stderr.startswith("rollstream: setting kafka.partitions")
    assert len(done.stderr.splitlines()) == 1


def test_sql_prints_rows_with_a_header(tmp_path) -> None:
    """A query over a store prints tab-separated rows; a store that is not there is named."""
    store = f"chdb://{tmp_path / 'store'}"
    code = f"from rollstream.sinks.connect import connect; connect({store!r})"
    subprocess.run([sys.executable, "-c", code], check=True)

    done = subprocess.run(
        [sys.executable, "-m", "rollstream", "sql", "SELECT 1 AS a, count() AS b FROM rollouts;", "--store", store],
        capture_output=True,
        text=True,
    )
    missing = subprocess.run(
        [sys.executable, "-m", "rollstream", "sql", "SELECT 1", "--store", f"chdb://{tmp_path / 'no'}"],
        capture_output=True,
        text=True,
    )

    assert (done.stdout, done.stderr) == ("a\tb\n1\t0\n", "")
    assert (missing.returncode, "there is no such folder" in missing.stderr) == (2, True)


def test_command_without_a_broker_says_so_in_one_line() -> None:
    """Nothing that needs Kafka fills the terminal when no broker answers."""
    done = subprocess.run(
        [sys.executable, "-m", "rollstream", "topics", "apply"],
        env={"ROLLSTREAM_KAFKA__BOOTSTRAP": "127.0.0.1:1"},
        capture_output=True,
        text=True,
    )

    assert done.returncode == 2
    assert "no Kafka broker answers at kafka.bootstrap='127.0.0.1:1'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_explain_refuses_a_token_that_is_no_number() -> None:
    """The position after the colon must be a number."""
    result = CliRunner().invoke(cli, ["explain", "abc:first"])

    assert result.exit_code == 2
    assert "is no token position" in result.output
