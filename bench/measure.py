"""CPU seconds, wall seconds and peak memory of another process."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

RUNS = 3


@dataclass(frozen=True)
class Usage:
    """CPU seconds (user and system) and wall seconds of a process and its children, and its peak memory in bytes."""

    cpu: float
    wall: float
    peak: int
    output: bytes


def run(command: Sequence[str]) -> Usage:
    """Run a command to its end. Raises `CalledProcessError` when it fails."""
    begin = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    wall = time.monotonic() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stdout.close()
    if process.returncode > 1:
        raise subprocess.CalledProcessError(process.returncode, command)
    return Usage(used.ru_utime + used.ru_stime, wall, used.ru_maxrss * 1024, output)


def best_of(commands: dict[str, Sequence[str]]) -> dict[str, Usage]:
    """Run all commands in turn, several times; return the best of each: a busy machine slows all alike."""
    best: dict[str, Usage] = {}
    for _ in range(RUNS):
        for name, command in commands.items():
            usage = run(command)
            wall = min(usage.wall, best[name].wall) if name in best else usage.wall
            if name not in best or usage.cpu < best[name].cpu:
                best[name] = usage
            best[name] = replace(best[name], wall=wall)
    return best
