"""Prompt deltas are lossless, and refuse to be wrong."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.errors import SchemaError
from rollstream.schemas.prompts import common_prefix, decode_prompt, decode_prompts, encode_prompt
from rollstream.schemas.types import pack_ids
from tests.unit.schemas.calls import a_call

ids_st = st.lists(st.integers(0, 3), max_size=12).map(lambda ids: np.array(ids, dtype=np.uint32))


@given(prompt=ids_st, bases=st.lists(ids_st, max_size=4))
def test_any_prompt_comes_back_from_its_delta(prompt, bases) -> None:
    """Whatever the bases, decoding gives the prompt, and the suffix is the shortest that any base allows."""
    named = {f"c{i}": base for i, base in enumerate(bases)}

    delta = encode_prompt(prompt, named)

    assert decode_prompt(delta, named.get(delta.base_call_id)).tolist() == prompt.tolist()
    assert delta.base_len == max([common_prefix(prompt, base) for base in bases], default=0)


@given(prompt=ids_st.filter(len), at=st.integers(0, 11), by=st.integers(1, 3))
def test_a_changed_base_is_refused(prompt, at: int, by: int) -> None:
    """A base that differs in any shared id gives an error, never another prompt."""
    base = np.concatenate([prompt, np.array([9], dtype=np.uint32)])
    delta = encode_prompt(prompt, {"c": base})
    other = base.copy()
    other[at % len(prompt)] += by

    with pytest.raises(SchemaError) as caught:
        decode_prompt(delta, other)

    assert caught.value.reason == "prompt_digest"


def test_a_missing_or_short_base_is_refused() -> None:
    """Each way a base can be absent has its reason."""
    delta = encode_prompt(np.array([1, 2, 3], dtype=np.uint32), {"c": np.array([1, 2], dtype=np.uint32)})

    with pytest.raises(SchemaError) as missing:
        decode_prompt(delta, None)
    with pytest.raises(SchemaError) as short:
        decode_prompt(delta, np.array([1], dtype=np.uint32))

    assert (missing.value.reason, short.value.reason) == ("base_missing", "base_too_short")


def test_a_chain_of_deltas_decodes_in_any_order() -> None:
    """Calls whose prompts build on each other decode whatever order they come in; a lost base fails only those above."""
    prompts = [np.arange(4 * (i + 1), dtype=np.uint32) for i in range(4)]
    calls, known = [], {}
    for i, prompt in enumerate(prompts):
        call = a_call(f"c{i}", prompt=encode_prompt(prompt, known), output=[100 + i])
        known[call.call_id] = np.append(prompt, np.uint32(100 + i))
        calls.append(call)

    decoded, failed = decode_prompts(reversed(calls))
    partly, lost = decode_prompts([c for c in calls if c.call_id != "c1"])

    assert {k: v.tolist() for k, v in decoded.items()} == {f"c{i}": p.tolist() for i, p in enumerate(prompts)}
    assert failed == {}
    assert set(partly) == {"c0"}
    assert {k: e.reason for k, e in lost.items()} == {"c2": "base_missing", "c3": "base_missing"}


def test_calls_that_build_on_each_other_in_a_circle_are_refused() -> None:
    """A circle of bases ends, with an error for each."""
    loop = dataclasses.replace(
        encode_prompt(np.array([1, 2], dtype=np.uint32), {"b": np.array([1], dtype=np.uint32)}), suffix=pack_ids([2])
    )
    a = a_call("a", prompt=loop, output=[1])
    b = a_call("b", prompt=dataclasses.replace(loop, base_call_id="a"), output=[1])

    decoded, failed = decode_prompts([a, b])

    assert decoded == {}
    assert set(failed) == {"a", "b"}
