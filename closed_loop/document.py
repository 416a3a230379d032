"""docs/closed-loop.md from closed_loop/results.json: where the advice ended, and what each advised change did. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from closed_loop import convergence
from closed_loop.collection import spread
from closed_loop.loops import LOOPS, Loop

SPEED = "tokens_per_cpu_second"
CLOSE = 0.9  # of the best by hand


def render(data: dict[str, Any]) -> str:
    """Write the whole page."""
    blocks = [_head(data), _followed(data), _changed(data), _repeat()]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _head(data: dict[str, Any]) -> str:
    shares = [side["others"] for side in _sides(data)]
    others = f"{100 * min(shares):.0f} to {100 * max(shares):.0f} %" if shares else "-"
    return f"""# The advice, followed on a real engine

Made by `python -m closed_loop document` from `closed_loop/results.json`; do not edit.

A real SGLang 0.5.23 starts with a wrong setting, beside it the exporter, Prometheus with the committed rules, and Alertmanager. A load is sent
that a seed decides; then the command line in the exporter's JSON (`/api/v1/findings`) is used unchanged, and the same load is sent again.

SGLang's scheduler, admission, cache and logs are unchanged; its model is a tiny Llama with random weights on a CPU ({data["machine"]["cores"]} cores).
So the figures show how scheduling reacts to a flag, not the speed on a GPU. The machine was shared (other programs took {others} of it):
compare **tokens a second of the scheduler's CPU**. Medians, with least and most in brackets."""


def _followed(data: dict[str, Any]) -> str:
    rows = []
    for start in convergence.STARTS:
        result = data["convergence"].get(start.name)
        if result is None:
            continue
        paths, grid = result["paths"], result["grid"]
        reached = spread(result["final"] or [path[-1] for path in paths], SPEED)
        # A point that was run less often may have been lucky.
        most = max((len(point["runs"]) for point in grid), default=0)
        best = max(
            (point for point in grid if len(point["runs"]) == most),
            key=lambda point: (spread(point["runs"], SPEED) or (0.0,))[0],
            default=None,
        )
        top = None if best is None else spread(best["runs"], SPEED)
        close = "-"
        if top is not None and reached is not None:
            share = reached[0] / top[0]
            close = (
                f"{100 * share:.0f} %"
                if share >= CLOSE
                else f"**{100 * share:.0f} %**{start.reason and f': {start.reason}'}"
            )
        rows.append([
            f"{start.what}: `{' '.join(filter(None, (start.fixed, start.right, start.wrong)))}`",
            "; then ".join(_said(step["changes"]) for step in paths[0] if step["changes"]) or "-",
            f"{_triple(spread([path[0] for path in paths], SPEED))} → {_triple(reached)}",
            "-" if best is None else f"{_triple(top)} with {_flags(best['flags'])}",
            close,
        ])  # fmt: skip
    if not rows:
        return ""
    heads = ("start", "advice, step by step", "start → end", "best by hand", "end / best")
    return (
        "## Followed to its end\n\nThe advice is followed until there is none. `--max-total-tokens` stands for a GPU's memory and is kept against any"
        " advice; the best by hand has the same memory.\n\n" + _table(heads, rows)
    )


def _changed(data: dict[str, Any]) -> str:
    rows = [_loop(loop, runs) for loop in LOOPS if (runs := data["loops"].get(loop.name))]
    if not rows:
        return ""
    heads = ("set wrong", "found", "advised", "before → after", "verdict after")
    return "## One advice, followed once\n\n" + _table(heads, rows)


def _loop(loop: Loop, runs: Sequence[Any]) -> list[str]:
    befores, afters = [run["before"] for run in runs], [run["after"] for run in runs if run["after"]]
    return [
        f"{loop.what}: `{loop.flags}`",
        _verdicts(befores),
        "; or ".join(dict.fromkeys(_said(run["changes"]) for run in runs if run["changes"])) or "-",
        _triple(spread(befores, SPEED)) + (f" → {_triple(spread(afters, SPEED))}" if afters else ""),
        _verdicts(afters) or "-",
    ]


def _repeat() -> str:
    return """## How to repeat it

```sh
make test-real                                       # every loop once; SGLang is installed first (3 GB, outside the repository)
make test-real REAL="--converge all --grid"          # several wrong flags at once, and the best by hand
python -m closed_loop document                       # writes closed_loop/results.json and this page from .closed-loop/
```

Repeated runs give other figures: answers end at random, and other programs change all wall-clock figures. A few per cent between two single
runs mean nothing."""


def _sides(data: dict[str, Any]) -> list[Any]:
    found = [side for runs in data["loops"].values() for run in runs for side in (run["before"], run["after"]) if side]
    for result in data["convergence"].values():
        found += [step for path in result["paths"] for step in path]
        found += [*result["final"], *(run for point in result["grid"] for run in point["runs"])]
    return found


def _said(changes: Iterable[Any]) -> str:
    return ", ".join(f"`{c['what']}` {c['old']} → {c['new']}" for c in changes)


def _verdicts(sides: Sequence[Any]) -> str:
    return ", ".join(f"`{verdict}`" for verdict in dict.fromkeys(side["verdict"] for side in sides))


def _flags(flags: str) -> str:
    return f"`{flags}`" if flags else "none of these flags"


def _triple(result: tuple[float, float, float] | None) -> str:
    if result is None:
        return "-"
    middle, least, most = result
    return _shown(middle) if least == most else f"{_shown(middle)} ({_shown(least)} to {_shown(most)})"


def _shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
