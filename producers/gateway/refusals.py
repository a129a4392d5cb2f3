"""Errors of the engine and of Kafka as the error that a client understands and knows whether to retry."""

from __future__ import annotations

from rollstream.errors import BrokerError, ProviderError
from rollstream.producers.dialects.chat import RequestRefused
from rollstream.schemas.records import Outcome

_RETRY_AFTER_S = 2


def engine_refusal(error: ProviderError) -> RequestRefused:
    """400 for what the client did, 503 for an engine that is away, 502 for one that failed."""
    if error.reason == "context_length":
        return RequestRefused(str(error), code="context_length_exceeded", param="messages")
    if error.reason == "bad_request":
        return RequestRefused(str(error))
    if error.reason == "engine_down":
        return RequestRefused(
            str(error), status=503, kind="server_error", code="engine_down", retry_after_s=_RETRY_AFTER_S
        )
    return RequestRefused(str(error), status=502, kind="server_error", code="engine_error")


def broker_refusal(error: BrokerError) -> RequestRefused:
    """503: the record is not in Kafka, so the call has not happened for anyone; send it again."""
    return RequestRefused(
        f"the call's record was not acknowledged, send it again: {error}",
        status=503,
        kind="server_error",
        code=error.reason,
        retry_after_s=_RETRY_AFTER_S,
    )


def unfinished_refusal(outcome: Outcome) -> RequestRefused:
    """503: the engine stopped before the end; a stop that it did not choose is never shown as one."""
    return RequestRefused(
        f"the engine ended this call as {outcome.value}; send it again",
        status=503,
        kind="server_error",
        code=outcome.value,
        retry_after_s=_RETRY_AFTER_S,
    )
