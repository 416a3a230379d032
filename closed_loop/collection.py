"""The committed data, collected from result files: every run in short, and each loop's outcome."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from closed_loop import convergence
from closed_loop.loops import LOOPS, Loop

MEASURES = (
    "tokens_per_second",
    "tokens_per_cpu_second",
    "latency_p50",
    "latency_p99",
    "first_token_p50",
    "first_token_p99",
    "retractions_per_minute",
    "token_usage",
    "running",
    "queued",
    "cached_share",
    "errors",
    "cpu_share",
)


def collect(results: Path) -> dict[str, Any]:
    """Return the data of the document from the result files."""
    return {
        "machine": {"cores": os.cpu_count(), "kind": "CPU only"},
        "loops": {loop.name: runs for loop in LOOPS if (runs := _runs(results, loop.name))},
        "convergence": {
            start.name: {"paths": paths, "grid": _grid(results, start), "final": _final(results, start)}
            for start in convergence.STARTS
            if (paths := _paths(results, start))
        },
    }


def beside(summary: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """Return the known data with the new results in place of the same old ones; the rest is unchanged.

    Both are what `document` writes. A series of loops takes hours, and no folder need hold all of them.
    """
    return {
        "machine": summary["machine"],
        "loops": {
            loop.name: runs
            for loop in LOOPS
            if (runs := summary["loops"].get(loop.name) or known.get("loops", {}).get(loop.name))
        },
        "convergence": {
            start.name: found
            for start in convergence.STARTS
            if (found := summary["convergence"].get(start.name) or known.get("convergence", {}).get(start.name))
        },
    }


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _numbered(results: Path, pattern: str) -> list[Path]:
    found = [(int(match[1]), path) for path in results.glob("*.json") if (match := re.fullmatch(pattern, path.name))]
    return [path for _, path in sorted(found)]


def _runs(results: Path, name: str) -> list[Any]:
    return [
        {
            "before": _side(run["before"]),
            "after": _side(run["after"]) if run.get("after") else None,
            "changes": run["advice"]["changes"],
            "words": run["advice"]["words"],
        }
        for run in map(_read, _numbered(results, rf"{re.escape(name)}\.(\d+)\.json"))
    ]


def _side(side: Any) -> dict[str, Any]:
    return {
        "verdict": side["verdict"],
        "findings": [finding["diagnosis"] for finding in side["findings"]],
        "says": _says(side),
        "advice": [advice for finding in side["findings"] for advice in finding["advice"]],
        "notifications": [[n["alert"], n["after_seconds"], n["flag"], n["suggested"]] for n in side["notifications"]],
        "others": side["others"],
        "time_scale": side["time_scale"],
        "seconds": side["load"]["seconds"],
        **{name: side["measures"][name] for name in MEASURES},
        "retractions_per_million_tokens": _per_million(side["measures"]),
    }


def _says(side: Any) -> str:
    """Return the advice of the verdict's finding in words; empty for none."""
    advice = [a for finding in side["findings"] if finding["diagnosis"] == side["verdict"] for a in finding["advice"]]
    if not advice:
        return ""
    flag, current, suggested = advice[0]
    return f"{flag} {current} → {suggested}" if flag else str(suggested)


def _per_million(measures: Any) -> float | None:
    """Retractions for each million of tokens: per minute a server that gets more of the CPU retracts more often."""
    tokens = 60 * measures["tokens_per_second"]
    return round(1e6 * measures["retractions_per_minute"] / tokens, 1) if tokens else None


def _paths(results: Path, start: convergence.Start) -> list[Any]:
    firsts = _numbered(results, rf"{re.escape(start.name)}\.(\d+)\.step0\.json")
    paths = []
    for first in firsts:
        stem = first.name.removesuffix("0.json")
        steps = map(_read, _numbered(results, rf"{re.escape(stem)}(\d+)\.json"))
        paths.append(
            [{**_side(step), "changes": step["advice"]["changes"], "words": step["advice"]["words"]} for step in steps]
        )
    return paths


def _final(results: Path, start: convergence.Start) -> list[Any]:
    """Return the runs of the advised setting, which ran in turn with those of the grid."""
    return [_side(run) for run in map(_read, _numbered(results, rf"{re.escape(start.name)}\.final\.(\d+)\.json"))]


def _grid(results: Path, start: convergence.Start) -> list[Any]:
    points = []
    for place, flags in enumerate(start.points):
        runs = list(map(_read, _numbered(results, rf"{re.escape(start.name)}\.grid{place}\.(\d+)\.json")))
        if runs:
            points.append({"flags": flags, "runs": [_side(run) for run in runs]})
    return points


def spread(runs: Sequence[Any], name: str) -> tuple[float, float, float] | None:
    """Return median, least and most of a figure over sides; None where no side has it."""
    summary = [side[name] for side in runs if side is not None and side[name] is not None]
    return (median(summary), min(summary), max(summary)) if summary else None


def diagnosed(loop: Loop, run: Any) -> bool:
    """Whether a run found the expected diagnosis, or a control found none."""
    found = run["before"]["findings"]
    return loop.expected in found if loop.expected else not found and not run["before"]["notifications"]


def notified_after(loop: Loop, run: Any) -> float | None:
    """Seconds from the start of the load to the expected notification; None if it did not come."""
    return next((after for alert, after, *_ in run["before"]["notifications"] if alert == loop.alert), None)


def forbidden(loop: Loop, run: Any) -> list[str]:
    """Return given advice that is forbidden for the loop, in words."""
    given = []
    for flag, way in loop.never:
        for advised, old, new in run["before"]["advice"]:
            if (
                advised == flag
                and isinstance(old, (int, float))
                and isinstance(new, (int, float))
                and (new > old) == (way == "up")
            ):
                given.append(f"{flag} {old} -> {new}")
    return given


def won(loop: Loop, runs: Sequence[Any]) -> dict[str, bool]:
    """Return for each figure that must move whether its median moved in that direction."""
    befores, afters = [run["before"] for run in runs], [run["after"] for run in runs]
    return {name: _moved(_middle(befores, name), _middle(afters, name), way) for name, way in loop.wins}


def _moved(before: float | None, after: float | None, way: str) -> bool:
    if before is None or after is None:
        return False
    return after > before if way == "up" else after < before


def _middle(runs: Sequence[Any], name: str) -> float | None:
    found = spread(runs, name)
    return None if found is None else found[0]
