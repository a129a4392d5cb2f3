"""What the processor process refuses before it starts."""

from __future__ import annotations

import pytest

from rollstream.errors import SettingsError
from rollstream.processors.shell.run import group_id, run
from rollstream.settings import ProcessorSettings, Settings


@pytest.mark.parametrize("stages", [(), ("join", "grup")])
def test_unknown_or_no_stages_are_refused(stages: tuple[str, ...]) -> None:
    """At start, with the names that are known."""
    with pytest.raises(SettingsError, match="expected some of"):
        run(Settings(processor=ProcessorSettings(stages=stages)))


def test_group_is_named_after_the_stages() -> None:
    """Processes with other stages are other groups: each commits for itself."""
    assert group_id("rollstream", ["join", "group"]) == "rollstream.processor.join-group"
