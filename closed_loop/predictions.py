"""What `plan` predicts from the log of a quiet time, beside what the server then does.

One server without a running limit: one to four clients ask it, `plan` reads its log, then the same requests come from
more clients, phase after phase. Clients measure each phase's tokens a second; errors are per second of the scheduler's
CPU, because other programs slow the quiet time and the phases differently. `plan` leaves prefill out, so its figures
are above the measured ones by the time that prefill takes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.table import markdown
from closed_loop import engine, load
from closed_loop.installation import Installation
from closed_loop.side import WARM_SECONDS, measure

LULL = (1, 2, 4, 1, 3)  # clients at once in the quiet time, one after the other, twice
QUIET_SECONDS, PHASE_SECONDS = 120.0, 30.0
# A line every 10 decode steps: of lines every 40, the usual distance, hardly two follow each other without a prefill.
ARGUMENTS = "--max-total-tokens 65536 --decode-log-interval 10"
CLIENTS = (4, 8, 16, 32)
MIXES: dict[str, load.Load] = {
    "short": load.Load(clients=1, prompt_tokens=(24, 60), most_new_tokens=200, ignore_eos=True),
    "long-prompts": load.Load(clients=1, prompt_tokens=(600,), most_new_tokens=150, ignore_eos=True),
    "mixed": load.Load(clients=1, prompt_tokens=(24, 24, 24, 1200), most_new_tokens=200, ignore_eos=True),
}
Phase = tuple[str, int, float | None, float, float]  # mix, clients, predicted, measured, error per CPU second


def run(installation: Installation, mix: str, say: Callable[[str], None]) -> list[Phase]:
    """Run one mix once. Raises `UsageError` if the server does not start."""
    with tempfile.TemporaryDirectory(prefix="closed-loop-") as scratch:
        args = engine.arguments(installation, ARGUMENTS)
        with engine.running(installation, args, Path(scratch) / "server.log", {}) as server:
            plan, share = _plan(server, MIXES[mix])
            say(f"{mix}: {plan['refused'] or [row['requests'] for row in plan['rows']]}")
            predicted, phases = {row["requests"]: row["tokens_per_second"] for row in plan["rows"]}, list[Phase]()
            for clients in CLIENTS:
                begin, cpu = time.time(), server.cpu_seconds(engine.SCHEDULER)
                records = load.run(replace(MIXES[mix], seed=9, clients=clients, seconds=PHASE_SECONDS), engine.URL)
                used = (server.cpu_seconds(engine.SCHEDULER) - cpu) / (time.time() - begin)
                found = measure(records, (), begin + WARM_SECONDS, begin + PHASE_SECONDS - 1, used)
                measured, speed = found["tokens_per_second"] or 0.0, predicted.get(clients)
                error = (speed / share) / (measured / used) - 1 if speed and measured else 0.0
                phases.append((mix, clients, speed, measured, error))
                say(f"{mix}: {phases[-1]}")
            return phases


def _plan(server: engine.Engine, sent: load.Load) -> tuple[dict[str, Any], float]:
    """Return the table of `plan` after few clients asked, and the share of a core that the scheduler got meanwhile."""
    begin, cpu = time.time(), server.cpu_seconds(engine.SCHEDULER)
    for place, clients in enumerate(2 * LULL):
        load.run(replace(sent, seed=place, clients=clients, seconds=QUIET_SECONDS / (2 * len(LULL))), engine.URL)
    share = (server.cpu_seconds(engine.SCHEDULER) - cpu) / (time.time() - begin)
    command = [sys.executable, "-m", "sglang_tuning_exporter", "plan", str(server.log), "--format", "json"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout), share


def table(phases: Sequence[Phase]) -> str:
    """Write predicted and measured throughput as a Markdown table."""
    rows = [
        [mix, str(clients), f"{speed:.0f}", f"{measured:.0f}", f"{100 * error:+.0f} %"]
        if speed
        else [mix, str(clients), "not predicted", f"{measured:.0f}", ""]
        for mix, clients, speed, measured, error in phases
    ]
    errors = [abs(error) for *_, speed, _, error in phases if speed]
    words = (
        f"\n\nMedian error per CPU second {100 * median(errors):.0f} %, worst {100 * max(errors):.0f} %."
        if errors
        else ""
    )
    return markdown(("mix", "clients", "predicted tokens/s", "measured", "error per CPU second"), rows) + words
