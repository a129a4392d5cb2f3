"""What Claude Code sends and how it fails, by hand over a socket: its shapes are wider than the official client's.

Source of the shapes: gateway.md §2.1, §2.2 of the design notes; the texts are made up.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from rollstream.schemas.prompts import decode_prompts
from rollstream.schemas.records import CallStarted, Outcome
from rollstream.schemas.types import unpack_ids
from tests.contract.protocols.world import World, served_world, until
from tests.scripted.engine import ScriptedEngine
from tests.scripted.plays import Play, tool_call

CACHED = {"cache_control": {"type": "ephemeral"}}
USER = {"role": "user", "content": [{"type": "text", "text": "Fix the bug.", **CACHED}]}
BASH = {
    "name": "Bash",
    "description": "Runs a command.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}
READ = {**BASH, "name": "Read", **CACHED}


def body(nonce: str, *messages: dict[str, Any], tools: Any = (BASH, READ), **values: Any) -> dict[str, Any]:
    billing = f"x-anthropic-billing-header: cc_version=2.1.197.{nonce}; cc_entrypoint=sdk-cli; cch={nonce};"
    return {
        "model": "claude-fable",
        "max_tokens": 32000,
        "messages": list(messages or (USER,)),
        "system": [
            {"type": "text", "text": billing},
            {"type": "text", "text": "You are an agent.", **CACHED},
            {"type": "text", "text": "Be careful.", **CACHED},
        ],
        "tools": list(tools),
        "metadata": {"user_id": json.dumps({"session_id": "one-for-all"})},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "stream": True,
        **values,
    }


@asynccontextmanager
async def claude_code(folder: Path, engine: ScriptedEngine, **settings: Any) -> AsyncIterator[tuple[World, Any]]:
    """Returns: the world, and a function that sends a body."""
    async with (
        served_world(folder, "anthropic-messages", engine, **settings) as world,
        httpx.AsyncClient(timeout=30) as http,
    ):
        headers = {
            "authorization": f"Bearer {world.api_key}",
            "anthropic-version": "2023-06-01",
            "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
            "x-claude-code-session-id": "one-for-all",
            "x-stainless-retry-count": "0",
            "user-agent": "claude-cli/2.1.197 (external, sdk-cli)",
        }

        async def send(values: dict[str, Any], path: str = "/v1/messages?beta=true") -> httpx.Response:
            return await http.post(world.root_url + path, json=values, headers=headers)

        yield world, send


async def test_request_of_claude_code_is_served(tmp_path: Path) -> None:
    """Beta query and headers, a bearer key, three system blocks, cache marks; its nonce is not in the prompt."""
    async with claude_code(tmp_path, ScriptedEngine(Play("done"))) as (world, send), httpx.AsyncClient() as http:
        alive = await http.head(world.root_url)
        answer = await send(body("3f1"))

        prompt = world.engine.requests[0].prompt
        assert (200, 200, 1) == (alive.status_code, answer.status_code, len(world.calls))
        assert answer.headers["request-id"] == world.call.call_id
        assert (True, False) == ("You are an agent.\nBe careful." in prompt, "x-anthropic-billing-header" in prompt)
        assert ("claude-fable", True) == (world.call.model_requested, world.call.trainable)
        assert "context_management" in json.loads(world.call.sampling_requested)


async def test_cut_stream_that_comes_again_without_stream_is_one_call(tmp_path: Path) -> None:
    """The retry counter stays 0 and the nonce moves; call, index and prompt are the same (row 11)."""
    engine = ScriptedEngine(Play("so far so good", chunk_tokens=1, waits_after=3, dies_after=3), Play("done"))
    async with claude_code(tmp_path, engine, keep_alive_s=0.01) as (world, send):
        call = asyncio.create_task(send(body("3f1")))
        await engine.is_waiting.wait()
        await until(lambda: len(world.sent) > 2)
        engine.go.set()
        cut = await call
        again = await send(body("9c2", stream=False))

        first, second = world.calls
        assert (200, 1, 0) == (cut.status_code, cut.text.count("event: error"), cut.text.count("message_stop"))
        assert ("done", "end_turn") == (again.json()["content"][0]["text"], again.json()["stop_reason"])
        assert (first.call_id, first.request_digest, 0, 1) == (
            second.call_id, second.request_digest, first.call_attempt, second.call_attempt,
        )  # fmt: skip
        assert (3, False, True) == (len(unpack_ids(first.output_ids)), first.trainable, second.trainable)
        assert engine.requests[0].prompt_ids == engine.requests[1].prompt_ids


async def test_sub_agents_on_one_session_id_are_calls_of_their_own(tmp_path: Path) -> None:
    """At once and interleaved; each prompt comes back from the records, and its continuation builds on its own past."""

    def plan(asked: Any) -> Play:
        return Play(f"{'main' if 'Fix' in asked.prompt else 'sub'} says {'b' if 'go on' in asked.prompt else 'a'}")

    sub = {"role": "user", "content": "Look around."}
    async with claude_code(tmp_path, ScriptedEngine(plan=plan)) as (world, send):

        async def twice(first: dict[str, Any], **values: Any) -> None:
            answer = (await send(body("1", first, stream=False, **values))).json()
            echo = {"role": "assistant", "content": answer["content"]}
            await send(body("2", first, echo, {"role": "user", "content": "go on"}, **values))

        await asyncio.gather(twice(USER), twice(sub, tools=[READ]))

        prompts, failed = decode_prompts(world.calls)
        by_id = {asked.request_id.rsplit("-", 1)[0]: asked.prompt_ids for asked in world.engine.requests}
        assert {} == failed
        assert by_id == {call_id: ids.tolist() for call_id, ids in prompts.items()}
        assert (4, {0}) == (len(by_id), {call.call_attempt for call in world.calls})
        followers = [call for call in world.calls if call.prompt.base_call_id]
        assert 2 <= len(followers)


async def test_reminder_within_the_list_does_not_move_the_head(tmp_path: Path) -> None:
    """The next prompt has the last one and its answer as its first ids, and says so by its delta (row 12)."""
    async with claude_code(tmp_path, ScriptedEngine(Play("first"), Play("second"))) as (world, send):
        answer = (await send(body("1", stream=False))).json()
        echo = {"role": "assistant", "content": answer["content"]}
        reminder = {"role": "system", "content": "Remember the plan."}
        moved = {"role": "user", "content": [{"type": "text", "text": "Fix the bug."}]}
        await send(body("2", moved, echo, reminder, {"role": "user", "content": "go on"}))

        first, second = world.engine.requests
        sampled = unpack_ids(world.calls[0].output_ids).tolist()
        head = [*first.prompt_ids, *sampled]
        assert head == second.prompt_ids[: len(head)]
        assert (world.calls[0].call_id, len(head)) == (
            world.calls[1].prompt.base_call_id,
            world.calls[1].prompt.base_len,
        )
        assert -1 < second.prompt.find("Fix the bug.") < second.prompt.find("Remember the plan.")


async def test_failed_tool_is_shown_to_the_model_as_failed(tmp_path: Path) -> None:
    """Two tools at once; the client's ids are taken as they come (row 23)."""
    both = tool_call("Bash", '{"command": "ls"}') + "\n" + tool_call("Read", '{"command": "x"}')
    async with claude_code(tmp_path, ScriptedEngine(Play(both), Play("ok"))) as (world, send):
        answer = (await send(body("1", stream=False))).json()
        calls = [block for block in answer["content"] if block["type"] == "tool_use"]
        echo = {"role": "assistant", "content": [{**block, "id": f"x{at}"} for at, block in enumerate(calls)]}
        results = [
            {"type": "tool_result", "tool_use_id": "x0", "content": "a.py", "is_error": False},
            {"type": "tool_result", "tool_use_id": "x1", "content": "no such file", "is_error": True, **CACHED},
            {"type": "text", "text": "<system-reminder>be brief</system-reminder>"},
        ]
        again = await send(body("2", USER, echo, {"role": "user", "content": results}))

        prompt = world.engine.requests[1].prompt
        assert ("tool_use", 2, 200) == (answer["stop_reason"], len(calls), again.status_code)
        assert -1 < prompt.find("a.py") < prompt.find("Error: no such file") < prompt.find("be brief")


