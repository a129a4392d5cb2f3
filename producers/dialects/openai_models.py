"""OpenAI's list of models. Pure. Source: openai 3.57 types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from rollstream.producers.dialects.base import RequestRefused
from rollstream.producers.dialects.openai_errors import error_answer


class OpenAIModels:
    """The list; see the module."""

    routes = ("/v1/models", "/v1/models/{model:path}")
    key_headers = (b"authorization", b"x-api-key")

    def is_mine(self, path: str, headers: Mapping[bytes, bytes]) -> bool:
        """As in `Surface`: whoever names no other protocol."""
        return path.startswith("/v1/")

    def listed(self, models: tuple[str, ...]) -> bytes:
        """As in `ModelCatalog`."""
        return orjson.dumps({"object": "list", "data": [_model(name) for name in models]})

    def described(self, model: str) -> bytes:
        """As in `ModelCatalog`."""
        return orjson.dumps(_model(model))

    def error(self, refusal: RequestRefused) -> tuple[int, bytes]:
        """As in `Surface`."""
        return error_answer(refusal)


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "rollstream"}
