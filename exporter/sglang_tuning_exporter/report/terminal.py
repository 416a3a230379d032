"""The report as text for a terminal. Pure: a document in, lines out."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_tuning_exporter.diagnosis.advice import SWITCHED, shown
from sglang_tuning_exporter.diagnosis.conditions.share import STATE_WORDS
from sglang_tuning_exporter.diagnosis.table import BY_ID
from sglang_tuning_exporter.report import wording as say

if TYPE_CHECKING:
    from sglang_tuning_exporter.diagnosis.json_findings import Document

_BAR = 20
_INDENT = "   "
_CODES = {"bold": "1", "soft": "2", "critical": "1;31", "warning": "1;33", "info": "1;36", "good": "1;32", "none": "1"}
_CHANGE_COLOURS = {"better": "good", "worse": "critical", "same": "soft", "different": "bold"}
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


def render(document: Document, style: Style = PLAIN) -> str:
    """Write the document as text: the verdict first, then why, what to change, and the course of the run."""
    parts = [_head(document, style), _comparison(document, style)]
    parts += [_finding(number, item, document, style) for number, item in enumerate(document["findings"], 1)]
    parts += [
        _command(document, style),
        _alerts(document, style),
        _phases(document, style),
        _earlier(document, style),
        _starts(document, style),
        _shares(document, style),
        _figures(document, style),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(document: Document, style: Style) -> str:
    verdict = document["verdict"]
    tone = BY_ID[verdict].severity if verdict in BY_ID else "good" if verdict == "healthy" else "none"
    sure = say.confidence(document)
    graded = [f"confidence: {sure}" if sure else "", say.verdict_time(document)]
    grade = f" ({'; '.join(filter(None, graded))})" if any(graded) else ""
    lines = [f"{style.paint(tone, say.sentence(document))}{grade}", say.span_words(document)]
    lines += [line for line in (say.judged_words(document), say.in_part(document)) if line]
    lines += [f"Note: {note}" for note in document["notes"]]
    return "\n".join(lines)


def _finding(number: int, finding: dict[str, Any], document: Document, style: Style) -> str:
    severity = style.paint(finding["severity"], finding["severity"])
    grade = f", confidence {finding['confidence']}" if say.is_measured(finding) else ""
    lines = [f"{number}. {style.paint('bold', say.summary(document, finding))} [{severity}{grade}]"]
    lines += [
        f"   {item['name']}: {say.figure(item['value'], item['unit'])} (threshold {say.figure(item['threshold'], item['unit'])})"
        for item in (finding["evidence"] if say.is_measured(finding) else ())
    ]
    for advice in finding["advice"]:
        if (first := say.first_with(advice, document)) < number:
            lines.append(_INDENT + style.paint("bold", f"change: {_typed(advice)}, as for finding {first}"))
            continue
        lines.append(_INDENT + style.paint("bold", _turn(advice)))
        lines.append(style.indented(f"why: {advice['why']}"))
        if advice["cost"]:
            lines.append(style.indented(f"it costs: {advice['cost'][:1].lower()}{advice['cost'][1:]}"))
        lines.append(style.indented(f"will not help if {advice['will_not_help_if']}"))
    lines.append(style.paint("soft", style.indented(f"guide: {finding['guide']}")))
    if finding["first_seen"] is not None:
        of_start = f", start {finding['run']}" if finding["run"] else ""
        lines.append(style.paint("soft", f"   seen: {finding['first_seen']} to {finding['last_seen']}{of_start}"))
    return "\n".join(lines)


def _turn(advice: dict[str, Any]) -> str:
    if advice["flag"] is None:
        return f"change: {_typed(advice)}"
    now = f" (now {shown(advice['current'])})" if advice["current"] not in (None, *SWITCHED) else ""
    gain = f"; {advice['gain']}" if advice["gain"] else ""
    return f"change: {_typed(advice)}{now}{gain}"


def _typed(advice: dict[str, Any]) -> str:
    """Return what to type, with the words for its value where it has none to type."""
    is_whole = advice["flag"] is None or advice["typed"] != advice["flag"] or advice["suggested"] in SWITCHED
    typed = advice["suggested"] if advice["flag"] is None else advice["typed"]
    return f"{typed}" if is_whole else f"{typed} {advice['suggested']}"


TOGETHER = "these changes go together: each answers another finding, and this release accepts them all"


def _command(document: Document, style: Style) -> str:
    command = document["command"]
    if command is None:
        return ""
    changes = ", ".join(f"{each['flag']} {each['current']} → {each['suggested']}" for each in command["changes"])
    secrets = (
        f"\n   (secrets are never read: add {', '.join(command['secrets'])} where set)" if command["secrets"] else ""
    )
    together = f"\n   ({TOGETHER})" if len(command["changes"]) > 1 else ""
    return f"{style.paint('bold', f'The command line with {changes}:')}\n   {command['text']}{together}{secrets}"


def _alerts(document: Document, style: Style) -> str:
    alerts = document["alerts"]
    after = say.after_the_end(document)
    if not alerts:
        fired = "No alert would have fired." if document["span"]["seconds"] else ""
        return " ".join(filter(None, (fired, after or say.no_alert(document))))
    lines = [style.paint("bold", "Alerts that would have fired")]
    for alert in alerts:
        when = f"{say.moment(alert)}  for {say.duration(alert['seconds'])}{', until the log ends' if alert['ongoing'] else ''}"
        lines.append(f"   {style.paint(alert['severity'], alert['alert'])} {when}")
    return "\n".join([*lines, *([style.indented(after)] if after else [])])


def _phases(document: Document, style: Style) -> str:
    phases = document["phases"]
    if not phases:
        return ""
    lines = [style.paint("bold", "The course of the run")]
    starts = {start["run"]: start for start in document["starts"]}
    for phase in phases[:_PHASES_SHOWN]:
        words = say.PHASES[phase["phase"]]
        line = f"   {say.moment(phase)}  {words:<9} {say.duration(phase['seconds']):>8}"
        if phase["detail"]:
            line += f"  {phase['detail']}"
        memory = starts.get(phase["run"], {}).get("memory")
        if phase["phase"] == "start_up" and memory:
            line += f"  {say.memory_words(memory)}"
        lines.append(line)
    return "\n".join([*lines, *_more(phases)])


def _more(items: list[Any]) -> list[str]:
    return [f"   and {len(items) - _PHASES_SHOWN} more"] if len(items) > _PHASES_SHOWN else []


def _earlier(document: Document, style: Style) -> str:
    earlier = document["earlier"]
    if not earlier:
        return ""
    shown_ = [style.indented(each["words"]) for each in earlier[:_PHASES_SHOWN]]
    return "\n".join([style.paint("bold", "Other starts, as each was judged"), *shown_, *_more(earlier)])


def _starts(document: Document, style: Style) -> str:
    starts = document["starts"]
    if len(starts) < 2:
        return ""
    lines = [style.paint("bold", "From start to start")]
    for start in starts[:_PHASES_SHOWN]:
        name = f"start {start['run']}" if start["started_in_log"] else "before the first start"
        lines.append(f"   {say.moment(start)}  {name}: {_start_figures(start)}; {say.ENDINGS[start['ending']]}")
        if start["against_last"] is not None:
            change = start["against_last"]
            lines += [f"      {each['flag']} {each['before']} → {each['after']}" for each in change["changed_args"][:8]]
            colour = _CHANGE_COLOURS.get(change["overall"], "bold")
            lines.append(style.indented(style.paint(colour, change["words"]), "      "))
    return "\n".join([*lines, *_more(starts)])


def _start_figures(start: dict[str, Any]) -> str:
    figures = start["figures"]
    if not figures or not figures["serving_seconds"]:
        return "nothing was served"
    words = [f"serving {say.duration(figures['serving_seconds'])}"]
    if figures["generated_tokens_per_second"] is not None:
        words.append(f"{figures['generated_tokens_per_second']:.0f} tokens/s")
    words.append(f"{figures['retractions_per_minute']:.1f} retractions/min")
    words.append(start["verdict"].replace("_", " "))
    return ", ".join(words)


def _comparison(document: Document, style: Style) -> str:
    comparison = document["comparison"]
    if comparison is None:
        return ""
    against = ", ".join(comparison["against"][:3]) + (" and more" if len(comparison["against"]) > 3 else "")
    lines = [
        style.paint("bold", f"Against {against}: {say.CHANGES[comparison['overall']]}"),
        style.indented(comparison["words"]),
    ]
    lines += [f"   {each['flag']}: {each['before']} → {each['after']}" for each in comparison["changed_args"]]
    for row in comparison["figures"]:
        if not row["before"] and not row["after"]:
            continue
        words = f"{say.figure(row['before'], row['unit'])} → {say.figure(row['after'], row['unit'])}"
        change = "" if row["change"] in {"same", "different"} else row["change"]
        lines.append(f"   {row['name']:<37} {words:<24} {style.paint(_CHANGE_COLOURS[row['change']], change)}".rstrip())
    return "\n".join(lines)


def _shares(document: Document, style: Style) -> str:
    lines = []
    for signal, states in document["shares"].items():
        by_share = sorted(((share, state) for state, share in states.items() if share > 0), reverse=True)
        if signal == "activity":
            continue
        for share, state in by_share:
            bar = "█" * max(round(_BAR * share), 1)
            lines.append(f"   {100 * share:3.0f} %  {style.paint('info', f'{bar:<{_BAR}}')}  {STATE_WORDS[state]}")
    return "\n".join([style.paint("bold", "Share of the serving time with"), *lines]) if lines else ""


def _figures(document: Document, style: Style) -> str:
    counts, last = document["counts"], document["last"]
    failures = {phase: count for phase, count in counts["out_of_memory"].items() if count}
    batches = (
        f"decode lines {counts['decode_batches']}{_stand_for(document)}, prefill batches {counts['prefill_batches']}"
    )
    lines = [
        style.paint("bold", "Counted"),
        f"   lines {counts['lines']}, {batches}, starts {counts['server_starts']}, unrecognised {counts['unrecognised']}",
        f"   retractions {counts['retraction_events']} ({counts['retracted_requests']} requests), out of memory "
        + (", ".join(f"{phase} {count}" for phase, count in failures.items()) or "never"),
    ]
    figures = [f"{name.replace('_', ' ')} {_word(value)}" for name, value in last.items() if value is not None]
    if figures:
        lines.append("   at the end: " + ", ".join(figures))
    return "\n".join(lines)


def _stand_for(document: Document) -> str:
    """Return for how many decode batches a decode line is printed, where the arguments show it."""
    interval = document["server"]["args"].get("decode_log_interval")
    return f" (one for {interval} batches)" if isinstance(interval, int) and interval > 1 else ""


def _word(value: object) -> str:
    return {True: "replayed", False: "not replayed"}[value] if isinstance(value, bool) else f"{value}"
