"""The number that the environment put into the rollout's outcome."""

from __future__ import annotations

import json
from typing import ClassVar

from rollstream.errors import StageError
from rollstream.processors.config import Part
from rollstream.schemas.records import Rollout


class EnvironmentOutcome:
    """Reads one field of `Rollout.outcome`; true and false are 1 and 0."""

    VERSION: ClassVar[int] = 1

    class Config(Part):
        """Knobs."""

        field: str = "reward"
        """Field of the outcome; dots lead into objects, as in `result.reward`."""

    def __init__(self, config: Config) -> None:
        self._path = config.field.split(".")

    async def score(self, rollout: Rollout) -> object:
        value = json.loads(rollout.outcome)
        for name in self._path:
            if not isinstance(value, dict) or name not in value:
                raise StageError(f"the outcome has no field {'.'.join(self._path)!r}", reason="no_value")
            value = value[name]
        return value
