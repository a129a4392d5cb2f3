"""Google's countTokens. Pure. Source: google-genai 3.6 types."""

from __future__ import annotations

import orjson

from rollstream.producers.dialects.base import Incoming
from rollstream.producers.dialects.body import read_object
from rollstream.producers.dialects.google_contents import conversation_of, fields, inner
from rollstream.producers.dialects.google_surface import GoogleSurface, versioned
from rollstream.producers.engines.base import Conversation


class CountTokens(GoogleSurface):
    """The count; see the module."""

    routes = versioned("/models/{model:path}:countTokens")

    def parse(self, incoming: Incoming) -> Conversation:
        """As in `TokenCounter`: contents, or a whole request, in which there may be tools."""
        values = fields(read_object(incoming.body))
        return conversation_of(inner(values, "generateContentRequest") or values)

    def counted(self, prompt_tokens: int) -> bytes:
        """As in `TokenCounter`."""
        return orjson.dumps({"totalTokens": prompt_tokens})
