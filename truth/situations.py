"""Captures of real servers, and logs of others: nothing false or harmful, the right verdict, the cure first.

Truth: `cases/situations.yaml`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from truth.cases import SILENT, WAYS, Answer, Case, Change, Checks, data
from truth.recording import ROOT, Recording, read

_SETTLED_SECONDS = 3.0  # between readiness and the first load
_AFTER_LAST_LINE = 2.0
_SILENCE = SILENT - {"starting"}  # of a server that serves
_NEUTRAL = SILENT | {"healthy", "idle"}  # at any time but the one at which it is asked
_UP, _DOWN = re.compile("rais|larger|increas|higher|above|more"), re.compile("lower|smaller|reduc|fewer|less")
Truth: TypeAlias = Mapping[str, Any]  # an entry of the file, its lists made flat


def _flat(value: Any) -> Any:
    return [one for each in value for one in (_flat(each) if isinstance(each, list) else [each])]


def cases() -> list[Case]:
    """One case for each capture and log."""
    entries = data("situations.yaml")
    places = {name: ROOT / "tests" / "captures" / f"{name}.tar.xz" for name in entries["captures"]}
    places |= {name: ROOT / "truth" / "cases" / name for name in entries["logs"]}
    made = []
    for name, entry in {**entries["captures"], **entries["logs"]}.items():
        truth = {key: _flat(value) if isinstance(value, list) else value for key, value in entry.items()}
        ways = WAYS if places[name].suffix == ".xz" else ("report", "log")
        recording = partial(read, places[name])
        asked = partial(check, truth, recording)
        made.append(Case(name, recording, asked, tuple(truth.get("ways", ways)), truth.get("profile", "online")))
    return made


def check(truth: Truth, recording: Callable[[], Recording], way: str, answers: Sequence[Answer]) -> Checks:
    """Compare what was said with the truth."""
    last, every = answers[-1], answers
    if way != "report":
        asked, begin, end = _times(truth, recording())
        last = [each for each in answers if each.at <= asked][-1]
        every = [each for each in answers if begin <= each.at <= end]
    found = {"nothing false": _false(truth, way, last, every), "verdict": _verdict(truth, way, last)}
    return found | ({"cure first": _cure(truth, way, last)} if "cures" in truth else {})


def _times(truth: Truth, recording: Recording) -> tuple[float, float, float]:
    """When it is asked, and from when to when nothing may be false: requests that are cut off at the end say nothing of
    the server.
    """
    begin = recording.ready + _SETTLED_SECONDS
    if "load_seconds" in truth:
        asked = recording.loads[-1][0] + truth["load_seconds"]
    elif "asked_at" in truth:
        asked = begin + truth["asked_at"]
    else:
        asked = recording.log[-1][0] + _AFTER_LAST_LINE
        return asked, recording.begin, asked
    end = max((end for _, end in recording.loads), default=recording.end)
    return asked, recording.begin if "from_start" in truth else begin, end


def _is_false(truth: Truth, verdict: str, neutral: frozenset[str]) -> bool:
    """Whether a verdict is neither right nor neutral; where none is given as right, whether it is given as false."""
    if "verdicts" in truth or verdict.startswith("exit"):
        return verdict not in {*truth.get("verdicts", ()), *neutral}
    return verdict in truth.get("never_verdicts", ())


def _false(truth: Truth, way: str, last: Answer, every: Sequence[Answer]) -> str:
    neutral = _NEUTRAL if way in truth.get("silent", ()) else _SILENCE
    wrong = [f"{last.verdict} is false"] if _is_false(truth, last.verdict, neutral) else []
    others = [each.verdict for each in every if each is not last and _is_false(truth, each.verdict, _NEUTRAL)]
    names = sorted({*others} - {last.verdict})
    wrong += [f"{name} for {others.count(name) / len(every):.0%} of the time" for name in names]
    rules, sayings = truth.get("never", ()), truth.get("never_says", ())
    said = {_words(each) for each in every} if sayings else set()
    changes = [change for each in every for change in each.changes]
    wrong += sorted({f"advises {_told(change)}" for change in changes if any(matches(rule, change) for rule in rules)})
    wrong += sorted({f"says {found[0]}" for words in said for rule in sayings if (found := re.search(rule, words))})
    return "; ".join(
        [
            *wrong,
            *(f"{name} is {value:g}" for name, value, low, high in _figures(truth, last) if not low <= value <= high),
        ]
    )


def _verdict(truth: Truth, way: str, last: Answer) -> str:
    if way in truth.get("silent", ()) and last.verdict in _NEUTRAL:
        return ""
    right = truth.get("verdicts", [last.verdict])
    if last.verdict == "no_limit_in_log" and "healthy" in right:
        return ""  # a log alone cannot prove more: whether clients got their answers is not in it
    if last.verdict not in right:
        return f"{'silent' if last.verdict in _SILENCE else last.verdict}, not {' or '.join(right)}"
    missing = [
        f"does not say {rule}" for rule in truth.get("says", ()) if not re.search(rule, _words(last), re.IGNORECASE)
    ]
    if way == "report" and last.status != truth.get("status", last.status):
        missing.append(f"exit status {last.status}, not {truth['status']}")
    if way != "report" and len(list(_figures(truth, last))) < len(truth.get("series", ())):
        missing.append(f"not each of {', '.join(truth['series'])}")
    return "; ".join(missing)


def _figures(truth: Truth, last: Answer) -> Iterator[tuple[str, float, float, float]]:
    for rule, (low, high) in truth.get("series", {}).items():
        yield from ((name, value, low, high) for name, value in last.metrics.items() if re.match(rule, name))


def _cure(truth: Truth, way: str, last: Answer) -> str:
    advising = [each for each in last.findings if each.changes]
    own = [each for each in advising if each.diagnosis == last.verdict]
    first = next((change for each in own or advising for change in each.changes), None)
    if first and any(matches(cure, first) for cure in truth["cures"]):
        return ""
    if first is None and way in truth.get("silent", ()):
        return ""
    return f"{_told(first) if first else 'nothing'}, not {' or '.join(truth['cures'])}"


def _words(answer: Answer) -> str:
    return json.dumps(answer.document) if answer.status == 200 else answer.text


def _told(change: Change) -> str:
    return f"{change.flag} {change.now} → {change.to}" if change.flag else str(change.to or change.words)


def matches(rule: str, change: Change) -> bool:
    """Whether a change is what a rule means: any flag (`--`), a flag, a flag and a direction, or words of an advice
    without a flag.
    """
    if not rule.startswith("--") or not change.flag:
        return not change.flag and rule in _told(change)
    flag, _, direction = rule.partition(" ")
    return flag in {change.flag, "--"} and direction in {"", _direction(change)}


def _direction(change: Change) -> str:
    """Give the direction also of a switch in words, and of a change whose value of now is not known."""
    if change.to in ("on", "off"):
        return "add" if change.to == "on" else "drop"
    if change.direction != "set" or not isinstance(change.to, str):
        return {"raise": "up", "lower": "down"}.get(change.said, "set") if change.now is None else change.direction
    return "up" if _UP.search(change.to) else "down" if _DOWN.search(change.to) else "set"
