"""`docs/alert-matrix.md`: what the matrix found before and now, what is beyond any rule, and which alert hides which.

`python -m alert_matrix.document --before FILE --now FILE` takes the outcomes that `python -m alert_matrix --json FILE` has written, keeps
their sums in `docs/alert-matrix.json`, and writes the page from that; without files only the page.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

from alert_matrix.beyond import BEYOND
from sglang_tuning_exporter.diagnosis.table import ALERTS
from sglang_tuning_exporter.mixin.alerts import is_inhibited_by

SUMS, PAGE = Path("docs/alert-matrix.json"), Path("docs/alert-matrix.md")
# Part → name → combinations, failures, failures beyond any rule.
Sums: TypeAlias = dict[str, dict[str, list[int]]]
_PARTS = (
    ("alerts", "alert"),
    ("scrapes", "scrape interval"),
    ("evaluations", "evaluation interval"),
    ("misses", "scrapes that fail"),
    ("disturbances", "beside"),
)
_HEAD = """# Alerts under every scraper

Made by `python -m alert_matrix.document`; do not edit.

`make test-rules` simulates each alert's server for promtool, in trouble and just below the limit, for every scrape interval (5, 15, 30, 60,
120 s), share of failed scrapes (none, 1 in 20, 1 in 5, 1 in 2, 30 s without any, 12 minutes in which Prometheus stores nothing, at the start of
the trouble or later), evaluation interval (15, 60 s) and disturbance (none, the exporter restarts and counts from 0 while the alert is
pending and while it fires, the server restarts, a label of the target changes, DP ranks come and go). A healthy server goes through the same.

The alert must fire within its window, its `for` and two more intervals (of successful scrapes, and of evaluations), keep firing without a break to the
end of the trouble and its `keep_firing_for`, and stay silent in all other runs. The servers follow from the kind of each row's condition
(`alert_matrix/troubles.py`); a test compares the names of their series with a real page. Scrapes happen at one of five offsets between two
evaluations; a failed one leaves a stale marker and `up` at 0, as in Prometheus.
"""


def sums(outcomes: Iterable[dict[str, Any]]) -> Sums:
    """Count combinations and failures by alert and by each part of the column."""
    found: dict[str, dict[str, Counter[int]]] = {part: {} for part, _ in _PARTS}
    for outcome in outcomes:
        column = outcome["column"]
        names = (
            outcome["alert"] if outcome["level"] != "absent" else "(healthy server, all alerts)",
            f"{column['scrape']} s",
            f"{column['evaluation']} s",
            column["misses"],
            column["disturbance"],
        )
        for (part, _), name in zip(_PARTS, names, strict=True):
            counts = found[part].setdefault(name, Counter())
            counts.update([0, *([2 if outcome["beyond"] else 1] if outcome["fault"] else [])])
    return {
        part: {name: [counts[place] for place in range(3)] for name, counts in names.items()}
        for part, names in found.items()
    }


def page(kept: dict[str, Any]) -> str:
    """Write the page from the kept sums."""
    before, now = kept["before"], kept["now"]
    lines = [_HEAD, "## Failures before and now", ""]
    lines += [
        f"Before: {before['rules']}; played: {before['played']}. Now: {now['rules']}; played: {now['played']}.",
        "",
    ]
    for part, title in _PARTS:
        lines += [
            f"| {title} | before: combinations | fail | now: combinations | fail | beyond any rule |",
            "|---|---:|---:|---:|---:|---:|",
        ]
        was, is_now = before["sums"][part], now["sums"][part]
        for name in sorted(was | is_now, key=_order):
            old, new = was.get(name), is_now.get(name)
            cells = [*(map(str, old[:2]) if old else "--"), *(map(str, new) if new else "---")]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        lines.append("")
    lines += ["## Beyond any rule", "", "Combinations that may fail (`alert_matrix/beyond.py`), with the reason:", ""]
    lines += [f"- {each.reason}" for each in BEYOND]
    lines += ["", "## Inhibition: alerts that another alert hides", "", _INHIBITION, ""]
    lines += ["| alert | severity | not notified while one of these fires for the same server |", "|---|---|---|"]
    lines += [f"| {row.alert} | {row.severity} | {_hiding(row.alert)} |" for row in ALERTS]
    return "\n".join(lines) + "\n"


_INHIBITION = (
    "`tests/test_inhibition.py` fires every pair of alerts at a real Alertmanager with the committed configuration, each pair for its own server."
    " A consequence never hides its cause, a less urgent alert never hides a critical one, and of two alerts one is always notified. An alert that"
    " is pending or has ended, or belongs to another server, hides nothing. A pager that receives only critical alerts rings for every server with one."
)


def _hiding(alert: str) -> str:
    row = next(each for each in ALERTS if each.alert == alert)
    return ", ".join(other.alert for other in ALERTS if is_inhibited_by(row, other)) or "-"


def _order(name: str) -> tuple[int, float, str]:
    names = [row.alert for row in ALERTS]
    number = name.removesuffix(" s")
    if number.isdigit():
        return 0, float(number), ""
    return (1, names.index(name), "") if name in names else (2, 0.0, name)


def main(arguments: list[str] | None = None) -> int:
    """Write the sums of the outcomes, and the page."""
    parser = argparse.ArgumentParser(prog="python -m alert_matrix.document", description=__doc__)
    for name in ("before", "now"):
        parser.add_argument(f"--{name}", type=Path, help="outcomes, a line for each")
        parser.add_argument(f"--{name}-rules", default="", help="which rules they are of, in words")
        parser.add_argument(f"--{name}-played", default="the whole matrix", help="which part was played, in words")
    options = vars(parser.parse_args(arguments))
    kept = json.loads(SUMS.read_text()) if SUMS.exists() else {}
    for name in ("before", "now"):
        if options[name]:
            outcomes = [json.loads(line) for line in options[name].read_text().splitlines()]
            kept[name] = {
                "rules": options[f"{name}_rules"],
                "played": options[f"{name}_played"],
                "sums": sums(outcomes),
            }
    SUMS.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page(kept))
    return 0


if __name__ == "__main__":
    sys.exit(main())
