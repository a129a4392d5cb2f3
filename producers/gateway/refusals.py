"""Errors of the engine and of Kafka as the error that a client understands and knows whether to retry."""

from __future__ import annotations

from rollstream.errors import BrokerError, ProviderError
from rollstream.producers.dialects.base import Problem, RequestRefused
from rollstream.schemas.records import Outcome

_RETRY_AFTER_S = 2


def engine_refusal(error: ProviderError) -> RequestRefused:
    """400 for what the client did, 503 for an engine that is away, 502 for one that failed."""
    if error.reason == "context_length":
        return RequestRefused(str(error), problem=Problem.OVERFLOW, code="context_length_exceeded", param="messages")
    if error.reason == "bad_request":
        return RequestRefused(str(error))
    if error.reason == "engine_down":
        return unavailable(str(error), code="engine_down")
    return RequestRefused(str(error), problem=Problem.ENGINE_FAILED, code="engine_error")


def broker_refusal(error: BrokerError) -> RequestRefused:
    """503: the record is not in Kafka, so the call has not happened for anyone; send it again. 413 if that would not help."""
    if error.reason == "too_large":
        return RequestRefused(str(error), problem=Problem.TOO_LARGE, code=error.reason)
    return unavailable(f"the call's record was not acknowledged, send it again: {error}", code=error.reason)


def unacknowledged(error: BrokerError) -> RequestRefused:
    """503 for a record that is no call; 413 if sending it again would not help."""
    if error.reason == "too_large":
        return RequestRefused(
            f"{error}; give large contents by reference", problem=Problem.TOO_LARGE, code=error.reason
        )
    return unavailable(f"not acknowledged, send it again: {error}", code=error.reason)


def unfinished_refusal(outcome: Outcome) -> RequestRefused:
    """503: the engine stopped before the end; a stop that it did not choose is never shown as one."""
    return unavailable(f"the engine ended this call as {outcome.value}; send it again", code=outcome.value)


def replaced_refusal() -> RequestRefused:
    """503 for whoever still waits for an attempt that its client has sent again; its answer would be a second one."""
    return unavailable("this request was sent again, and that attempt is served in its place", code="retried")


def context_overflow(prompt_tokens: int, limit_tokens: int) -> RequestRefused:
    """400, in the words that agents know an overflow by; a protocol may have others."""
    return RequestRefused(
        f"This model's maximum context length is {limit_tokens} tokens. However, your messages resulted in "
        f"{prompt_tokens} tokens. Please reduce the length of the messages.",
        problem=Problem.OVERFLOW,
        code="context_length_exceeded",
        param="messages",
    )


def unavailable(message: str, *, code: str) -> RequestRefused:
    """503 with a time to come again."""
    return RequestRefused(message, problem=Problem.UNAVAILABLE, code=code, retry_after_s=_RETRY_AFTER_S)
