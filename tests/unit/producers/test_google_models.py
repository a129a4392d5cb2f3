"""Google's token count and list of models, with the official client's types as the judge of what goes out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from google.genai import types

from rollstream.producers.dialects import surface_of
from rollstream.producers.dialects.base import Incoming, RequestRefused
from rollstream.producers.dialects.google_generate import GenerateContent
from rollstream.producers.dialects.google_models import GoogleModels
from rollstream.producers.dialects.google_surface import GoogleSurface
from rollstream.producers.dialects.google_tokens import CountTokens

WHOLE = {
    "contents": [{"role": "user", "parts": [{"text": "hi"}]}],
    "systemInstruction": {"parts": [{"text": "s"}]},
    "tools": [{"functionDeclarations": [{"name": "f", "parameters": {"type": "OBJECT"}}]}],
}


def incoming(body: Any) -> Incoming:
    return Incoming(json.dumps(body).encode(), path={"model": "m"})


@pytest.mark.parametrize("body", [WHOLE, {"generateContentRequest": {"model": "models/m", **WHOLE}}])
def test_count_is_of_the_same_conversation_as_the_call(body: dict[str, Any]) -> None:
    """System and tools count, whether they stand beside the contents or in a whole request."""
    assert GenerateContent().parse(incoming(WHOLE)).request.prompt == CountTokens().parse(incoming(body))


def test_count_is_what_the_official_client_reads() -> None:
    """One number."""
    assert 42 == types.CountTokensResponse.model_validate_json(CountTokens().counted(42)).total_tokens


@pytest.mark.parametrize("body", [{}, [], {"contents": 3}, {"generateContentRequest": []}])
def test_count_of_nothing_is_refused(body: Any) -> None:
    """As a call would be."""
    with pytest.raises(RequestRefused):
        CountTokens().parse(incoming(body))


def test_models_have_resource_names_and_say_what_they_can_do() -> None:
    """In the list as alone, and whatever the name; the official client reads them in `tests/contract/protocols`."""
    listed = json.loads(GoogleModels().listed(("a", "org/b")))["models"]

    assert ["models/a", "models/org/b"] == [model["name"] for model in listed]
    assert listed[1] == json.loads(GoogleModels().described("org/b"))
    assert "generateContent" in listed[0]["supportedGenerationMethods"]


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/v1/models", {b"x-goog-api-key": b"k"}),
        ("/v1beta/models/x:embedContent", {}),
        ("/v1beta/cachedContents", {}),
    ],
)
def test_what_is_not_served_gets_googles_error(path: str, headers: dict[bytes, bytes]) -> None:
    """Whatever the order of the tables."""
    assert isinstance(surface_of(path, headers), GoogleSurface)