async def test_slow_answer_begins_with_the_message_and_goes_on_with_pings(tmp_path: Path) -> None:
    """Its idle timeout does not end a long thought; the intent is in the log before the first byte."""
    engine = ScriptedEngine(Play("late", waits_after=0))
    async with claude_code(tmp_path, engine, keep_alive_s=0.01) as (world, send):
        call = asyncio.create_task(send(body("1")))
        await engine.is_waiting.wait()
        await until(lambda: len(world.sent) > 3)
        intents = [record for record in world.publisher.records if isinstance(record, CallStarted)]
        engine.go.set()
        lines = (await call).text.split("\n")

        names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
        pings = names.count("ping")
        assert [world.call.call_id] == [record.call_id for record in intents]
        assert pings > 2
        assert ["message_start", *["ping"] * pings, "content_block_start"] == names[: pings + 2]
        assert ["content_block_delta", "content_block_stop", "message_delta", "message_stop"] == names[pings + 2 :]


@pytest.mark.parametrize("stream", [False, True])
async def test_abort_is_an_overload_with_a_time_to_come_again(tmp_path: Path, stream: bool) -> None:
    """The engine says 200 and part of an answer; that is no end of a turn (row 14)."""
    engine = ScriptedEngine(Play("The answer", ids=[5, 6], reason="abort"))
    async with claude_code(tmp_path, engine) as (world, send):
        answer = await send(body("1", stream=stream))

        assert (529, "overloaded_error") == (answer.status_code, answer.json()["error"]["type"])
        assert int(answer.headers["retry-after"]) > 0
        assert Outcome.ABORTED == world.call.outcome


async def test_overflow_names_both_numbers(tmp_path: Path) -> None:
    """The words by which compaction starts (row 30); to count such a prompt is no error."""
    async with claude_code(tmp_path, ScriptedEngine(max_context_tokens=16)) as (world, send):
        answer = await send(body("1"))
        asked = {name: value for name, value in body("1").items() if name in ("model", "messages", "system", "tools")}
        counted = (await send(asked, "/v1/messages/count_tokens?beta=true")).json()["input_tokens"]

        assert 400 == answer.status_code
        assert f"prompt is too long: {counted} tokens > 16 maximum" == answer.json()["error"]["message"]
        assert (1, counted) == (len(world.calls), world.call.prompt.length)


async def test_models_and_unknown_paths_are_answered_to_whoever_asks(tmp_path: Path) -> None:
    """One path, two protocols: each official client reads its own list, and its own 404."""
    async with claude_code(tmp_path, ScriptedEngine()) as (world, send):
        async with anthropic.AsyncAnthropic(base_url=world.root_url, api_key=world.api_key, max_retries=0) as client:
            page = await client.models.list()
            model = await client.models.retrieve("claude-fable")
        async with openai.AsyncOpenAI(base_url=f"{world.root_url}/v1", api_key=world.api_key) as other:
            listed = await other.models.list()
        missing = await send({}, "/v1/messages/batches")

        assert [one.id for one in listed.data] == [one.id for one in page.data]
        assert ("claude-fable", "model") == (model.id, model.type)
        assert (404, "not_found_error") == (missing.status_code, missing.json()["error"]["type"])
