"""The report as text for a terminal. Pure: a document in, lines out."""

from __future__ import annotations

import textwrap
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
_CODES = {"bold": "1", "soft": "2", "bad": "1;31", "warn": "1;33", "info": "1;36", "good": "1;32", "calm": "1"}
_CHANGE_COLOURS = {"better": "good", "worse": "bad", "same": "soft", "different": "bold"}
_PHASES_SHOWN = 40


@dataclass(frozen=True, slots=True)
class Style:
    """How text is shown: with colours or without, and broken at `width` characters (None: not at all)."""

    colour: bool = False
    width: int | None = None

    def paint(self, kind: str, text: str) -> str:
        """Colour a piece of text."""
        return f"\x1b[{_CODES[kind]}m{text}\x1b[0m" if self.colour else text

    def indented(self, text: str, indent: str = _INDENT) -> str:
        """Indent a paragraph; what follows its first line stands further in."""
        if self.width is None:
            return indent + text
        inner = indent + "  "
        return textwrap.fill(
            text,
            max(self.width, 40),
            initial_indent=indent,
            subsequent_indent=inner,
            break_long_words=False,
            break_on_hyphens=False,
        )


PLAIN = Style()


def render(document: Document, analysis: Analysis, style: Style = PLAIN) -> str:
    """Write the document as text: the verdict first, then why, what to change, and the course of the run."""
    text = say.text_of(document, analysis)
    parts = [_head(document, text, style), _comparison(document, style)]
    parts += [_finding(number, finding, style) for number, finding in enumerate(text.findings, 1)]
    parts += [
        _command(text.command, style) if text.command is not None else "",
        _alerts(document, style),
        _phases(document, style),
        _earlier(document, style),
        _starts(document, style),
        _shares(document, style),
        _figures(document, style),
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
    lines += [style.paint("soft", style.indented(each)) for each in after]
    return "\n".join(lines)


def _change(change: ChangeText, style: Style) -> list[str]:
    typed = " ".join(filter(None, (change.verb, change.typed, change.words)))
    if change.as_in:
        return [_INDENT + style.paint("bold", f"{typed.removesuffix('.')}, as for finding {change.as_in}")]
    lines = [f"{label} {words}" for label, words in change.reasons]
    first = _INDENT + style.paint("bold", f"{typed}, {change.now}" if change.now else typed)
    return [first, *(style.indented(each) for each in (change.gain, *lines) if each)]


def _command(command: CommandText, style: Style) -> str:
    changes = ", ".join(map(changed, command.changes))
    lines = [" ".join(words for words, _ in command.pieces), *command.notes]
    return _section(f"{command.title}, {changes}:", [_INDENT + line for line in lines], style)


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
    return _section("Alerts that would have fired", [*lines, *([style.indented(after)] if after else [])], style)


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
    lines = [style.indented(each["words"]) for each in document["earlier"][:_PHASES_SHOWN]]
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
            colour = _CHANGE_COLOURS.get(change["overall"], "bold")
            lines.append(style.indented(style.paint(colour, change["words"]), "      "))
    return _section("From start to start", lines, style, starts)


def _comparison(document: Document, style: Style) -> str:
    comparison = document["comparison"]
    if comparison is None:
        return ""
    lines = [style.indented(comparison["words"])]
    lines += [_INDENT + changed(each) for each in comparison["changed_args"]]
    for row in comparison["figures"]:
        if not row["before"] and not row["after"]:
            continue
        words = f"{figure(row['before'], row['unit'])} → {figure(row['after'], row['unit'])}"
        change = "" if row["change"] in {"same", "different"} else row["change"]
        lines.append(f"   {row['name']:<37} {words:<24} {style.paint(_CHANGE_COLOURS[row['change']], change)}".rstrip())
    return _section(f"Against {say.few(comparison['against'])}: {say.CHANGES[comparison['overall']]}", lines, style)


def _shares(document: Document, style: Style) -> str:
    lines = []
    for words, share in state_shares(document["shares"]):
        bar = "█" * max(round(_BAR * share), 1)
        lines.append(f"   {100 * share:3.0f} %  {style.paint('info', f'{bar:<{_BAR}}')}  {words}")
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
