"""Mutated log lines by the million through reader, watch and judgement, without coverage, because that is fastest.

No line may raise, each has one kind, and memory may not grow: all is checked at every block.
"""

from __future__ import annotations

import random
import resource
import sys
import time
import traceback
from pathlib import Path

from fuzz.lines import mutators, seeds
from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.lines import Reader
from sglang_tuning_exporter.core.watch import Watch

BLOCK_LINES = 2000
# What the interpreter's arenas may take on top after the first blocks have warmed every cache.
GROWTH_MIB = 64
FAILURE = Path("build/fuzz/spoiled.log")
BEGIN = 1_763_640_000.0


def run(lines: int, seconds: float, seed: int) -> int:
    """Feed spoiled lines until `lines` or `seconds` are reached. Returns the exit status."""
    rng = random.Random(seed)
    clean = [line[:4000] for line in seeds()]
    ways = mutators(rng, clean)
    reader, watch = Reader(), Watch(PROFILES["offline"], BEGIN, reads=True, scrapes=False)
    begin, done, now, events, lines_read = time.monotonic(), 0, BEGIN, 0, 0
    warm = 0
    while done < lines and time.monotonic() - begin < seconds:
        block = b"".join(rng.choice(ways)(rng.choice(clean)) + b"\n" for _ in range(BLOCK_LINES))
        now += 1.0
        try:
            for line in block.splitlines():
                lines_read += 1
                for event in reader.read(line):
                    event.time, events = now, events + 1
                    watch.take(event)
            watch.judge(now)
            if sum(reader.lines.values()) != lines_read:
                message = f"{lines_read} lines, by kind {reader.lines}"
                raise AssertionError(message)  # noqa: TRY301 - reported as any other failure
        except Exception:  # noqa: BLE001 - any exception is what is looked for
            traceback.print_exc()
            FAILURE.parent.mkdir(parents=True, exist_ok=True)
            FAILURE.write_bytes(block)
            print(f"failed: seed {seed}, after {done} lines; the block is in {FAILURE}", file=sys.stderr)
            return 1
        done += BLOCK_LINES
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        warm = memory if done <= 50 * BLOCK_LINES else warm
        if memory - warm > GROWTH_MIB:
            print(f"failed: memory grew from {warm} to {memory} MiB after {done} lines, seed {seed}", file=sys.stderr)
            return 1
        if sys.stderr.isatty() and done % (50 * BLOCK_LINES) == 0:
            print(f"\r{done:,} lines, {events:,} events, {memory} MiB", end="", file=sys.stderr)
    took = time.monotonic() - begin
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"{done:,} spoiled lines, {events:,} events, no exception, {warm} → {memory} MiB, {took:.0f} s, seed {seed}")
    return 0
