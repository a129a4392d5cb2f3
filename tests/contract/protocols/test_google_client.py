"""What only Google's protocol has, over HTTP: the official client's chat and models, and streams read by hand."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from google import genai
from google.genai import errors, types

from rollstream.schemas.records import Outcome
from tests.contract.protocols.world import World, served_world, until
from tests.scripted.engine import ScriptedEngine
from tests.scripted.plays import Play, thought, tool_call

HI = {"contents": [{"parts": [{"text": "hi"}]}]}
ADD = types.FunctionDeclaration(
    name="add",
    parameters=types.Schema(type=types.Type.OBJECT, properties={"a": types.Schema(type=types.Type.INTEGER)}),
)


def official(world: World, http: aiohttp.ClientSession, **options: Any) -> genai.Client:
    return genai.Client(
        api_key=world.api_key,
        vertexai=False,
        http_options=types.HttpOptions(base_url=world.root_url, aiohttp_client=http, **options),
    )


async def post(world: World, http: aiohttp.ClientSession, path: str, body: Any) -> tuple[int, str, Any]:
    """Status, content type and JSON of an answer to a request by hand."""
    headers = {"x-goog-api-key": world.api_key}
    async with http.post(f"{world.root_url}{path}", json=body, headers=headers) as answer:
        return answer.status, answer.content_type, json.loads(await answer.text())


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
async def test_chat_of_the_official_client_sends_one_content_for_each_answer(tmp_path: Path, stream: bool) -> None:
    """It keeps every response of a stream as a content of its own; an answer in pieces would be several in the next prompt."""
    first = thought("hm") + "I add. " + tool_call("add", '{"a": 1}')
    async with (
        served_world(tmp_path, "google-generate", ScriptedEngine(Play(first), Play("2"))) as world,
        aiohttp.ClientSession() as http,
    ):
        config = types.GenerateContentConfig(
            tools=[types.Tool(function_declarations=[ADD])],
            thinking_config=types.ThinkingConfig(include_thoughts=True),
        )
        chat = official(world, http).aio.chats.create(model="m", config=config)
        result = types.Part.from_function_response(name="add", response={"output": "2"})
        for message in ("hi", result):
            if stream:
                async for _ in await chat.send_message_stream(message):
                    pass
            else:
                await chat.send_message(message)

        roles = [message["role"] for message in world.engine.rendered[-1]["messages"]]
        assert ["user", "assistant", "tool"] == roles
        answer, response = world.engine.rendered[-1]["messages"][1:]
        assert ("I add. ", "hm") == (answer["content"], answer["reasoning_content"])
        assert answer["tool_calls"][0]["id"] == response["tool_call_id"]
        (tool,) = world.engine.rendered[-1]["tools"]
        assert {"type": "object", "properties": {"a": {"type": "integer"}}} == tool["function"]["parameters"]


@pytest.mark.parametrize("version", ["v1beta", "v1"])
async def test_models_and_calls_are_there_in_each_version(tmp_path: Path, version: str) -> None:
    """The list, one model whatever its name, and a call of a model whose name has a slash."""
    async with served_world(tmp_path, "google-generate") as world, aiohttp.ClientSession() as http:
        models = official(world, http, api_version=version).aio.models
        listed = [model.name async for model in await models.list()]
        one = await models.get(model="org/gemini-x")
        await models.generate_content(model="org/gemini-x", contents="hi")

        assert (["models/policy"], "models/org/gemini-x") == (listed, one.name)
        assert ("org/gemini-x", "google-generate") == (world.call.model_requested, world.call.protocol)


async def test_what_is_not_served_is_an_error_of_googles(tmp_path: Path) -> None:
    """The official client shows status and message."""
    async with served_world(tmp_path, "google-generate") as world, aiohttp.ClientSession() as http:
        with pytest.raises(errors.ClientError) as found:
            await official(world, http).aio.models.embed_content(model="m", contents="hi")

        assert found.value.status in ("NOT_FOUND", "INVALID_ARGUMENT")
        assert "is not served here" in (found.value.message or "")


async def test_stream_without_alt_is_one_array_with_space_in_it(tmp_path: Path) -> None:
    """What a request by hand gets; signs of life do not break it."""
    engine = ScriptedEngine(Play("late", waits_after=0))
    async with (
        served_world(tmp_path, "google-generate", engine, keep_alive_s=0.01) as world,
        aiohttp.ClientSession() as http,
    ):
        call = asyncio.create_task(post(world, http, "/v1beta/models/m:streamGenerateContent", HI))
        await engine.is_waiting.wait()
        await until(lambda: len(world.sent) > 2)
        engine.go.set()
        status, kind, (answer,) = await call

        assert (200, "application/json", world.call.call_id) == (status, kind, answer["responseId"])
        assert "late" == answer["candidates"][0]["content"]["parts"][0]["text"]


@pytest.mark.parametrize("alt", ["json", "sse"])
async def test_engine_that_fails_within_a_stream_leaves_an_error_object(tmp_path: Path, alt: str) -> None:
    """In the array it is the last element; as an event it stands alone between blank lines."""
    engine = ScriptedEngine(Play("The answer", waits_after=1, fails_after=1, chunk_tokens=2))
    async with (
        served_world(tmp_path, "google-generate", engine, keep_alive_s=0.01) as world,
        aiohttp.ClientSession() as http,
    ):
        call = asyncio.create_task(post(world, http, f"/v1beta/models/m:streamGenerateContent?alt={alt}", HI))
        await engine.is_waiting.wait()
        await until(lambda: len(world.sent) > 2)
        engine.go.set()
        status, _, answer = await call

        error = (answer[-1] if alt == "json" else answer)["error"]
        assert (200, 502, "INTERNAL") == (status, error["code"], error["status"])
        assert Outcome.UPSTREAM_ERROR == world.call.outcome


async def test_error_before_a_stream_has_its_status(tmp_path: Path) -> None:
    """A stream that has not begun is refused as a plain call is."""
    async with served_world(tmp_path, "google-generate") as world, aiohttp.ClientSession() as http:
        status, kind, answer = await post(world, http, "/v1beta/models/m:streamGenerateContent?alt=sse", {})

        assert (400, "application/json", "INVALID_ARGUMENT") == (status, kind, answer["error"]["status"])
