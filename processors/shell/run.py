"""The processor process."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import Callable, Sequence

from rollstream.errors import SettingsError
from rollstream.kafka import check_broker
from rollstream.processors.shell.admission import kinds_by_topic
from rollstream.processors.shell.app import build_app
from rollstream.processors.shell.handler import Shell
from rollstream.processors.shell.metrics import serve_metrics
from rollstream.schemas.registry import open_codec
from rollstream.settings import Settings

log = logging.getLogger("rollstream.processor")
_GARBAGE = (100_000, 20, 100)
"""Objects made before the youngest are looked through, and how often before the older ones are; Python's: 700, 10, 10."""
_STOP_S = 25.0
"""How long the last commit may take before the process ends without it; Kubernetes kills it after 30 s."""


def run(settings: Settings) -> None:
    """Run the stages named in the settings until SIGTERM or SIGINT; whatever makes the worker stop is raised.

    Raises: SettingsError: an unknown stage, or the pipeline file is wrong.
    """
    from rollstream.processors.pipeline import STAGES, load_pipeline

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for chatty in ("faust", "aiokafka", "mode", "rollstream.processors.shell"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    wanted = settings.processor.stages
    if not wanted or set(wanted) - set(STAGES):
        raise SettingsError(f"cannot run processor.stages={wanted!r}: expected some of {STAGES}")
    names = [name for name in STAGES if name in wanted]
    pipeline = load_pipeline(settings.processor.pipeline)
    check_broker(settings.kafka)

    def make_shell() -> Shell:
        return Shell(
            settings,
            lambda partition: [stage for stage in pipeline.build_stages(partition) if stage.name in names],
            open_codec(settings.kafka.registry_url, settings.claims),
            max_work=pipeline.max_concurrency,
            kinds=kinds_by_topic(),
        )

    run_shell(settings, make_shell, names)


def group_id(prefix: str, names: Sequence[str]) -> str:
    """The consumer group of the processes that host these stages."""
    return f"{prefix}.processor.{'-'.join(names)}"


def run_shell(settings: Settings, make_shell: Callable[[], Shell], names: Sequence[str]) -> None:
    """Run a shell until SIGTERM or SIGINT; whatever makes the worker stop is raised.

    Args: make_shell: called inside the event loop; names: of the stages it hosts, in pipeline order.
    """
    # What is open lives long in many objects without cycles. Where Python looks through them as often as it does by itself, that
    # is a fifth of the processor time of a restart with 1,000 open rollouts.
    gc.set_threshold(*_GARBAGE)
    # asyncio's own loop: under uvloop a write to a connection that the broker has just closed raises RuntimeError, which
    # aiokafka does not expect; it ends the task that keeps its metadata, and everybody who waits for a coordinator waits for ever
    # (aiokafka issue 1038).
    asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())
    asyncio.run(_serve(settings, make_shell, group_id(settings.kafka.prefix, names)))


async def _serve(settings: Settings, make_shell: Callable[[], Shell], group: str) -> None:
    shell = make_shell()
    app = build_app(settings, shell, group)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, app.has_ended.set)
    if settings.processor.metrics_port:
        serve_metrics(shell, settings.processor.metrics_port)
    app.finalize()
    starting = asyncio.ensure_future(app.start())
    log.info("processor starts as group %s at %s", group, settings.kafka.bootstrap)
    ended = asyncio.ensure_future(app.has_ended.wait())
    await asyncio.wait([starting, ended], return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        starting.result()
    await ended
    log.info("processor stops")
    stopping = asyncio.ensure_future(app.stop())
    await asyncio.wait([stopping], timeout=_STOP_S)
    if not stopping.done():
        log.error("the broker did not let go within %g s; what is not committed is read again", _STOP_S)
    starting.cancel()
    if app.crash_reason is not None:
        raise app.crash_reason
