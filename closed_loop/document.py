"""docs/closed-loop.md from closed_loop/results.json: each loop's finding, advice and effect. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from closed_loop import agreement, chain, convergence, liveness, quiet
from closed_loop.collection import diagnosed, forbidden, in_every_run, notified_after, spread, won
from closed_loop.findings import MENDED
from closed_loop.loops import LOOPS, Loop

WORDS = {
    "tokens_per_second": "tokens a second",
    "tokens_per_cpu_second": "tokens a second of the scheduler's CPU",
    "latency_p50": "latency p50, s",
    "latency_p99": "latency p99, s",
    "first_token_p50": "first token p50, s",
    "first_token_p99": "first token p99, s",
    "retractions_per_minute": "retractions a minute",
    "retractions_per_million_tokens": "retractions per million tokens",
    "token_usage": "mean token usage",
    "running": "mean running",
    "queued": "mean queued",
    "cached_share": "prompts from the cache",
}
SHOWN = tuple(name for name in WORDS if name != "tokens_per_second")
CLOSE = 0.9  # of the grid's best


def render(data: dict[str, Any]) -> str:
    """Write the whole page."""
    blocks = [
        _head(data),
        _overview(data),
        *(_loop(loop, data["loops"][loop.name]) for loop in LOOPS if loop.name in data["loops"]),
    ]
    blocks += [_converged(data), _quiet(data), _liveness(data), _agreement(data), _mended(), _repeat()]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _head(data: dict[str, Any]) -> str:
    machine = data["machine"]
    sides = [side for runs in data["loops"].values() for run in runs for side in (run["before"], run["after"]) if side]
    shares = [side["others"] for side in sides]
    scales = _distinct(sides, "time_scale") or [chain.TIME_SCALE]
    scale = _either(scales)
    others = f"{100 * median(shares):.0f} % (most {100 * max(shares):.0f} %)" if shares else "-"
    return f"""# The advice, followed on a real engine

Made by `python -m closed_loop document` from `closed_loop/results.json`; do not edit.

Each loop starts a real SGLang 0.5.23 with a wrong setting, with the exporter, Prometheus with the committed rules, and Alertmanager, and sends a
load that a seed decides. Then the command line of the exporter's JSON (`/api/v1/findings`) is used unchanged, and the same load is sent again.
Every duration of the rules is divided by {scale}, so ten minutes take {600 / max(scales):.0f} seconds; a *rate* of the rules is then that many
times as hard to reach.

