"""generateContent and streamGenerateContent, spoken by `google-genai`."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import aiohttp
from google import genai
from google.genai import errors, types

from tests.contract.protocols.speakers.base import Failed, Heard, HeardCall, Results, Talk, User, What, Wishes

_ENDS: dict[types.FinishReason, Literal["stop", "length"]] = {
    types.FinishReason.STOP: "stop",
    types.FinishReason.MAX_TOKENS: "length",
}


class GoogleGenerate:
    """See `Speaker`.

    Counting goes by `extra_body`: this client has no parameter for system and tools there, the protocol has. The session is given
    because the one that the client would make is of a class that aiohttp warns of.
    """

    protocol = "google-generate"
    can: frozenset[What] = frozenset(("system", "tools", "thoughts", "images", "stop", "count", "seed"))
    path = "/v1beta/models/m:generateContent"
    body: ClassVar[dict[str, Any]] = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}

    def __init__(self, root_url: str, api_key: str) -> None:
        self._http = aiohttp.ClientSession()
        options = types.HttpOptions(base_url=root_url, aiohttp_client=self._http)
        self._client = genai.Client(api_key=api_key, vertexai=False, http_options=options)

    async def ask(self, talk: Talk, *, stream: bool, wishes: Wishes = Wishes()) -> Heard:  # noqa: B008 - frozen
        config = types.GenerateContentConfig(
            system_instruction=talk.system,
            tools=[_tool(talk)] if talk.tools else None,
            max_output_tokens=wishes.max_tokens,
            temperature=wishes.temperature,
            stop_sequences=list(wishes.stop) or None,
            seed=wishes.seed,
            thinking_config=types.ThinkingConfig(include_thoughts=True),
            http_options=types.HttpOptions(extra_body=dict(wishes.unknown)),
        )
        asked: dict[str, Any] = {"model": "some-model", "contents": [*_contents(talk)], "config": config}
        if not stream:
            return _heard([await self._client.aio.models.generate_content(**asked)])
        return _heard([chunk async for chunk in await self._client.aio.models.generate_content_stream(**asked)])

    async def count(self, talk: Talk) -> int:
        whole: dict[str, Any] = {}
        if talk.system is not None:
            whole["systemInstruction"] = {"parts": [{"text": talk.system}]}
        if talk.tools:
            whole["tools"] = [_tool(talk).model_dump(mode="json", by_alias=True, exclude_none=True)]
        config = types.CountTokensConfig(http_options=types.HttpOptions(extra_body=whole))
        counted = await self._client.aio.models.count_tokens(
            model="some-model", contents=[*_contents(talk)], config=config
        )
        assert counted.total_tokens is not None
        return counted.total_tokens

    def failed(self, error: BaseException) -> Failed:
        if not isinstance(error, errors.APIError):
            raise error
        response: Any = error.response
        is_in_stream = getattr(response, "status", None) is None
        after = response.headers.get("retry-after")
        return Failed(
            status=None if is_in_stream else error.code,
            text=str(error),
            is_overflow=error.status == "INVALID_ARGUMENT"
            and "input token count exceeds the maximum number of tokens" in (error.message or ""),
            retry_after_s=None if after is None else float(after),
        )

    async def close(self) -> None:
        await self._client.aio.aclose()
        self._client.close()
        await self._http.close()


def _heard(chunks: list[types.GenerateContentResponse]) -> Heard:
    """All responses of an answer put together, as the client's own chat does it."""
    contents, end, usage, call_id = [], None, None, ""
    for chunk in chunks:
        (candidate,) = chunk.candidates or ()
        assert candidate.content is not None
        contents.append(candidate.content)
        end, usage, call_id = (
            candidate.finish_reason or end,
            chunk.usage_metadata or usage,
            chunk.response_id or call_id,
        )
    parts = [part for content in contents for part in content.parts or ()]
    calls = [part.function_call for part in parts if part.function_call]
    assert end is not None
    assert usage is not None
    reason: Literal["stop", "tools", "length"] = _ENDS[end]
    return Heard(
        id=call_id,
        text="".join(part.text or "" for part in parts if not part.thought),
        thoughts="".join(part.text or "" for part in parts if part.thought),
        calls=tuple(HeardCall(call.id or "", call.name or "", call.args) for call in calls),
        end="tools" if calls and reason == "stop" else reason,
        prompt_tokens=usage.prompt_token_count or 0,
        output_tokens=usage.candidates_token_count or 0,
        raw=contents,
    )


def _tool(talk: Talk) -> types.Tool:
    return types.Tool(
        function_declarations=[
            types.FunctionDeclaration(
                name=t.name, description=t.description, parameters_json_schema=dict(t.parameters)
            )
            for t in talk.tools
        ]
    )


def _contents(talk: Talk) -> Iterator[types.Content]:
    for turn in talk.turns:
        if isinstance(turn, User):
            parts = [types.Part(text=turn.text)]
            if turn.image is not None:
                parts.append(types.Part.from_bytes(data=base64.b64decode(turn.image), mime_type="image/png"))
            yield types.Content(role="user", parts=parts)
        elif isinstance(turn, Results):
            answers = [
                types.FunctionResponse(id=call.id, name=call.name, response={"output": text})
                for call, text in turn.results
            ]
            yield types.Content(role="user", parts=[types.Part(function_response=answer) for answer in answers])
        else:
            yield from turn.raw
