"""What a call's record costs: encoding, decoding, prompts as deltas, and the bytes of a whole rollout.

The numbers behind two decisions of docs/architecture.md: token ids as packed bytes, and prompts as deltas.
"""

from __future__ import annotations

import io
import json
from dataclasses import replace
from importlib.resources import files

import fastavro
import numpy as np
import numpy.typing as npt

from benchmarks.measure import Figure, measure, report
from rollstream.schemas.codec import Codec
from rollstream.schemas.prompts import decode_prompts, encode_prompt
from rollstream.schemas.readable import from_readable
from rollstream.schemas.records import ModelCall
from rollstream.schemas.types import pack_floats, pack_ids, unpack_ids

TURNS, TURN_TOKENS, OUTPUT_TOKENS = 20, 400, 200


def _example() -> ModelCall:
    file = files("rollstream.schemas").joinpath("examples/calls/v1/first_call_whole_prompt.pass.json")
    return from_readable(ModelCall, json.loads(file.read_text("utf-8"))["value"])


def _rollout(rng: np.random.Generator) -> list[ModelCall]:
    """A rollout that grows by a turn's tokens and an output with every call, as harnesses send it."""
    calls: list[ModelCall] = []
    bases: dict[str, npt.NDArray[np.uint32]] = {}
    ids = rng.integers(0, 150_000, TURN_TOKENS).astype(np.uint32)
    for turn in range(TURNS):
        output = rng.integers(0, 150_000, OUTPUT_TOKENS).astype(np.uint32)
        call = replace(
            _example(),
            call_id=f"c{turn}",
            call_index=turn,
            prompt=encode_prompt(ids, bases),
            output_ids=pack_ids(output),
            output_logprobs=pack_floats(np.full(OUTPUT_TOKENS, -0.5, np.float32)),
        )
        calls.append(call)
        bases[call.call_id] = np.concatenate([ids, output])
        ids = np.concatenate([bases[call.call_id], rng.integers(0, 150_000, TURN_TOKENS).astype(np.uint32)])
    return calls


def _packed_against_array() -> list[Figure]:
    """33,000 token ids as bytes, and as an Avro array of ints."""
    ids = np.arange(33_000, dtype=np.uint32)
    schema = fastavro.parse_schema({"type": "array", "items": "int"})
    out = io.BytesIO()
    fastavro.schemaless_writer(out, schema, ids.tolist())
    packed = pack_ids(ids)

    def read_array() -> object:
        out.seek(0)
        return np.asarray(fastavro.schemaless_reader(out, schema, None))

    return [
        measure("33,000 ids: unpack bytes", lambda: unpack_ids(packed), note=f"{len(packed):,} bytes"),
        measure("33,000 ids: read Avro array", read_array, note=f"{len(out.getvalue()):,} bytes"),
    ]


def main() -> None:
    """Measure and report."""
    codec = Codec()
    calls = _rollout(np.random.default_rng(0))
    last = codec.encode(calls[-1])
    prompts, _ = decode_prompts(calls)
    whole = [replace(call, prompt=encode_prompt(prompts[call.call_id], {})) for call in calls]
    base = {"c0": np.concatenate([prompts["c0"], unpack_ids(calls[0].output_ids)])}
    sizes = [sum(len(codec.encode(call)) for call in some) for some in (calls, whole)]
    shape = f"{TURNS} turns of {TURN_TOKENS} + {OUTPUT_TOKENS} tokens"
    report(
        "records",
        [
            measure("encode a call", lambda: codec.encode(calls[-1]), note=f"{len(last):,} bytes"),
            measure("decode a call", lambda: codec.decode(last)),
            measure("find a prompt's delta", lambda: encode_prompt(prompts["c1"], base)),
            measure("decode a rollout's prompts", lambda: decode_prompts(calls), note=shape),
            measure("encode a rollout, deltas", lambda: [codec.encode(c) for c in calls], note=f"{sizes[0]:,} bytes"),
            measure("encode a rollout, whole", lambda: [codec.encode(c) for c in whole], note=f"{sizes[1]:,} bytes"),
            *_packed_against_array(),
        ],
    )


if __name__ == "__main__":
    main()
