"""Responses, spoken by `openai`, with everything in the request: nothing is kept on the server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, ClassVar

import openai
from openai.types.responses import Response

from tests.contract.protocols.speakers.base import Failed, Heard, HeardCall, Results, Talk, User, What, Wishes


class ResponseFailed(Exception):
    """A stream ended with `response.failed`; this client hands that out as an event."""


class OpenAIResponses:
    """See `Speaker`."""

    protocol = "openai-responses"
    can: frozenset[What] = frozenset(("system", "tools", "thoughts", "images", "count"))
    path = "/v1/responses"
    body: ClassVar[dict[str, Any]] = {"model": "m", "input": "hi"}

    def __init__(self, root_url: str, api_key: str) -> None:
        self._client = openai.AsyncOpenAI(base_url=f"{root_url}/v1", api_key=api_key, max_retries=0)

    async def ask(self, talk: Talk, *, stream: bool, wishes: Wishes = Wishes()) -> Heard:  # noqa: B008 - frozen
        named = {"max_output_tokens": wishes.max_tokens, "temperature": wishes.temperature}
        values: dict[str, Any] = {
            **_prompt(talk),
            "store": False,
            "extra_body": dict(wishes.unknown),
            **{name: value for name, value in named.items() if value is not None},
        }
        if stream:
            return _heard(await self._streamed(values))
        return _heard(await self._client.responses.create(**values))

    async def _streamed(self, values: dict[str, Any]) -> Response:
        text = thoughts = arguments = ""
        async with self._client.responses.stream(**values) as events:
            async for event in events:
                if event.type == "response.output_text.delta":
                    text += event.delta
                elif event.type == "response.reasoning_text.delta":
                    thoughts += event.delta
                elif event.type == "response.function_call_arguments.delta":
                    arguments += event.delta
                elif event.type == "response.failed":
                    raise ResponseFailed(event.response.error)
                elif event.type in ("response.completed", "response.incomplete"):
                    calls = [item for item in event.response.output if item.type == "function_call"]
                    assert (text, thoughts) == (event.response.output_text, _thoughts(event.response))
                    assert arguments == "".join(call.arguments for call in calls)
                    return event.response  # type: ignore[return-value]
        raise AssertionError("the stream has no end")

    async def count(self, talk: Talk) -> int:
        return (await self._client.responses.input_tokens.count(**_prompt(talk))).input_tokens

    def failed(self, error: BaseException) -> Failed:
        if isinstance(error, ResponseFailed):
            (said,) = error.args
            return Failed(None, said.message, is_overflow=said.code == "context_length_exceeded")
        if not isinstance(error, openai.APIError):
            raise error
        response = error.response if isinstance(error, openai.APIStatusError) else None
        after = response.headers.get("retry-after") if response else None
        return Failed(
            status=response.status_code if response else None,
            text=f"{error.message} {error.body}",
            is_overflow=error.code == "context_length_exceeded",
            retry_after_s=None if after is None else float(after),
        )

    async def close(self) -> None:
        await self._client.close()


def _heard(answer: Response) -> Heard:
    calls = tuple(
        HeardCall(item.call_id, item.name, json.loads(item.arguments))
        for item in answer.output
        if item.type == "function_call"
    )
    assert answer.usage is not None
    assert answer.status in ("completed", "incomplete")
    if answer.status == "incomplete":
        assert answer.incomplete_details is not None
        assert answer.incomplete_details.reason == "max_output_tokens"
    return Heard(
        id=answer.id,
        text=answer.output_text,
        thoughts=_thoughts(answer),
        calls=calls,
        end="length" if answer.status == "incomplete" else "tools" if calls else "stop",
        prompt_tokens=answer.usage.input_tokens,
        output_tokens=answer.usage.output_tokens,
        raw=[item.model_dump(exclude_none=True) for item in answer.output],
    )


def _thoughts(answer: Any) -> str:
    parts = [part for item in answer.output if item.type == "reasoning" for part in item.content or ()]
    return "".join(part.text for part in parts)


def _prompt(talk: Talk) -> dict[str, Any]:
    values: dict[str, Any] = {"model": "some-model", "input": [*_items(talk)]}
    if talk.system is not None:
        values["instructions"] = talk.system
    if talk.tools:
        values["tools"] = [
            {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": dict(tool.parameters),
                "strict": False,
            }
            for tool in talk.tools
        ]
    return values


def _items(talk: Talk) -> Iterator[dict[str, Any]]:
    for turn in talk.turns:
        if isinstance(turn, User):
            parts: list[dict[str, Any]] = [{"type": "input_text", "text": turn.text}]
            if turn.image is not None:
                url = f"data:image/png;base64,{turn.image}"
                parts.append({"type": "input_image", "image_url": url, "detail": "auto"})
            yield {"role": "user", "content": parts}
        elif isinstance(turn, Results):
            for call, text in turn.results:
                yield {"type": "function_call_output", "call_id": call.id, "output": text}
        else:
            yield from turn.raw
