"""A judged log in words: figures with their units, changes, findings, and the whole report for a terminal. Pure.

Every format is made of the same words: `FindingWords` for text and HTML, `amount` and `duration` everywhere.
"""

from __future__ import annotations

import datetime as dt
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sglang_tuning_exporter.config.profiles import Profile
from sglang_tuning_exporter.core.against import FIGURES, Comparison
from sglang_tuning_exporter.core.findings import (
    URGENCY,
    Change,
    Figure,
    Finding,
    Judged,
    Judgement,
    Start,
    Stretch,
    Unit,
    Value,
)
from sglang_tuning_exporter.core.rows import BY_ID, STATE_WORDS
from sglang_tuning_exporter.sglang.clean import clean

FIRST_DATED_SECOND = 30 * 86400.0  # below it a time is of a log without dates: seconds since its first midnight
TONES = {"critical": "bad", "warning": "warn", "info": "info", "none": "calm"}
TONE_WORDS = {"bad": "Critical", "warn": "Warning", "info": "Hint", "good": "No limit", "calm": "No verdict"}
LIVE_WORDS = {"healthy": "Healthy", "idle": "Idle", "starting": "Starting", "stopped": "Stopped"}  # by verdict
GOOD = frozenset({"no_limit_in_log", "healthy"})
TITLES = {
    "out_of_memory_any": "Out of memory",
    "pd_queue": "Other server of the pair is slow",
    "dp_imbalanced": "DP ranks unbalanced",
    "unexplained": "Requests wait, cause not known",
}  # of diagnoses whose id is not their title
SHOWN_SIGNALS = ("queue", "admission", "cuda_graph")
NOT_SHOWN = "no_queue"  # the queue says it
COUNTS = {
    "lines": "lines", "decode_batches": "decode lines", "prefill_batches": "prefill lines", "server_starts": "starts",
    "unrecognised": "unrecognised", "rejected_requests": "answered with 503", "server_errors": "answered with 500",
}  # fmt: skip
MEMORY = {
    "before_weights_gb": "free before weights", "weights_gb": "weights", "kv_pool_gb": "KV cache", "graphs_gb": "graphs",
    "left_gb": "left",
}  # fmt: skip
START_FIGURES = (
    "generated_tokens_per_second", "running_requests", "queued_requests", "token_usage", "retractions_per_minute",
    "share_waiting", "share_cached",
)  # fmt: skip
_MOSTLY = {"no_limit_in_log": "nothing limited the server", "not_enough_data": "too little load for a verdict"}
_SIDES = {"above": "limit", "below": "at least", "": "threshold"}
_MOST_ROWS = 40
HALF_A_DAY = 43200.0


# Figures and times


def amount(value: float, unit: Unit | str) -> str:
    """Return a figure with its unit."""
    if unit == "share":
        return f"{100 * value:.0f} %"
    if unit == "GB":
        return f"{value:.3g} GB"
    if unit == "seconds":
        return duration(value) if value >= 180 else f"{value:.3g} s"
    if unit == "ratio":
        return f"{value:.2f}"
    number = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}".removesuffix(".0")
    return number + {"per_minute": "/min", "tokens": " tokens"}.get(unit, "")


def value_words(figure: Figure) -> str:
    """Return a figure's value; empty where its name says all."""
    return "" if figure.unit == "words" else amount(figure.value, figure.unit)


def limit_words(figure: Figure) -> str:
    """Return a figure's limit, such as `at least 0.90`; empty where it has none."""
    if figure.limit is None or figure.unit == "words":
        return ""
    is_none = figure.limit == 0 and figure.unit == "count" and figure.side != "below"
    return f"{_SIDES[figure.side]} {'none' if is_none else amount(figure.limit, figure.unit)}"


def figure_line(figure: Figure) -> str:
    """Return a figure in one line: `Token usage: 0.95 (limit 0.90)`."""
    value, limit = value_words(figure), limit_words(figure)
    return f"{capitalised(figure.name)}{f': {value}' if value else ''}{f' ({limit})' if limit else ''}"


