"""The advice followed from a start until there is none; each run's result as a file, all of them as `results.json` and
docs/closed-loop.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from bench.table import markdown
from closed_loop.advice import advised
from closed_loop.engine import arguments
from closed_loop.installation import Installation
from closed_loop.side import Side, run
from closed_loop.starts import STARTS, Start

KEPT = Path(__file__).with_name("results.json")  # what every start brought, as it was last committed
PAGE = Path(__file__).parent.parent / "docs" / "closed-loop.md"
BEGIN, END = "<!-- generated: results -->", "<!-- /generated -->"
SPEED = "tokens_per_cpu_second"
Say = Callable[[str], None]


def follow(start: Start, installation: Installation, say: Say, *, restarts: int, by_hand: bool) -> dict[str, Any]:
    """Start, send the load, and follow the advice with so many restarts at most; then the setting by hand.

    Raises `UsageError`.
    """

    def side(args: Sequence[str], sent: Any) -> tuple[Side, dict[str, Any]]:
        ran = run(args, start, sent, installation, say)
        return ran, ran.as_json()

    args: Sequence[str] = arguments(installation, f"{start.fixed} {start.right} {start.wrong}")
    load, sides, steps = start.load, list[Side](), list[dict[str, Any]]()
    for restart in range(restarts + 1):
        ran, step = side(args, load)
        advice = advised(ran.document, args, load, start.fixed.split()[::2])
        step["changes"] = [asdict(change) for change in advice.changes]
        sides, steps = [*sides, ran], [*steps, step]
        said = "; ".join(f"{change.what} {change.old} -> {change.new}" for change in advice.changes)
        say(f"{start.name}, step {restart}: {_speed(step)}, {step['verdict']}: {said or 'nothing to change'}")
        if not advice.changes or start.expected == "healthy":
            break
        args, load = advice.args, advice.load
    result = {"steps": steps, "problems": problems(start, sides)}
    if by_hand and start.by_hand is not None:
        _, step = side(arguments(installation, f"{start.fixed} {start.right} {start.by_hand}"), start.load)
        say(f"{start.name}, by hand: {_speed(step)}, {step['verdict']}")
        result["by_hand"] = {"flags": start.by_hand, **step}
    return result


def _speed(step: dict[str, Any]) -> str:
    return f"{step['tokens_per_second']:.0f} tok/s ({step[SPEED] or 0:.0f} per CPU second)"


def problems(start: Start, sides: Sequence[Side]) -> list[str]:
    """Say what is not as the start expects: the diagnosis, the notification, forbidden advice, figures that did not
    move.
    """
    first, last = sides[0], sides[-1]
    found = [finding["diagnosis"] for finding in first.document["findings"]]
    notified = [name for name, _ in first.notified]
    if start.expected == "healthy":
        return [f"{name} in a control" for name in (*found, *notified)]
    wrong = [f"no {start.expected}, but {found}"] if start.expected and start.expected not in found else []
    wrong += [f"no notification {start.alert}"] if start.alert and start.alert not in notified else []
    for finding in first.document["findings"]:
        for each in finding["advice"]:
            numbers = [value for value in (each["current"], each["suggested"]) if isinstance(value, (int, float))]
            way = "up" if len(numbers) == 2 and numbers[1] > numbers[0] else "down" if len(numbers) == 2 else ""
            wrong += [f"advises {each['flag']} {way}"] if (each["flag"], way) in start.never else []
    if len(sides) == 1:
        return [*wrong, "no advice to follow"]
    for figure in start.brings:
        old, new = first.figures[figure[1:]], last.figures[figure[1:]]
        if old is None or new is None or (new > old) != (figure[0] == "+") or new == old:
            wrong.append(f"{figure[1:]} {old} -> {new}")
    return wrong


def collected(folder: Path, known: dict[str, Any]) -> dict[str, Any]:
    """Return the known results, those of the starts that the folder has in place of the same old ones: a series takes
    hours.
    """
    starts = {}
    for start in STARTS:
        files = sorted(folder.glob(f"{start.name}.*.json"), key=lambda path: int(path.suffixes[-2][1:]))
        runs = [json.loads(path.read_text(encoding="utf-8")) for path in files]
        if kept := runs or known.get("starts", {}).get(start.name):
            starts[start.name] = kept
    return {"starts": starts}


def write(folder: Path) -> None:
    """Write `results.json` and the page."""
    data = collected(folder, json.loads(KEPT.read_text(encoding="utf-8")))
    KEPT.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(data, PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def spread(steps: Iterable[Any], name: str = SPEED) -> tuple[float, float, float] | None:
    """Return median, least and most of a figure; None where no step has it."""
    values = [step[name] for step in steps if step and step[name] is not None]
    return (median(values), min(values), max(values)) if values else None


def page(data: dict[str, Any], before: str) -> str:
    """Return the page with its table anew."""
    heads = ("start", "advice, step by step", "start → end", "by hand", "end / by hand")
    rows = [_row(start, runs) for start in STARTS if (runs := data["starts"].get(start.name))]
    head, rest = before.split(BEGIN)
    return f"{head}{BEGIN}\n{markdown(heads, rows)}\n{END}{rest.partition(END)[2]}"


def _row(start: Start, runs: Sequence[Any]) -> list[str]:
    ends, hands = [run["steps"][-1] for run in runs], [run["by_hand"] for run in runs if "by_hand" in run]
    steps = [
        ", ".join(f"`{change['what']}` {change['old']} → {change['new']}" for change in step["changes"])
        for step in runs[0]["steps"]
        if step["changes"]
    ]
    reached, hand = spread(ends), spread(hands)
    flags = f"`{hands[0]['flags']}`" if hands and hands[0]["flags"] else "none of these flags"
    return [
        f"{start.what}: `{' '.join(filter(None, (start.fixed, start.right, start.wrong)))}`",
        "; then ".join(steps) or "-",
        f"{_shown(spread(run['steps'][0] for run in runs))} → {_shown(reached)}",
        f"{_shown(hand)} with {flags}" if hand else "-",
        f"{100 * reached[0] / hand[0]:.0f} %" if reached and hand else "-",
    ]


def _shown(found: tuple[float, float, float] | None) -> str:
    if found is None:
        return "-"
    middle, least, most = found
    return f"{middle:,.0f}" if least == most else f"{middle:,.0f} ({least:,.0f} to {most:,.0f})"
