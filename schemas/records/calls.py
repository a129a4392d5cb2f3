"""What the gateway writes about a rollout's model calls, in this order: opening, then per call an intent and an outcome.

Topic `calls`. The rollout's barrier (`Terminal`) is the last record of the rollout in this topic, too.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum

from rollstream.schemas.identity import canonical_json
from rollstream.schemas.types import Json, PackedFloats, PackedIds


class LogprobSemantics(StrEnum):
    """Which distribution a log-probability belongs to."""

    PROCESSED = "processed"
    """After temperature, penalties and truncation: the distribution the token was drawn from."""
    RAW = "raw"
    """The model's own, before any of them. Equal to `processed` only at temperature 1 without truncation."""
    UNKNOWN = "unknown"
    """The engine did not say; such a call is not trainable."""


class Outcome(StrEnum):
    """How a call ended, seen from the engine."""

    COMPLETED = "completed"
    """The model stopped by itself, with its end token."""
    LENGTH = "length"
    """The token limit cut the output."""
    ABORTED = "aborted"
    """The engine aborted the request, for another reason than new weights."""
    CLIENT_DISCONNECTED = "client_disconnected"
    """The client left before the end; the engine was cancelled and the ids so far were kept."""
    UPSTREAM_ERROR = "upstream_error"
    """The engine failed or died."""
    REJECTED = "rejected"
    """No engine request was made: the body, the context length or the broker did not allow it."""
    LOST = "lost"
    """Only ever set by the join: an intent without an outcome before the rollout closed."""
    STOP_STRING = "stop_string"
    """A stop string that the client gave ended the output; its tokens are kept up to the one that completed it."""
    ABORTED_POLICY_UPDATE = "aborted_policy_update"
    """The engine aborted the request, and weights were being changed while it ran."""

    @property
    def is_whole(self) -> bool:
        """Whether the answer ended as an answer ends: by the model, by a stop string or by the token limit."""
        return self in (Outcome.COMPLETED, Outcome.STOP_STRING, Outcome.LENGTH)


class Delivery(StrEnum):
    """How much of the answer reached the client."""

    UNKNOWN = "unknown"
    """Not known when the record was written; a `CallDelivery` follows if it was less than everything."""
    FULL = "full"
    """The last event was sent."""
    PARTIAL = "partial"
    """Some events were sent, not the last one."""
    NONE = "none"
    """Nothing was sent."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters the engine really used, not those the client asked for."""

    temperature: float
    """1 leaves the distribution as it is; 0 is greedy."""
    top_p: float
    """Nucleus size; 1 keeps everything."""
    top_k: int
    """Number of tokens kept; -1 keeps everything."""
    max_tokens: int
    """Most tokens the call may sample."""
    seed: int | None = None
    """Seed of this request, if one was given."""
    stop: tuple[str, ...] = ()
    """Stop strings."""

    def as_json(self) -> Json:
        """The fields in canonical JSON, as an intent holds them."""
        return Json(canonical_json(asdict(self)).decode())


@dataclass(frozen=True, slots=True)
class Encoding:
    """Everything that turns messages into token ids and back. Equal encodings have equal digests."""

    tokenizer_digest: str
    """Digest of the tokenizer's files or, where the engine shows none, of its answers to a fixed text."""
    chat_template_digest: str
    """Digest of the chat template."""
    template_kwargs_digest: str
    """Digest of the arguments given to the chat template."""
    parser: str
    """Names of the tool and reasoning parsers, for instance `hermes`; empty for none."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Output tokens [start, end) were sampled by this version of the policy's weights."""

    start: int
    """First output token of the span, counted from the call's first output token."""
    end: int
    """One past the last output token of the span."""
    version: int
    """Policy version."""


@dataclass(frozen=True, slots=True)
class PromptDelta:
    """A prompt, written as what it shares with an earlier call of the rollout and what it adds.

    The prompt is the first `base_len` ids of (the base call's prompt ‖ its output), then `suffix`.
    """

    suffix: PackedIds
    """The ids after the shared ones; the whole prompt where there is no base."""
    length: int
    """Number of ids in the whole prompt."""
    digest: str
    """blake2b-128 over the whole prompt as packed u32; every decoder checks it."""
    base_call_id: str | None = None
    """The call whose ids are shared; None where no base was known."""
    base_len: int = 0
    """How many ids of the base call's (prompt ‖ output) are shared."""


@dataclass(frozen=True, slots=True)
class RolloutOpened:
    """A rollout attempt was opened. First record of the attempt."""

    rollout_id: str
    """The rollout."""
    attempt: int
    """Attempt number, from 0; a higher attempt replaces lower ones."""
    group_id: str
    """The group whose rollouts are compared; the key of every topic up to samples."""
    group_size: int
    """How many rollouts the group shall have."""
    task_id: str
    """Name of the task."""
    opened_at_ms: int
    """UTC epoch milliseconds."""
    task: Json = Json("{}")
    """The task itself, for scorers."""
    policy: str = "default"
    """Name of the policy that plays."""


