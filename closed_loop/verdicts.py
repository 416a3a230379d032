"""The verdicts of two revisions of the exporter on each capture, beside the truth: the table of docs/situations.md."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from closed_loop import keeping
from closed_loop.situations import NEUTRAL, SITUATIONS, Situation
from sglang_tuning_exporter.config.values import UsageError

HERE = Path(__file__).parent
BEFORE = "2338a13"
SOURCES = ("both", "log", "metrics", "report")
_SETTLED_SECONDS = 3.0  # between readiness and the first step
_UNDECIDED = frozenset({"not_enough_data", "no_clear_bottleneck"})
_PEOPLE = ("requests at once", "replica", "max_new_tokens")


@dataclass(frozen=True, slots=True)
class Seen:
    """The answer from one source on a situation: the headline when asked, its advice, and what is wrong with it."""

    verdict: str
    advice: tuple[str, ...]
    alerts: tuple[str, ...] = ()  # that would be pending
    false_headlines: tuple[str, ...] = ()
    harmful: tuple[str, ...] = ()  # advised at any time
    missed: tuple[str, ...] = ()

    @property
    def wrong(self) -> tuple[str, ...]:
        """Everything that is wrong."""
        return (*self.false_headlines, *self.harmful, *self.missed)


Row = tuple[Situation, Mapping[str, Mapping[str, Seen]]]
_INTRODUCTION = """# Situations on a real engine, and what is said of them

Made by `python -m closed_loop situations`; do not edit.

Each situation was done to a real SGLang on a CPU (`python -m closed_loop capture`) and kept in `tests/captures`: its log and each page
of `/metrics`. The exporter of each revision then watched what was kept, with its own clock moved by hand: from log and metrics
(first line of a cell), from the log alone, from the metrics alone, and offline (`report`). A cell has the headline when the load ends,
what is advised then, where another way of seeing has another headline, and what is wrong by the table of
`closed_loop/situations.py`: a headline that is false at that time or at any other, an advice that must never be given, a cure that is not
named. `no_clear_bottleneck` and `not_enough_data` are silence, and not wrong.
"""


def revision(name: str, folder: Path) -> Path:
    """Return the exporter's folder at that revision, unpacked; `work` is the working tree."""
    if name == "work":
        return HERE.parent / "exporter"
    asked = subprocess.run(
        ["git", "rev-parse", "--short", f"{name}^{{commit}}"], capture_output=True, text=True, cwd=HERE, check=False
    )
    if asked.returncode:
        raise UsageError(f"revision={name}: not a revision of this repository")
    place = folder / asked.stdout.strip()
    if not (place / "exporter").is_dir():
        place.mkdir(parents=True, exist_ok=True)
        packed = subprocess.run(["git", "archive", name, "exporter"], capture_output=True, check=True, cwd=HERE.parent)
        subprocess.run(["tar", "-x", "-C", str(place)], input=packed.stdout, check=True)
    return place / "exporter"


def short(name: str) -> str:
    """Return the short hash of that revision; `work` is itself."""
    if name == "work":
        return name
    asked = subprocess.run(["git", "rev-parse", "--short", name], check=True, capture_output=True, text=True, cwd=HERE)
    return asked.stdout.strip()


Judge = Callable[[Path, str], dict[str, Any]]  # a capture and a profile → the judgement