The engine is SGLang's own scheduler, admission, cache, KV cache and logs, unchanged. Its model is a tiny Llama with random weights on a CPU
({machine["cores"]} cores), whose answers end at random after some 500 tokens. The loops show how scheduling reacts to a flag, not the speed on a GPU.
The machine was shared: the engine had one core with priority; other programs took {others} of the machine. So compare **tokens a second of the
scheduler's CPU**, not of wall time. Figures are medians with least and most in brackets; in the table of all loops the brackets hold the gain of each
run. A difference with another sign in some run is no effect. `--max-total-tokens` stands for a GPU's memory: advice to raise it is followed only in
`ineffective`, which is about that flag."""


def _overview(data: dict[str, Any]) -> str:
    rows = [
        [
            f"[{loop.name}](#{loop.name})",
            f"`{loop.expected}`" if loop.expected else "nothing",
            _counted(diagnosed(loop, run) for run in runs),
            _notified(loop, runs),
            _changes(runs),
            _arrow(runs, "tokens_per_cpu_second"),
            _after(runs),
        ]
        for loop in LOOPS
        if (runs := data["loops"].get(loop.name))
    ]
    heads = ("loop", "expected", "found", "notified after", "advice", WORDS["tokens_per_cpu_second"], "verdict after")
    return "## All loops\n\n" + _table(heads, rows)


def _loop(loop: Loop, runs: Sequence[Any]) -> str:
    environment = "".join(f" `{name}={value}`" for name, value in loop.env.items())
    seconds = _either(_distinct([run["before"] for run in runs], "seconds"))
    lines = [f"## {loop.name}", ""]
    lines.append(
        f"Set: {loop.what}. `{loop.flags}`{environment}, profile `{loop.profile}`, {loop.load.clients} clients, {seconds} s."
    )
    lines += [f"Advice to people: {text}." for text in dict.fromkeys(run["words"] for run in runs if run["words"])]
    given = [text for run in runs for text in forbidden(loop, run)]
    if given:
        lines.append(f"**Forbidden advice:** {', '.join(dict.fromkeys(given))}.")
    befores, afters = [run["before"] for run in runs], [run["after"] for run in runs if run["after"]]
    moved = won(loop, runs) if afters else {}
    if moved:
        ways = dict(loop.wins)
        result = (
            f"{WORDS[name]} {('in every run' if in_every_run(runs, name, ways[name]) else 'on the median') if fine else '**no**'}"
            for name, fine in moved.items()
        )
        lines.append(f"Expected: {loop.brings}. Moved so: {', '.join(result)}.")
    next_words = dict.fromkeys(side["says"] for side in afters if side["says"])
    lines += [f"Advice afterwards: {text}." for text in next_words]
    rows = [[WORDS[name], _figure(befores, name), _figure(afters, name)] for name in ("tokens_per_second", *SHOWN)]
    rows.append(["verdict", _verdicts(befores), _verdicts(afters)])
    return (
        "\n".join(lines) + "\n\n" + _table((f"{len(runs)} runs" if len(runs) > 1 else "1 run", "before", "after"), rows)
    )


def _converged(data: dict[str, Any]) -> str:
    result = data.get("convergence") or {}
    if not result:
        return ""
    sides = [side for each in result.values() for path in each["paths"] for side in path]
    sides += [run for each in result.values() for point in each["grid"] for run in point["runs"]]
    blocks = [
        (
            "## From several wrong flags at once\n\nThe advice (whole command lines of the JSON) is followed until there is none. It is compared with a grid"
            " over the same flags, whose best points are run again in turn with the advised setting: the machine's speed drifts within minutes, so only"
            " runs of the same minutes are compared, and not with the figures above. Other programs took"
            f" {100 * median(side['others'] for side in sides):.0f} % of the machine meanwhile."
            f" A run is {_either(_distinct(sides, 'seconds'))} s of load, with clocks"
            f" {_either(_distinct(sides, 'time_scale'))} times as fast."
        ),
    ]
    heads = ("step", "flags", "tokens a second", WORDS["tokens_per_cpu_second"], "first token p50, s", "verdict")
    for start in convergence.STARTS:
        if start.name not in result:
            continue
        paths, grid, final = (result[start.name][part] for part in ("paths", "grid", "final"))
        flags = " ".join(filter(None, (start.fixed, start.right, start.wrong)))
        lines = [f"### {start.name}", "", f"{start.what}: `{flags}`. {start.load.clients} clients.", ""]
        for path in paths:
            rows = [_step(number, path, start) for number in range(len(path))]
            lines += [_table(heads, rows), ""]
        lines += _against(start, paths, grid, final)
        blocks.append("\n".join(lines).rstrip())
    return "\n\n".join(blocks)


def _step(number: int, path: Sequence[Any], start: convergence.Start) -> list[str]:
    side, before = path[number], path[number - 1] if number else None
    flags = f"`{start.wrong}`" if before is None else _said(before["changes"])
    return [
        str(number),
        flags,
        f"{side['tokens_per_second']:.0f}",
        _shown(side["tokens_per_cpu_second"]),
        _shown(side["first_token_p50"]),
        f"`{side['verdict']}`" + ("" if side["changes"] or not side["words"] else f": {side['words']}"),
    ]


def _against(start: convergence.Start, paths: Sequence[Any], grid: Sequence[Any], final: Sequence[Any]) -> list[str]:
    if not grid or not final:
        return ["The grid has not been run."]
    measure = "tokens_per_cpu_second"
    ranked = sorted(grid, key=lambda point: -(spread(point["runs"], measure) or (0.0,))[0])
    # A point that was run once may have been lucky.
    most = max(len(point["runs"]) for point in grid)
    best = next(point for point in ranked if len(point["runs"]) == most)
    top = spread(best["runs"], measure)
    reached = spread(final, measure)
    begun = spread([path[0] for path in paths], measure)
    if top is None or reached is None or begun is None:
        return []
    followed = any(not change["what"].startswith("--") for path in paths for step in path for change in step["changes"])
    others = [run["others"] for run in (*final, *(run for point in grid for run in point["runs"]))]
    points = f"{len(grid)} of {len(start.points)} points" if len(grid) < len(start.points) else f"{len(grid)} points"
    share, restarts = reached[0] / top[0], max(map(_restarts, paths))
    lines = [
        (
            f"Reached {_triple(reached)} from {_triple(begun)} in {restarts} {'restart' if restarts == 1 else 'restarts'}, "
            f"{100 * share:.0f} % of the grid's best, which is {_triple(top)} with {_flags(best['flags'])}"
            f" ({points}): {'within ten per cent' if share >= CLOSE else '**not within ten per cent**'}."
            f" Other programs took {100 * min(others):.0f} to {100 * max(others):.0f} % of the machine meanwhile."
            + (f" {start.reason}" if share < CLOSE and start.reason else "")
            + (
                " The grid's clients send what they sent at the start; those of the advice followed it."
                if followed
                else ""
            )
        ),
        "",
    ]
    rows = [
        [name, _figure(runs, measure), _figure(runs, "first_token_p50"), str(len(runs))]
        for name, runs in [("the advised setting", final), *((_flags(p["flags"]), p["runs"]) for p in ranked)]
    ]
    return [*lines, _table(("grid", WORDS[measure], "first token p50, s", "runs"), rows)]


def _restarts(path: Sequence[Any]) -> int:
    """Return how many steps needed a restart of the server; changes of the clients need none."""
    return sum(any(change["what"].startswith("--") for change in step["changes"]) for step in path[:-1])


def _quiet(data: dict[str, Any]) -> str:
    result = data.get("quiet")
    if not result:
        return ""
    hours = sum(each["seconds"] * each["time_scale"] for each in result) / 3600
    sent = sum(each["requests"] for each in result)
    came = {(each["load"], name) for each in result for _, name, state, _ in each["alerts"] if state}
    explained = "".join(f"\n\n{why}" for key, why in quiet.EXPLAINED.items() if key in came)
    false = sorted({load for load, name in came if (load, name) not in quiet.EXPLAINED})
    rows, shares = "\n".join(quiet.table(result)), [each["others"] for each in result]
    return f"""## False alarms under healthy loads

