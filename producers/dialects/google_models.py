"""Google's list of models. Pure. Source: google-genai 3.6 types."""

from __future__ import annotations

from typing import Any

import orjson

from rollstream.producers.dialects.google_surface import GoogleSurface, versioned

_METHODS = ("generateContent", "countTokens")
"""What every model can do; Google does not name the stream apart."""


class GoogleModels(GoogleSurface):
    """The list; see the module."""

    routes = (*versioned("/models"), *versioned("/models/{model:path}"))

    def listed(self, models: tuple[str, ...]) -> bytes:
        """As in `ModelCatalog`."""
        return orjson.dumps({"models": [_model(name) for name in models]})

    def described(self, model: str) -> bytes:
        """As in `ModelCatalog`."""
        return orjson.dumps(_model(model))


def _model(name: str) -> dict[str, Any]:
    return {"name": f"models/{name}", "displayName": name, "supportedGenerationMethods": _METHODS}
