"""`plan`: what a server would do with more or fewer requests at once, by its log."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sglang_tuning_exporter.config import profiles
from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.core.capacity import Room, StepTime, rooms, step_time
from sglang_tuning_exporter.core.inputs import Logs
from sglang_tuning_exporter.core.report import plain, write
from sglang_tuning_exporter.core.server import Server

_FORMATS = ("text", "json")
_MOST_BATCH = 4096
_FP8_TIMES = 2.0  # as many tokens in the KV cache as at 16 bits
_BROKEN = {
    "inter_token": "tokens later than the objective",
    "kv_cache": "more than the KV cache holds",
    "running_limit": "above the running limit",
}


def run(
    logs: Sequence[str],
    *,
    profile: str,
    threshold: Mapping[str, float],
    format: str,  # noqa: A002 - the flag's name
    most: int | None = None,
) -> int:
    """Print the table by the last ten minutes with decode lines; return the exit status. Raise `UsageError`.

    The status is 1 where only batches near the present one are known, or none.
    """
    if format not in _FORMATS:
        raise UsageError(f"--format={format}: give one of {', '.join(_FORMATS)}")
    server, last = Server(profiles.PROFILES[profile].with_thresholds(threshold)), 0.0
    for event in Logs(logs, most=most).events():
        server.take_line(event)
        if event.kind == "decode":
            last = max(last, server.now or 0.0)
    made = table(step_time(server, last), rooms(server, last), server.profile)
    write(json.dumps(made, indent=2, allow_nan=False) + "\n" if format == "json" else text(made))
    return 1 if made["refused"] else 0


def table(step: StepTime | str, ranks: Sequence[Room], profile: profiles.Profile) -> dict[str, Any]:
    """Return the table as a document: of one step time, or why it is not known, and the room of each scheduler."""
    known = step if isinstance(step, StepTime) else None
    rows = [] if known is None else plan_rows(known, ranks, profile)
    made: dict[str, Any] = plain({
        "schema_version": "2",
        "seen": None if known is None else {"least": len(ranks) * known.seen[0], "most": len(ranks) * known.seen[1]},
        "refused": step if isinstance(step, str) else step.refused or None,
        "objectives": {"inter_token_seconds": profile.inter_token_seconds},
        "rows": rows,
        "with_fp8_kv_cache": None if known is None else _with_larger_cache(known, ranks, _FP8_TIMES),
        "with_one_more_replica": {"tokens_per_second": 2 * rows[-1]["tokens_per_second"]} if rows else None,
    })  # fmt: skip
    return made


def text(made: dict[str, Any]) -> str:
    """Return a document in words."""
    rows = made["rows"]
    if not rows:
        return f"No table: {made['refused'] or 'how many requests run is not known'}.\n"
    least, most = made["seen"]["least"], made["seen"]["most"]

    def speed(requests: int, tokens_per_second: float) -> str:
        return f"{'up to ' if requests > most else ''}{tokens_per_second:,.0f}"

    batches = f"{least:.0f}" if least == most else f"{least:.0f} to {most:.0f}"
    lines = [
        f"From the log's decode lines, prefill left out, with {batches} requests at once.",
        "",
        f"{'at once':>8} {'tokens/s':>14} {'inter-token p50':>17} {'KV cache':>9}",
    ]
    for row in rows:
        tokens, gap = speed(row["requests"], row["tokens_per_second"]), f"{1e3 * row['inter_token_p50_seconds']:.3g} ms"
        cache = "" if row["kv_cache"] is None else f"{100 * row['kv_cache']:.0f} %"
        remarks = "; ".join(([] if row["seen"] else ["not seen"]) + [_BROKEN[name] for name in row["breaks"]])
        lines.append(f"{row['requests']:>8} {tokens:>14} {gap:>17} {cache:>9}  {remarks}".rstrip())
    lines.append("")
    if not all(row["seen"] for row in rows):
        lines.append(
            "Not seen: by the line through the batches that were seen. Steps of larger batches may take longer."
        )
    if (larger := made["with_fp8_kv_cache"]) is not None:
        tokens = speed(larger["requests"], larger["tokens_per_second"])
        lines.append(
            f"FP8 KV cache (from 16 bits): {larger['requests']:,} at once, {tokens} tokens/s, if steps stay as long."
        )
    if made["refused"]:
        lines.append(f"Only batches near the present one: {made['refused']}.")
    replica = speed(rows[-1]["requests"], made["with_one_more_replica"]["tokens_per_second"])
    lines.append(f"One more replica: {replica} tokens/s with both full.")
    return "\n".join(lines) + "\n"


def plan_rows(step: StepTime, ranks: Sequence[Room], profile: profiles.Profile) -> list[dict[str, Any]]:
    """Return a row for 1, 2, 4 … requests per scheduler, up to as many as fit; without a line only the mean batch."""
    most = min((rank.most_requests or _MOST_BATCH for rank in ranks), default=0)
    mean = [round(step.batch)] if step.line is None else []
    batches = sorted({*(1 << power for power in range(13) if 1 << power < most), most, *mean})
    rows = (_row(step, ranks, batch, profile) for batch in batches if batch)
    return [row for row in rows if row is not None]


def _row(step: StepTime, ranks: Sequence[Room], batch: int, profile: profiles.Profile) -> dict[str, Any] | None:
    """Return all schedulers together at a batch; None where its step time is not known.

    The gap between two tokens is the step time, because no prefill delays more than half of them.
    """
    seconds, speed = step.at(batch), step.tokens_per_second(batch)
    if seconds is None or speed is None:
        return None
    gap = seconds / step.tokens_per_request
    cache = _fullest(ranks, batch)
    limit = min((rank.running_limit for rank in ranks if rank.running_limit is not None), default=None)
    bounds = {
        "inter_token": (gap, profile.inter_token_seconds),
        "kv_cache": (cache, 1.0),
        "running_limit": (float(batch), limit),
    }
    return {
        "requests": batch * len(ranks),
        "seen": step.seen[0] <= batch <= step.seen[1],
        "tokens_per_second": len(ranks) * speed,
        "inter_token_p50_seconds": gap,
        "kv_cache": cache,
        "breaks": [
            name for name, (value, most) in bounds.items() if value is not None and most is not None and value > most
        ],
    }


def _fullest(ranks: Sequence[Room], batch: int) -> float | None:
    """Return the used share of the fullest KV cache at a batch; None unless all are known."""
    used = [
        batch * rank.tokens_per_request / rank.pool_tokens
        for rank in ranks
        if rank.tokens_per_request and rank.pool_tokens
    ]
    return max(used) if used and len(used) == len(ranks) else None


def _with_larger_cache(step: StepTime, ranks: Sequence[Room], times: float) -> dict[str, Any] | None:
    """Return requests and tokens a second with a KV cache `times` as large and as long steps; None where unknown."""
    batches = _known(rank.requests_in(times * (rank.pool_tokens or 0.0)) for rank in ranks)
    speeds = _known(step.tokens_per_second(batch) for batch in batches)
    return {"requests": sum(batches), "tokens_per_second": sum(speeds)} if speeds else None


def _known(figures: Iterable[Any]) -> list[Any]:
    """Return the figures of all schedulers; empty unless each is known."""
    listed = [*figures]
    return [] if None in listed else listed
