"""Anthropic's list of models. Pure. Source: anthropic 2.14 types."""

from __future__ import annotations

from typing import Any

import orjson

from rollstream.producers.dialects.anthropic_surface import AnthropicSurface


class AnthropicModels(AnthropicSurface):
    """The list; see the module."""

    routes = ("/v1/models", "/v1/models/{model:path}")

    def listed(self, models: tuple[str, ...]) -> bytes:
        """As in `ModelCatalog`: one page, whatever page is asked for."""
        ends = {"first_id": models[0], "last_id": models[-1]} if models else {"first_id": None, "last_id": None}
        return orjson.dumps({"data": [_model(name) for name in models], "has_more": False, **ends})

    def described(self, model: str) -> bytes:
        """As in `ModelCatalog`."""
        return orjson.dumps(_model(model))


def _model(name: str) -> dict[str, Any]:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",  # what the protocol says for a date that is not known
        "lifecycle": "active",
    }
