"""`plan`: what a server would do with more or fewer requests at once, of a log. The document and its words serve a live server as well."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_tuning_exporter.capacity.model import Measured, RankCapacity
from sglang_tuning_exporter.capacity.prediction import PlanRow, larger_cache, plan_rows
from sglang_tuning_exporter.capacity.step_time import Estimate
from sglang_tuning_exporter.config.profiles import PROFILES, Profile
from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.core.capacities import capacities
from sglang_tuning_exporter.core.inputs import Logs
from sglang_tuning_exporter.core.report import plain
from sglang_tuning_exporter.core.server import Server

FORMATS = ("text", "json")
BROKEN = {
    "inter_token": "tokens later than the objective",
    "first_token": "first tokens later than the objective",
    "kv_cache": "more than the KV cache holds",
    "running_limit": "above the running limit",
}
SOURCES = {"v1_loads": "the server's own step counters", "log": "the log's decode lines, prefill left out"}


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
    server, read, last = Server(PROFILES[profile].with_thresholds(threshold)), Logs(logs, most=most), 0.0
    for event in read.events():
        server.take(event)
        if event.kind == "decode":
            last = max(last, server.now or 0.0)
    return show(table(server, None, last), format)


def table(server: Server, measured: Measured | None, now: float) -> dict[str, Any]:
    """Return the table of a server's last ten minutes as a document."""
    totals = server.window(server.profile.window_seconds, now)
    own = totals["computed"] / totals["started"] if totals["started"] else None
    return document(capacities(server, measured, now), server.profile, own)


def check_format(format: str) -> None:  # noqa: A002 - the flag's name
    """Raise `UsageError` for a format that is none."""
    if format not in FORMATS:
        raise UsageError(f"--format={format}: give one of {', '.join(FORMATS)}")


def show(made: dict[str, Any], format: str) -> int:  # noqa: A002 - the flag's name
    """Print a document; return the exit status."""
    sys.stdout.write(json.dumps(made, indent=2, allow_nan=False) + "\n" if format == "json" else text(made))
    return 1 if made["refused"] else 0


def document(ranks: Sequence[RankCapacity], profile: Profile, prompt: float | None) -> dict[str, Any]:
    """Return the table as a document. `prompt`: tokens of the mean prompt that are computed."""
    found = plan_rows(ranks, profile, prompt)
    doubled, best = larger_cache(ranks, 2.0), found[-1].tokens_per_second.value if found else None
    seen = [rank.step for rank in ranks if rank.step is not None]
    made: dict[str, Any] = plain({
        "schema_version": "1",
        "basis": sorted({step.source for step in seen}),
        "seen": {"least": sum(step.smallest_seen for step in seen), "most": sum(step.largest_seen for step in seen)}
        if seen
        else None,
        "refused": _why_not(ranks),
        "objectives": {
            "first_token_seconds": profile.time_to_first_token_seconds,
            "inter_token_seconds": profile.inter_token_seconds,
        },
        "rows": [_row(row) for row in found],
        "with_fp8_kv_cache": None
        if doubled is None
        else {"requests": doubled[0], "tokens_per_second": _estimate(doubled[1])},
        "with_one_more_replica": None if best is None else {"tokens_per_second": 2 * best},
    })  # fmt: skip
    return made


def _why_not(ranks: Sequence[RankCapacity]) -> str | None:
    """Say why nothing, or nothing but the present batch, can be predicted; None where more can."""
    unknown = next((rank.no_step for rank in ranks if rank.step is None), "" if ranks else "no scheduler was seen")
    return unknown or next((rank.step.refused for rank in ranks if rank.step and rank.step.line is None), None)


def _row(row: PlanRow) -> dict[str, Any]:
    return {
        "requests": row.requests,
        "tokens_per_second": _estimate(row.tokens_per_second),
        "inter_token_p50_seconds": _estimate(row.inter_token_p50_seconds),
        "kv_cache": row.kv_cache,
        "first_token_seconds": row.first_token_seconds,
        "breaks": list(row.exceeded),
    }


def _estimate(figure: Estimate) -> dict[str, Any]:
    _, low, high = figure.with_drift
    return {"value": figure.value, "interval": [low, high]}


def text(made: dict[str, Any]) -> str:
    """Return a document in words."""
    if not made["rows"]:
        return f"No table: {made['refused'] or 'what runs is not known'}.\n"
    least, most = made["seen"]["least"], made["seen"]["most"]
    lines = [
        f"From {', '.join(SOURCES[each] for each in made['basis'])}, with {least:.0f} to {most:.0f} requests at once; in brackets the interval of 95 %.",
        "",
        f"{'at once':>8} {'tokens/s':>22} {'inter-token p50':>17} {'KV cache':>9} {'first token':>12}",
    ]
    marked = False
    for row in made["rows"]:
        speed, step = row["tokens_per_second"], row["inter_token_p50_seconds"]
        low, high = speed["interval"]
        cache = "" if row["kv_cache"] is None else f"{100 * row['kv_cache']:.0f} %"
        first = "" if row["first_token_seconds"] is None else f"{row['first_token_seconds']:.3g} s"
        broken = "; ".join(BROKEN[each] for each in row["breaks"])
        if not marked and row["requests"] > most:
            marked = True
            lines.append("    (not seen from here on)")
        speeds = f"{speed['value']:,.0f} ({low:,.0f} to {high:,.0f})"
        lines.append(
            f"{row['requests']:>8} {speeds:>22} {1e3 * step['value']:>14.3g} ms {cache:>9} {first:>12}  {broken}".rstrip()
        )
    lines.append("")
    doubled, replica = made["with_fp8_kv_cache"], made["with_one_more_replica"]
    if doubled is not None:
        lines.append(
            f"FP8 KV cache (from 16 bits): {doubled['requests']:,} at once, {doubled['tokens_per_second']['value']:,.0f} tokens/s, if steps stay as long."
        )
    if made["refused"]:
        lines.append(f"Only batches near the present one: {made['refused']}.")
    lines.append(f"One more replica: {replica['tokens_per_second']:,.0f} tokens/s with both full.")
    return "\n".join(lines) + "\n"
