"""`python -m closed_loop run|predict|capture|document|install`: the advice on a real SGLang, see CONTRIBUTING.md."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterable
from itertools import product
from pathlib import Path

from closed_loop import captures, predictions, results
from closed_loop.engine import stay_beside
from closed_loop.installation import RELEASES, install
from closed_loop.starts import BY_NAME, STARTS
from sglang_tuning_exporter.config.values import UsageError

RESULTS = Path(".closed-loop")
_BEGUN = time.monotonic()


def say(words: str) -> None:
    """Show progress, with the seconds since the start."""
    print(f"[{time.monotonic() - _BEGUN:5.0f} s] {words}", flush=True)


def _run(args: argparse.Namespace) -> int:
    wanted, failed = _chosen("--only", args.only, BY_NAME), 0
    installation = install(RELEASES[0], say=say)
    stay_beside()
    args.results.mkdir(parents=True, exist_ok=True)
    for number, name in product(range(1, args.runs + 1), wanted):
        path = args.results / f"{name}.{number}.json"  # what an interrupted series has is not run again
        if not path.exists():
            result = results.follow(BY_NAME[name], installation, say, restarts=args.restarts, by_hand=args.by_hand)
            path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        problems = json.loads(path.read_text(encoding="utf-8"))["problems"]
        say(f"{name}.{number}: {'; '.join(problems) or 'as it must be'}")
        failed += bool(problems)
    return 1 if failed else 0


def _predict(args: argparse.Namespace) -> int:
    mixes, installation = _chosen("--only", args.only, predictions.MIXES), install(RELEASES[0], say=say)
    stay_beside()
    print(predictions.table([phase for mix in mixes for phase in predictions.run(installation, mix, say)]))
    return 0


def _capture(args: argparse.Namespace) -> int:
    for situation in [captures.read(path) for path in args.situation]:
        folder = args.results / "captures" / situation.name
        say(situation.name)
        captures.capture(situation, folder, say)
        archive = args.into / f"{situation.name}.tar.xz"
        say(f"{archive}: {captures.keep(folder, archive)} bytes")
    return 0


def _document(args: argparse.Namespace) -> int:
    if not args.results.is_dir():
        raise UsageError(f"--results={args.results}: no such folder; run some loops first")
    results.write(args.results)
    return 0


def _install(args: argparse.Namespace) -> int:
    install(args.version, say=say)
    return 0


def _chosen(key: str, given: str, known: Iterable[str]) -> list[str]:
    names = list(known) if given == "all" else given.split(",")
    for name in names:
        if name not in known:
            raise UsageError(f"{key}={name}: give all, or some of {', '.join(known)}")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m closed_loop", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"folder of the results (default {RESULTS})")
    tasks = parser.add_subparsers(dest="task", required=True)
    running = tasks.add_parser("run", help="start servers with wrong settings, follow the advice, and compare")
    usual = ",".join(start.name for start in STARTS if start.expected)
    running.add_argument(
        "--only",
        default=usual,
        metavar="NAME,NAME",
        help=f"all, or of {', '.join(BY_NAME)}; default: those with one wrong flag",
    )
    running.add_argument("--runs", type=int, default=1, help="runs of each")
    running.add_argument("--restarts", type=int, default=1, help="how often the advice is followed at most (default 1)")
    running.add_argument("--by-hand", action="store_true", help="run the setting by hand as well")
    foretelling = tasks.add_parser("predict", help="predicted throughput at larger batches beside the measured one")
    foretelling.add_argument("--only", default="all", metavar="NAME,NAME", help=f"of {', '.join(predictions.MIXES)}")
    capturing = tasks.add_parser(
        "capture", help="make situations on a real server, and keep what it printed and answered"
    )
    capturing.add_argument("situation", type=Path, nargs="+", metavar="SITUATION.yaml")
    capturing.add_argument("--into", type=Path, default=captures.ARCHIVES, help="folder of the archives")
    tasks.add_parser("document", help="write closed_loop/results.json and docs/closed-loop.md out of the results")
    installing = tasks.add_parser("install", help="install a release of SGLang for CPUs")
    installing.add_argument("version", nargs="?", default=RELEASES[0], choices=RELEASES)
    return parser


def main() -> int:
    """Run the task of the command line and return the exit status."""
    args = _parser().parse_args()
    # A shell ignores SIGINT in the background; an engine must not outlive this process.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    tasks = (_run, _predict, _capture, _document, _install)
    try:
        return {task.__name__[1:]: task for task in tasks}[args.task](args)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
