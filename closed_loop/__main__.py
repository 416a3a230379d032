"""`python -m closed_loop [run|liveness|agreement|predict|capture|keep|quiet|acceptance|install|document]`: see CONTRIBUTING.md."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from closed_loop import agreement, captures, keeping, liveness, predictions, quiet
from closed_loop.acceptance import ASKED, accept
from closed_loop.chain import Lane
from closed_loop.collection import beside, collect
from closed_loop.convergence import BY_NAME as STARTS
from closed_loop.convergence import REPEATED, converge, search
from closed_loop.document import render
from closed_loop.engine import prefer
from closed_loop.faults import FAULTS
from closed_loop.installation import RELEASES, install, installed
from closed_loop.loops import BY_NAME
from closed_loop.series import Bench, run_loop
from closed_loop.situations import BY_NAME as SITUATIONS
from sglang_tuning_exporter.config.values import UsageError

RESULTS = Path(".closed-loop")
KEPT = Path(__file__).parent / "results.json"  # what every loop brought, as it was last committed
_BEGUN = time.monotonic()


def say(words: str) -> None:
    """Show progress, with the seconds since the start."""
    print(f"[{time.monotonic() - _BEGUN:5.0f} s] {words}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m closed_loop", description=__doc__)
    tasks = parser.add_subparsers(dest="task", required=True)
    running = tasks.add_parser("run", help="run the loops that have no result yet")
    running.add_argument("--runs", type=int, default=1, help="runs of each loop")
    running.add_argument("--only", default="", metavar="NAME,NAME", help=f"of {', '.join(BY_NAME)}")
    running.add_argument(
        "--lane", type=int, default=0, choices=(0, 1), help="port and cores; two lanes run side by side"
    )
    running.add_argument("--results", type=Path, default=RESULTS)
    running.add_argument(
        "--lull", type=float, default=0.0, metavar="SECONDS", help="before each load, with one to four of its clients"
    )
    running.add_argument(
        "--converge",
        default="",
        metavar="NAME,NAME",
        help=f"follow the advice to its end: all, or of {', '.join(STARTS)}",
    )
    running.add_argument("--grid", action="store_true", help="search the grid of what --converge names as well")
    running.add_argument("--repeats", type=int, default=REPEATED, help="runs of the best points of a grid")
    living = tasks.add_parser("liveness", help="end a server in each way that has no result yet")
    living.add_argument("--versions", default="all", metavar="VERSION,VERSION", help=f"of {', '.join(RELEASES)}")
    living.add_argument("--only", default="all", metavar="NAME,NAME", help=f"of {', '.join(f.id for f in FAULTS)}")
    living.add_argument(
        "--time-scale", type=float, default=10.0, help="how much faster the clocks of the rules run; 1: true"
    )
    foretelling = tasks.add_parser("predict", help="predicted throughput at larger batches beside the measured one")
    foretelling.add_argument("--runs", type=int, default=1, help="runs of each mix")
    consistent = tasks.add_parser("agreement", help="count a storm of retractions in four ways")
    consistent.add_argument("--seconds", type=float, default=600.0)
    for parsing in (living, consistent, foretelling):
        parsing.add_argument("--lane", type=int, default=0, choices=(0, 1), help="port and cores")
        parsing.add_argument("--results", type=Path, default=RESULTS)
        parsing.add_argument("--again", action="store_true", help="also where a result exists")
    capturing = tasks.add_parser("capture", help="make each situation on a real server and keep its log and metrics")
    capturing.add_argument("--lane", type=int, default=0, choices=(0, 1), help="port and cores")
    packing = tasks.add_parser("keep", help="pack captures into small archives for the net and the tests")
    for parsing in (capturing, packing):
        parsing.add_argument("--only", default="all", metavar="NAME,NAME", help=f"of {', '.join(SITUATIONS)}")
        parsing.add_argument("--results", type=Path, default=RESULTS)
    calming = tasks.add_parser("quiet", help="healthy loads in turn on one real server, where every alert is false")
    calming.add_argument("--only", default="all", metavar="NAME,NAME", help=f"of {', '.join(quiet.HEALTHY)}")
    calming.add_argument("--minutes", type=float, default=15.0, help="of each load, by the rules' clocks")
    calming.add_argument("--time-scale", type=float, default=1.0, help="how much faster the rules' clocks run")
    calming.add_argument("--true", default="", metavar="NAME,NAME", help="loads with true clocks all the same")
    calming.add_argument("--lane", type=int, default=0, choices=(0, 1), help="port and cores")
    calming.add_argument("--results", type=Path, default=RESULTS)
    documenting = tasks.add_parser(
        "document", help="write closed_loop/results.json and docs/closed-loop.md out of the results"
    )
    documenting.add_argument("--results", type=Path, default=RESULTS)
    documenting.add_argument("--docs", type=Path, default=Path("docs"))
    accepting = tasks.add_parser(
        "acceptance", help="check every advice with the parsers of released wheels (needs PyPI)"
    )
    accepting.add_argument("--versions", default="all", metavar="VERSION,VERSION", help=f"of {', '.join(ASKED)}")
    installing = tasks.add_parser("install", help="install a release of SGLang for CPUs")
    installing.add_argument("version", nargs="?", default=RELEASES[0], choices=RELEASES)
    return parser


def main() -> int:
    """Run the task of the command line and return the exit status."""
    args = _parser().parse_args()
    # A shell ignores SIGINT in the background; an engine must not outlive this process.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    try:
        if args.task == "install":
            install(args.version, say=say)
            return 0
        return {
            "run": _run,
            "liveness": _liveness,
            "agreement": _agreement,
            "predict": _predict,
            "capture": _capture,
            "keep": _keep,
            "quiet": _quiet,
            "document": _document,
            "acceptance": _acceptance,
        }[args.task](args)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _acceptance(args: argparse.Namespace) -> int:
    return accept(args.versions, say)


def _run(args: argparse.Namespace) -> int:
    starts = _chosen("--converge", args.converge, tuple(STARTS))
    wanted = _chosen("--only", args.only, tuple(BY_NAME)) or ([] if starts else list(BY_NAME))
    lane = Lane.of(args.lane)
    lane.stay()
    bench = Bench(install(RELEASES[0], say=say), lane, args.results, say, args.lull)
    tasks: list[Callable[[], object]] = []
    for number in range(1, args.runs + 1):
        tasks += [partial(run_loop, bench, BY_NAME[name], number) for name in wanted]
        tasks += [partial(converge, bench, STARTS[name], number) for name in starts]
    tasks += [partial(search, bench, STARTS[name], args.repeats) for name in starts if args.grid]
    failed = [task for task in tasks if not _done(task)]
    return 1 if failed else 0


def _done(task: Callable[[], object]) -> bool:
    """Run one task, and once more if something did not start; return False if it failed twice."""
    for _ in range(2):
        try:
            task()
        except UsageError as error:
            say(str(error))
        else:
            return True
    return False


def _chosen(key: str, outcome: str, known: tuple[str, ...]) -> list[str]:
    names = list(known) if outcome == "all" else [name for name in outcome.split(",") if name]
    for name in names:
        if name not in known:
            raise UsageError(f"{key}={name}: give all, or some of {', '.join(known)}")
    return names


def _liveness(args: argparse.Namespace) -> int:
    versions = _chosen("--versions", args.versions, RELEASES)
    wanted = _chosen("--only", args.only, tuple(fault.id for fault in FAULTS))
    if args.time_scale < 1:
        raise UsageError(f"--time-scale={args.time_scale:g}: give 1 or more")
    lane = Lane.of(args.lane)
    found: list[dict[str, Any]] = []
    for version in versions:
        found += liveness.run(
            install(version, say=say),
            args.results,
            faults=[fault for fault in FAULTS if fault.id in wanted],
            time_scale=args.time_scale,
            port=lane.port,
            core=lane.core,
            again=args.again,
            say=say,
        )
    print("\n".join(liveness.table(found)))
    return 1 if any(outcome["problems"] for outcome in found) else 0


def _predict(args: argparse.Namespace) -> int:
    lane = Lane.of(args.lane)
    lane.stay()
    for number in range(1, args.runs + 1):
        for mix in predictions.MIXES:
            kept = args.results / f"prediction-{mix}-{number}.json"
            if args.again or not kept.exists():
                args.results.mkdir(parents=True, exist_ok=True)
                outcome = predictions.run(install(RELEASES[0], say=say), lane, mix, args.results, say)
                kept.write_text(json.dumps(outcome, indent=1) + "\n", encoding="utf-8")
    print(predictions.table(predictions.results_of(args.results)))
    return 0


def _agreement(args: argparse.Namespace) -> int:
    lane = Lane.of(args.lane)
    outcome = agreement.run(
        install(RELEASES[0], say=say),
        args.results,
        seconds=args.seconds,
        port=lane.port,
        core=lane.core,
        again=args.again,
        say=say,
    )
    print("\n".join(agreement.table(outcome)))
    return 1 if outcome["problems"] else 0


def _capture(args: argparse.Namespace) -> int:
    folder = args.results / "captures"
    failed = 0
    for name in _chosen("--only", args.only, tuple(SITUATIONS)):
        situation = SITUATIONS[name]
        if (folder / name).exists():
            continue
        installation = install(situation.version, say=say)
        say(name)
        begun = folder / f".{name}"
        shutil.rmtree(begun, ignore_errors=True)
        try:
            captures.capture(situation, installation, begun, port=Lane.of(args.lane).port, say=say)
        except UsageError as error:
            say(str(error))
            failed += 1
        else:
            begun.rename(folder / name)
    return 1 if failed else 0


def _keep(args: argparse.Namespace) -> int:
    for name in _chosen("--only", args.only, tuple(SITUATIONS)):
        capture = args.results / "captures" / name
        if capture.is_dir():
            say(f"{name}: {keeping.keep(SITUATIONS[name], capture)} bytes")
    return 0


def _quiet(args: argparse.Namespace) -> int:
    known = tuple(quiet.HEALTHY)
    wanted, true = _chosen("--only", args.only, known), _chosen("--true", args.true, known)
    if args.time_scale < 1:
        raise UsageError(f"--time-scale={args.time_scale:g}: give 1 or more")
    prefer(0)  # on any core: an exporter that waits for one is no false alarm of the rules
    courses = quiet.run(
        quiet.plans(wanted, args.time_scale, true),
        60 * args.minutes,
        installed(RELEASES[0]),
        Lane.of(args.lane),
        args.results,
        say=say,
    )
    print("\n".join(quiet.table([course.as_json() for course in courses])))
    return 0 if all(course.is_quiet for course in courses) else 1


def _document(args: argparse.Namespace) -> int:
    if not args.results.is_dir():
        raise UsageError(f"--results={args.results}: no such folder; run some loops first")
    known = KEPT
    data = beside(collect(args.results), json.loads(known.read_text(encoding="utf-8")) if known.exists() else {})
    known.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    (args.docs / "closed-loop.md").write_text(render(data), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
