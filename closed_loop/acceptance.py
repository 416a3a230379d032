"""Every advice of the table, checked by the real parsers and argument checks of released wheels.

For each release servers of several kinds are described, every diagnosis gives its advice for them under several loads, and the
command line with it is given to the release's own `ServerArgs`. A server whose own command line is refused is left out: it
does not exist. The Python of an installed engine (`python -m closed_loop install`) runs the wheels; nothing is started.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from closed_loop.installation import HERE, default_home, installed
from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.core.advice import advise, setting
from sglang_tuning_exporter.core.events import NO_RANK
from sglang_tuning_exporter.core.facts import Facts, RankMemory
from sglang_tuning_exporter.core.rows import ROWS
from sglang_tuning_exporter.core.server import Totals
from sglang_tuning_exporter.core.view import View
from sglang_tuning_exporter.sglang.args.command import Command, command_line
from sglang_tuning_exporter.sglang.args.flags import flag_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

ASKED = ("0.3.0", "0.4.6.post5", "0.4.9.post6", "0.5.3.post3", "0.5.5.post3", "0.5.9", "0.5.17", "0.5.23")
SECONDS = 100.0  # of the busy stretch
ENGINE = "0.5.23"  # whose Python imports the wheels
_SERVERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "eight GPUs": {"tp_size": 8},
    "priorities": {"enable_priority_scheduling": True},
    "no radix cache": {"disable_radix_cache": True},
    "no graphs": {"disable_cuda_graph": True},
    "pages": {"page_size": 64},
    "ranks": {"tp_size": 8, "dp_size": 8, "enable_dp_attention": True, "chunked_prefill_size": 1024},
    "replicas": {"dp_size": 2},
    "few at once": {"max_running_requests": 8, "max_total_tokens": 8192, "schedule_conservativeness": 3.0},
    "large chunk": {"chunked_prefill_size": 16384, "mem_fraction_static": 0.6},
}
_USUAL: dict[str, Any] = {
    "tp_size": 1,
    "dp_size": 1,
    "ep_size": 1,
    "schedule_policy": "fcfs",
    "schedule_conservativeness": 1.0,
    "chunked_prefill_size": 4096,
    "max_prefill_tokens": 16384,
    "max_running_requests": 64,
    "mem_fraction_static": 0.85,
    "kv_cache_dtype": "auto",
    "load_balance_method": "round_robin",
    "quantization": None,
    "enable_torch_compile": False,
}


@dataclass(frozen=True, slots=True)
class Piece:
    """One advice on one server: the words after the program, with it and without."""

    server: str
    diagnosis: str
    changes: str
    without: tuple[str, ...]
    words: tuple[str, ...]


def pieces(release: str, model: Path) -> Iterator[Piece]:
    """Return every advice for the servers of one release, each command line once."""
    seen = set()
    for name, own in _SERVERS.items():
        if any(flag_of(arg, release) is None for arg in own):
            continue
        args = {arg: value for arg, value in _USUAL.items() if flag_of(arg, release) is not None} | own
        for usage, ran in ((0.3, 50), (0.95, 300)):
            view = _view(release, {"model_path": str(model), **args}, usage, ran)
            for row in ROWS:
                changes = {
                    change.arg: None if change.removes and change.to is None else setting(change.to)
                    for change in advise(row, view, frozenset({row.id}))
                    if change.arg and (change.to is not None or change.removes)
                }
                known = view.facts.arguments
                before, after = command_line(release, known, {}), command_line(release, known, changes)
                if not changes or before is None or after is None or after.text in seen:
                    continue
                seen.add(after.text)
                data = ", ".join(change.text for change in after.changes)
                yield Piece(name, row.id, data, _arguments(before), _arguments(after))


def _arguments(command: Command) -> tuple[str, ...]:
    """Give the words behind the program, which is `python3 -m sglang.launch_server`."""
    return tuple(shlex.split(command.text)[3:])


def _view(release: str, args: dict[str, Any], usage: float, ran: int) -> View:
    """Return a busy stretch of a server's time, in which requests wait and this many run at most."""
    shares = {"serves/None": 1.0, "usage": usage, "running": ran / 4, "queued": 20.0, f"batch/{ran}": 1.0}
    totals = Totals(
        {name: SECONDS * share for name, share in {**shares, "usage:s": 1, "running:s": 1, "queued:s": 1}.items()}
    )
    facts = Facts(version=release, arguments=args)
    facts.available[None] = 13.5
    facts.memory[NO_RANK] = RankMemory(before=80.0, taken={"graph": 1.0, "decode_graph": 1.0})
    return View(totals, facts, PROFILES["offline"], SECONDS)


def wheel(release: str, home: Path) -> Path:
    """Return the folder of an unpacked wheel; the first time it is downloaded from PyPI."""
    folder = home / "wheels" / release
    if not (folder / "sglang").exists():
        folder.mkdir(parents=True, exist_ok=True)
        fetch = [
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--only-binary=:all:",
            "-d",
            str(folder),
            f"sglang=={release}",
        ]
        subprocess.run([str(installed(ENGINE, home).python), *fetch], check=True)
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
            archive.extractall(folder)
    return folder


def ask(release: str, home: Path, commands: list[tuple[str, ...]]) -> list[str]:
    """Run a release's parser in the engine's Python; return for each command line why it is refused, empty if it is not."""
    environment = {
        "PYTHONPATH": str(wheel(release, home)),
        "PATH": "/usr/bin:/bin",
        "HOME": str(home),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command, lines = [str(installed(ENGINE, home).python), str(HERE / "asked.py")], map(json.dumps, commands)
    done = subprocess.run(
        command, input="\n".join([*lines, ""]), env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise UsageError(f"release={release}: {done.stderr.strip()[-300:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def accept(releases: Iterable[str], say: Callable[[str], None]) -> int:
    """Check all advice with the releases, print what they refuse, and return the exit status. A server refused without advice is left out."""
    home, refused, asked = default_home(), 0, 0
    for release in releases:
        found = list(pieces(release, installed(ENGINE, home).model))
        bare = sorted({piece.without for piece in found})
        said = ask(release, home, [*bare, *(piece.words for piece in found)])
        exists = {each for each, refusal in zip(bare, said, strict=False) if not refusal}
        if not exists:
            raise UsageError(f"release={release}: it accepts no server at all here: {said[:1]}")
        answers = [each for each in zip(found, said[len(bare) :], strict=True) if each[0].without in exists]
        bad = [(piece, refusal) for piece, refusal in answers if refusal]
        asked, refused = asked + len(answers), refused + len(bad)
        say(f"{release}: {len(answers)} pieces of advice, {len(bad)} refused")
        for piece, refusal in bad:
            say(f"  {piece.diagnosis} on {piece.server}: {piece.changes}: {refusal[:200]}")
    say(f"{asked} pieces of advice, {refused} refused")
    return 1 if refused else 0
