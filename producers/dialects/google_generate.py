"""Google's generateContent and streamGenerateContent. Pure.

Honoured: contents, systemInstruction, tools, toolConfig; of generationConfig temperature, maxOutputTokens, stopSequences, seed
and thinkingConfig.includeThoughts; and `chatTemplateKwargs`, which is ours. Safety settings change nothing: nothing is filtered.

Thoughts are shown only where `includeThoughts` asks for them: clients that do not ask take the first part for the answer.
A stream is one response that holds all parts and the end, as Google sends a short answer: the official chat sends each response
of a stream back as a content of its own, and an answer in pieces would come back as several.

Signs of life are blank lines: the official clients for Python and Go take a comment line for a broken answer. An error in a
stream of events stands there without `data:`, as Google sends it: the client for Go and older ones for JavaScript look for no
other.

Source: google-genai 3.6 (`_api_client.py`), @google/genai 1.52 and 2.32, go-genai `api_client.go`; gateway.md §3.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from rollstream.producers.dialects.base import (
    End,
    Exchange,
    Incoming,
    Request,
    RequestRefused,
    Shown,
    Stream,
    ToolCall,
    Wishes,
)
from rollstream.producers.dialects.body import digest_request, number, overruled, read_object, stops, typed, whole
from rollstream.producers.dialects.google_contents import conversation_of, fields, inner, tool_choice, tools_of
from rollstream.producers.dialects.google_surface import GoogleSurface, error_body, versioned
from rollstream.producers.dialects.sse import MEDIA_TYPE, event
from rollstream.schemas.identity import digest_bytes

_STREAMED = "streamed_model"
"""The model's name in the path of a stream, and how a stream is told from a plain call."""
_NOT_IN_DIGEST = ("labels", "store", "serviceTier", "service_tier")
_OVERRULED = {
    "topP": 1,
    "topK": 0,
    "presencePenalty": 0,
    "frequencyPenalty": 0,
    "responseLogprobs": False,
    "logprobs": 0,
    "responseMimeType": "text/plain",
    "responseSchema": None,
    "responseJsonSchema": None,
}
"""Fields of `generationConfig` that the server decides → what is as good as none."""
_OVERRULED_THOUGHTS = {"thinkingBudget": -1, "thinkingLevel": None}
_STATEFUL = ("cachedContent", "continuationToken")
"""Fields that point to what an earlier request left behind."""


class GenerateContent(GoogleSurface):
    """The protocol; see the module."""

    protocol = "google-generate"
    version = "1"
    routes = (
        *versioned("/models/{model:path}:generateContent"),
        *versioned(f"/models/{{{_STREAMED}:path}}:streamGenerateContent"),
    )

    def parse(self, incoming: Incoming) -> Exchange:
        """As in `Dialect`."""
        body = read_object(incoming.body)
        values = fields(body)
        for name in _STATEFUL:
            if values.get(name) is not None:
                raise RequestRefused(
                    f"{name} is not served: nothing is kept between requests; send it all", param=name
                )
        config = inner(values, "generationConfig")
        is_stream = _STREAMED in incoming.path
        model = str(incoming.path.get(_STREAMED if is_stream else "model", ""))
        request = Request(
            prompt=conversation_of(values),
            model=model,
            wishes=_wishes(values, config),
            is_stream=is_stream,
            digest=digest_request(self.protocol, {**body, "model": model}, without=_NOT_IN_DIGEST),
        )
        shows_thoughts = inner(config, "thinkingConfig").get("includeThoughts") is True
        return GenerateExchange(request, shows_thoughts, _is_events(incoming) if is_stream else False)


@dataclass(frozen=True, slots=True)
class GenerateExchange:
    """One request."""

    request: Request
    """As in `Exchange`."""
    shows_thoughts: bool
    """Whether the answer has the thoughts."""
    is_events: bool
    """Whether a stream is server-sent events; otherwise it is one JSON array."""

    def whole(self, shown: Shown) -> bytes:
        """As in `Exchange`."""
        return orjson.dumps(_response(shown, self.shows_thoughts))

    def stream(self, call_id: str, created_s: int, model: str) -> Stream:
        """As in `Exchange`."""
        return EventStream(self.shows_thoughts) if self.is_events else ArrayStream(self.shows_thoughts)


class EventStream:
    """`?alt=sse`: the response as an event, or an error; see the module."""

    media_type = MEDIA_TYPE

    def __init__(self, shows_thoughts: bool) -> None:
        self._shows_thoughts = shows_thoughts

    def keep_alive(self) -> bytes:
        """As in `Stream`."""
        return b"\n\n"

    def end(self, shown: Shown) -> bytes:
        """As in `Stream`."""
        return event(_response(shown, self._shows_thoughts))

    def fail(self, refusal: RequestRefused) -> bytes:
        """As in `Stream`. No line end: a client that reads it in two pieces takes the rest for a broken answer, too."""
        return orjson.dumps(error_body(refusal))


