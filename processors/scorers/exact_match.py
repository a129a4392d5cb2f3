"""Whether the rollout's answer equals the task's."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from rollstream.errors import StageError
from rollstream.processors.config import Part
from rollstream.processors.scorers.base import Verdict
from rollstream.schemas.records import Rollout


class ExactMatch:
    """1 if the answer equals what the task expects, else 0."""

    VERSION: ClassVar[int] = 1

    class Config(Part):
        """Knobs."""

        expected: str = "answer"
        """Field of the task that holds the expected answer."""
        outcome_field: str | None = None
        """Field of the outcome that holds the answer; None takes the text of the last call's message."""
        ignore_case: bool = False
        """Compare without regard to case."""
        strip: bool = True
        """Compare without leading and trailing white space."""

    def __init__(self, config: Config) -> None:
        self._config = config

    async def score(self, rollout: Rollout) -> Verdict:
        config = self._config
        task = json.loads(rollout.task)
        if not isinstance(task, dict) or config.expected not in task:
            raise StageError(f"the task has no field {config.expected!r}", reason="no_value")
        expected = self._plain(task[config.expected])
        found = self._plain(self._answer(rollout))
        return Verdict(float(expected == found), {"expected": expected, "found": found})

    def _answer(self, rollout: Rollout) -> Any:
        field = self._config.outcome_field
        if field is None:
            ended = [call for call in rollout.calls if call.outcome.is_whole]
            return _text(json.loads(ended[-1].message)) if ended else ""
        outcome = json.loads(rollout.outcome)
        if not isinstance(outcome, dict) or field not in outcome:
            raise StageError(f"the outcome has no field {field!r}", reason="no_value")
        return outcome[field]

    def _plain(self, value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        text = text.strip() if self._config.strip else text
        return text.casefold() if self._config.ignore_case else text


def _text(message: Any) -> str:
    """The text of an assistant message whose content is a string or a list of parts."""
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""
