"""`plan`: what a server would do with more or fewer requests at once, each figure with its interval. Of a log; its table serves a live server too."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any

from sglang_tuning_exporter.config import profiles
from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.core.capacity import Estimate, Measured, RankCapacity, capacities
from sglang_tuning_exporter.core.inputs import Logs
from sglang_tuning_exporter.core.report import plain, write
from sglang_tuning_exporter.core.server import Server

_FORMATS = ("text", "json")
_MOST_BATCH = 4096
_BROKEN = {
    "inter_token": "tokens later than the objective",
    "first_token": "first tokens later than the objective",
    "kv_cache": "more than the KV cache holds",
    "running_limit": "above the running limit",
}
_SOURCES = {"v1_loads": "the server's own step counters", "log": "the log's decode lines, prefill left out"}


def run(
    logs: Sequence[str],
    *,
    profile: str,
    threshold: Mapping[str, float],
    format: str,  # noqa: A002 - the flag's name
    most: int | None = None,
) -> int:
    """Print the table of the last ten minutes with decode lines; 0, or 1 where the step time is not known. Raise `UsageError`."""
    check_format(format)
    server, read, last = Server(profiles.PROFILES[profile].with_thresholds(threshold)), Logs(logs, most=most), 0.0
    for event in read.events():
        server.take(event)
        if event.kind == "decode":
            last = max(last, server.now or 0.0)
    return show(table(server, None, last), format)


def check_format(format: str) -> None:  # noqa: A002 - the flag's name
    """Raise `UsageError` for a format that is none."""
    if format not in _FORMATS:
        raise UsageError(f"--format={format}: give one of {', '.join(_FORMATS)}")


def show(made: dict[str, Any], format: str) -> int:  # noqa: A002 - the flag's name
    """Print a document; return the exit status."""
    write(json.dumps(made, indent=2, allow_nan=False) + "\n" if format == "json" else text(made))
    return 1 if made["refused"] else 0


def table(server: Server, measured: Measured | None, now: float) -> dict[str, Any]:
    """Return the table of a server's last ten minutes as a document."""
    totals, profile = server.window(server.profile.window_seconds, now), server.profile
    ranks = capacities(server, measured, now)
    found = plan_rows(ranks, profile, totals["computed"] / totals["started"] if totals["started"] else None)
    steps = [step for rank in ranks if (step := rank.step) is not None]
    # Why nothing, or nothing but the present batch, can be predicted.
    unknown = next((rank.no_step for rank in ranks if rank.step is None), "" if ranks else "no scheduler was seen")
    least, most = (sum(ends) for ends in zip(*(step.seen for step in steps), strict=True)) if steps else (None, None)
    made: dict[str, Any] = plain({
        "schema_version": "1",
        "basis": sorted({step.source for step in steps}),
        "seen": {"least": least, "most": most} if steps else None,
        "refused": unknown or next((step.refused for step in steps if step.line is None), None),
        "objectives": {
            "first_token_seconds": profile.time_to_first_token_seconds,
            "inter_token_seconds": profile.inter_token_seconds,
        },
        "rows": found,
        "with_fp8_kv_cache": _larger_cache(ranks, 2.0),
        "with_one_more_replica": {"tokens_per_second": 2 * found[-1]["tokens_per_second"]["value"]} if found else None,
    })  # fmt: skip
    return made


def text(made: dict[str, Any]) -> str:
    """Return a document in words."""
    if not made["rows"]:
        return f"No table: {made['refused'] or 'what runs is not known'}.\n"
    least, most = made["seen"]["least"], made["seen"]["most"]
    lines = [
        f"From {', '.join(_SOURCES[each] for each in made['basis'])}, with {least:.0f} to {most:.0f} requests at once; in brackets the interval of 95 %.",
        "",
        f"{'at once':>8} {'tokens/s':>22} {'inter-token p50':>17} {'KV cache':>9} {'first token':>12}",
    ]
    marked = False
    for row in made["rows"]:
        speed, step = row["tokens_per_second"], row["inter_token_p50_seconds"]
        low, high = speed["interval"]
        cache = "" if row["kv_cache"] is None else f"{100 * row['kv_cache']:.0f} %"
        first = "" if row["first_token_seconds"] is None else f"{row['first_token_seconds']:.3g} s"
        broken = "; ".join(_BROKEN[each] for each in row["breaks"])
        if not marked and row["requests"] > most:
            marked = True
            lines.append("    (not seen from here on)")
        speeds, gap = f"{speed['value']:,.0f} ({low:,.0f} to {high:,.0f})", f"{1e3 * step['value']:.3g} ms"
        lines.append(f"{row['requests']:>8} {speeds:>22} {gap:>17} {cache:>9} {first:>12}  {broken}".rstrip())
    lines.append("")
    if (doubled := made["with_fp8_kv_cache"]) is not None:
        lines.append(
            f"FP8 KV cache (from 16 bits): {doubled['requests']:,} at once, {doubled['tokens_per_second']['value']:,.0f} tokens/s, if steps stay as long."
        )
    if made["refused"]:
        lines.append(f"Only batches near the present one: {made['refused']}.")
    lines.append(
        f"One more replica: {made['with_one_more_replica']['tokens_per_second']:,.0f} tokens/s with both full."
    )
    return "\n".join(lines) + "\n"


