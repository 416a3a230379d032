"""Today's answers on every log there is and on many short ones: a difference is judged once, by the lines of that log
that decide it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cache, partial, reduce
from itertools import dropwhile
from pathlib import Path
from typing import Any
from zlib import crc32

from truth.cases import Answer, Case, Checks, data
from truth.recording import ROOT, Recording, read
from truth.ways import answer_of, command

ANSWERS = ROOT / "truth" / "cases" / "today.json"  # one line for each log, so that a change shows in a diff
FIELDS = {
    "same status": ("status", "error"), "same verdict": ("verdict", "confidence"), "same first change": ("change",),
    "same findings": ("findings",), "same counts": ("counts",),
}  # fmt: skip
_STAMP = re.compile(r"\[(\d{4}-\d\d-\d\d )?(\d\d:\d\d:\d\d)")
_RANK = re.compile(r"(?<=\d\d:\d\d:\d\d)((?: [A-Z]+\d+)*)\]")
_recipes = cache(partial(data, "today/recipes.yaml"))
_read_judged = cache(partial(data, "judged.yaml"))
_judged = cache(lambda: _mapped(_read_judged(), _plain))  # without what a sentence says beside its advice
_answers = cache(lambda: json.loads(ANSWERS.read_text()) if ANSWERS.exists() else {})
Lines = list[str]


def _time(found: re.Match[str]) -> datetime:
    return datetime.fromisoformat((found[1] or "2025-11-20 ") + found[2] + "+00:00")


def _timed(lines: Lines) -> Iterator[tuple[datetime, str]]:
    """Give each line its time; one without has that of the line before."""
    stamps = [_STAMP.search(line) for line in lines]
    at = next((_time(stamp) for stamp in stamps if stamp), datetime.fromisoformat("2025-11-20T00:00:00+00:00"))
    for line, stamp in zip(lines, stamps, strict=True):
        yield (at := _time(stamp) if stamp else at), line


def _moved(lines: Lines, seconds: float) -> Lines:
    def later(found: re.Match[str]) -> str:
        return f"[{_time(found) + timedelta(seconds=seconds):{'%Y-%m-%d ' if found[1] else ''}%H:%M:%S}"

    return [_STAMP.sub(later, line, count=1) for line in lines]


def _replaced(line: str, words: tuple[str, str]) -> str:
    return re.sub(words[0], words[1], line)


def _join(lines: Lines, recipe: Mapping[str, Any], *, after: bool) -> Lines:
    """Let another log follow, from a second after the last line on, or mix it in by its times as if both had begun at
    once.
    """
    more, begin = made(recipe), max(_timed(lines))[0] + timedelta(seconds=1) if after else min(_timed(lines))[0]
    more = _moved(more, (begin - min(_timed(more))[0]).total_seconds())
    mixed = sorted([*_timed(lines), *_timed(more)], key=lambda timed: timed[0])
    return lines + more if after else [line for _, line in mixed]


def _wrap(lines: Lines, name: str, every: int = 1) -> Lines:
    """Put around each line what a tool does, a text or a JSON object; or add that after so many lines."""
    form, wrapped = _recipes()["wraps"][name], []
    for n, (t, line) in enumerate(_timed(lines), 1):
        filled = partial(str.format, line=line, n=n, t=t, quoted=json.dumps(line), doubled=line.replace('"', '""'))
        text = filled(form) if isinstance(form, str) else json.dumps({k: filled(v) for k, v in form.items()})
        wrapped += [text] if every == 1 else [line, text] if n % every == 0 else [line]
    return wrapped


STEPS: dict[str, Callable[[Lines, Any], Lines]] = {
    "lines": lambda lines, numbers: lines[numbers[0] - 1 : numbers[1]],
    "tail": lambda lines, count: lines[-count - 1 :],
    "paste": lambda lines, first: lines[first - 1 : first + 9],
    "without": lambda lines, words: (
        list(dropwhile(lambda line: not re.search("(Prefill|Decode) batch", line), lines)) if words == "start"
        else [line for line in lines if not re.search(words, line)]
    ),
    "only": lambda lines, words: [line for line in lines if re.search(words, line)],
    "rank": lambda lines, rank: [  # its lines, and those of none
        line for line in lines if not (found := _RANK.search(line)) or not found[1] or rank in found[1].split()
    ],
    "ranks": lambda lines, ranks: [  # each of them prints the lines of batches and retractions
        _RANK.sub(f" {rank}]", line, count=1) if rank else line
        for line in lines
        for rank in (ranks.split() if re.search("(Prefill|Decode) batch|retracted_reqs", line) else [""])
    ],
    "repeat": lambda lines, how: [line for n in range(how[0]) for line in _moved(lines, n * how[1])],
    "each": lambda lines, times: [line for line in lines for _ in range(times)],
    "every": lambda lines, nth: lines[::nth],
    "torn": lambda lines, size: "\n".join(lines)[size:-size].split("\n"),
    "events": lambda lines, every: _wrap(lines, "event", every),
    "then": partial(_join, after=True), "beside": partial(_join, after=False), "shift": _moved, "wrap": _wrap,
    "set": lambda lines, words: [reduce(_replaced, words.items(), line) for line in lines],
}  # fmt: skip


def made(recipe: Mapping[str, Any]) -> Lines:
    """Make a log: `from` a whole one or a `text`, then step by step in the order written."""
    whole = recipe["text"].encode() if "text" in recipe else recording(recipe["from"]).text
    lines = whole.decode("utf-8", "surrogateescape").split("\n")
    for step, value in list(recipe.items())[1:]:
        lines = STEPS[step](lines, value)
    return lines


@cache
def _whole() -> dict[str, Path]:
    """Every log in the repository, by its folder and name."""
    paths = [path for pattern in _recipes()["whole"] for path in sorted(ROOT.glob(pattern))]
    named = {f"{path.parent.name}/{re.sub(r'(.log|.tar)?([.][gx]z)?$', '', path.name)}": path for path in paths}
    assert len(named) == len(paths), "two logs have one name"
    return named


@cache
def recording(name: str) -> Recording:
    """Return the log of this name."""
    recipe = _recipes()["short"].get(name)
    text = "\n".join(made(recipe)).encode("utf-8", "surrogateescape") if recipe else read(_whole()[name]).text
    return Recording(((0.0, text),))


def _ask(case: Case) -> list[Answer]:
    status, out, error = command(["report", "--format", "json", "--profile", case.profile, "-"], case.recording().text)
    return [answer_of(json.loads(out), 0.0, status, "") if out else Answer(0.0, status, f"exit {status}", text=error)]


def said(answer: Answer) -> dict[str, Any]:
    """Return what is recorded of an answer."""
    first = next(([change.flag, change.now, change.to] for change in answer.changes), None)
    named = {"status": answer.status, "verdict": answer.verdict, "confidence": answer.confidence, "change": first}
    findings = [each.diagnosis for each in answer.findings]
    return {**named, "findings": findings, "counts": dict(answer.counts), "error": answer.text}


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Return a value of JSON with each of its texts changed."""
    if isinstance(value, dict):
        return {_mapped(key, change): _mapped(each, change) for key, each in value.items()}
    if isinstance(value, list):
        return [_mapped(each, change) for each in value]
    return change(value) if isinstance(value, str) else value


