"""Fixtures of the shell's tests."""

from tests.integration.shell_fixtures import shell_topics, worker

__all__ = ["shell_topics", "worker"]