# Other batches


def throughput(rank: RankCapacity, batch: float) -> Estimate | None:
    """Return generated tokens a second at a batch, with the prefill of the present mix.

    Each generated token takes its share of a step and of the prefill that comes with it:
    1 / (step / (batch x tokens per step) + prompt tokens per generated token / prefill speed).
    """
    speed, prefill, mix = rank.decode_speed(batch), rank.prefill, rank.per_token or 0.0
    if speed is None or prefill is None or not mix:
        return speed
    return Estimate(*(1 / (1 / generated + mix / computed) for generated, computed in zip(speed, prefill, strict=True)))


def _together(figures: Iterable[Estimate | None]) -> Estimate | None:
    """Return the sum over all schedulers; None unless each is known."""
    each = [*figures]
    known = [figure for figure in each if figure is not None]
    return Estimate(*map(sum, zip(*known, strict=True))) if known and len(known) == len(each) else None


def _estimate(figure: Estimate) -> dict[str, Any]:
    _, low, high = figure.with_drift
    return {"value": figure.value, "interval": [low, high]}


def plan_rows(ranks: Sequence[RankCapacity], profile: profiles.Profile, prompt: float | None) -> list[dict[str, Any]]:
    """Return a row for 1, 2, 4 … requests per scheduler, up to as many as fit; no rows without step times.

    Without a line only batches near the mean one are known, so that has a row. `prompt`: uncached tokens of the mean prompt.
    """
    most = min((rank.most_requests or _MOST_BATCH for rank in ranks), default=0)
    means = {round(step.batch) for rank in ranks if (step := rank.step) is not None and step.line is None}
    batches = sorted({*(1 << power for power in range(13) if 1 << power < most), most, *means})
    found = (_row(ranks, batch, profile, prompt) for batch in batches if batch)
    return [row for row in found if row is not None]


def _row(
    ranks: Sequence[RankCapacity], batch: int, profile: profiles.Profile, prompt: float | None
) -> dict[str, Any] | None:
    """Return all schedulers together at a batch; the gap of tokens is the step time, because no prefill delays more than half of them."""
    speed = _together(throughput(rank, batch) for rank in ranks)
    gap = _together(
        seconds and seconds.times(1 / (step.tokens_per_request or 1.0) / len(ranks))
        for rank in ranks
        if (step := rank.step) is not None
        for seconds in [step.at(batch)]
    )
    if speed is None or gap is None:
        return None
    held = [
        batch * rank.tokens_per_request / rank.pool_tokens
        for rank in ranks
        if rank.tokens_per_request and rank.pool_tokens
    ]
    cache = max(held) if len(held) == len(ranks) else None
    first = _first_token(ranks[0], speed.value / len(ranks), prompt)
    limit = min((rank.running_limit for rank in ranks if rank.running_limit is not None), default=None)
    bounds = {
        "inter_token": (gap.value, profile.inter_token_seconds),
        "first_token": (first, profile.time_to_first_token_seconds),
        "kv_cache": (cache, 1.0),
        "running_limit": (float(batch), limit),
    }
    return {
        "requests": batch * len(ranks),
        "tokens_per_second": _estimate(speed),
        "inter_token_p50_seconds": _estimate(gap),
        "kv_cache": cache,
        "first_token_seconds": first,
        "breaks": [
            name for name, (value, most) in bounds.items() if value is not None and most is not None and value > most
        ],
    }


def _first_token(rank: RankCapacity, tokens_per_second: float, prompt: float | None) -> float | None:
    """Return the time to the first token: the prompt's own prefill and that of the prompts before it.

    For prompts of equal length that arrive at random, the wait before it is use / (2 (1 - use)) of one prefill.
    """
    speed, mix = rank.prefill, rank.per_token
    if speed is None or mix is None or prompt is None:
        return None
    use = tokens_per_second * mix / speed.value
    return None if use >= 1 else prompt / speed.value * (1 + use / (2 * (1 - use)))


def _larger_cache(ranks: Sequence[RankCapacity], times: float) -> dict[str, Any] | None:
    """Return requests and tokens a second with a KV cache `times` as large and the same step time; None where unknown."""
    batches = [
        int(min(times * rank.pool_tokens / rank.tokens_per_request, rank.running_limit or inf))
        for rank in ranks
        if rank.pool_tokens and rank.tokens_per_request
    ]
    if len(batches) < len(ranks):
        return None
    speed = _together(throughput(rank, batch) for rank, batch in zip(ranks, batches, strict=True))
    return None if speed is None else {"requests": sum(batches), "tokens_per_second": _estimate(speed)}