@contextmanager
def judging(exporter: Path) -> Iterator[Judge]:
    """Start a process that judges captures with that exporter, which it imports once."""
    process = subprocess.Popen(
        [sys.executable, str(HERE / "rejudge.py")],
        env={**os.environ, "PYTHONPATH": str(exporter)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    asked, answers = process.stdin, process.stdout
    assert asked is not None
    assert answers is not None

    def judge(capture: Path, profile: str) -> dict[str, Any]:
        print(profile, capture, file=asked, flush=True)
        data: dict[str, Any] = json.loads(answers.readline() or '{"error": "the process has ended"}')
        if "error" in data:
            raise UsageError(f"{capture.name}: {data['error']}")
        return data

    with process:
        yield judge


def seen(situation: Situation, data: Mapping[str, Any]) -> dict[str, Seen]:
    """Compare the answers with the truth, for each source."""
    return {source: seen_by(situation, data, source) for source in SOURCES}


def seen_by(situation: Situation, data: Mapping[str, Any], source: str) -> Seen:
    """Compare the answer with the truth, for one source."""
    begin = _SETTLED_SECONDS
    asked = begin + situation.asked_at if situation.asked_at is not None else _end_of_load(situation, data["events"])
    if source == "report":
        last, every = data["report"], [data["report"]]
    else:
        times = data[source]["times"]
        # Requests that are cut off when the load is over say nothing of the server.
        over = max((float(at) for name, at in data["events"] if name == "load_end"), default=float("inf"))
        every = [each for each in times if (situation.from_start or each["at"] >= begin) and each["at"] <= over]
        before = [each for each in times if each["at"] <= asked]
        last = before[-1]
    verdict = last["verdict"]
    silence = NEUTRAL if source in situation.silent_sources else _UNDECIDED
    false = [f"`{verdict}` is false"] if verdict not in {*situation.verdicts, *silence} else []
    others = [each["verdict"] for each in every if each["verdict"] not in {*situation.verdicts, *NEUTRAL}]
    if source != "report":
        share = len(others) / max(1, len(every))
        false += [f"`{name}` for {share:.0%} of the time" for name in sorted(set(others) - {verdict})]
    always = {words for each in every for finding in each["findings"] for words in advised(finding)}
    harmful = {f"advises {words}" for words in always for rule in situation.never if _matches(rule, words)}
    advice = tuple(words for finding in last["findings"] for words in advised(finding))
    missed = _missed(situation, advice) if source == "both" else ""
    return Seen(
        verdict,
        advice,
        alerts=tuple(f["alert"] for f in last["findings"] if f.get("alert")),
        false_headlines=tuple(false),
        harmful=tuple(sorted(harmful)),
        missed=(missed,) if missed else (),
    )


def _missed(situation: Situation, advice: Sequence[str]) -> str:
    """Return what is missing: no flag that helps is named, or advice to people comes before it."""
    cures = [place for place, words in enumerate(advice) if any(_matches(cure, words) for cure in situation.cures)]
    if not situation.cures or (cures and all(words.startswith("--") for words in advice[: cures[0]])):
        return ""
    if cures:
        return f"{advice[cures[0]]} comes after: {advice[0]}"
    return "does not name " + " or ".join(f"`{cure}`" for cure in situation.cures)


def _end_of_load(situation: Situation, events: Sequence[Sequence[Any]]) -> float:
    """Return when the last load stops sending; afterwards its clients only wait for answers."""
    lengths = [max(load.seconds for load in step) for step in situation.steps]
    busy = [length for step, length in zip(situation.steps, lengths, strict=True) if any(load.clients for load in step)]
    begins = [float(at) for name, at in events if name == "load_begin"]
    return begins[-1] + busy[-1] if busy and begins else _SETTLED_SECONDS + sum(lengths)


def advised(finding: Mapping[str, Any]) -> list[str]:
    """Return each advice of a finding: its flag with the values, or its words to people."""
    found = []
    for advice in finding["advice"]:
        current, suggested = advice.get("current"), advice.get("suggested")
        if not advice.get("flag"):
            found.append(str(advice.get("suggestion") or finding.get("action") or "").strip())
        elif advice.get("is_switch") or (
            suggested in (0, 1) and advice["flag"].startswith(("--disable-", "--enable-"))
        ):
            found.append(f"{advice['flag']} {'add' if suggested else 'drop'}")
        elif suggested is None:
            found.append(f"{advice['flag']} {advice.get('suggestion') or ''}".strip())
        else:
            found.append(f"{advice['flag']} {_figure(current)} → {_figure(suggested)}")
    return [words for words in found if words]


def _figure(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _matches(rule: str, words: str) -> bool:
    if rule in _PEOPLE:
        return rule in words
    flag, _, way = rule.partition(" ")
    if words.split(" ", maxsplit=1)[0] != flag:
        return False
    if not way:
        return True
    if way == "drop":
        return any(word in words for word in ("drop", "without", "leave"))
    before, arrow, after = words.removeprefix(flag).partition("→")
    try:
        return bool(arrow) and (float(after) > float(before)) is (way == "up")
    except ValueError:
        return False


def table(
    captures: Path, names: Sequence[str], revisions: Sequence[str], folder: Path, say: Callable[[str], None]
) -> list[Row]:
    """Judge every existing capture with each revision; return situation → revision → source.

    What a revision says of a kept capture is remembered in `folder`.
    """
    exporters = {name: revision(name, folder) for name in revisions}
    with ExitStack() as open_judges:
        judges = {name: open_judges.enter_context(judging(exporter)) for name, exporter in exporters.items()}
        return list(_rows(captures, names, exporters, judges, say))


def _rows(
    captures: Path,
    names: Sequence[str],
    exporters: Mapping[str, Path],
    judges: Mapping[str, Judge],
    say: Callable[[str], None],
) -> Iterator[Row]:
    for situation in (each for each in SITUATIONS if not names or each.name in names):
        kept, capture = keeping.archive_of(situation.name, captures), captures / situation.name
        if not kept.exists() and not capture.is_dir():
            continue
        with TemporaryDirectory(prefix="capture-") as scratch:
            mark = ""
            if kept.exists():
                mark, capture = hashlib.sha256(kept.read_bytes()).hexdigest()[:8], keeping.unpack(kept, Path(scratch))
            found = {}
            for name, judge in judges.items():
                known = exporters[name].parent / f"{situation.name}-{mark}.json"
                if name != "work" and mark and known.exists():
                    data = json.loads(known.read_text(encoding="utf-8"))
                else:
                    data = judge(capture, situation.profile)
                    if name != "work" and mark:
                        known.write_text(json.dumps(data), encoding="utf-8")
                found[name] = seen(situation, data)
        say(situation.name)
        yield situation, found


def is_wrong(rows: Iterable[Row], name: str) -> bool:
    """Return whether that revision is wrong about any of them."""
    return any(data.wrong for _, found in rows for data in found[name].values())


def render(rows: Iterable[Row], revisions: Sequence[str]) -> str:
    """Write the page."""
    rows = list(rows)
    columns = ["before", *["between"] * (len(revisions) - 2), "now"] if len(revisions) > 1 else ["now"]
    heads = [f"{column} ({name})" for column, name in zip(columns, revisions, strict=True)]
    head = f"| situation | truth, *right advice* | {' | '.join(heads)} |"
    lines = [_INTRODUCTION, head, "|---|---|" + "---|" * len(revisions)]
    for situation, found in rows:
        cells = " | ".join(_cell(found[name]) for name in revisions)
        lines.append(f"| `{situation.name}`: {situation.what} | {situation.truth} *{situation.right}* | {cells} |")
    lines.append("")
    for name in revisions:
        wrong = sum(any(data.wrong for data in found[name].values()) for _, found in rows)
        lines.append(f"At {name}, {wrong} of {len(rows)} situations have something wrong.")
    return "\n".join(lines) + "\n"


def _cell(found: Mapping[str, Seen]) -> str:
    both = found["both"]
    words = [f"`{both.verdict}`"]
    if both.advice:  # two findings may ask for the same
        words.append("; ".join(f"`{said}`" if said.startswith("--") else said for said in dict.fromkeys(both.advice)))
    others = {source: found[source].verdict for source in SOURCES[1:] if found[source].verdict != both.verdict}
    if others:
        words.append(", ".join(f"{source}: `{verdict}`" for source, verdict in others.items()))
    problems = dict.fromkeys(problem for source in SOURCES for problem in found[source].wrong)
    wrong = [
        f"{problem} ({', '.join(source for source in SOURCES if problem in found[source].wrong)})"
        for problem in problems
    ]
    if wrong:
        words.append("**Wrong:** " + "; ".join(wrong))
    return "<br>".join(words).replace("|", "\\|")