def _plain(text: str) -> str:
    """Leave out what a sentence says beside its advice."""
    return reduce(_replaced, _read_judged()["forms"].items(), text)


def _renamed(text: str) -> str:
    """Put a word that changed on purpose in place of what it was."""
    return str(_judged()["words"].get(plain := _plain(text), plain))


def _fits(judged: Any, value: Any) -> bool:
    """Whether a value is the one of a rule: equal, or where that begins with ~ its JSON is all of this form."""
    if isinstance(judged, str) and judged.startswith("~"):
        return re.fullmatch(judged[1:], json.dumps(value, ensure_ascii=False)) is not None
    return bool(judged == value) and type(judged) is type(value)


def _ruled(name: str, text: str, difference: tuple[str, Any, Any], said_now: Mapping[str, Any]) -> bool:
    """Whether a rule explains a difference, checked on this log; a counterexample is what keeps the old answer."""
    field, was, now = difference
    return any(
        rule["field"] == field and _fits(rule["was"], was) and _fits(rule["is"], now) and name != rule["but"]
        and said_now["verdict"] in rule.get("verdict", [said_now["verdict"]]) and re.search(rule["line"], text)
        for rule in _judged()["rules"]
    )  # fmt: skip


def _fault(name: str, log: str, difference: tuple[str, Any, Any], said_now: Mapping[str, Any]) -> str:
    """Say why a difference is not right as judged."""
    field, was, now = difference
    if isinstance(was, dict):  # counts: those that differ
        was, now = ({k: v for k, v in one.items() if other.get(k) != v} for one, other in ((was, now), (now, was)))
    text = recording(log).text.decode("utf-8", "replace")
    if _ruled(name, text, (field, was, now), said_now):
        return ""
    judged, differs = _judged()["logs"].get(name, {}).get(field, {}), f"{field} was {was}, is {now}"
    if (judged.get("was"), judged.get("is")) != (was, now):
        return f"{differs}: not judged"
    if judged["right"] != "new":
        return f"{differs}: {judged['why']}"
    if not judged["lines"] or any(line not in text for line in judged["lines"]):
        return f"{differs}: the lines that decide it are not in the log"
    same = [each for each, how in _judged()["logs"].items() if judged["why"] in [one["why"] for one in how.values()]]
    if len(same) > 10:
        return f"{differs}: more than ten differ because {judged['why']!r}: a rule, which needs a counterexample"
    return ""


def _check(name: str, log: str, _way: str, answers: Sequence[Answer]) -> Checks:
    if name not in _answers():
        return dict.fromkeys(FIELDS, "no answer is recorded: python -m truth.today record")
    added = _judged()["added"]  # rows that the recorded product did not have
    known = replace(answers[-1], findings=tuple(each for each in answers[-1].findings if each.diagnosis not in added))
    was, now = _mapped(_answers()[name], _renamed), said(known)
    faults = {
        each: _fault(name, log, (each, was[each], now[each]), now) if was[each] != now[each] else "" for each in now
    }
    return {check: "; ".join(filter(None, (faults[each] for each in fields))) for check, fields in FIELDS.items()}


def cases() -> Iterator[Case]:
    """Ask for every log, and for half of them by another profile too."""
    for log in [*_whole(), *_recipes()["short"]]:
        for profile in ("online", "offline")[: 1 + crc32(log.encode()) % 2]:
            name = f"today/{log}" + (" offline" if profile == "offline" else "")
            yield Case(name, partial(recording, log), partial(_check, name, log), ("report",), profile, ask=_ask)


def record(answers: dict[str, Any]) -> None:
    """Ask about each case whose answer is not known, and write it down."""
    for case in cases():
        if case.name not in answers:
            answers[case.name] = said(_ask(case)[0])
            rows = [f"{json.dumps(name)}: {json.dumps(answer)}" for name, answer in sorted(answers.items())]
            ANSWERS.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__" and sys.argv[1:2] == ["record"]:
    record({} if "--again" in sys.argv else _answers())
