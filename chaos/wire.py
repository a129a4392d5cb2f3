"""What of a gateway's answers counts for a client: whole JSON, or a stream that came to its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson


@dataclass(slots=True)
class Reply:
    """What became of one request."""

    code: int = 0
    """HTTP status; 0: there was none."""
    values: Any = None
    """The whole answer; None where it did not come whole."""
    error: str = ""
    """Why not."""

    @property
    def ok(self) -> bool:
        """Whether the client may rely on it."""
        return self.values is not None

    @property
    def is_refused(self) -> bool:
        """Whether sending it again would not help."""
        return self.code // 100 == 4 and self.code not in (408, 409, 425, 429)


async def read_json(response: aiohttp.ClientResponse, reply: Reply) -> None:
    data = await response.read()
    if response.status in (200, 201):
        reply.values = orjson.loads(data)
    else:
        reply.error = data[:200].decode(errors="replace")


async def read_whole(response: aiohttp.ClientResponse, reply: Reply) -> None:
    """A chat completion that is not streamed."""
    await read_json(response, reply)
    if reply.ok:
        choice, usage = reply.values["choices"][0], reply.values["usage"]
        reply.values = {
            "id": reply.values["id"],
            "text": choice["message"]["content"] or "",
            "finish": choice["finish_reason"],
            "usage": [usage["prompt_tokens"], usage["completion_tokens"]],
        }


async def read_stream(response: aiohttp.ClientResponse, reply: Reply) -> None:
    """A chat completion that is streamed; it is whole only with `[DONE]`."""
    if response.status != 200:
        await read_json(response, reply)
        return
    values: dict[str, Any] = {"id": None, "text": "", "finish": None}
    async for raw in response.content:
        if not raw.startswith(b"data: "):
            continue
        if raw.startswith(b"data: [DONE]"):
            if values["finish"] is not None:
                reply.values = values
            return
        event = orjson.loads(raw[6:])
        if "error" in event:
            reply.error = str(event["error"].get("message"))[:200]
            return
        values["id"] = event["id"]
        for choice in event["choices"]:
            values["text"] += choice["delta"].get("content") or ""
            values["finish"] = choice["finish_reason"] or values["finish"]
    reply.error = "the stream ended early"