class ArrayStream:
    """Without `alt`: a JSON array of responses; signs of life are space in it."""

    media_type = "application/json; charset=utf-8"

    def __init__(self, shows_thoughts: bool) -> None:
        self._shows_thoughts = shows_thoughts
        self._open = b"["

    def keep_alive(self) -> bytes:
        """As in `Stream`."""
        return self._begun() + b"\n"

    def end(self, shown: Shown) -> bytes:
        """As in `Stream`."""
        return self._begun() + orjson.dumps(_response(shown, self._shows_thoughts)) + b"]"

    def fail(self, refusal: RequestRefused) -> bytes:
        """As in `Stream`."""
        return self._begun() + orjson.dumps(error_body(refusal)) + b"]"

    def _begun(self) -> bytes:
        opening, self._open = self._open, b""
        return opening


def _is_events(incoming: Incoming) -> bool:
    alt = incoming.query.get("alt", "json")
    if alt not in ("sse", "json"):
        raise RequestRefused(f"alt={alt!r}: expected 'sse', or 'json' for one array", param="alt")
    return alt == "sse"


def _wishes(values: dict[str, Any], config: dict[str, Any]) -> Wishes:
    if config.get("candidateCount") not in (None, 1):
        raise RequestRefused(
            f"candidateCount={config['candidateCount']!r}: expected 1; send the request n times",
            param="candidateCount",
        )
    modalities = [str(name).upper() for name in typed(config, "responseModalities", list) or ("TEXT",)]
    if "TEXT" not in modalities:
        raise RequestRefused(
            f"responseModalities={modalities!r}: expected 'TEXT' among them; only text is served",
            code="content_not_served",
            param="responseModalities",
        )
    unused = overruled(config, _OVERRULED) | overruled(inner(config, "thinkingConfig"), _OVERRULED_THOUGHTS)
    if len(modalities) > 1:
        unused["responseModalities"] = modalities
    _, left_out = tools_of(values)
    if left_out:
        unused["tools"] = left_out
    _, allowed = tool_choice(values)
    if allowed:
        unused["allowedFunctionNames"] = allowed
    return Wishes(
        temperature=number(config, "temperature", 0.0, 100.0),
        max_tokens=whole(config, "maxOutputTokens", 1),
        seed=whole(config, "seed", -(2**63)),
        stop=stops(config, "stopSequences"),
        overruled=unused,
    )


def _response(shown: Shown, shows_thoughts: bool) -> dict[str, Any]:
    """The answer as a GenerateContentResponse."""
    parts: list[dict[str, Any]] = []
    if shown.reasoning and shows_thoughts:
        parts.append({"text": shown.reasoning, "thought": True, "thoughtSignature": _signature(shown, 0)})
    if shown.content:
        parts.append({"text": shown.content})
    broken: list[ToolCall] = []
    for index, call in enumerate(shown.tool_calls):
        arguments = _arguments(call)
        if arguments is None:
            broken.append(call)
            continue
        part: dict[str, Any] = {"functionCall": {"id": call.id, "name": call.name, "args": arguments}}
        if shown.reasoning and index == 0:
            part["thoughtSignature"] = _signature(shown, len(parts))
        parts.append(part)
    candidate: dict[str, Any] = {
        "content": {"role": "model", "parts": parts or [{"text": ""}]},
        "finishReason": "MAX_TOKENS" if shown.end is End.LENGTH else "MALFORMED_FUNCTION_CALL" if broken else "STOP",
        "index": 0,
    }
    if broken:
        said = ", ".join(f"{call.name}({call.arguments})" for call in broken)
        candidate["finishMessage"] = f"arguments are no JSON object: {said}"
    return {
        "candidates": [candidate],
        "usageMetadata": {
            "promptTokenCount": shown.prompt_tokens,
            "candidatesTokenCount": shown.output_tokens,
            "totalTokenCount": shown.prompt_tokens + shown.output_tokens,
        },
        "modelVersion": shown.model,
        "responseId": shown.call_id,
    }


def _arguments(call: ToolCall) -> orjson.Fragment | None:
    """The arguments as they were sampled; None if they are no JSON object.

    Line ends, which JSON has only between its tokens, become spaces: they would end the line of an event.
    """
    text = call.arguments.strip() or "{}"
    try:
        if not isinstance(orjson.loads(text), dict):
            return None
    except orjson.JSONDecodeError:
        return None
    return orjson.Fragment(text.replace("\r", " ").replace("\n", " "))


def _signature(shown: Shown, index: int) -> str:
    """Of the part at this place: equal for a replay, and base64 in both of its alphabets, since clients print it anew."""
    return digest_bytes(b"thought", shown.call_id.encode(), str(index).encode())
