"""The report as text for a terminal. Pure: a document in, lines out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from sglang_tuning_exporter.diagnosis.json_findings import Document
from sglang_tuning_exporter.diagnosis.wording import (
    TONES,
    ChangeText,
    CommandText,
    FindingText,
    VerdictText,
    duration,
    figure,
    state_shares,
)
from sglang_tuning_exporter.report import wording as say
from sglang_tuning_exporter.report.analysis import Analysis
from sglang_tuning_exporter.report.comparison import changed

_BAR = 20
_INDENT = "   "
# Ink and paper are both set, of the part of the palette that no theme replaces: a tone is readable on a white and on a black terminal.
# Other text has the terminal's own colours.
_CODES = {
    "bold": "1",
    "calm": "1",
    "bad": "1;38;5;231;48;5;124",  # white on red
    "warn": "1;38;5;16;48;5;214",  # black on amber
    "info": "1;38;5;231;48;5;24",  # white on blue
    "good": "1;38;5;231;48;5;22",  # white on green
}
_CHANGE_TONES = {"better": "good", "worse": "bad", "different": "bold"}
_END = "\x1b[0m"
_CODE = re.compile(r"\x1b\[[0-9;]*m")
_NARROWEST = 40  # columns
_PHASES_SHOWN = 40


@dataclass(frozen=True, slots=True)
class Style:
    """How text is shown: with colours or without, and broken at `width` characters (None: not at all)."""

    colour: bool = False
    width: int | None = None

    def paint(self, kind: str | None, text: str) -> str:
        """Colour a piece of text; without a kind, or without text, nothing is added."""
        return f"\x1b[{_CODES[kind]}m{text}{_END}" if self.colour and kind is not None and text else text

    def fit(self, text: str) -> str:
        """Break lines that are too long between words; what follows the first line stands further in."""
        return text if self.width is None else "\n".join(self._broken(line) for line in text.split("\n"))

    def _broken(self, line: str) -> str:
        indent = line[: len(line) - len(line.lstrip(" "))]
        first, *rest = re.split(r"( +)", line[len(indent) :])
        return self.fill([("", first), *zip(rest[::2], rest[1::2], strict=True)], indent)

    def fill(self, words: Iterable[tuple[str, str]], indent: str, end: str = "") -> str:
        """Join words, each with the blanks before it, to lines that fit; `end` is put where a line is broken."""
        width = max(self.width or 0, _NARROWEST) - len(end) if self.width is not None else None
        lines, line, painted = [], indent, ""
        begun = False
        for blanks, word in words:
            if begun and width is not None and _columns(line + blanks + word) > width:
                lines.append(line + (_END if painted else "") + end)
                line = f"{indent}  {painted}{word}"
            else:
                line += blanks + word
            begun = True
            for code in _CODE.findall(word):
                painted = "" if code == _END else code
        return "\n".join([*lines, line])


def _columns(text: str) -> int:
    return len(_CODE.sub("", text))


PLAIN = Style()


def render(document: Document, analysis: Analysis, style: Style = PLAIN) -> str:
    """Write the document as text: the verdict first, then why, what to change, and the course of the run."""
    text = say.text_of(document, analysis)
    findings = [_finding(number, finding, style) for number, finding in enumerate(text.findings, 1)]
    course = [_alerts, _phases, _earlier, _starts, _shares, _figures]
    parts = [
        *map(style.fit, (_head(document, text, style), _comparison(document, style), *findings)),
        _command(text.command, style) if text.command is not None else "",
        *(style.fit(write(document, style)) for write in course),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(document: Document, text: VerdictText, style: Style) -> str:
    graded = [f"confidence: {text.confidence}" if text.confidence else "", say.verdict_time(document)]
    grade = f" ({'; '.join(filter(None, graded))})" if any(graded) else ""
    lines = [f"{style.paint(text.tone, text.sentence)}{grade}", say.span_words(document)]
    lines += filter(None, (text.remark, say.judged_words(document), say.in_part(document)))
    lines += [f"Note: {note}" for note in document["notes"]]
    return "\n".join(lines)


def _finding(number: int, finding: FindingText, style: Style) -> str:
    grade = f", confidence {finding.confidence}" if finding.confidence else ""
    severity = style.paint(TONES[finding.row.severity], finding.row.severity)
    lines = [f"{number}. {style.paint('bold', finding.headline)} [{severity}{grade}]"]
    lines += [_INDENT + each for each in finding.figures]
    for change in finding.changes:
        lines += _change(change, style)
    after = filter(None, (f"Guide: {finding.row.guide}.", finding.period))
    lines += [_INDENT + each for each in after]
    return "\n".join(lines)


def _change(change: ChangeText, style: Style) -> list[str]:
    typed = " ".join(filter(None, (change.verb, change.typed, change.words)))
    if change.as_in:
        return [_INDENT + style.paint("bold", f"{typed.removesuffix('.')}, as for finding {change.as_in}")]
    lines = [f"{label} {words}" for label, words in change.reasons]
    first = _INDENT + style.paint("bold", f"{typed}, {change.now}" if change.now else typed)
    return [first, *(_INDENT + each for each in (change.gain, *lines) if each)]


def _command(command: CommandText, style: Style) -> str:
    changes = ", ".join(map(changed, command.changes))
    words = [(" " if number else "", piece) for number, (piece, _) in enumerate(command.pieces)]
    title = style.fit(style.paint("bold", f"{command.title}, {changes}:"))
    # A value in quotes stays whole, and broken lines can be pasted into a shell.
    return "\n".join(
        [title, style.fill(words, _INDENT, end=" \\"), *(style.fit(_INDENT + note) for note in command.notes)]
    )


def _section(title: str, lines: list[str], style: Style, of: list[Document] | None = None) -> str:
    """Return lines below a title, nothing without any; `of`: all that they might show."""
    more = len(of or ()) - _PHASES_SHOWN
    further = [f"   and {more} more"] if more > 0 else []
    return "\n".join([style.paint("bold", title), *lines, *further]) if lines else ""


def _alerts(document: Document, style: Style) -> str:
    alerts = document["alerts"]
    after = say.after_the_end(document)
    if not alerts:
        fired = "No alert would have fired." if document["span"]["seconds"] else ""
        return " ".join(filter(None, (fired, after or say.no_alert(document))))
    lines = []
    for alert in alerts:
        name = style.paint(TONES[alert["severity"]], alert["alert"])
        lines.append(f"   {name} {say.moment(alert)}  for {say.lasted(alert)}")
    return _section("Alerts that would have fired", [*lines, *([_INDENT + after] if after else [])], style)


def _phases(document: Document, style: Style) -> str:
    phases, lines = document["phases"], []
    starts = {start["run"]: start for start in document["starts"]}
    for phase in phases[:_PHASES_SHOWN]:
        words = say.PHASES[phase["phase"]]
        line = f"   {say.moment(phase)}  {words:<9} {duration(phase['seconds']):>8}"
        if phase["detail"]:
            line += f"  {phase['detail']}"
        memory = starts.get(phase["run"], {}).get("memory")
        if phase["phase"] == "start_up" and memory:
            line += f"  {say.memory_words(memory)}"
        lines.append(line)
    return _section("The course of the run", lines, style, phases)


def _earlier(document: Document, style: Style) -> str:
    lines = [_INDENT + each["words"] for each in document["earlier"][:_PHASES_SHOWN]]
    return _section("Other starts, as each was judged", lines, style, document["earlier"])


def _starts(document: Document, style: Style) -> str:
    starts, lines = document["starts"], []
    for start in starts[:_PHASES_SHOWN] if len(starts) > 1 else ():
        name = f"start {start['run']}" if start["started_in_log"] else "before the first start"
        figures = ", ".join(f"{value} {what.lower()}" for what, value in say.start_figures(start))
        figures = f"{figures}: {say.label(start['verdict'])}" if figures else "nothing was served"
        lines.append(f"   {say.moment(start)}  {name}: {figures}; {say.ENDINGS[start['ending']]}")
        if start["against_last"] is not None:
            change = start["against_last"]
            lines += [f"      {changed(each)}" for each in change["changed_args"][:8]]
            lines.append(f"      {style.paint(_CHANGE_TONES.get(change['overall'], 'bold'), change['words'])}")
    return _section("From start to start", lines, style, starts)


def _comparison(document: Document, style: Style) -> str:
    comparison = document["comparison"]
    if comparison is None:
        return ""
    lines = [_INDENT + comparison["words"]]
    lines += [_INDENT + changed(each) for each in comparison["changed_args"]]
    for row in comparison["figures"]:
        if not row["before"] and not row["after"]:
            continue
        words = f"{figure(row['before'], row['unit'])} → {figure(row['after'], row['unit'])}"
        change = "" if row["change"] in {"same", "different"} else row["change"]
        lines.append(
            f"   {row['name']:<37} {words:<24} {style.paint(_CHANGE_TONES.get(row['change']), change)}".rstrip()
        )
    return _section(f"Against {say.few(comparison['against'])}: {say.CHANGES[comparison['overall']]}", lines, style)


def _shares(document: Document, style: Style) -> str:
    lines = []
    for words, share in state_shares(document["shares"]):
        bar = "█" * max(round(_BAR * share), 1)
        lines.append(f"   {100 * share:3.0f} %  {bar:<{_BAR}}  {words}")
    return _section("Share of the serving time with", lines, style)


def _figures(document: Document, style: Style) -> str:
    counted = ", ".join(f"{name.lower()} {value}" for name, value in say.counted(document))
    graph = {True: "replayed", False: "not replayed"}
    last = ", ".join(
        f"{name.replace('_', ' ')} {graph[value] if isinstance(value, bool) else value}"
        for name, value in document["last"].items()
        if value is not None
    )
    lines = [counted, *([f"At the end: {last}"] if last else [])]
    return _section("Counted", [_INDENT + line for line in lines], style)