@dataclass(frozen=True, slots=True)
class CallStarted:
    """The intent: this call is about to be sent to the engine. Written, and acknowledged, before the engine request."""

    call_id: str
    """Minted by the gateway."""
    rollout_id: str
    """The rollout."""
    attempt: int
    """The rollout's attempt."""
    group_id: str
    """The rollout's group."""
    call_index: int
    """Orders the calls of the rollout attempt as the gateways saw them: rising, not consecutive."""
    prompt_length_tokens: int
    """Number of prompt ids."""
    prompt_digest: str
    """Digest of the prompt ids."""
    request_digest: str
    """Digest of the normalised request body."""
    started_at_ms: int
    """UTC epoch milliseconds."""
    call_attempt: int = 0
    """Attempt of this call, from 0; a client's retry of an undelivered call counts up."""
    protocol: str = ""
    """Client protocol, for instance `openai-chat`."""
    prompt_suffix: PackedIds = PackedIds(b"")
    """The prompt's ids after those that it shares with the base call; all of them without a base. Empty in records of v1."""
    prompt_base_call_id: str | None = None
    """The call whose (prompt ‖ output) the prompt begins like; None where no base was known."""
    prompt_base_len: int = 0
    """How many ids of the base call's (prompt ‖ output) are shared."""
    sampling: Json = Json("{}")
    """Effective sampling parameters, the fields of `SamplingParams`."""


@dataclass(frozen=True, slots=True)
class ModelCall:
    """The outcome of one model call. Written once; acknowledged before the client sees the end."""

    call_id: str
    """Minted by the gateway; equal to the intent's."""
    rollout_id: str
    """The rollout."""
    attempt: int
    """The rollout's attempt."""
    group_id: str
    """The rollout's group."""
    call_index: int
    """Orders the calls of the rollout attempt as the gateways saw them: rising, not consecutive."""
    protocol: str
    """Client protocol, for instance `openai-chat`."""
    adapter_version: str
    """Version of the code that turned the protocol's request into messages and the tokens into its response."""
    model_requested: str
    """The model name in the request; never used as a version."""
    model_served: str
    """The model name the engine was asked for."""
    engine: str
    """Engine kind, for instance `vllm`."""
    engine_version: str
    """The engine's version."""
    encoding: Encoding
    """What turned messages into ids."""
    sampling: SamplingParams
    """Effective sampling parameters."""
    logprob_semantics: LogprobSemantics
    """Which distribution `output_logprobs` belong to."""
    prompt: PromptDelta
    """The exact ids the engine was conditioned on."""
    output_ids: PackedIds
    """The ids the engine sampled, end token included, exactly as reported."""
    output_logprobs: PackedFloats
    """Log-probability of each sampled id; NaN where the engine gave none."""
    version_spans: tuple[VersionSpan, ...]
    """Which policy version sampled which output tokens; covers all of them in a trainable call."""
    policy: str
    """Name of the policy."""
    finish_reason: str
    """The engine's own word: `stop`, `length`, `abort`, `error`; empty if it gave none."""
    outcome: Outcome
    """How the call ended."""
    delivered: Delivery
    """How much the client got, as far as known when the record was written."""
    trainable: bool
    """True if all hard checks passed."""
    defects: tuple[str, ...]
    """Reason codes of the failed checks; empty in a trainable call."""
    request_digest: str
    """Digest of the normalised request body."""
    started_at_ms: int
    """UTC epoch milliseconds of the intent."""
    finished_at_ms: int
    """UTC epoch milliseconds of the outcome."""
    first_token_at_ms: int | None = None
    """UTC epoch milliseconds of the first sampled token, if known."""
    call_attempt: int = 0
    """Attempt of this call, from 0."""
    choice_index: int = 0
    """Index of the choice in the response."""
    message: Json = Json("{}")
    """The assistant message the client was shown."""
    error: str | None = None
    """What went wrong, if anything."""
    harness: str = ""
    """The client's user agent."""
    state_key: str | None = None
    """Environment state before the action, if the harness gave one."""
    action_key: str | None = None
    """Canonical action, if the harness gave one."""
    request_ref: str | None = None
    """Where the raw request body is stored, if it is."""
    response_ref: str | None = None
    """Where the raw response body is stored, if it is."""
    sampling_requested: Json = Json("{}")
    """Sampling parameters that the client asked for and the server decided otherwise, by their names in the protocol."""
    stop_reason: str = ""
    """The stop string that ended the output; empty for none."""
    engine_fingerprint: str = ""
    """Digest of what decides which tokens a text is and which text the tokens are; empty if it is not known."""
    tools_digest: str = ""
    """Digest of the tools as they were rendered; empty without tools."""
    adapter: str = ""
    """Name of the LoRA adapter that sampled; empty for the full weights. A name never stands for two adapters."""
    adapter_digest: str = ""
    """Digest of the adapter's files, if known."""
    version_before: int | None = None
    """The policy version that the gateway took the engine to serve when the call began; for reports only."""
    version_after: int | None = None
    """The same when the call ended. Without spans, the tokens were sampled by an unknown version from one to the other."""
    pause_mode: str = ""
    """How the engine was paused while the call ran: `abort`, `wait` or `keep`; empty if it was not, as far as known."""
    cache_cleared: bool | None = None
    """Whether the pause cleared the prefix cache, so that no key or value of older weights was used; None without a pause."""


@dataclass(frozen=True, slots=True)
class CallDelivery:
    """A correction to `ModelCall.delivered`: the answer did not reach the client whole."""

    call_id: str
    """The call."""
    rollout_id: str
    """The rollout."""
    attempt: int
    """The rollout's attempt."""
    group_id: str
    """The rollout's group."""
    delivered: Delivery
    """How much the client got."""
    reason: str
    """Short code: `ack_timeout`, `client_disconnected`."""
    at_ms: int
    """UTC epoch milliseconds."""
    call_attempt: int = 0
    """Attempt of the call."""
