"""`.env.example` names every setting once, with its default."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from rollstream.settings import PREFIX, Settings, setting_names
from tests.contract.checkout import ROOT


def _examples() -> list[tuple[str, str]]:
    return re.findall(r"^# (ROLLSTREAM_\w+)=(.*)$", (ROOT / ".env.example").read_text("utf-8"), re.MULTILINE)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str | Path):
        return str(value)
    return json.dumps(value)


def test_env_example_names_every_setting_in_order() -> None:
    """Whoever adds a setting adds its line here."""
    assert list(setting_names()) == [name for name, _ in _examples()]


def test_env_example_shows_the_defaults() -> None:
    """Copying the file changes nothing; the host's name stands for itself."""
    settings = Settings()
    expected = {}
    for name in setting_names():
        part, field = name.removeprefix(PREFIX).lower().split("__")
        expected[name] = _text(getattr(getattr(settings, part), field))
    expected["ROLLSTREAM_PROCESSOR__INSTANCE_ID"] = "<host name>"

    assert expected == dict(_examples())