Healthy loads, one after the other, on one server whose KV cache holds 32,768 tokens: {hours:.1f} hours by the rules' clocks, {sent:,}
requests. {f"False alerts came under {', '.join(false)}." if false else "No false alert was pending or firing."}
With faster clocks neither loads nor thresholds in seconds change: a stall of one second is longer to the rules, so false alarms are more
likely than with true clocks, except for rates per minute, which then cover a fraction of a minute. Prometheus scrapes every
{quiet.SCRAPE_SECONDS:g} s by the rules' clocks, with the same timeout. The server runs with `--sleep-on-idle`, because the machine is shared.
Other programs took {100 * median(shares):.0f} % of the machine meanwhile (most {100 * max(shares):.0f} %).

{rows}{explained}"""


def _liveness(data: dict[str, Any]) -> str:
    result = data.get("liveness")
    if not result:
        return ""
    rows = "\n".join(liveness.table(result))
    return f"""## Whether the server lives

Each fault of a real server, the alert that reported it, and seconds: from the fault up to the first *notified*, from the repair
for *serves again* and after. With clocks ten times as fast, the rules' durations are divided by ten, but SGLang's start is not faster: a slow
start is then reported as a server that is down, and is not with true clocks.

{rows}"""


def _agreement(data: dict[str, Any]) -> str:
    result = data.get("agreement")
    if not result:
        return ""
    rows = "\n".join(agreement.table(result))
    return f"""## Whether all counts agree

A storm of {result["storm"]["seconds"]:.0f} s with retractions, clients that leave, and rejected requests, counted by the clients, SGLang's log,
SGLang's counters, the exporter, and `report` on the same log.

