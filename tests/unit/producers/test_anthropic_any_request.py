"""Whatever JSON is sent to Anthropic's routes, it is a request or a refusal."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.producers.dialects.anthropic_messages import Messages, MessagesTokenCount
from rollstream.producers.dialects.base import Incoming, RequestRefused

JSON: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
KINDS = st.sampled_from(
    ["text", "image", "document", "search_result", "thinking", "tool_use", "tool_result", "tool_reference", "custom",
     "web_search_20250305", "bash_20250124", "auto", "any", "tool", "content", "x"]
)  # fmt: skip
NAMES = (
    "text",
    "content",
    "source",
    "data",
    "title",
    "name",
    "id",
    "input",
    "tool_use_id",
    "thinking",
    "input_schema",
)


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Objects with the field names of blocks, so that more than the first check is reached."""
    value = JSON | inner | st.lists(inner, max_size=3)
    return st.fixed_dictionaries({}, optional={"type": KINDS | JSON, **dict.fromkeys(NAMES, value)})


OTHERS = (
    "tool_choice", "thinking", "output_config", "context_management", "mcp_servers", "container", "model",
    "max_tokens", "temperature", "top_p", "top_k", "stop_sequences", "stream", "metadata",
)  # fmt: skip
BLOCK = st.recursive(nested(st.text(max_size=5)), nested, max_leaves=4)
CONTENT = JSON | st.text(max_size=5) | st.lists(BLOCK | JSON, max_size=3)
MESSAGE = st.fixed_dictionaries(
    {}, optional={"role": st.sampled_from(["user", "assistant", "system"]) | JSON, "content": CONTENT}
)
BODY = st.fixed_dictionaries(
    {},
    optional={
        "messages": st.lists(MESSAGE | JSON, max_size=4) | JSON,
        "system": CONTENT,
        "tools": st.lists(BLOCK | JSON, max_size=3) | JSON,
        **dict.fromkeys(OTHERS, JSON | BLOCK),
    },
)  # fmt: skip


@settings(deadline=None)
@given(BODY | JSON)
def test_any_json_is_a_request_or_a_refusal(values: Any) -> None:
    """Never another exception; and what is taken has the messages that a template expects."""
    incoming = Incoming(json.dumps(values).encode())
    for parse_it in (Messages().parse, MessagesTokenCount().parse):
        try:
            found: Any = parse_it(incoming)
        except RequestRefused as refusal:
            json.loads(Messages().error(refusal)[1])
            continue
        prompt = found.request.prompt if hasattr(found, "request") else found
        assert prompt.messages
        assert all(isinstance(message["content"], str) for message in prompt.messages)
        assert {"role", "content"} <= set(prompt.messages[0])
        json.dumps([prompt.messages, prompt.tools])
