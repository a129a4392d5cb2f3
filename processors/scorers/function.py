"""A scorer of your own: `package.module:function`.

The function gets the `Rollout`, and the scorer's `config` as keyword arguments. It returns a number, or a `Verdict`. An
`async def` runs on the event loop and must not block it. Any other function runs in a thread of its own, a daemon: if it
never returns, its score is missing after the time limit, the thread stays, and the process can still end. At most
`MAX_THREADS` of a scorer may be stuck like that in one partition; beyond, its scores are missing at once.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rollstream.errors import RollstreamError, SettingsError, StageError, boundary
from rollstream.processors.scorers.base import scoring
from rollstream.schemas.records import Rollout

MAX_THREADS = 256
"""Most threads of one scorer in one partition; far above any sensible `max_concurrency`, so that all are stuck ones."""


class FunctionScorer:
    """Calls a function for each rollout."""

    def __init__(self, kind: str, config: dict[str, Any]) -> None:
        """Args: kind: `package.module:function`.

        Raises: SettingsError: it cannot be imported, is not callable, or does not take the configuration.
        """
        self._function = _load(kind, config)
        self._config = config
        self._kind = kind
        self._threads = 0

    async def score(self, rollout: Rollout) -> object:
        if inspect.iscoroutinefunction(self._function):
            return await self._function(rollout, **self._config)
        if self._threads >= MAX_THREADS:
            raise StageError(f"{MAX_THREADS} calls of {self._kind} have not returned; restart the processor")
        self._threads += 1
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[object] = loop.create_future()

        def settle(result: object, error: RollstreamError | None) -> None:
            self._threads -= 1
            if answer.done():
                return
            if error is None:
                answer.set_result(result)
            else:
                answer.set_exception(error)

        def work() -> None:
            result: object = None
            failure: RollstreamError | None = None
            try:
                with scoring():
                    result = self._function(rollout, **self._config)
            except RollstreamError as error:
                failure = error
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settle, result, failure)

        threading.Thread(target=work, name=f"scorer {self._kind}", daemon=True).start()
        return await answer


def _load(kind: str, config: dict[str, Any]) -> Callable[..., Any]:
    module, _, name = kind.partition(":")
    try:
        with boundary(SettingsError, f"import scorer {kind!r}"):
            function = getattr(importlib.import_module(module), name)
    except RollstreamError as cause:
        raise SettingsError(f"{cause}; it must be importable where the processor runs") from cause
    if not callable(function):
        raise SettingsError(f"cannot use scorer {kind!r}: expected a function, got {type(function).__name__}")
    try:
        inspect.signature(function).bind(None, **config)
    except TypeError as cause:
        raise SettingsError(
            f"cannot use scorer {kind!r}: it does not take (rollout, {', '.join(config) or 'no config'}): {cause}"
        ) from cause
    loaded: Callable[..., Any] = function
    return loaded
