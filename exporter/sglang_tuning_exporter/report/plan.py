"""`plan`: what a server would do with more or fewer requests at once, from the server itself or from its log."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from sglang_tuning_exporter.capacity.estimate import Estimate
from sglang_tuning_exporter.capacity.prediction import PlanRow, larger_cache, plan_rows
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.config import Config
from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.diagnosis.demand import mean_prompt
from sglang_tuning_exporter.diagnosis.evidence import Past, past_of
from sglang_tuning_exporter.diagnosis.json_findings import number
from sglang_tuning_exporter.report.analysis import Analysis
from sglang_tuning_exporter.report.inputs import Logs
from sglang_tuning_exporter.sglang.events import DecodeBatch
from sglang_tuning_exporter.sglang.log.fast_path import BatchRun
from sglang_tuning_exporter.state.profiles import PROFILES

FORMATS = ("text", "json")
LEAST_SECONDS, MOST_SECONDS = 30.0, 86400.0
ASK_SECONDS = 5.0
BROKEN = {
    "inter_token": "tokens later than the objective",
    "first_token": "first tokens later than the objective",
    "kv_cache": "more than the KV cache holds",
    "running_limit": "above the running limit",
}


def live(config: Config, *, seconds: float, format: str) -> int:  # noqa: A002 - the flag's name
    """Watch a server for `seconds` and print its table; 0, or 1 where its step time is not known. Raises `UsageError`."""
    _check(format)
    if not LEAST_SECONDS <= seconds <= MOST_SECONDS:
        raise UsageError(f"--seconds={seconds:g}: give {LEAST_SECONDS:g} to {MOST_SECONDS:g}")
    sidecar = Sidecar(config, self_scrape_seconds=ASK_SECONDS)
    sidecar.start()
    try:
        time.sleep(seconds)
        with sidecar.view() as now:
            if sidecar.health.up is False:
                raise UsageError(f"--sglang-url={config.sglang_url}: {sidecar.health.message}")
            return _print(sidecar.past(now), format)
    finally:
        sidecar.stop()


def of_logs(
    logs: Sequence[str],
    *,
    profile: str,
    own_thresholds: Mapping[str, float],
    format: str,  # noqa: A002 - the flag's name
    most: int | None = None,
) -> int:
    """Print the table of the last ten minutes with decode lines; 0, or 1 where the step time is not known. Raises `UsageError`."""
    _check(format)
    analysis, read, last = Analysis(PROFILES[profile].with_thresholds(own_thresholds)), Logs(logs, most=most), 0.0
    with closing(read.events()) as events:
        for moment, event in events:
            analysis.take(moment, event)
            if isinstance(event, DecodeBatch) or (isinstance(event, BatchRun) and event.decodes):
                last = max(last, moment)
    analysis.state.advance(last)
    return _print(past_of(analysis.state, last), format)


def _check(format: str) -> None:  # noqa: A002 - the flag's name
    if format not in FORMATS:
        raise UsageError(f"--format={format}: give one of {', '.join(FORMATS)}")


def _print(past: Past, format: str) -> int:  # noqa: A002 - the flag's name
    document = plan(past)
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n" if format == "json" else _text(document))
    return 1 if document["refused"] else 0


def plan(past: Past) -> dict[str, Any]:
    """Return the table as a document."""
    ranks, profile = past.capacities(), past.profile
    prompt, counts = mean_prompt(past), past.recent.counts
    tokens = counts["computed_tokens"] + counts["cached_tokens"]
    own = None if prompt is None or not tokens else prompt * counts["computed_tokens"] / tokens
    found = plan_rows(ranks, profile, prompt if own is None else own)
    doubled, best = larger_cache(ranks, 2.0), found[-1].tokens_per_second.value if found else None
    return {
        "schema_version": "1",
        "basis": sorted({rank.step.source for rank in ranks if rank.step is not None}),
        "refused": _why_not(past),
        "objectives": {
            "first_token_seconds": profile.time_to_first_token_seconds,
            "inter_token_seconds": profile.inter_token_seconds,
        },
        "rows": [_row(row) for row in found],
        "with_fp8_kv_cache": None
        if doubled is None
        else {"requests": doubled[0], "tokens_per_second": _estimate(doubled[1])},
        "with_one_more_replica": None if best is None else {"tokens_per_second": number(2 * best)},
    }


def _why_not(past: Past) -> str | None:
    """Say why nothing, or nothing but the present batch, can be predicted; None where more can."""
    ranks = past.capacities()
    unknown = next((rank.no_step for rank in ranks if rank.step is None), "" if ranks else "no scheduler was seen")
    return unknown or next((rank.step.refused for rank in ranks if rank.step and rank.step.line is None), None)


def _row(row: PlanRow) -> dict[str, Any]:
    return {
        "requests": row.requests,
        "tokens_per_second": _estimate(row.tokens_per_second),
        "inter_token_p50_seconds": _estimate(row.inter_token_p50_seconds),
        "kv_cache": number(row.kv_cache),
        "first_token_seconds": number(row.first_token_seconds),
        "breaks": list(row.exceeded),
    }


def _estimate(figure: Estimate) -> dict[str, Any]:
    _, low, high = figure.with_drift
    return {"value": number(figure.value), "interval": [number(low), number(high)]}


def _text(document: dict[str, Any]) -> str:
    if not document["rows"]:
        return f"No table: {document['refused'] or 'what runs is not known'}.\n"
    source = {"v1_loads": "the server's own step counters", "log": "the log's decode lines, prefill left out"}
    lines = [
        f"From {', '.join(source[each] for each in document['basis'])}; in brackets the interval of 95 %.",
        "",
        f"{'at once':>8} {'tokens/s':>22} {'inter-token p50':>17} {'KV cache':>9} {'first token':>12}",
    ]
    for row in document["rows"]:
        speed, step = row["tokens_per_second"], row["inter_token_p50_seconds"]
        low, high = speed["interval"]
        cache = "" if row["kv_cache"] is None else f"{100 * row['kv_cache']:.0f} %"
        first = "" if row["first_token_seconds"] is None else f"{row['first_token_seconds']:.3g} s"
        broken = "; ".join(BROKEN[each] for each in row["breaks"])
        speeds = f"{speed['value']:,.0f} ({low:,.0f} to {high:,.0f})"
        lines.append(
            f"{row['requests']:>8} {speeds:>22} {1e3 * step['value']:>14.3g} ms {cache:>9} {first:>12}  {broken}".rstrip()
        )
    lines.append("")
    doubled, replica = document["with_fp8_kv_cache"], document["with_one_more_replica"]
    if doubled is not None:
        lines.append(
            f"FP8 KV cache (from 16 bits): {doubled['requests']:,} at once, {doubled['tokens_per_second']['value']:,.0f} tokens/s, if steps stay as long."
        )
    if document["refused"]:
        lines.append(f"Only batches near the present one: {document['refused']}.")
    lines.append(f"One more replica: {replica['tokens_per_second']:,.0f} tokens/s with both full.")
    return "\n".join(lines) + "\n"
