"""Ports for services that several processes of this machine start at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rollstream import process

PORTS = range(20_000, 20_200)
TAKEN = 150
OTHER = f"""
from rollstream import process
process._PORTS = range({PORTS.start}, {PORTS.stop})
print(*(process.free_port() for _ in range({TAKEN})), flush=True)
input()
"""


def test_port_of_another_living_process_is_not_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though nothing listens on it yet, or not at the moment: the service behind it may be about to start again."""
    monkeypatch.setattr(process, "_PORTS", PORTS)
    command = [sys.executable, "-c", OTHER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        taken = set(map(int, other.stdout.readline().split()))

        ports = {process.free_port() for _ in range(20)}
        other.communicate("\n")

    assert (TAKEN, 20) == (len(taken), len(ports))
    assert set() == taken & ports
