"""Mutated log lines by the million through reader, state and findings, without coverage, because that is fastest.

No line may raise, read alone or with the usual lines of its second, both ways must read the same kinds of lines, and
memory may not grow: all is checked at every block.
"""

from __future__ import annotations

import random
import resource
import sys
import time
import traceback
from pathlib import Path

from fuzz.lines import mutators, seeds
from sglang_tuning_exporter.diagnosis.evidence import past_of
from sglang_tuning_exporter.diagnosis.findings import judge
from sglang_tuning_exporter.sglang.log.reader import LogReader
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.server import ServerState

BLOCK_LINES = 2000
# What the interpreter's arenas may take on top after the first blocks have warmed every cache.
GROWTH_MIB = 64
FAILURE = Path("build/fuzz/spoiled.log")


def run(lines: int, seconds: float, seed: int) -> int:
    """Feed spoiled lines until `lines` or `seconds` are reached. Returns the exit status."""
    rng = random.Random(seed)
    clean = [line[:4000] for line in seeds()]
    ways = mutators(rng, clean)
    reader, state = LogReader(), ServerState(PROFILES["offline"], 0.0)
    live_reader, live_state = LogReader(), ServerState(PROFILES["offline"], 0.0)
    begin, done, now, events = time.monotonic(), 0, 0.0, 0
    warm = 0
    while done < lines and time.monotonic() - begin < seconds:
        block = b"".join(rng.choice(ways)(rng.choice(clean)) + b"\n" for _ in range(BLOCK_LINES))
        now += 1.0
        try:
            for event in reader.feed(block):
                state.observe(event, now)
                events += 1
            live_state.observe_all(live_reader.feed_runs(block), now)
            for each in (state, live_state):
                judge(past_of(each, now))
            if live_reader.counts != reader.counts:
                message = f"in runs {live_reader.counts}, alone {reader.counts}"
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
