"""What `plan` predicts from 90 quiet seconds, beside what the server then does.

One server without a running limit: `plan --sglang-url` watches it with one to four clients, then the same requests come from more
clients, phase after phase. Clients measure each phase's tokens a second; errors are per second of the scheduler's CPU, because other
programs slow the watched minutes and the phases differently.
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

LULL = (1, 2, 4, 1, 3)  # clients at once while `plan` watches, one after the other, twice
QUIET_SECONDS, PHASE_SECONDS = 90.0, 30.0
CLIENTS = (4, 8, 16, 32)
MIXES: dict[str, load.Load] = {
    "short": load.Load(clients=1, prompt_tokens=(24, 60), most_new_tokens=200, ignore_eos=True),
    "long-prompts": load.Load(clients=1, prompt_tokens=(600,), most_new_tokens=150, ignore_eos=True),
    "mixed": load.Load(clients=1, prompt_tokens=(24, 24, 24, 1200), most_new_tokens=200, ignore_eos=True),
}
Phase = tuple[str, int, dict[str, Any] | None, float, float]  # mix, clients, predicted, measured, error per CPU second


def run(installation: Installation, mix: str, say: Callable[[str], None]) -> list[Phase]:
    """Run one mix once. Raises `UsageError` if the server does not start."""
    with tempfile.TemporaryDirectory(prefix="closed-loop-") as scratch:
        args = engine.arguments(installation, "--max-total-tokens 65536")
        with engine.running(installation, args, Path(scratch) / "server.log", {}) as server:
            plan, share = _plan(server, MIXES[mix])
            say(f"{mix}: {plan['refused'] or [row['requests'] for row in plan['rows']]}")
            predicted, phases = {row["requests"]: row["tokens_per_second"] for row in plan["rows"]}, list[Phase]()
            for clients in CLIENTS:
                begin, cpu = time.time(), server.cpu_seconds(engine.SCHEDULER)
                records = load.run(replace(MIXES[mix], seed=9, clients=clients, seconds=PHASE_SECONDS), engine.URL)
                used = (server.cpu_seconds(engine.SCHEDULER) - cpu) / (time.time() - begin)
                found = measure(records, (), begin + WARM_SECONDS, begin + PHASE_SECONDS - 1, used)
                measured, row = found["tokens_per_second"] or 0.0, predicted.get(clients)
                error = (row["value"] / share) / (measured / used) - 1 if row else 0.0
                phases.append((mix, clients, row, measured, error))
                say(f"{mix}: {phases[-1]}")
            return phases


def _plan(server: engine.Engine, sent: load.Load) -> tuple[dict[str, Any], float]:
    """Return the table of `plan`, which watches while few clients ask, and the share of a core that the scheduler got meanwhile."""
    command = [sys.executable, "-m", "sglang_tuning_exporter", "plan", "--sglang-url", engine.URL, "--format", "json"]
    cpu = server.cpu_seconds(engine.SCHEDULER)
    with subprocess.Popen([*command, "--seconds", f"{QUIET_SECONDS:g}"], stdout=subprocess.PIPE, text=True) as plan:
        for place, clients in enumerate(2 * LULL):
            load.run(replace(sent, seed=place, clients=clients, seconds=QUIET_SECONDS / (2 * len(LULL))), engine.URL)
        share = (server.cpu_seconds(engine.SCHEDULER) - cpu) / QUIET_SECONDS
        return json.loads(plan.communicate()[0]), share


def table(phases: Sequence[Phase]) -> str:
    """Write predicted and measured throughput as a Markdown table."""
    rows = [
        [mix, str(clients), f"{row['value']:.0f} ({row['interval'][0]:.0f} to {row['interval'][1]:.0f})", f"{measured:.0f}", f"{100 * error:+.0f} %"]
        if row
        else [mix, str(clients), "not predicted", f"{measured:.0f}", ""]
        for mix, clients, row, measured, error in phases
    ]  # fmt: skip
    errors = [abs(error) for *_, row, _, error in phases if row]
    words = (
        f"\n\nMedian error per CPU second {100 * median(errors):.0f} %, worst {100 * max(errors):.0f} %."
        if errors
        else ""
    )
    return markdown(("mix", "clients", "predicted tokens/s", "measured", "error per CPU second"), rows) + words
