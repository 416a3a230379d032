"""The figures of one run: from its clients, SGLang's log and its processes. Pure.

The log is read with patterns of this module, independent of the exporter.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from closed_loop.load import Record

_TIME = re.compile(r"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
_DECODE = re.compile(r"Decode batch.*#running-req: (\d+).*token usage: ([\d.]+).*#queue-req: (\d+)")
_PREFILL = re.compile(r"Prefill batch.*#new-token: (\d+), #cached-token: (\d+)")
_RETRACTED = re.compile(r"KV cache pool is full\. Retract requests")


@dataclass(frozen=True, slots=True)
class Measures:
    """Figures of one run within its measured seconds; None where nothing happened to measure.

    Latencies are seconds of requests answered in that time, tokens those that reached a client in it. `unstarted` is the
    longest wait of a request that had no first token when the load ended. `tokens_per_cpu_second` divides by what the
    scheduler's process got of a core, so that other programs matter less; `cpu_share` is that part of a core.
    """

    seconds: float
    tokens_per_second: float
    requests_per_minute: float
    tokens_per_request: float | None
    latency_p50: float | None
    latency_p99: float | None
    first_token_p50: float | None
    first_token_p99: float | None
    unstarted: float
    errors: int
    retractions_per_minute: float
    token_usage: float | None
    running: float | None
    queued: float | None
    cached_share: float | None
    tokens_per_cpu_second: float | None
    cpu_share: float | None

    def as_json(self) -> dict[str, Any]:
        """Return it as plain JSON, figures of three places."""
        return {k: round(v, 3) if isinstance(v, float) else v for k, v in asdict(self).items()}


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the value that `share` of all do not exceed; None of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def measure(
    records: Sequence[Record], log: Iterable[str], begin: float, end: float, cpu_seconds: float | None = None
) -> Measures:
    """Return the figures between two times, unix seconds; `log` are the server's lines, in UTC as it prints them."""
    seconds = end - begin
    tokens = sum(count for record in records for at, count in record.arrivals if begin <= at < end)
    answered = [r for r in records if r.is_answered and r.ended is not None and begin <= r.ended < end]
    latencies = [r.ended - r.sent for r in answered if r.ended is not None]
    firsts = [r.first - r.sent for r in records if r.first is not None and begin <= r.first < end]
    waiting = [end - r.sent for r in records if r.first is None and not r.error]
    running, usage, queued, computed, cached, retractions = [], [], [], 0, 0, 0
    for line in log:
        at = _time(line)
        if at is None or not begin <= at < end:
            continue
        if found := _DECODE.search(line):
            running.append(float(found[1]))
            usage.append(float(found[2]))
            queued.append(float(found[3]))
        elif found := _PREFILL.search(line):
            computed += int(found[1])
            cached += int(found[2])
        elif _RETRACTED.search(line):
            retractions += 1
    return Measures(
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        requests_per_minute=60 * len(answered) / seconds,
        tokens_per_request=_mean([float(r.tokens) for r in answered]),
        latency_p50=quantile(latencies, 0.5),
        latency_p99=quantile(latencies, 0.99),
        first_token_p50=quantile(firsts, 0.5),
        first_token_p99=quantile(firsts, 0.99),
        unstarted=max(waiting, default=0.0),
        errors=sum(bool(r.error) or r.status not in {None, 200} for r in records),
        retractions_per_minute=60 * retractions / seconds,
        token_usage=_mean(usage),
        running=_mean(running),
        queued=_mean(queued),
        cached_share=cached / (cached + computed) if cached + computed else None,
        tokens_per_cpu_second=tokens / cpu_seconds if cpu_seconds else None,
        cpu_share=cpu_seconds / seconds if cpu_seconds is not None else None,
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _time(line: str) -> float | None:
    found = _TIME.match(line)
    if found is None:
        return None
    return dt.datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=dt.timezone.utc).timestamp()
