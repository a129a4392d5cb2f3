"""Completions, spoken by `openai`: the conversation is one text, turn by turn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import openai

from tests.contract.protocols.speakers.base import Failed, Heard, Results, Talk, User, What, Wishes

_ENDS: dict[str, Literal["stop", "length"]] = {"stop": "stop", "length": "length"}


class OpenAICompletions:
    """See `Speaker`."""

    protocol = "openai-completions"
    can: frozenset[What] = frozenset(("stop", "seed"))
    path = "/v1/completions"
    body: ClassVar[dict[str, Any]] = {"model": "m", "prompt": "hi"}

    def __init__(self, root_url: str, api_key: str) -> None:
        self._client = openai.AsyncOpenAI(base_url=f"{root_url}/v1", api_key=api_key, max_retries=0)

    async def ask(self, talk: Talk, *, stream: bool, wishes: Wishes = Wishes()) -> Heard:  # noqa: B008 - frozen
        named = {"max_tokens": wishes.max_tokens, "temperature": wishes.temperature, "seed": wishes.seed}
        values: dict[str, Any] = {
            "model": "some-model",
            "prompt": "\n".join(_lines(talk)),
            "extra_body": dict(wishes.unknown),
            **{name: value for name, value in named.items() if value is not None},
        }
        if wishes.stop:
            values["stop"] = list(wishes.stop)
        if stream:
            return await self._streamed(values)
        answer = await self._client.completions.create(**values)
        (choice,) = answer.choices
        return _heard(answer.id, choice.text, choice.finish_reason, answer.usage)

    async def _streamed(self, values: dict[str, Any]) -> Heard:
        answer = await self._client.completions.create(**values, stream=True, stream_options={"include_usage": True})
        call_id, text, end, usage = "", "", None, None
        async for chunk in answer:
            call_id, usage = chunk.id, chunk.usage or usage
            for choice in chunk.choices:
                text += choice.text
                end = choice.finish_reason or end
        return _heard(call_id, text, end, usage)

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


def _heard(call_id: str, text: str, end: str | None, usage: Any) -> Heard:
    assert end is not None
    assert usage is not None
    return Heard(
        id=call_id,
        text=text,
        calls=(),
        end=_ENDS[end],
        prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        raw=text,
    )


def _lines(talk: Talk) -> Iterator[str]:
    for turn in talk.turns:
        assert not isinstance(turn, Results), "this protocol has no tools"
        yield turn.text if isinstance(turn, User) else turn.raw
