"""Property tests: no deadline, since a shared machine may stop a test for longer than that; the same examples each run."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("shared", deadline=None, max_examples=60, derandomize=True, database=None)
settings.load_profile("shared")
