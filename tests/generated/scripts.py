"""What a generated engine does in one call: which ids, in which split and chunks, cut where, by which versions, what is wrong.

Everything is drawn from one `random.Random`, so a case is its number.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from typing import Any

END = 2
"""The id that ends an answer."""
_PIECES: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((12,), (10, 11)),  # ab
    ((9,), (3, 3)),  # an empty line
    ((28,),),  # ok
    ((10,),),  # a
    ((18,),),  # 1
    ((20, 21, 22, 23),),  # an emoji, one id a byte
    ((29,), ),  # hi
)  # fmt: skip
"""Texts of the toy vocabulary, each with its splits; the first one is what encoding the text gives."""
_CALLS = ((13, 15, 16, 18, 14), (13, 15, 17, 18, 14))
"""`{"x":1}` without and with a space."""
_ENDINGS = ("stop",) * 10 + ("length", "length", "stop_string", "abort", "update", "error", "died", "left", "refused")
_FAULTS = ("none", "none", "logprob", "logprob", "count", "spans", "echo", "vocabulary", "chunk")


@dataclass
class Script:
    """What the engine does; the fields are those of `truth.Attempt`."""

    chunks: list[list[Any]]
    """The ids, as they come."""
    logprobs: list[Any]
    """One each, for all chunks together."""
    how: str
    spans: tuple[tuple[int, int, str], ...] = ()
    echo: Any = None
    """Prompt ids → what is said back."""
    counted: int | None = None
    moves_to: int | None = None
    """The version that the engine serves when the call has ended; None is the same as before."""
    gives: int | None = None
    """How many chunks come before it ends otherwise; None is all."""
    sent: str = "whole"
    names: list[str] = field(default_factory=list)
    """What was drawn, so that a run can tell what it has covered."""


def draw_script(rng: random.Random, version: int | None) -> Script:
    """Draw one."""
    how = rng.choice(_ENDINGS)
    ids = _sampled(rng, how)
    chunks = _chunked(rng, ids)
    script = Script(chunks, [-rng.random() * 3 for _ in ids], how, names=[how])
    script.spans = _spans(rng, len(ids), version or 0)
    script.echo = rng.choice((None, list))
    script.counted = rng.choice((None, len(ids)))
    script.moves_to = rng.choice((None, None, None, (version or 0) + 1))
    if how in ("died", "left", "abort", "update", "error"):
        script.gives = rng.randint(0, len(chunks))
    if how == "refused":
        script.gives = 0
    if how in ("stop", "length", "stop_string"):
        script.sent = rng.choices(("whole", "no", "part"), (12, 1, 1))[0]
    fault = rng.choice(_FAULTS) if rng.random() < 0.6 else "none"
    script.names += [fault, script.sent]
    return script if fault == "none" else _faulty(rng, script, fault)


def without_faults(rng: random.Random, script: Script) -> Script:
    """The same end with nothing wrong about it, for the calls that rows are made of."""
    ids = _sampled(rng, "stop")
    return replace(
        script,
        chunks=_chunked(rng, ids),
        logprobs=[-rng.random() for _ in ids],
        how="stop",
        spans=_spans(rng, len(ids), 3),
        echo=list,
        counted=len(ids),
        gives=None,
        sent="whole",
        names=["stop", "none", "whole"],
    )


def _sampled(rng: random.Random, how: str) -> list[int]:
    if rng.random() < 0.2:
        text = list(rng.choice(_CALLS))
    else:
        text = [i for _ in range(rng.randint(0, 5)) for i in rng.choice(rng.choice(_PIECES))]
    if rng.random() < 0.3:
        text = [7, 3, *rng.choice(rng.choice(_PIECES)), 3, 8, 9, *text]
    ids = [*text, END]
    if how == "length":  # the cut may go through an emoji, a thought or a tool call
        ids = ids[: rng.randint(0, len(ids) - 1)]
    return ids[:-1] if how == "stop_string" else ids


def _chunked(rng: random.Random, ids: list[int]) -> list[list[Any]]:
    cuts = sorted(rng.sample(range(1, len(ids)), rng.randint(0, len(ids) - 1))) if len(ids) > 1 else []
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def _spans(rng: random.Random, count: int, version: int) -> tuple[tuple[int, int, str], ...]:
    parts = rng.choice((1, 1, 1, 2, 3))
    cuts = sorted(rng.sample(range(1, count), min(parts - 1, count - 1))) if count > 1 else []
    first = "default" if version == 0 else str(version)
    labels = [first, str(version + 1), str(version + 5)]
    return tuple((a, b, labels[at]) for at, (a, b) in enumerate(zip([0, *cuts], [*cuts, count], strict=True)))


def _faulty(rng: random.Random, script: Script, fault: str) -> Script:
    count = len(script.logprobs)
    if fault == "logprob" and count:
        kind = rng.choice(("value", "value", "value", "dropped", "added"))
        at = rng.randrange(count)
        if kind == "value":
            odd = (None, math.nan, -math.inf, math.inf, -9999.0, -1e30, 1e300, 0.5, 5e-5, 5e-5, "-0.1", True)
            script.logprobs[at] = rng.choice(odd)
        elif kind == "dropped":
            del script.logprobs[at]
        else:
            script.logprobs.insert(at, -0.5)
        script.names.append(f"logprob {kind}")
    elif fault == "count":
        script.counted = count + rng.choice((-1, 1, 5))
    elif fault == "spans":
        kind, script.spans = _wrong_spans(rng, script.spans, count)
        script.names.append(f"spans {kind}")
    elif fault == "echo":
        kind, script.echo = _wrong_echo(rng)
        script.names.append(f"echo {kind}")
    elif fault == "vocabulary" and count:
        chunk = rng.choice([chunk for chunk in script.chunks if chunk])
        chunk[rng.randrange(len(chunk))] = rng.choice((40, 151_643, -1, 2**32, 39))
    elif fault == "chunk" and len(script.chunks) > 1:
        _lose_chunk(rng, script)
        script.names.append("lost chunk")
    return script


def _wrong_spans(
    rng: random.Random, spans: tuple[tuple[int, int, str], ...], count: int
) -> tuple[str, tuple[tuple[int, int, str], ...]]:
    kind = rng.choice(("none", "label", "late", "early", "long", "gap", "overlap", "order"))
    (start, end, label), rest = spans[0], spans[1:]
    middle = count // 2
    wrong = {
        "none": (),
        "label": ((start, end, rng.choice(("v7", "", "-1", "1.5", "9" * 19, "٣"))), *rest),
        "late": ((1, end + (end == 1), label), *rest),
        "early": ((0, count - 1, label),) if count > 1 else spans,
        "long": ((0, count + rng.randint(1, 3), label),),
        "gap": ((0, middle, label), (middle + 1, count, label)) if count > 2 else spans,
        "overlap": ((0, middle + 1, label), (middle, count, label)) if count > 2 else spans,
        "order": ((middle, count, label), (0, middle, label)) if count > 2 else spans,
    }
    return kind, wrong[kind]


def _wrong_echo(rng: random.Random) -> tuple[str, Any]:
    kind, keep = rng.choice(("other", "head", "tail", "middle", "longer", "empty")), rng.random()
    echoes = {
        "other": lambda prompt: [*prompt[:-1], prompt[-1] + 1],
        "head": lambda prompt: prompt[: max(1, int(len(prompt) * keep))],
        "tail": lambda prompt: prompt[-max(1, int(len(prompt) * keep)) :],
        "middle": lambda prompt: prompt[2:-2],
        "longer": lambda prompt: [*prompt, 3],
        "empty": lambda prompt: [],
    }
    return kind, echoes[kind]


def _lose_chunk(rng: random.Random, script: Script) -> None:
    """A chunk's ids and log-probabilities never come; the engine's count and spans still say how many there were."""
    lost = rng.randrange(len(script.chunks))
    before = sum(len(chunk) for chunk in script.chunks[:lost])
    script.counted = len(script.logprobs)
    del script.logprobs[before : before + len(script.chunks[lost])]
    del script.chunks[lost]
