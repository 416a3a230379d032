"""`python -m fuzz [--seconds S] [--seed N] [--target NAME …]`: hostile input for every reader of outside input.

It mutates log lines by the million, then whole pages for a real Prometheus, then the input of each target of `fuzz/targets.py`: guided by coverage (atheris)
where there is a wheel of it for this Python, else by Hypothesis; the first line says which. The time is for all together. Each target's check states what
must not happen; an input that makes it happen is kept under `build/fuzz/<target>/`. Move it to `tests/data/fuzz/<target>/`, where a test tries it again, and
correct the fault. Exit status 1 when something was found.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import logging
import random
import re
import subprocess
import sys
from pathlib import Path

from fuzz import files, mutated, scraped, spoiled
from fuzz.targets import FOUND, TARGETS, Target

BUILT = Path("build/fuzz")
# A page of any size must be read in a moment; ten seconds is a loop or an expression that backtracks.
_UNIT_SECONDS, _MEMORY_MIB = 10, 2048


def led(target: Target, seconds: float, seed: int) -> int:
    """Run one target under atheris for this long. Returns 0, or 1 when something was found."""
    place = BUILT / target.name
    corpus = place / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for seeded in target.seeds():
        (corpus / hashlib.sha256(seeded).hexdigest()[:16]).write_bytes(seeded[: target.longest])
    words = place / "words.txt"
    words.write_text("".join(f'"{_escaped(word)}"\n' for word in target.words))
    known = FOUND / target.name
    flags = [
        *(f"-max_total_time={max(1, round(seconds))}", f"-seed={seed}", f"-max_len={target.longest}", f"-dict={words}"),
        *(
            f"-timeout={_UNIT_SECONDS}",
            f"-rss_limit_mb={_MEMORY_MIB}",
            f"-artifact_prefix={place}/",
            "-print_final_stats=1",
        ),
    ]
    directories = [str(corpus), *([str(known)] if known.is_dir() else [])]
    log = place / "log.txt"
    with log.open("wb") as sink:
        ran = subprocess.run(
            [sys.executable, "-m", "fuzz.led", target.name, *flags, *directories],
            stdout=sink, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
    text = log.read_text(errors="replace")
    if ran.returncode:
        print(text[-4000:], file=sys.stderr)
        print(f"{target.name}: found something with seed {seed}; the input is under {place}/", file=sys.stderr)
        return 1
    done = re.findall(r"^#(\d+)\s+DONE\s+cov: (\d+) ft: (\d+)", text, re.MULTILINE)
    ran_units, covered, _ = done[-1] if done else ("?", "?", "")
    print(
        f"{target.name}: {ran_units} inputs in {seconds:.0f} s, {covered} edges, nothing found, seed {seed}", flush=True
    )
    return 0


def _escaped(word: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word)


def main() -> int:
    """Read the flags and run."""
    names = ("spoiled", "scraped", "files", *TARGETS)
    parser = argparse.ArgumentParser(
        prog="python -m fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="for all targets together (default 600)")
    parser.add_argument("--lines", type=int, default=10_000_000, help="spoiled lines at most (default ten million)")
    parser.add_argument("--runs", type=int, default=2000, help="orders of events in a log's files (default 2000)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31), help="repeat a run")
    parser.add_argument("--target", nargs="+", choices=names, default=names, help=f"which: {', '.join(names)}")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)  # a seed may be a damaged file, which is said aloud
    guided = importlib.util.find_spec("atheris") is not None
    print(f"seed {arguments.seed}, {_engine(guided=guided)}", flush=True)
    share = arguments.seconds / len(arguments.target)
    found = 0
    for number, name in enumerate(arguments.target):
        seed = arguments.seed + number
        if name == "spoiled":
            found |= spoiled.run(arguments.lines, share, seed)
        elif name == "scraped":
            found |= scraped.run(share, seed)
        elif name == "files":
            found |= files.run(arguments.runs, seed)
        elif guided:
            found |= led(TARGETS[name], share, seed)
        else:
            found |= mutated.run(TARGETS[name], share, seed, BUILT / name)
    return found


def _engine(*, guided: bool) -> str:
    if guided:
        return "targets led by coverage (atheris)"
    version = ".".join(map(str, sys.version_info[:2]))
    return f"targets by Hypothesis, not led by coverage: atheris is not installed for Python {version}"


if __name__ == "__main__":
    sys.exit(main())
