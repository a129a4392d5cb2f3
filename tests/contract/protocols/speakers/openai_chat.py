"""Chat Completions, spoken by `openai`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import openai

from tests.contract.protocols.speakers.base import Failed, Heard, HeardCall, Results, Talk, User, What, Wishes

_ENDS: dict[str, Literal["stop", "tools", "length"]] = {"stop": "stop", "tool_calls": "tools", "length": "length"}


class OpenAIChat:
    """See `Speaker`."""

    protocol = "openai-chat"
    can: frozenset[What] = frozenset(("system", "tools", "thoughts", "images", "stop", "seed"))
    path = "/v1/chat/completions"
    body: ClassVar[dict[str, Any]] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}

    def __init__(self, root_url: str, api_key: str) -> None:
        self._client = openai.AsyncOpenAI(base_url=f"{root_url}/v1", api_key=api_key, max_retries=0)

    async def ask(self, talk: Talk, *, stream: bool, wishes: Wishes = Wishes()) -> Heard:  # noqa: B008 - frozen
        values: dict[str, Any] = {
            "model": "some-model",
            "messages": [*_messages(talk)],
            "extra_body": dict(wishes.unknown),
        }
        if talk.tools:
            values["tools"] = [
                {
                    "type": "function",
                    "function": {"name": t.name, "description": t.description, "parameters": dict(t.parameters)},
                }
                for t in talk.tools
            ]
        named = {"max_tokens": wishes.max_tokens, "temperature": wishes.temperature, "seed": wishes.seed}
        values |= {name: value for name, value in named.items() if value is not None}
        if wishes.stop:
            values["stop"] = list(wishes.stop)
        if stream:
            return await self._streamed(values)
        answer = await self._client.chat.completions.create(**values)
        (choice,) = answer.choices
        message = choice.message
        assert answer.usage is not None
        return Heard(
            id=answer.id,
            text=message.content or "",
            thoughts=getattr(message, "reasoning_content", None) or "",
            calls=tuple(
                HeardCall(call.id, call.function.name, json.loads(call.function.arguments))
                for call in message.tool_calls or ()
                if call.type == "function"
            ),
            end=_ENDS[choice.finish_reason],
            prompt_tokens=answer.usage.prompt_tokens,
            output_tokens=answer.usage.completion_tokens,
            raw=message.model_dump(exclude_none=True),
        )

    async def _streamed(self, values: dict[str, Any]) -> Heard:
        answer = await self._client.chat.completions.create(
            **values, stream=True, stream_options={"include_usage": True}
        )
        message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
        call_id, end, usage = "", None, None
        async for chunk in answer:
            call_id, usage = chunk.id, chunk.usage or usage
            for choice in chunk.choices:
                end = choice.finish_reason or end
                message["content"] += choice.delta.content or ""
                message["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
                for part in choice.delta.tool_calls or ():
                    assert part.function is not None
                    if part.index == len(message["tool_calls"]):
                        head = {"name": part.function.name, "arguments": ""}
                        message["tool_calls"].append({"id": part.id, "type": "function", "function": head})
                    message["tool_calls"][part.index]["function"]["arguments"] += part.function.arguments or ""
        assert end is not None
        assert usage is not None
        return Heard(
            id=call_id,
            text=message["content"],
            thoughts=message["reasoning_content"],
            calls=tuple(
                HeardCall(call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
                for call in message["tool_calls"]
            ),
            end=_ENDS[end],
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            raw={name: value for name, value in message.items() if value},
        )

    async def count(self, talk: Talk) -> int:
        raise AssertionError("this protocol does not count")

    def failed(self, error: BaseException) -> Failed:
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


def _messages(talk: Talk) -> Iterator[dict[str, Any]]:
    if talk.system is not None:
        yield {"role": "system", "content": talk.system}
    for turn in talk.turns:
        if isinstance(turn, User):
            parts: list[dict[str, Any]] = [{"type": "text", "text": turn.text}]
            if turn.image is not None:
                parts.append({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{turn.image}"}})
            yield {"role": "user", "content": turn.text if turn.image is None else parts}
        elif isinstance(turn, Results):
            for call, text in turn.results:
                yield {"role": "tool", "tool_call_id": call.id, "content": text}
        else:
            yield turn.raw