{rows}"""


def _mended() -> str:
    rows = [f"- **{seen}** {mended}" for seen, mended in MENDED]
    return (
        "## Fixed because of these loops\n\nWrong advice that these loops showed, and what was changed, before the figures above were taken:\n\n"
        + "\n".join(rows)
    )


def _repeat() -> str:
    return """## How to repeat it

```sh
make test-real                                       # every loop once; SGLang is installed first (3 GB, outside the repository)
make test-real REAL="--runs 3 --only retracting"     # more runs of some; what has its file in .closed-loop/ is not run again
make test-real REAL="--converge all --grid"          # several wrong flags at once, and the grids
python -m closed_loop document                       # writes closed_loop/results.json and this page from .closed-loop/
```

Repeated runs give other figures. The seed decides the order of requests, but the length of an answer is random, and other programs
change all wall-clock figures. Differences of a few per cent between two single runs mean nothing. Two engines side by side
(`--lane 1`) slow each other by up to a quarter even on separate cores: run one at a time for figures."""


def _distinct(sides: Iterable[Any], name: str) -> list[float]:
    return sorted({side[name] for side in sides})


def _either(figures: Iterable[float]) -> str:
    return " or ".join(f"{figure:g}" for figure in figures)


def _counted(held: Iterable[bool]) -> str:
    result = list(held)
    return "yes" if all(result) and len(result) == 1 else f"{sum(result)} of {len(result)}"


def _notified(loop: Loop, runs: Sequence[Any]) -> str:
    if not loop.alert:
        others = {alert for run in runs for alert, *_ in run["before"]["notifications"]}
        return ", ".join(sorted(others)) if others else "none"
    result = [after for run in runs if (after := notified_after(loop, run)) is not None]
    if not result:
        return "**none**"
    came = f"{median(result):.0f} s" + (f" ({len(result)} of {len(runs)})" if len(result) < len(runs) else "")
    named = {_names_the_same(loop, run) for run in runs if run["changes"]} - {None}
    return came if named <= {True} else f"{came}, **with other advice**"


def _names_the_same(loop: Loop, run: Any) -> bool | None:
    """Whether the notification named a flag that the JSON advised too; None without a flag or notification."""
    flags = [flag for alert, _, flag, _ in run["before"]["notifications"] if alert == loop.alert and flag]
    return any(change["what"] in flags for change in run["changes"]) if flags else None


def _changes(runs: Sequence[Any]) -> str:
    return "; or ".join(dict.fromkeys(_said(run["changes"]) for run in runs if run["changes"])) or "-"


def _said(changes: Sequence[Any]) -> str:
    return ", ".join(f"`{c['what']}` {c['old']} → {c['new']}" for c in changes)


def _after(runs: Sequence[Any]) -> str:
    return _verdicts([run["after"] for run in runs if run["after"]]) or "-"


def _verdicts(sides: Sequence[Any]) -> str:
    return ", ".join(f"`{verdict}`" for verdict in dict.fromkeys(side["verdict"] for side in sides))


def _arrow(runs: Sequence[Any], name: str) -> str:
    before, after = spread([run["before"] for run in runs], name), spread([run["after"] for run in runs], name)
    if before is None or after is None:
        return "-" if before is None else _shown(before[0])
    pairs = [(run["before"][name], run["after"][name]) for run in runs if run["after"]]
    gains = ", ".join(f"{100 * (then / now - 1):+.0f}" for now, then in pairs if now and then is not None)
    return f"{_shown(before[0])} → {_shown(after[0])}" + (f" ({gains} %)" if gains else "")


def _figure(sides: Sequence[Any], name: str) -> str:
    result = spread(sides, name)
    return "-" if result is None else _triple(result)


def _flags(flags: str) -> str:
    return f"`{flags}`" if flags else "none of these flags"


def _triple(result: tuple[float, float, float]) -> str:
    middle, least, most = result
    return _shown(middle) if least == most else f"{_shown(middle)} ({_shown(least)} to {_shown(most)})"


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
