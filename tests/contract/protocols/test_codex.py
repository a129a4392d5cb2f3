"""What Codex sends and how it fails, by hand over a socket: its shapes are wider than the official client's.

Source of the shapes: requests of Codex 0.171; gateway.md §2.1, §2.2 of the design notes. The texts are made up.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollstream.schemas.prompts import decode_prompts
from rollstream.schemas.records import Outcome
from rollstream.schemas.types import unpack_ids
from tests.contract.protocols.world import World, served_world, until
from tests.scripted.engine import ScriptedEngine
from tests.scripted.plays import Asked, Play, thought, tool_call

Item = dict[str, Any]
Send = Callable[[dict[str, Any]], Awaitable[list[Item]]]

EXEC = {
    "type": "function", "name": "exec_command", "description": "Runs a command.", "strict": False,
    "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]},
}  # fmt: skip
WAIT = {"type": "function", "name": "wait_agent", "parameters": {"type": "object", "properties": {}}, "strict": False}
PATCH = {
    "type": "custom", "name": "apply_patch", "description": "Patches files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: begin"},
}  # fmt: skip
TOOLS = (
    EXEC,
    {"type": "namespace", "name": "multi_agent_v1", "description": "Agents.", "tools": [WAIT]},
    PATCH,
    {"type": "web_search", "external_web_access": False},
)


def message(role: str, text: str, name: str) -> Item:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "id": f"msg_{name}", "role": role, "content": [{"type": kind, "text": text}]}


HEAD = (message("developer", "You are a coding agent.", "1"), message("developer", "Skills: none.", "2"))
TASK = message("user", "Fix it.", "3")


def body(*items: Item, tools: Any = TOOLS, turn: str = "turn-1") -> dict[str, Any]:
    return {
        "model": "gpt-6", "input": [*HEAD, *items], "tools": list(tools), "tool_choice": "auto", "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"}, "store": False, "stream": True, "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "one-for-all", "client_metadata": {"x-codex-turn-metadata": turn},
    }  # fmt: skip


def echo(item: Item) -> Item:
    """An item as Codex sends it back: a thought without its text, everything else as it came and without its status."""
    if item["type"] == "reasoning":
        return {**item, "content": None}
    return {name: value for name, value in item.items() if name != "status"}


def result(item: Item, text: str) -> Item:
    kind = item["type"].replace("_call", "_call_output")
    return {"type": kind, "call_id": item["call_id"], "output": text}


class Failed(Exception):
    """The stream ended with this response."""


def _items(text: str) -> list[Item]:
    """What Codex reads of a stream: items as they are done, and an end, without which it tries again."""
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    if events[-1]["type"] != "response.completed":
        raise Failed(events[-1]["response"])
    return [event["item"] for event in events if event["type"] == "response.output_item.done"]


@asynccontextmanager
async def codex(folder: Path, engine: ScriptedEngine, **more: Any) -> AsyncIterator[tuple[World, Send]]:
    """Returns: the world, and a function that sends a body and reads the answer as Codex does."""
    async with (
        served_world(folder, "openai-responses", engine, **more) as world,
        httpx.AsyncClient(timeout=30) as http,
    ):

        async def send(values: dict[str, Any]) -> list[Item]:
            headers = {"authorization": f"Bearer {world.api_key}", "session-id": "one-for-all"}
            answer = await http.post(f"{world.root_url}/v1/responses", json=values, headers=headers)
            assert 200 == answer.status_code, answer.text
            return _items(answer.text)

        yield world, send


async def test_each_kind_of_tool_is_called_and_answered(tmp_path: Path) -> None:
    """A function, one of a namespace and a custom one in one answer; the next prompt holds them as they were sampled."""
    odd = '{"cmd":  "echo caf\\u00e9"}'
    sampled = thought("I run three.") + "\n".join(
        (
            "So: " + tool_call("exec_command", odd),
            tool_call("multi_agent_v1__wait_agent", "{}"),
            tool_call("apply_patch", '{"input": "*** Begin Patch"}'),
        )
    )
    engine = ScriptedEngine(Play(sampled), Play("Done."))
    async with codex(tmp_path, engine) as (world, send):
        first = await send(body(TASK))
        results = [result(item, f"result {at}") for at, item in enumerate(first[2:])]
        (last,) = await send(body(TASK, *map(echo, first), *results, turn="turn-2"))

        assert ["reasoning", "message", "function_call", "function_call", "custom_tool_call"] == [
            i["type"] for i in first
        ]
        assert [("exec_command", None), ("wait_agent", "multi_agent_v1"), ("apply_patch", None)] == [
            (item["name"], item.get("namespace")) for item in first[2:]
        ]
        assert (odd, "*** Begin Patch", "Done.") == (
            first[2]["arguments"],
            first[4]["input"],
            last["content"][0]["text"],
        )
        answer, *tool_messages = world.engine.rendered[-1]["messages"][3:]
        assert ("I run three.", odd) == (
            answer["reasoning_content"],
            answer["tool_calls"][0]["function"]["arguments"],
        )
        assert [f"result {at}" for at in range(3)] == [one["content"] for one in tool_messages]
        assert [call["id"] for call in answer["tool_calls"]] == [one["tool_call_id"] for one in tool_messages]
        prompts, failed = decode_prompts(world.calls)
        assert {} == failed
        assert [asked.prompt_ids for asked in engine.requests] == [
            prompts[call.call_id].tolist() for call in world.calls
        ]
        assert [*engine.tongue.encode(sampled), engine.tongue.end_id] == unpack_ids(
            world.calls[0].output_ids
        ).tolist()
        assert {"web_search"} == {
            kind for call in world.calls for kind in json.loads(call.sampling_requested)["tools"]
        }
        assert all(call.trainable for call in world.calls)


async def test_failed_stream_is_tried_again_as_the_same_call(tmp_path: Path) -> None:
    """Codex sends the same bytes again and no mark of it: one call, two attempts (verifiers#1756)."""
    engine = ScriptedEngine(Play("The answer.", chunk_tokens=2, waits_after=1, fails_after=1), Play("whole"))
    async with codex(tmp_path, engine, keep_alive_s=0.01) as (world, send):
        failing = asyncio.create_task(send(body(TASK)))
        await engine.is_waiting.wait()
        await until(lambda: len(world.sent) > 3)
        engine.go.set()
        with pytest.raises(Failed) as failed:
            await failing
        (item,) = await send(body(TASK))

        cut, whole = world.calls
        assert ("server_error", "failed") == (failed.value.args[0]["error"]["code"], failed.value.args[0]["status"])
        assert ("whole", cut.call_id, 0, 1) == (
            item["content"][0]["text"], whole.call_id, cut.call_attempt, whole.call_attempt,
        )  # fmt: skip
        assert (Outcome.UPSTREAM_ERROR, False, True) == (cut.outcome, cut.trainable, whole.trainable)


async def test_sub_agents_on_one_session_build_on_their_own_calls(tmp_path: Path) -> None:
    """Two agents take turns under one session id; each prompt is written against the tail that it goes on from."""

    def plan(asked: Asked) -> Play:
        return Play(("A" if "exec_command" in asked.prompt else "B") + str(len(engine.requests)))

    engine = ScriptedEngine(plan=plan)
    async with codex(tmp_path, engine) as (world, send):
        talks: dict[str, list[Item]] = {"A": [TASK], "B": [TASK]}
        tools = {"A": (EXEC,), "B": (PATCH,)}
        for _ in range(3):
            answers = await asyncio.gather(*(send(body(*talks[who], tools=tools[who])) for who in talks))
            for who, answer in zip(talks, answers, strict=True):
                assert answer[0]["content"][0]["text"].startswith(who)
                talks[who] += [*map(echo, answer), message("user", "Go on.", who)]

        agents = {"A": "", "B": ""}
        for call in sorted(world.calls, key=lambda one: one.call_index):
            who = json.loads(call.message)["content"][0]
            assert agents[who] == (call.prompt.base_call_id or "")
            agents[who] = call.call_id
        assert {} == decode_prompts(world.calls)[1]


async def test_cut_tool_call_is_never_run(tmp_path: Path) -> None:
    """Codex runs a call when its item is done: what the limit cut has no such item, and the response is incomplete."""
    engine = ScriptedEngine(Play(tool_call("exec_command", '{"cmd": "rm -r build"}')))
    async with codex(tmp_path, engine) as (world, send):
        with pytest.raises(Failed) as failed:
            await send({**body(TASK), "max_output_tokens": 12})

        response = failed.value.args[0]
        assert ("incomplete", "max_output_tokens") == (response["status"], response["incomplete_details"]["reason"])
        assert ["message"] == [item["type"] for item in response["output"]]
        assert (Outcome.LENGTH, True) == (world.call.outcome, world.call.trainable)
