"""Errors, models and counts in Anthropic's words, with the official client's types as the judge, and whose client is whose."""

from __future__ import annotations

import json

import pytest
from anthropic.types import MessageTokensCount, ModelInfo
from anthropic.types.shared import ErrorResponse

from rollstream.producers.dialects import CATALOGS, COUNTERS, DIALECTS, surface_of
from rollstream.producers.dialects.anthropic_messages import Messages, MessagesTokenCount
from rollstream.producers.dialects.anthropic_models import AnthropicModels
from rollstream.producers.dialects.base import Problem, RequestRefused
from rollstream.producers.dialects.openai_models import OpenAIModels
from rollstream.producers.gateway.refusals import context_overflow


@pytest.mark.parametrize(
    ("problem", "status", "kind"),
    [
        (Problem.INVALID, 400, "invalid_request_error"),
        (Problem.OVERFLOW, 400, "invalid_request_error"),
        (Problem.UNAUTHENTICATED, 401, "authentication_error"),
        (Problem.NOT_FOUND, 404, "not_found_error"),
        (Problem.METHOD, 405, "invalid_request_error"),
        (Problem.TOO_LARGE, 413, "request_too_large"),
        (Problem.RATE_LIMITED, 429, "rate_limit_error"),
        (Problem.INTERNAL, 500, "api_error"),
        (Problem.ENGINE_FAILED, 502, "api_error"),
        (Problem.UNAVAILABLE, 529, "overloaded_error"),
    ],
)
def test_error_has_the_protocol_s_words(problem: Problem, status: int, kind: str) -> None:
    """HTTP status and type; what the gateway calls it is a detail."""
    refusal = RequestRefused("why", problem=problem, code="a_code")
    found, body = Messages().error(refusal)

    assert (status, kind) == (found, json.loads(body)["error"]["type"])
    values = json.loads(body)
    assert ("error", {"error_code": "a_code"}) == (values["type"], values["error"]["details"])
    assert "why" in values["error"]["message"]
    if kind != "request_too_large":  # the client's types do not name it
        assert kind == ErrorResponse.model_validate_json(body).error.type


def test_every_problem_has_a_status() -> None:
    """None is a KeyError on the way out."""
    for problem in Problem:
        assert 400 <= Messages().error(RequestRefused("why", problem=problem))[0] < 600


@pytest.mark.parametrize(
    ("refusal", "says"),
    [
        (context_overflow(70, 64), "prompt is too long: 70 tokens > 64 maximum"),
        (
            RequestRefused(
                "This model's maximum context length is 16 tokens. However, you requested 40 tokens (30 in the "
                "messages, 10 in the completion). Please reduce the length of the messages.",
                problem=Problem.OVERFLOW,
            ),
            "prompt is too long: 40 tokens > 16 maximum",
        ),
        (RequestRefused("more than fits", problem=Problem.OVERFLOW), "prompt is too long: more than fits"),
    ],
    ids=["gateway", "vllm", "another engine"],
)
def test_overflow_starts_with_what_claude_code_looks_for(refusal: RequestRefused, says: str) -> None:
    """So that it compacts (row 30)."""
    _, body = Messages().error(refusal)

    assert says == json.loads(body)["error"]["message"]


def test_count_is_what_the_official_client_reads() -> None:
    """One number."""
    assert 12 == MessageTokensCount.model_validate_json(MessagesTokenCount().counted(12)).input_tokens


def test_models_are_what_the_official_client_reads() -> None:
    """A page, and any single one: harnesses ask for names of their own."""
    page = json.loads(AnthropicModels().listed(("a", "b")))

    assert ["a", "b"] == [ModelInfo.model_validate(model).id for model in page["data"]]
    assert (False, "a", "b") == (page["has_more"], page["first_id"], page["last_id"])
    assert "claude-x" == ModelInfo.model_validate_json(AnthropicModels().described("claude-x")).id
    assert [] == json.loads(AnthropicModels().listed(()))["data"]


def test_clients_are_known_by_their_header_on_any_path() -> None:
    """And by the path of calls alone; everybody else is not ours."""
    named = {b"anthropic-version": b"2023-06-01"}

    for path in ("/v1/models", "/v1/models/x", "/v1/files", "/"):
        assert "not_found_error" in str(surface_of(path, named).error(RequestRefused("", problem=Problem.NOT_FOUND)))
    for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/batches"):
        assert surface_of(path, {}).key_headers == Messages.key_headers
    assert not Messages().is_mine("/v1/messages_of", {})
    assert not AnthropicModels().is_mine("/v1/models", {})
    kinds = [type(catalog) for catalog in CATALOGS]
    assert kinds.index(AnthropicModels) < kinds.index(OpenAIModels)


def test_protocol_is_registered() -> None:
    """Under its name in records, with the route that counts."""
    assert isinstance(DIALECTS["anthropic-messages"], Messages)
    assert any("/v1/messages/count_tokens" in counter.routes for counter in COUNTERS)
