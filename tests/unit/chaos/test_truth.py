"""What the stand-in engine says is a function of the request, and its template lets prompts grow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos.truth import from_ids, message_tokens, render, sample, text_of, to_ids

ASKED = {"request_id": "call-1-0", "temperature": 1.0, "max_tokens": 64, "seed": 3}


@given(st.binary(max_size=200))
def test_ids_and_tokens_are_each_other(tokens: bytes) -> None:
    """No token is lost on the way to an id and back."""
    assert tokens == from_ids(to_ids(tokens))


def test_ids_of_another_vocabulary_are_refused() -> None:
    """An id outside this engine's range is an error, not another token."""
    with pytest.raises(ValueError, match="ids from 5 to 5"):
        from_ids(np.array([5], dtype=np.uint32))


def test_prompt_of_the_next_turn_begins_with_this_prompt_and_its_output() -> None:
    """The chat template is prefix-preserving, so a prompt can be written as a delta; also where the token limit cut."""
    talk = [{"role": "system", "content": "x"}, {"role": "user", "content": "go"}]
    for max_tokens in (3, 64):
        prompt = render(talk)
        said = sample(prompt, **{**ASKED, "max_tokens": max_tokens})  # type: ignore[arg-type]

        following = render([*talk, {"role": "assistant", "content": text_of(said.tokens)}, talk[1]])

        assert following.startswith(prompt + said.tokens)


@pytest.mark.parametrize(
    "change", [{"request_id": "call-2-0"}, {"temperature": 0.5}, {"max_tokens": 63}, {"seed": 4}, {"seed": None}]
)
def test_every_part_of_a_request_decides_what_is_said(change: dict[str, object]) -> None:
    """An answer that was given to another request is not this one's."""
    prompt = render([{"role": "user", "content": "go"}])

    said, other = sample(prompt, **ASKED), sample(prompt, **{**ASKED, **change})  # type: ignore[arg-type]

    assert said != replace(other, pause_ms=said.pause_ms)
    assert said == sample(prompt, **ASKED)  # type: ignore[arg-type]


@given(st.text(max_size=20), st.integers(1, 64))
def test_what_is_said_can_be_recorded_exactly(request_id: str, max_tokens: int) -> None:
    """Within the limit, one f32 a token, negative, all tokens in one span each, the end mark only where it stopped itself."""
    said = sample(b"x", request_id=request_id, temperature=1.0, max_tokens=max_tokens, seed=None)

    count = len(said.tokens)
    assert 0 < count <= max_tokens
    assert count == len(said.logprobs)
    assert np.array(said.logprobs, dtype=np.float32).tolist() == list(said.logprobs)
    assert max(said.logprobs) < 0
    assert list(range(count)) == [at for span in said.spans for at in range(span.start, span.end)]
    assert ("stop" if said.tokens.endswith(b"\x02") else "length") == said.finish_reason


def test_message_that_cannot_be_rendered_is_refused() -> None:
    """The engine answers 400, and invents nothing."""
    with pytest.raises(ValueError, match="expected a role"):
        message_tokens({"role": "robot", "content": "x"})