def duration(seconds: float) -> str:
    """Return seconds in words, such as `15 min`."""
    if seconds < 180:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def capitalised(words: str) -> str:
    """Return the words with a capital first letter, unless they begin with a flag or a path."""
    return words[:1].upper() + words[1:]


@dataclass(frozen=True, slots=True)
class Times:
    """Times of one log as text: `03:12:05` within a day, with the date over several, `+0:01:30` from its begin without dates."""

    begin: float | None
    end: float | None

    @property
    def is_dated(self) -> bool:
        """Whether the log prints dates."""
        return self.begin is not None and self.begin >= FIRST_DATED_SECOND

    def at(self, time: float, *, whole: bool = False) -> str:
        """Return a time; `whole`: with its date in any case."""
        if not self.is_dated:
            seconds = int(time - (self.begin or 0.0))
            return f"+{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        when, first, last = (_utc(each if each is not None else time) for each in (time, self.begin, self.end))
        return f"{when:%Y-%m-%d %H:%M:%S}" if whole or first.date() != last.date() else f"{when:%H:%M:%S}"

    def period(self, begin: float | None, end: float | None) -> str:
        """Return `from 03:12:05 to 03:37:00`; empty where a time is not known."""
        if begin is None or self.begin is None:
            return ""
        if end is None:
            return f"since {self.at(begin)}"
        return f"from {self.at(begin)} to {self.at(end)}" if end > begin else f"at {self.at(begin)}"


