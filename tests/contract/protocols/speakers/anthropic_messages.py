"""Messages, spoken by `anthropic`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import anthropic

from tests.contract.protocols.speakers.base import Failed, Heard, HeardCall, Results, Talk, User, What, Wishes

_ENDS: dict[str, Literal["stop", "tools", "length", "stop_string"]] = {
    "end_turn": "stop",
    "tool_use": "tools",
    "max_tokens": "length",
    "stop_sequence": "stop_string",
}


class AnthropicMessages:
    """See `Speaker`."""

    protocol = "anthropic-messages"
    can: frozenset[What] = frozenset(("system", "tools", "thoughts", "images", "stop", "count"))
    path = "/v1/messages"
    body: ClassVar[dict[str, Any]] = {
        "model": "m",
        "max_tokens": 64,
        "messages": [{"role": "user", "content": "hi"}],
    }

    def __init__(self, root_url: str, api_key: str) -> None:
        self._client = anthropic.AsyncAnthropic(base_url=root_url, api_key=api_key, max_retries=0)

    async def ask(self, talk: Talk, *, stream: bool, wishes: Wishes = Wishes()) -> Heard:  # noqa: B008 - frozen
        values: dict[str, Any] = {
            **_asked(talk),
            "max_tokens": wishes.max_tokens or 1024,
            "extra_body": dict(wishes.unknown),
        }
        if wishes.temperature is not None:
            values["extra_body"]["temperature"] = wishes.temperature
        if wishes.stop:
            values["stop_sequences"] = list(wishes.stop)
        if stream:
            async with self._client.messages.stream(**values) as events:
                message: Any = await events.get_final_message()
        else:
            message = await self._client.messages.create(**values)
        return Heard(
            id=message.id,
            text="".join(block.text for block in message.content if block.type == "text"),
            thoughts="".join(block.thinking for block in message.content if block.type == "thinking"),
            calls=tuple(
                HeardCall(block.id, block.name, block.input) for block in message.content if block.type == "tool_use"
            ),
            end=_ENDS[message.stop_reason],
            prompt_tokens=message.usage.input_tokens,
            output_tokens=message.usage.output_tokens,
            raw=message.to_param(),
        )

    async def count(self, talk: Talk) -> int:
        return (await self._client.messages.count_tokens(**_asked(talk))).input_tokens

    def failed(self, error: BaseException) -> Failed:
        if not isinstance(error, anthropic.APIError):
            raise error
        response = error.response if isinstance(error, anthropic.APIStatusError) else None
        after = response.headers.get("retry-after") if response else None
        said = getattr(error, "api_message", None) or ""
        return Failed(
            status=response.status_code if response is not None and response.status_code >= 400 else None,
            text=f"{error.message} {error.body}",
            is_overflow=getattr(error, "type", None) == "invalid_request_error"
            and said.startswith("prompt is too long"),
            retry_after_s=None if after is None else float(after),
        )

    async def close(self) -> None:
        await self._client.close()


def _asked(talk: Talk) -> dict[str, Any]:
    """What a call and a count have in common."""
    values: dict[str, Any] = {
        "model": "claude-some",
        "messages": [*_messages(talk)],
        "thinking": {"type": "adaptive"},
    }
    if talk.system is not None:
        values["system"] = talk.system
    if talk.tools:
        values["tools"] = [
            {"name": tool.name, "description": tool.description, "input_schema": dict(tool.parameters)}
            for tool in talk.tools
        ]
    return values


def _messages(talk: Talk) -> Iterator[Any]:
    for turn in talk.turns:
        if isinstance(turn, User):
            blocks: list[dict[str, Any]] = [{"type": "text", "text": turn.text}]
            if turn.image is not None:
                source = {"type": "base64", "media_type": "image/png", "data": turn.image}
                blocks.append({"type": "image", "source": source})
            yield {"role": "user", "content": turn.text if turn.image is None else blocks}
        elif isinstance(turn, Results):
            yield {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": call.id, "content": text} for call, text in turn.results
                ],
            }
        else:
            yield turn.raw
