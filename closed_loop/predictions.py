"""Throughput at larger batches as predicted from 90 quiet seconds, beside the measured one.

One server without a running limit: 90 seconds of one to four clients, from which the model is fitted, then the same requests from more
clients, phase after phase. Clients measure each phase's tokens a second; errors are per second of the scheduler's CPU, because other
programs slow the fit and the phases differently.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import requests

from closed_loop import engine, load
from closed_loop.chain import LULL, SETTLE_SECONDS, Lane
from closed_loop.installation import Installation
from sglang_tuning_exporter.capacity.prediction import throughput
from sglang_tuning_exporter.capacity.ranks import RankCapacity
from sglang_tuning_exporter.capacity.readings import Counters, Readings, measure
from sglang_tuning_exporter.capacity.step_time import StepTime, fit
from sglang_tuning_exporter.sglang.server_info import parse_loads

QUIET_SECONDS, PHASE_SECONDS, WARM_SECONDS = 90.0, 30.0, 8.0
POLL_SECONDS = 3.0
CLIENTS = (4, 8, 16, 32)
MIXES: dict[str, load.Load] = {
    "short": load.Load(clients=1, prompt_tokens=(24, 60), most_new_tokens=200, ignore_eos=True),
    "long-prompts": load.Load(clients=1, prompt_tokens=(600,), most_new_tokens=150, ignore_eos=True),
    "mixed": load.Load(clients=1, prompt_tokens=(24, 24, 24, 1200), most_new_tokens=200, ignore_eos=True),
}
FLAGS = "--max-total-tokens 65536"


def run(installation: Installation, lane: Lane, mix: str, scratch: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Run one mix once. Raises `UsageError` if the server does not start."""
    args = engine.arguments(installation, lane.port, *FLAGS.split())
    server = engine.start(installation, args, port=lane.port, log=scratch / f"{mix}.log", core=lane.any, env={})
    try:
        server.wait_ready()
        server.pin(lane.core)
        time.sleep(SETTLE_SECONDS)
        readings, begin = Readings(600.0), server.cpu_seconds("sglang::scheduler")
        for number in range(2):
            for clients in LULL:
                _phase(server, replace(MIXES[mix], seed=number), clients, QUIET_SECONDS / 2 / len(LULL), readings)
        share = (server.cpu_seconds("sglang::scheduler") - begin) / QUIET_SECONDS
        rank = _capacity(readings)
        say(f"{mix}: {_words(rank.step)}")
        phases = [_compared(server, replace(MIXES[mix], seed=9), clients, rank) for clients in CLIENTS]
        for phase in phases:
            say(f"{mix}: {phase}")
        return {"mix": mix, "model": _words(rank.step), "cpu_share": round(share, 3), "phases": phases}
    finally:
        server.stop()


def _capacity(readings: Readings) -> RankCapacity:
    intervals = list(readings.intervals)
    step = fit([each.decode for each in intervals])
    generated = sum(each.decode.tokens for each in intervals)
    mix = sum(each.prefill_tokens for each in intervals) / generated if generated else None
    return RankCapacity(0, step, measure(intervals), prefill_per_token=mix)


def _words(step: StepTime | None) -> str:
    if step is None or step.line is None:
        return "none" if step is None else step.refused
    line = step.line
    return (
        f"{1e3 * line.fixed.value:.2f} + {1e3 * line.per_request.value:.3f} ms x batch (± {100 * line.per_request.half_width:.0f} %),"
        f" batch {step.batch:.1f} ± {step.deviation:.1f}"
    )


def _phase(
    server: engine.Engine, sent: load.Load, clients: int, seconds: float, readings: Readings | None
) -> list[load.Record]:
    records: list[load.Record] = []
    sending = threading.Thread(
        target=lambda: records.extend(load.run(replace(sent, clients=clients, seconds=seconds), server.url))
    )
    sending.start()
    while sending.is_alive():
        sending.join(POLL_SECONDS)
        if readings is not None:
            text = requests.get(f"{server.url}/v1/loads", timeout=5).text
            for each in parse_loads(text):
                found = Counters.of(each)
                if found is not None:
                    readings.take(found)
    return records


def _compared(server: engine.Engine, sent: load.Load, clients: int, rank: RankCapacity) -> dict[str, Any]:
    """Run one phase and return its tokens a second with a full batch, measured and predicted."""
    own, begin, cpu = Readings(600.0), time.time(), server.cpu_seconds("sglang::scheduler")
    records = _phase(server, sent, clients, PHASE_SECONDS, own)
    used = (server.cpu_seconds("sglang::scheduler") - cpu) / (time.time() - begin)
    first, last = begin + WARM_SECONDS, begin + PHASE_SECONDS - 1
    tokens = sum(count for record in records for at, count in record.arrivals if first <= at < last)
    predicted = throughput(rank, float(clients))
    decode = [each.decode for each in own.intervals if each.decode.steps]
    steps = sum(each.steps for each in decode)
    predicted_step = None if rank.step is None else rank.step.at(float(clients))
    return {
        "clients": clients,
        "measured": round(tokens / (last - first), 1),
        "predicted": None if predicted is None else [round(each, 1) for each in predicted.with_drift],
        "step_ms": round(1e3 * sum(each.seconds for each in decode) / steps, 3) if steps else None,
        "predicted_step_ms": None if predicted_step is None else round(1e3 * predicted_step.value, 3),
        "cpu_share": round(used, 3),
    }


def errors(results: list[dict[str, Any]]) -> list[float]:
    """Return the relative error of each predicted throughput, both per second of the scheduler's CPU."""
    found = []
    for result in results:
        for phase in result["phases"]:
            if phase["predicted"] is not None and phase["measured"]:
                predicted = phase["predicted"][0] / result["cpu_share"]
                measured = phase["measured"] / phase["cpu_share"]
                found.append(predicted / measured - 1.0)
    return found


def table(results: list[dict[str, Any]]) -> str:
    """Return predicted and measured throughput as a Markdown table."""
    rows = ["| mix | clients | predicted tokens/s | measured | error |", "|---|---|---|---|---|"]
    for result in results:
        for phase in result["phases"]:
            if phase["predicted"] is None:
                rows.append(
                    f"| {result['mix']} | {phase['clients']} | refused: {result['model']} | {phase['measured']:.0f} | |"
                )
                continue
            value, low, high = phase["predicted"]
            off = 100 * (value / phase["measured"] - 1)
            rows.append(
                f"| {result['mix']} | {phase['clients']} | {value:.0f} ({low:.0f} to {high:.0f}) | {phase['measured']:.0f} | {off:+.0f} % |"
            )
    found = [abs(each) for each in errors(results)]
    if found:
        rows += ["", f"Median error per CPU second {100 * median(found):.0f} %, worst {100 * max(found):.0f} %."]
    return "\n".join(rows) + "\n"


def results_of(folder: Path) -> list[dict[str, Any]]:
    """Return the existing results."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("prediction-*.json"))]