def _utc(time: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(min(max(time, 0.0), 253402300799.0), dt.timezone.utc)


# Changes and findings


def typed_value(value: Value) -> str:
    """Return a value as it is typed after its flag."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float | int):
        return f"{value:.0f}" if float(value).is_integer() else f"{value:.6g}"
    return "" if value is None else value


@dataclass(frozen=True, slots=True)
class ChangeWords:
    """A change: what to type (empty for advice to people) and words after it; `again`: the number of the finding that has it first."""

    verb: str
    typed: str
    words: str
    now: str
    reasons: Mapping[str, str]
    again: int = 0

    @property
    def line(self) -> str:
        """The change in one line: `Try --x 2, now 1`."""
        line = " ".join(filter(None, (self.verb, self.typed, self.words)))
        return f"{line}, {self.now}" if self.now else line


@dataclass(frozen=True, slots=True)
class FindingWords:
    """A finding, its number, and what is made of it: `after` its figures and changes come causes and notes."""

    number: int
    finding: Finding
    tone: str
    sentence: str  # empty where the headline says it
    changes: tuple[ChangeWords, ...]
    after: tuple[str, ...]
    period: str
    said: str = (
        ""  # the line of the log that explains it, where the headline does not have it whole, and where it stands
    )

    @property
    def is_main(self) -> bool:
        """Whether it is more than an opportunity: it limits the server, or somebody is called for it."""
        return self.finding.is_limit or self.finding.severity != "info"


def typed(change: Change) -> str:
    """Return a change as typed: `--x 2`, or a switch alone."""
    if not change.flag:
        return ""
    if change.removes or isinstance(change.to, bool) or change.to is None:
        return change.flag
    return f"{change.flag} {shlex.quote(typed_value(change.to))}"


def action(change: Change) -> str:
    """Return the verb of a change; empty for advice to people."""
    if not change.flag:
        return ""
    return "Remove" if change.removes or change.to is False else "Try"


def change_words(change: Change, again: int = 0) -> ChangeWords:
    """Return a change in words."""
    verb = action(change)
    words = _ended(capitalised(change.words)) if not change.flag else change.words if change.to is None else ""
    is_switch = isinstance(change.now, bool) or isinstance(change.to, bool)
    now = "" if change.now is None or is_switch or verb != "Try" else f"now {typed_value(change.now)}"
    reasons = {
        "": capitalised(_ended(change.gain)),
        "Why:": capitalised(_ended(change.why)),
        "It costs:": capitalised(_ended(change.cost)),
        "It will not help if": _ended(change.will_not_help_if),
    }
    return ChangeWords(verb, typed(change), words, now, {label: text for label, text in reasons.items() if text}, again)


def title(diagnosis: str) -> str:
    """Return a diagnosis in a few words."""
    return TITLES.get(diagnosis) or diagnosis.replace("_", " ").capitalize().replace("Cuda", "CUDA")


def findings_words(judged: Judged) -> tuple[FindingWords, ...]:
    """Return the findings in words; a change that an earlier finding has is only named again."""
    times, first = Times(judged.begin, judged.end), dict[tuple[str, str, str], int]()
    headlines = {each.diagnosis: each.headline.rstrip(".") for each in judged.judgement.findings}
    found = []
    for number, finding in enumerate(judged.judgement.findings, 1):
        keys = [(each.flag, typed_value(each.to), each.words) for each in finding.changes]
        before = [first.setdefault(key, number) for key in keys]
        changes = [
            change_words(each, at if at < number else 0) for each, at in zip(finding.changes, before, strict=True)
        ]
        causes = "; ".join(headlines[each] for each in finding.because if each in headlines)
        period = times.period(finding.since, finding.until)
        length = (finding.until or 0.0) - (finding.since or 0.0)
        held = f", {duration(finding.seconds)} of that time" if 0 < finding.seconds < 0.9 * length else ""
        after = (f"Caused by: {causes}." if causes else "", *map(_ended, finding.notes))
        is_new = finding.sentence.rstrip(".") != finding.headline.rstrip(".")
        found.append(
            FindingWords(
                number,
                finding,
                TONES[finding.severity],
                _ended(capitalised(finding.sentence)) if is_new else "",
                tuple(changes),
                tuple(filter(None, after)),
                f"Seen {period}{held}." if period else "",
                _quotation(finding),
            )
        )
    return tuple(found)


def _quotation(finding: Finding) -> str:
    """Return SGLang's own words that explain a finding, where the headline does not have them whole."""
    said = finding.explained_by
    if said is None or said.ending == "cut" or said.words.rstrip(".") in finding.headline:
        return ""
    marked = " This line stands beside text that clients can write." if said.marked else ""
    where = "" if said.where and said.where in finding.sentence else f" ({said.where})" if said.where else ""
    return f"In its log: “{said.text}”{where}.{marked}"


def _ended(words: str) -> str:
    return words if not words or words[-1] in ".!?…:" else f"{words}."


def pieces(command: str) -> tuple[str, ...]:
    """Cut a command line before each flag; the pieces joined with blanks are the line again."""
    words = re.findall(r"""(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^\s'"\\])+""", command)
    groups: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--"):
            groups.append([])
        groups[-1].append(word)
    cut = tuple(" ".join(group) for group in groups if group)
    return cut if " ".join(cut) == command else (command,)


# The parts of a report


def tone(judged: Judged) -> str:
    """Return the tone of the verdict: a class of the page's style sheet and a colour of the terminal."""
    if judged.judgement.severity == "none" and judged.judgement.verdict in GOOD:
        return "good"
    return TONES[judged.judgement.severity]


def word(judged: Judged) -> str:
    """Return the verdict of a running server in a word, for readers who cannot see its colour."""
    return LIVE_WORDS.get(judged.judgement.verdict) or TONE_WORDS[tone(judged)]


def follows(finding: FindingWords, judged: Judged) -> bool:
    """Whether it follows from another finding, which says what to change."""
    own = finding.finding
    return finding.is_main and bool(own.because) and own.diagnosis != judged.judgement.verdict


def order(finding: FindingWords, judged: Judged) -> tuple[bool, int]:
    """Return the place of a finding on a page: the verdict first, then the most urgent."""
    return finding.finding.diagnosis != judged.judgement.verdict, -URGENCY[finding.finding.severity]


def checks(judgement: Judgement) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """Return what was checked and found right, with its figure; and by what is missing, what could not be."""
    found = {finding.diagnosis for finding in judgement.findings}
    passed, missing = dict[str, str](), dict[str, tuple[str, ...]]()
    for name, figure in judgement.checks.items():
        row, needs = BY_ID[name], BY_ID[name].when.needs
        if row.alert and figure is None:
            missing[needs] = (*missing.get(needs, ()), title(name))
        elif row.alert and figure is not None and not figure.holds and name not in found:
            passed[title(row.id)] = _passed_words(figure, is_event=row.when.kind == "event")
    return passed, missing


def _passed_words(figure: Figure, *, is_event: bool) -> str:
    if figure.limit == 0 and figure.side == "above":
        return "none" if is_event else "no"
    return f"{value_words(figure)} ({limit_words(figure)})" if figure.limit is not None else value_words(figure)


def guide(finding: Finding) -> str:
    """Return what SGLang's guide says of a finding."""
    if finding.guide.startswith("not in SGLang's guide"):
        return _ended(capitalised(finding.guide))
    return f"Guide: {finding.guide if finding.guide.endswith(')') else _ended(finding.guide)}"


def seen(words: FindingWords) -> str:
    """Return what was seen: the sentence with the limit of the figure that decided, and the figures beside it."""
    return " ".join(_ended(line) for line in (_said(words), *map(figure_line, _beside(words))) if line)


def _says_figure(words: FindingWords) -> bool:
    """Whether the sentence has the figure that decided, or that is yes or no: then one line says both."""
    if not words.finding.evidence or not words.sentence:
        return False
    figure = words.finding.evidence[0]
    is_fact = figure.limit == 0 and figure.value == 1 and figure.unit == "count"
    return is_fact or (bool(value_words(figure)) and value_words(figure).split("/")[0] in words.sentence)


def _said(words: FindingWords) -> str:
    if not _says_figure(words):
        return words.sentence
    figure = words.finding.evidence[0]
    limit = limit_words(figure) if figure.limit else ""  # none is no limit to name
    return f"{words.sentence.rstrip('.')}{f' ({limit})' if limit else ''}."


def _beside(words: FindingWords) -> tuple[Figure, ...]:
    return words.finding.evidence[1:] if _says_figure(words) else words.finding.evidence


def verdict_finding(judged: Judged) -> Finding | None:
    """Return the finding that is the verdict."""
    found = (each for each in judged.judgement.findings if each.diagnosis == judged.judgement.verdict)
    return next(found, None)


def grade(judged: Judged) -> str:
    """Return confidence and times of the verdict, such as `confidence: high; from 03:12:00 to 03:37:05`."""
    own, times = verdict_finding(judged), Times(judged.begin, judged.end)
    if own is None:
        return ""
    return "; ".join(filter(None, (f"confidence: {own.confidence}", times.period(own.since, own.until))))


def standing(judged: Judged, since: float | None, now: float) -> str:
    """Return for how long the verdict of a running server has stood, and how sure it is: `For 46 min, since 11:17:03 UTC. Confidence: high.`"""
    own, times = verdict_finding(judged), Times(judged.begin, judged.end)
    lasted = ""
    if since is not None:
        seconds = max(now - since, 0.0)
        begin = f"since {times.at(since, whole=seconds > HALF_A_DAY)} UTC"
        lasted = f"For {duration(seconds)}, {begin}." if seconds >= 2 else f"{capitalised(begin)}."
    return " ".join(filter(None, (lasted, f"Confidence: {own.confidence}." if own is not None else "")))


def mostly(judged: Judged) -> str:
    """Return what took most of the serving time, where that is not the verdict."""
    if judged.mostly is None or judged.mostly[0] == judged.judgement.verdict:
        return ""
    name, share = judged.mostly
    headline = next((each.headline for each in judged.judgement.findings if each.diagnosis == name), "")
    words = headline or _MOSTLY.get(name, name.replace("_", " "))
    return f"Most of the serving time ({amount(share, 'share')}): {_ended(words)}"


def about(judged: Judged) -> str:
    """Return which logs these are, and from when to when."""
    times, seconds = Times(judged.begin, judged.end), (judged.end or 0.0) - (judged.begin or 0.0)
    when = "no date in the log"
    if times.is_dated and judged.begin is not None and judged.end is not None:
        when = f"{times.at(judged.begin, whole=True)} to {times.at(judged.end, whole=True)} as printed"
    served = f"{duration(seconds)}, serving {duration(judged.serving_seconds)}"
    return f"{few(judged.sources)}: {when}, {served}; profile {judged.profile}"


def few(names: Sequence[str]) -> str:
    """Return the first names."""
    return ", ".join(names[:3]) + (" and more" if len(names) > 3 else "")


def notes(judged: Judged) -> tuple[str, ...]:
    """Return all notes of a log, each once."""
    return tuple(dict.fromkeys(filter(None, (*judged.notes, judged.marked_note, *judged.judgement.notes))))


def alert_words(judged: Judged) -> Iterator[tuple[str, str, str]]:
    """Give severity, name and times of each notification that would have been sent."""
    times = Times(judged.begin, judged.end)
    for alert in judged.alerts:
        until = "still firing when the log ends" if alert.until is None else f"until {times.at(alert.until)}"
        yield alert.severity, alert.alert, f"would have been notified at {times.at(alert.at)} ({until})"


def none_fires(judged: Judged) -> str:
    """Return that no alert of a running server fires, and why not yet, where one might be expected."""
    expected = any(each.alert and each.severity != "info" for each in judged.judgement.findings)
    return f"No alert is firing{': what was found has not lasted long enough' if expected else ''}."


def no_alert(judged: Judged) -> str:
    """Return why no notification would have been sent, where one might be expected."""
    if judged.begin is None:
        return "The log has no times, so it is not known which notifications would have been sent."
    expected = any(each.alert and each.severity != "info" for each in judged.judgement.findings)
    why = ": what was found did not last long enough for an alert" if expected else ""
    return f"No notification would have been sent{why}."


def shares(judged: Judged, profile: Profile) -> list[tuple[str, float]]:
    """Return what the serving time was spent with, the largest share of each signal first."""
    healthy = profile.healthy["queue"].replace("2000", "2,000")
    words = STATE_WORDS | {
        "below_range": f"the queue shorter than its range, {healthy}",
        "above_range": f"the queue longer than healthy, {healthy}",
    }
    return [
        (words[state], share)
        for signal in SHOWN_SIGNALS
        for state, share in sorted(judged.shares.get(signal, {}).items(), key=lambda item: -item[1])
        if state != NOT_SHOWN and round(100 * share) > 0
    ]


def counted(judged: Judged) -> dict[str, str]:
    """Return what was counted, by name; what is beside text of clients is said with it."""
    counts, marked = judged.counts, judged.marked
    found = {words: f"{counts[name]:,.0f}" for name, words in COUNTS.items() if name in counts}
    for name in ("rejected_requests", "server_errors"):
        if not counts.get(name):
            found.pop(COUNTS[name], None)
    events, requests = counts.get("retraction_events", 0), counts.get("retracted_requests", 0)
    found["retractions"] = f"{events:,.0f} ({requests:,.0f} requests)"
    if beside := marked.get("retraction_events"):
        found["beside text of clients"] = f"{beside:,.0f} of them"
    failures = [
        f"{name.partition('.')[2].replace('_', ' ')} {value:,.0f}"
        for name, value in counts.items()
        if name.startswith("out_of_memory.") and value
    ]
    return {**found, "out of memory": ", ".join(failures) or "never"}


def last_words(judged: Judged) -> str:
    """Return the figures of the last line."""
    graph = {1.0: "replayed", 0.0: "not replayed"}
    return ", ".join(
        f"{name.replace('_', ' ')} {graph.get(value, value) if name == 'cuda_graph' else typed_value(round(value, 3))}"
        for name, value in judged.last.items()
        if value is not None
    )


def stretch_words(stretch: Stretch) -> str:
    """Return a stretch of the run: its name and words."""
    return f"{stretch.what}: {stretch.words}" if stretch.words else stretch.what


def memory_words(start: Start) -> str:
    """Return the memory of a start by use."""
    parts = [
        f"{value:.2f} GB {words}"
        for key, words in MEMORY.items()
        if isinstance(value := start.memory.get(key), int | float)
    ]
    return ("host memory: " if start.memory.get("device") == "cpu" else "memory: ") + ", ".join(parts) if parts else ""


def start_name(start: Start, times: Times) -> str:
    """Return when a start was."""
    if start.time is not None:
        return times.at(start.time, whole=True)
    return "at a time that is not printed" if start.arguments else "before the log begins"


def start_figures(start: Start) -> dict[str, str]:
    """Return the figures of a start by name."""
    found = {name: FIGURES[name] for name in START_FIGURES if name in start.figures}
    return {figure.words: amount(start.figures[name], figure.unit) for name, figure in found.items()}


def changed_words(changed: Mapping[str, tuple[object, object]]) -> list[str]:
    """Return arguments that differ: `--x 1 → 2`."""
    return [
        f"--{arg.replace('_', '-')} {argument_words(old)} → {argument_words(new)}"
        for arg, (old, new) in changed.items()
    ]


def argument_words(value: object) -> str:
    """Return an argument's value on one line, cut where it is very long."""
    words = "not set" if value is None else clean(str(value)[:200])
    return words if len(words) <= 80 else f"{words[:79]}…"


# The terminal

_INDENT = "   "
# Ink and paper are both set, of the part of the palette that no theme replaces: a tone is readable on white and on black.
_CODES = {
    "bold": "1",
    "calm": "1",
    "bad": "1;38;5;231;48;5;124",  # white on red
    "warn": "1;38;5;16;48;5;214",  # black on amber
    "info": "1;38;5;231;48;5;24",  # white on blue
    "good": "1;38;5;231;48;5;22",  # white on green
}
_CHANGES = {"better": "good", "worse": "bad"}
_END = "\x1b[0m"
_CODE = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class Style:
    """How text is shown: with colours or without, and broken at `width` characters (None: not at all)."""

    colour: bool = False
    width: int | None = None

    def paint(self, kind: str, text: str) -> str:
        """Colour a piece of text; without a kind, or without text, nothing is added."""
        return f"\x1b[{_CODES[kind]}m{text}{_END}" if self.colour and kind and text else text

    def fit(self, text: str) -> str:
        """Break a line that is too long between words; what follows stands further in."""
        indent = text[: len(text) - len(text.lstrip(" "))]
        return self.fill(re.findall(r" *[^ ]+", text[len(indent) :]), indent)

    def fill(self, words: Iterable[str], indent: str, end: str = "") -> str:
        """Join words, each with the blanks before it, to lines that fit; `end` is put where a line is broken."""
        width = max(self.width, 40) - len(end) if self.width is not None else None
        lines, line, painted = list[str](), indent, ""
        for number, word in enumerate(words):
            if number and width is not None and len(_CODE.sub("", line + word)) > width:
                lines.append(line + (_END if painted else "") + end)
                line = f"{indent}  {painted}{word.lstrip(' ')}"
            else:
                line += word
            for code in _CODE.findall(word):
                painted = "" if code == _END else code
        return "\n".join([*lines, line])


def text(judged: Judged, profile: Profile, against: Comparison | None = None, style: Style | None = None) -> str:
    """Return the report as text: the verdict first, then why, what to change, and the course of the run."""
    style = style or Style()
    times = Times(judged.begin, judged.end)
    parts: list[list[str]] = [_head(judged, style)]
    parts.append([] if against is None else _against(against, style))
    parts += [_finding(finding, style) for finding in findings_words(judged)]
    parts.append([*_command(judged, style)])
    alerts = [f"{_INDENT}{style.paint(TONES[severity], name)} {words}" for severity, name, words in alert_words(judged)]
    parts.append(_section("Alerts", alerts, style) or [no_alert(judged)])
    course = [
        f"{_INDENT}{times.at(each.begin, whole=True)}  {duration(each.end - each.begin):>7}  {stretch_words(each)}"
        for each in judged.course
    ]
    parts.append(_section("The course of the run", course, style))
    parts.append(_section("From start to start" if len(judged.starts) > 1 else "The start", _starts(judged), style))
    bars = [
        f"{_INDENT}{100 * share:3.0f} %  {'█' * max(round(20 * share), 1):<20}  {words}"
        for words, share in shares(judged, profile)
    ]
    parts.append(_section("Share of the serving time with", bars, style))
    last = last_words(judged)
    figures = [_INDENT + ", ".join(f"{name} {value}" for name, value in counted(judged).items())]
    parts.append(_section("Counted", [*figures, *([f"{_INDENT}At the end: {last}"] if last else [])], style))
    fitted = ("\n".join(line if line.endswith("\0") else style.fit(line) for line in part) for part in parts if part)
    return "\n\n".join(fitted).replace("\0", "") + "\n"


def _head(judged: Judged, style: Style) -> list[str]:
    graded = grade(judged)
    lines = [style.paint(tone(judged), judged.judgement.sentence) + (f" ({graded})" if graded else "")]
    lines += [about(judged), mostly(judged), *(f"Note: {note}" for note in notes(judged))]
    return [line for line in lines if line]


def _against(against: Comparison, style: Style) -> list[str]:
    lines = [_INDENT + each for each in changed_words(against.changed)]
    for row in against.rows:
        words = f"{amount(row.before, row.figure.unit)} → {amount(row.after, row.figure.unit)}"
        change = style.paint(_CHANGES.get(row.change, ""), row.change if row.change in _CHANGES else "")
        lines.append(f"{_INDENT}{row.figure.words:<34} {words:<22} {change}".rstrip())
    return [style.paint("bold", f"Against {few(against.sources)}: {against.words}"), *lines]


def _finding(words: FindingWords, style: Style) -> list[str]:
    finding = words.finding
    severity = style.paint(words.tone, finding.severity)
    title = f"{words.number}. {style.paint('bold', finding.headline)} [{severity}, confidence {finding.confidence}]"
    lines = [_said(words), words.said, *map(figure_line, _beside(words))]
    for change in words.changes:
        if change.again:
            lines.append(style.paint("bold", f"{change.line.rstrip('.')}, as for finding {change.again}"))
        else:
            lines.append(style.paint("bold", change.line))
            lines += [f"{label} {reason}".lstrip() for label, reason in change.reasons.items()]
    lines += [*words.after, guide(finding) if finding.guide else "", words.period]
    return [title, *(_INDENT + line for line in lines if line)]


def _command(judged: Judged, style: Style) -> Iterator[str]:
    if judged.command:
        title = f"The command line with {'this change' if len(judged.command_changes) == 1 else 'these changes'}"
        yield style.paint("bold", ", ".join((title, *judged.command_changes)) + ":")
        # A value in quotes stays whole, and broken lines can be pasted into a shell.
        words = [f" {piece}" if number else piece for number, piece in enumerate(pieces(judged.command))]
        yield style.fill(words, _INDENT, end=" \\") + "\0"
    yield from (_INDENT + note for note in judged.command_notes)


def _starts(judged: Judged) -> Iterator[str]:
    times = Times(judged.begin, judged.end)
    for number, start in enumerate(judged.starts, 1):
        name = start_name(start, times)
        figures = ", ".join(f"{words} {value}" for words, value in start_figures(start).items())
        release = f" (SGLang {start.release})" if start.release else ""
        end = f"; {start.end}" if start.end else ""
        yield f"{_INDENT}{number}. {name}{release}: {figures or 'nothing was served'}{end}"
        memory = memory_words(start)
        if memory and not any(memory in stretch.words for stretch in judged.course):
            yield f"{_INDENT}{_INDENT}{memory}"
        yield from (f"{_INDENT}{_INDENT}{each}" for each in changed_words(start.changed)[:8])


def _section(title: str, lines: Iterable[str], style: Style) -> list[str]:
    """Return lines below a title, nothing without any."""
    rows = list(lines)
    more = [f"{_INDENT}and {len(rows) - _MOST_ROWS} more"] if len(rows) > _MOST_ROWS else []
    return [style.paint("bold", title), *rows[:_MOST_ROWS], *more] if rows else []
