"""Runs of loops, one after another: each result is a file, and a run with a file is not repeated."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from closed_loop import chain
from closed_loop.advice import Advised, advised
from closed_loop.engine import arguments
from closed_loop.installation import Installation
from closed_loop.load import Load
from closed_loop.loops import Loop

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Bench:
    """Where runs happen and where their results are written."""

    installation: Installation
    lane: chain.Lane
    results: Path
    say: Say
    lull_seconds: float = 0.0  # before each load, see `chain.Setting`
    raw: Path | None = None  # where each side's log and answers of `/v1/loads` are kept

    def side(
        self, args: Sequence[str], profile: str, env: dict[str, str], load: Load, *, lull: bool = True, name: str = ""
    ) -> tuple[chain.Side, Any]:
        """Run one side; return it and its JSON."""
        side = chain.run(
            chain.Setting(
                tuple(args),
                profile,
                env,
                lull_seconds=self.lull_seconds if lull else 0.0,
                raw=self.raw / name if self.raw is not None and name else None,
            ),
            load,
            self.installation,
            self.lane,
            self.say,
        )
        data = side.as_json()
        data["args"] = chain.shown(args, self.installation, self.lane)
        data["load"] = load.as_json()
        data["time_scale"] = side.time_scale
        return side, data

    def arguments(self, flags: str) -> list[str]:
        """Return the whole command line of a server with these flags."""
        return arguments(self.installation, self.lane.port, *flags.split())

    def kept(self, name: str) -> Any:
        """Return an existing result, else None."""
        path = self.results / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def keep(self, name: str, result: Any) -> None:
        """Write a result atomically."""
        path = self.results / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        unfinished.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(path)


def run_loop(bench: Bench, loop: Loop, number: int) -> Any:
    """Run a loop once, unless its result exists: the wrong setting, then the advised one."""
    name = f"{loop.name}.{number}"
    known = bench.kept(name)
    if known is not None:
        bench.say(f"{name}: known")
        return known
    bench.say(f"{name}: {loop.what}")
    begin = time.time()
    args, load, env = bench.arguments(loop.flags), loop.load, dict(loop.env)
    before, data = bench.side(args, loop.profile, env, load, name=f"{name}.before")
    result: dict[str, Any] = {"loop": loop.name, "run": number, "version": bench.installation.version, "before": data}
    advice = advised(before.document, args, load, loop.fixed)
    result["advice"] = advice.as_json()
    bench.say(f"{name}: {data['verdict']} {_words(advice)}")
    if loop.expected and advice.changes:
        _, result["after"] = bench.side(advice.args, loop.profile, env, advice.load, lull=False, name=f"{name}.after")
        bench.say(f"{name}: then {result['after']['verdict']}")
    bench.keep(name, result)
    bench.say(f"{name}: {_gain(result)} in {time.time() - begin:.0f} s")
    return result


def _words(advice: Advised) -> str:
    changes = [f"{c.what}: {c.old} -> {c.new}" for c in advice.changes]
    return "; ".join(changes) or advice.words or "nothing to change"


def _gain(result: dict[str, Any]) -> str:
    figures = [
        f"{side['measures']['tokens_per_second']:.0f} tok/s ({side['measures']['tokens_per_cpu_second'] or 0:.0f} per CPU second)"
        for side in (result["before"], result.get("after"))
        if side is not None
    ]
    return " -> ".join(figures)
