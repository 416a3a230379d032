"""The figures and words of an answer beside its findings, and the report for a terminal. Pure.

Reports, page and API share these texts; those of a single figure, change or finding are in `findings`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from sglang_tuning_exporter.config import profiles
from sglang_tuning_exporter.core.diagnoses import ALL, BY_ID, EXPORTER, Diagnosis
from sglang_tuning_exporter.core.diagnoses.steps import setting
from sglang_tuning_exporter.core.events import COUNTED_KINDS, OUT_OF_MEMORY_PHASES
from sglang_tuning_exporter.core.facts import Facts
from sglang_tuning_exporter.core.findings import (
    STATE_WORDS,
    TONES,
    Change,
    Figure,
    Finding,
    Judgement,
    Series,
    Start,
    amount,
    capitalised,
    duration,
    ended,
    typed_value,
)
from sglang_tuning_exporter.core.server import Server
from sglang_tuning_exporter.core.sums import SIGNALS, Totals
from sglang_tuning_exporter.core.view import View
from sglang_tuning_exporter.sglang.clean import clean
from sglang_tuning_exporter.sglang.flags import command_line

Comparison: TypeAlias = Mapping[str, Any]
# The counts of a report, and the sums that they are. SGLang prints a line for one decode batch in 40, so batches are
# named apart.
EVENTS = (
    "retraction_events",
    "retracted_requests",
    "rejected_requests",
    "server_errors",
    "server_starts",
    *(f"out_of_memory.{phase}" for phase in OUT_OF_MEMORY_PHASES),
    *(kind for kind, words in COUNTED_KINDS.items() if words),
)
COUNTED = {name: name for name in EVENTS} | {"decode_batches": "decode_lines", "prefill_batches": "prefill_lines"}


def with_figures(judgement: Judgement, server: Server, totals: Totals, **more: Any) -> Judgement:
    """Return the judgement with the figures that report and page show beside it; `totals`: sums of the judged time."""
    line, changes, notes = command(judgement, server.facts)
    marked = {name: number for name in EVENTS if (number := totals[f"marked.{name}"])}
    events = totals["marked.retraction_events"]
    note = f"{totals['retraction_events']:.0f} retractions, {events:.0f} of them beside text that clients can write."
    return replace(
        judgement,
        notes=(*([note] if events else []), *judgement.notes),
        marked=marked,
        shares=_shares(totals),
        last=_last_figures(server),
        series=_series(server),
        running_limit=server.running_limit,
        command=line,
        command_changes=changes,
        command_notes=notes,
        facts=_printed(server.facts),
        **more,
    )


def _shares(totals: Totals) -> dict[str, dict[str, float]]:
    """Return the share of each state in the serving time in which its signal was known."""
    return {
        signal: {
            state: seconds / known
            for state, seconds in totals.under(signal).items()
            if state not in {"idle", "unknown"}
        }
        for signal in SIGNALS
        if (known := totals.known(signal)) > 0
    }


def command(
    judgement: Judgement, facts: Facts
) -> tuple[tuple[str, ...], tuple[tuple[str, str, str], ...], tuple[str, ...]]:
    """Return the command line changed as the limits of the server ask, these changes, and remarks.

    All three are empty where the present command line is not known or nothing on it changes.
    """
    values = _advised_values(judgement)
    changed_line = None if facts.cut else command_line(facts.release, facts.arguments, values)
    if changed_line is None or not values:
        return (), (), ()
    line, changed, secrets = changed_line
    note = f"Secrets are never read: add {', '.join(secrets)} again where the server has them now."
    return line, changed, (note,) if secrets else ()


def _advised_values(judgement: Judgement) -> dict[str, object]:
    """Return the value of each argument that the limits of the server ask for; None where its flag is removed."""
    values: dict[str, object] = {}
    changes = [change for finding in judgement.findings if finding.is_limit for change in finding.changes]
    for change in changes:
        if change.arg and (change.to is not None or change.removes):
            values.setdefault(change.arg, None if change.to is None else setting(change.to))
    return values


def figures_of(view: View) -> dict[str, float]:
    """Return the figures of a start, those that are known."""
    figures = {
        "serving_seconds": view.served,
        "running_requests": view.sum("running"),
        "queued_requests": view.sum("queued"),
        "token_usage": view.mean("usage"),
        "generated_tokens_per_second": view.generated_per_second,
        "share_cached": view.cached_share,
        "prompt_tokens_per_second": view.totals["computed_tokens"] / view.served if view.served else None,
        "retractions": view.totals["retraction_events"] if view.served else None,
    }
    return {name: value for name, value in figures.items() if value is not None}


def _last_figures(server: Server) -> Mapping[str, float | None]:
    """Return the present figures of all schedulers together, None where unknown."""

    def known(figure: str) -> list[float]:
        values = (getattr(scheduler.shown, figure) for scheduler in server.schedulers.values())
        return [float(value) for value in values if value is not None]

    return {
        "running_requests": sum(known("running")) if known("running") else None,
        "queued_requests": sum(known("queued")) if known("queued") else None,
        "token_usage": max(known("usage"), default=None),
        "cuda_graph": min(known("graph"), default=None),
    }


def _series(server: Server) -> dict[str, Series]:
    """Return the figures over time: means of ten seconds for all schedulers together, and numbers of retractions."""

    def of_all(totals: Totals, figure: str) -> float | None:
        mean = totals.mean(figure)
        return mean and mean * max(len(totals.under("serves")), 1)

    buckets = list(server.buckets)
    return {
        **{name: tuple((at, of_all(totals, name)) for at, totals in buckets) for name in ("running", "queued")},
        "usage": tuple((at, totals.mean("usage")) for at, totals in buckets),
        "retractions": tuple((at, totals["retraction_events"]) for at, totals in buckets),
    }


def memory(facts: Facts) -> dict[str, float | str]:
    """Return the memory of one rank at the start in GB, and the device where it is no GPU."""
    left = [memory_gb["left"] for memory_gb in facts.memory.values() if memory_gb.get("left")]
    figures = {
        "before_weights_gb": facts.capacity_gb,
        "weights_gb": facts.gigabytes("weights"),
        "draft_weights_gb": facts.gigabytes("draft_weights"),
        "kv_pool_gb": facts.gigabytes("pool"),
        "graphs_gb": facts.gigabytes("graph"),
        "left_gb": min(facts.left.values() or left, default=None),
    }
    known: dict[str, float | str] = {name: value for name, value in figures.items() if value is not None}
    return known | {"device": "cpu"} if known and facts.is_cpu else known


def _printed(facts: Facts) -> dict[str, float | str | None]:
    """Return sizes and limits as the start printed them."""
    return {
        "kv_pool_tokens": facts.pool(),
        "max_running_requests": facts.least_limit,
        "largest_captured_batch": facts.largest_captured,
        "release": facts.shown_release,
        "available_gpu_memory_gb": facts.reserve_gb,
    }


# `report --against`: the figures of two logs side by side, without a guess why they differ

_SAME = 0.1  # share of the larger figure: figures that differ by less differ by chance
_SAME_SHARE = 0.05  # difference: shares and ratios that differ by less differ by chance
_DRAWN = frozenset({"random_seed", "nccl_port", "port", "host"})  # differ at every start, and change no figure
# By the name in `figures_of`: words, unit, and the better side, if any.
FIGURES: Mapping[str, tuple[str, str, str]] = {
    "generated_tokens_per_second": ("generated tokens/s", "count", "higher"),
    "prompt_tokens_per_second": ("prompt tokens/s", "count", "higher"),
    "running_requests": ("mean running requests", "count", ""),
    "queued_requests": ("mean queued requests", "count", "lower"),
    "token_usage": ("mean token usage", "ratio", ""),
    "share_cached": ("prompt tokens found in the cache", "share", "higher"),
}


def compare(before: Judgement, after: Judgement) -> Comparison:
    """Return how one log differs from the log before, by the last loaded start of both, as a report has it.

    The `change` of a figure is better, worse, different (neither is better) or same. `overall` is better, worse,
    mixed, same, or not_comparable where a log has no loaded start.
    """
    old, new = _last_loaded_start(before), _last_loaded_start(after)
    figures, changed = list[dict[str, Any]](), dict[str, tuple[object, object]]()
    if old is not None and new is not None:
        figures, changed = _compared_figures(old.figures, new.figures), _differing(old.arguments, new.arguments)
    names = {
        change: [figure["name"] for figure in figures if figure["change"] == change] for change in ("better", "worse")
    }
    clear = [change for change in names if names[change]]
    return {
        "against": before.sources,
        "overall": "not_comparable" if not figures else "mixed" if len(clear) > 1 else next(iter(clear), "same"),
        "words": "; ".join(f"{change}: {', '.join(names[change])}" for change in clear) or "no clear difference",
        "changed_args": changed_args(changed),
        "figures": figures,
    }


def _last_loaded_start(judged: Judgement) -> Start | None:
    """Return the last start of a log that served requests; None where there is none."""
    return next((start for start in reversed(judged.starts) if start.figures), None)


def _differing(old: Mapping[str, object], new: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    """Return the arguments of both starts whose values differ: before, after."""
    names = sorted((old.keys() & new.keys()) - _DRAWN)
    return {arg: (old[arg], new[arg]) for arg in names if old[arg] != new[arg] and (old[arg] or new[arg])}


def _compared_figures(old: Mapping[str, float], new: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the figures that both starts have, without those that are 0 in both."""
    names = [name for name in FIGURES if name in old and name in new and (old[name] or new[name])]
    return [_compared(old[name], new[name], *FIGURES[name]) for name in names]


def _compared(before: float, after: float, words: str, unit: str, better: str) -> dict[str, Any]:
    """Return a figure of both logs and how it changed."""
    change = _change(unit, better, before, after)
    return {"name": words, "before": before, "after": after, "unit": unit, "change": change}


def _change(unit: str, better: str, before: float, after: float) -> str:
    """Return whether a figure is better, worse, different (neither is better) or the same."""
    difference = after - before
    least = _SAME_SHARE if unit in {"share", "ratio"} else _SAME * max(abs(before), abs(after))
    if abs(difference) <= least:
        return "same"
    if not better:
        return "different"
    return "better" if (difference > 0) == (better == "higher") else "worse"


# Words

TONE_WORDS = {"bad": "Critical", "warn": "Warning", "info": "Hint", "good": "No limit", "calm": "No verdict"}
_LIVE_WORDS = {"healthy": "Healthy", "idle": "Idle", "starting": "Starting", "stopped": "Stopped"}  # by verdict
GOOD = frozenset({"no_limit_in_log", "healthy"})
_SHORT = {diagnosis.id: diagnosis.short for diagnosis in (*ALL, *EXPORTER)}
_SHOWN_SIGNALS = ("queue", "admission", "cuda_graph")
_NOT_SHOWN = "no_queue"  # the states of the queue show the same
_COUNTS = {
    "lines": "lines",
    "decode_batches": "decode lines",
    "prefill_batches": "prefill lines",
    "server_starts": "starts",
    "unrecognised": "unrecognised",
    "rejected_requests": "answered with 503",
    "server_errors": "answered with 500",
    **{kind: words for kind, words in COUNTED_KINDS.items() if words},
}
MEMORY = {
    "before_weights_gb": "free before weights",
    "weights_gb": "weights",
    "kv_pool_gb": "KV cache",
    "graphs_gb": "graphs",
    "left_gb": "left",
}
_MOSTLY = {"no_limit_in_log": "nothing limited the server", "not_enough_data": "too little load for a verdict"}
_MOST_LINES = 40
_HALF_A_DAY = 43200.0


# Findings


def _title(diagnosis: str) -> str:
    """Return a diagnosis in a few words."""
    return _SHORT[diagnosis]


def changes(finding: Finding, judged: Judgement) -> list[tuple[Change, Finding | None]]:
    """Return the changes of a finding, each with the earlier finding that has the same change; None where none has."""

    def key(change: Change) -> tuple[str, str, str]:
        return change.flag, typed_value(change.to), change.words

    firsts = [
        next(other for other in judged.findings if key(own) in map(key, other.changes)) for own in finding.changes
    ]
    return [(own, None if first is finding else first) for own, first in zip(finding.changes, firsts, strict=True)]


def remarks(finding: Finding, judged: Judgement) -> list[str]:
    """Return the causes of a finding, and its notes."""
    headlines = {other.diagnosis: other.headline.rstrip(".") for other in judged.findings}
    causes = "; ".join(headlines[name] for name in finding.because if name in headlines)
    return [*([f"Caused by: {causes}."] if causes else []), *map(ended, filter(None, finding.notes))]


def times(finding: Finding, judged: Judgement) -> str:
    """Return from when to when a finding held; empty where that is not known."""
    period = judged.period(finding.since, finding.until)
    length = (finding.until or 0.0) - (finding.since or 0.0)
    part = f", {duration(finding.seconds)} of that time" if 0 < finding.seconds < 0.9 * length else ""
    return f"Seen {period}{part}." if period else ""


def quotation(finding: Finding) -> str:
    """Return the line of SGLang's that explains a finding, quoted; empty where the headline quotes all of it."""
    line = finding.explained_by
    if line is None or line.word == "cut" or line.short.rstrip(".") in finding.headline:
        return ""
    marked = " This line stands beside text that clients can write." if line.marked else ""
    at = f" ({line.where})" if line.where and line.where not in finding.sentence else ""
    return f"In its log: “{line.text}”{at}.{marked}"


# The parts of a report


def tone(judged: Judgement) -> str:
    """Return the tone of the verdict: a class of the page's style sheet and a colour of the terminal."""
    return "good" if judged.severity == "none" and judged.verdict in GOOD else TONES[judged.severity]


def word(judged: Judgement) -> str:
    """Return the verdict of a running server in a word, for readers who cannot see its colour."""
    return _LIVE_WORDS.get(judged.verdict) or TONE_WORDS[tone(judged)]


def checks(judged: Judgement) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """Return the checks that passed, with their figures, and those that could not run, by the missing source."""
    failed = {finding.diagnosis for finding in judged.findings}
    passed, missing = dict[str, str](), dict[str, tuple[str, ...]]()
    for name, figure in judged.checks.items():
        diagnosis, needs = BY_ID[name], BY_ID[name].when.needs
        if diagnosis.alert and figure is None:
            missing[needs] = (*missing.get(needs, ()), _title(name))
        elif diagnosis.alert and figure is not None and not figure.holds and name not in failed:
            passed[_title(name)] = _passed_words(figure, is_event=diagnosis.when.kind == "event")
    return passed, missing


def mark(judged: Judgement, about: frozenset[str], between: str = "") -> tuple[str, str]:
    """Return whether a shown figure is good, bad or not judged (empty), and for how much of the time it was bad.

    The diagnoses that judge the figure are those that measure one of the sums in `about`, or have one of the thresholds
    in it as their limit. The figure is not judged where one of them holds and is no finding: it is muted, or another
    diagnosis explains it better. Nor is it judged while the state `between` is the most frequent one: no diagnosis
    calls that state good or bad.
    """
    names = {diagnosis.id for diagnosis in ALL if not about.isdisjoint(_basis(diagnosis))}
    bad = next((finding for finding in judged.findings if finding.diagnosis in names and not finding.over), None)
    if bad is not None:
        shares_of_time = [figure for figure in bad.evidence[:1] if figure.unit == "share"]  # the figure that decided
        return "bad", f"{shares_of_time[0].value_words} of the time" if shares_of_time else ""
    measured = [figure for name in names if (figure := judged.checks.get(name)) is not None]
    is_good = bool(measured) and not any(figure.holds for figure in measured) and not _is_mostly(judged, between)
    return "good" if is_good else "", ""


def _is_mostly(judged: Judgement, state: str) -> bool:
    """Return whether a state, such as `queue/empty`, is the most frequent one of its signal."""
    signal, _, name = state.partition("/")
    states = judged.shares.get(signal, {})
    return bool(states) and max(states, key=states.__getitem__) == name


def _basis(diagnosis: Diagnosis) -> set[str]:
    """Return the sums and the threshold that a diagnosis rests on."""
    when = diagnosis.when
    return {*when.counts, f"admission/{diagnosis.wait}", *([when.limit] if isinstance(when.limit, str) else [])}


def _passed_words(figure: Figure, *, is_event: bool) -> str:
    """Return the figure of a check that passed beside its limit."""
    if figure.limit == 0 and figure.side == "above":
        return "none" if is_event else "no"
    return f"{figure.value_words} ({figure.limit_words})" if figure.limit is not None else figure.value_words


def guide(finding: Finding) -> str:
    """Return the advice of SGLang's guide about a finding, or that the guide has none."""
    if finding.guide.startswith("not in SGLang's guide"):
        return ended(capitalised(finding.guide))
    return f"Guide: {finding.guide if finding.guide.endswith(')') else ended(finding.guide)}"


def evidence(finding: Finding) -> list[str]:
    """Return the sentence of a finding with the limit of the figure that decided, and the figures beside it."""
    figures, sentence = finding.evidence, finding.more
    first = figures[0] if figures and sentence else None
    if first is not None:  # one line is enough where the sentence has the figure, or the figure is yes or no
        is_fact = first.limit == 0 and first.value == 1 and first.unit == "count"
        if is_fact or (first.value_words and first.value_words.split("/")[0] in sentence):
            limit = first.limit_words if first.limit else ""  # a limit of 0 is not named
            sentence, figures = f"{sentence.rstrip('.')}{f' ({limit})' if limit else ''}.", figures[1:]
    return [*filter(None, [sentence]), *(figure.line for figure in figures)]


def grade(judged: Judgement) -> str:
    """Return confidence and times of the verdict, such as `confidence: high; from 03:12:00 to 03:37:05`."""
    own = judged.own
    if own is None:
        return ""
    return "; ".join(filter(None, (f"confidence: {own.confidence}", judged.period(own.since, own.until))))


def standing(judged: Judgement, since: float | None, now: float) -> str:
    """Return how long the verdict of a running server has held, and its confidence.

    For example `For 46 min, since 11:17:03 UTC. Confidence: high.`
    """
    lasted = ""
    if since is not None:
        seconds = max(now - since, 0.0)
        begin = f"since {judged.at(since, with_date=seconds > _HALF_A_DAY)} UTC"
        lasted = f"For {duration(seconds)}, {begin}." if seconds >= 2 else f"{capitalised(begin)}."
    sure = f"Confidence: {judged.own.confidence}." if judged.own is not None else ""
    return " ".join(filter(None, (lasted, sure)))


def mostly(judged: Judgement) -> str:
    """Return the verdict of most of the serving time; empty where it is the verdict of the whole."""
    if judged.mostly is None or judged.mostly[0] == judged.verdict:
        return ""
    name, share = judged.mostly
    headline = next((finding.headline for finding in judged.findings if finding.diagnosis == name), "")
    words = headline or (BY_ID[name].summary if name in BY_ID else _MOSTLY.get(name, name.replace("_", " ")))
    return f"Most of the serving time ({amount(share, 'share')}): {ended(words)}"


def about(judged: Judgement) -> str:
    """Return the names of the logs, their times and the profile."""
    seconds, when = (judged.end or 0.0) - (judged.begin or 0.0), "no date in the log"
    if judged.is_dated and judged.begin is not None and judged.end is not None:
        when = f"{judged.at(judged.begin, with_date=True)} to {judged.at(judged.end, with_date=True)} as printed"
    served = f"{duration(seconds)}, serving {duration(judged.serving_seconds)}"
    return f"{few(judged.sources)}: {when}, {served}; profile {judged.profile}"


def few(names: Sequence[str]) -> str:
    """Return the first three names, and whether there are more."""
    return ", ".join(names[:3]) + (" and more" if len(names) > 3 else "")


def notes(judged: Judgement) -> list[str]:
    """Return all notes, each once."""
    return [*dict.fromkeys(filter(None, judged.notes))]


def alert_words(judged: Judgement) -> Iterator[tuple[str, str, str]]:
    """Give severity, name and times of every notification that would have been sent."""
    for alert in judged.alerts:
        until = "still firing when the log ends" if alert.until is None else f"until {judged.at(alert.until)}"
        yield alert.severity, alert.alert, f"would have been notified at {judged.at(alert.at)} ({until})"


def no_alert(judged: Judgement, *, live: bool = False) -> str:
    """Return a sentence for a judgement without alerts; with the reason where a finding has an alert."""
    if judged.begin is None:
        return "The log has no times, so it is not known which notifications would have been sent."
    why = ""
    if any(finding.alert and finding.severity != "info" for finding in judged.findings):
        why = f": what was found {'has not lasted long enough' if live else 'did not last long enough for an alert'}"
    return f"{'No alert is firing' if live else 'No notification would have been sent'}{why}."


def shares(judged: Judgement, profile: profiles.Profile) -> list[tuple[str, float]]:
    """Return the states of each signal in words with their share of the serving time, the largest first."""
    healthy = profile.healthy["queue"].replace("2000", "2,000")
    words = STATE_WORDS | {
        "below_range": f"the queue shorter than its range, {healthy}",
        "above_range": f"the queue longer than healthy, {healthy}",
    }
    return [
        (words[state], share)
        for signal in _SHOWN_SIGNALS
        for state, share in sorted(judged.shares.get(signal, {}).items(), key=lambda item: -item[1])
        if state != _NOT_SHOWN and round(100 * share) > 0
    ]


def counted(judged: Judgement) -> dict[str, str]:
    """Return the counts of a report by name; retractions beside text of clients are named apart."""
    counts, marked = judged.counts, judged.marked
    shown = {words: f"{counts[name]:,.0f}" for name, words in _COUNTS.items() if name in counts}
    for name in ("rejected_requests", "server_errors", *COUNTED_KINDS):
        if not counts.get(name):
            shown.pop(_COUNTS.get(name, ""), None)
    events, requests = counts.get("retraction_events", 0), counts.get("retracted_requests", 0)
    shown["retractions"] = f"{events:,.0f} ({requests:,.0f} requests)"
    if beside := marked.get("retraction_events"):
        shown["beside text of clients"] = f"{beside:,.0f} of them"
    failures = [
        f"{name.partition('.')[2].replace('_', ' ')} {value:,.0f}"
        for name, value in counts.items()
        if name.startswith("out_of_memory.") and value
    ]
    return {**shown, "out of memory": ", ".join(failures) or "never"}


def last_words(judged: Judgement) -> str:
    """Return the figures of the last line, named."""
    graph = {1.0: "replayed", 0.0: "not replayed"}
    return ", ".join(
        f"{name.replace('_', ' ')} {graph.get(value, value) if name == 'cuda_graph' else typed_value(round(value, 3))}"
        for name, value in judged.last.items()
        if value is not None
    )


def memory_words(memory: Mapping[str, float | str], graphs: str = MEMORY["graphs_gb"]) -> list[str]:
    """Return the memory of a start, a text for each use."""
    names = MEMORY | {"graphs_gb": graphs}
    parts = [
        f"{value:.2f} GB {words}" for key, words in names.items() if isinstance(value := memory.get(key), int | float)
    ]
    return [f"host memory: {parts[0]}", *parts[1:]] if parts and memory.get("device") == "cpu" else parts


def memory_line(start: Start) -> str:
    """Return the memory of a start on one line; empty where the log does not show it."""
    words = ", ".join(memory_words(start.memory))
    return words if not words or start.memory.get("device") == "cpu" else f"memory: {words}"


def start_name(start: Start, judged: Judgement) -> str:
    """Return the time of a start as its title."""
    if start.time is not None:
        return judged.at(start.time, with_date=True)
    return "at a time that is not printed" if start.arguments else "before the log begins"


def start_figures(start: Start) -> dict[str, str]:
    """Return the figures of a start by name."""
    shown = (name for name in FIGURES if name in start.figures and name != "prompt_tokens_per_second")
    return {words: amount(start.figures[name], unit) for name in shown for words, unit, _ in [FIGURES[name]]}


def changed_args(changed: Mapping[str, tuple[object, object]]) -> list[dict[str, str]]:
    """Return the arguments that differ, as a report has them."""
    return [
        {"arg": arg, "flag": f"--{arg.replace('_', '-')}", "before": argument_words(old), "after": argument_words(new)}
        for arg, (old, new) in changed.items()
    ]


def changed_words(changed: Iterable[Mapping[str, str]]) -> list[str]:
    """Return the arguments that differ, such as `--x 1 → 2`."""
    return [f"{argument['flag']} {argument['before']} → {argument['after']}" for argument in changed]


def argument_words(value: object) -> str:
    """Return an argument's value on one line, cut where it is very long."""
    words = "not set" if value is None else clean(str(value)[:200])
    return words if len(words) <= 80 else f"{words[:79]}…"


# The terminal

_INDENT = "   "
# Text and background are both set, from the part of the palette that no theme replaces: a tone is readable on white
# and on black.
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
    """The layout of text: with colours or without, and broken at `width` characters (None: not broken)."""

    colour: bool = False
    width: int | None = None

    def paint(self, kind: str, text: str) -> str:
        """Return a piece of text in the colour of its kind; unchanged without colours, kind or text."""
        return f"\x1b[{_CODES[kind]}m{text}{_END}" if self.colour and kind and text else text

    def fit(self, text: str) -> str:
        """Return a line broken between words where it is too long; its further lines are indented more."""
        indent = text[: len(text) - len(text.lstrip(" "))]
        return self.fill(re.findall(r" *[^ ]+", text[len(indent) :]), indent)

    def fill(self, words: Iterable[str], indent: str, end: str = "") -> str:
        """Return words, each with the blanks before it, joined to lines that fit; a broken line ends with `end`."""
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


def text(
    judged: Judgement, profile: profiles.Profile, against: Comparison | None = None, style: Style | None = None
) -> str:
    """Return the report as text: the verdict first, then why, what to change, and the course of the run."""
    style = style or Style()
    parts: list[list[str]] = [_head(judged, style)]
    parts.append([] if against is None else _against(against, style))
    parts += [_finding(number, finding, judged, style) for number, finding in enumerate(judged.findings, 1)]
    parts.append([*_command(judged, style)])
    alerts = [f"{_INDENT}{style.paint(TONES[severity], name)} {words}" for severity, name, words in alert_words(judged)]
    parts.append(_section("Alerts", alerts, style) or [no_alert(judged)])
    course = [
        f"{_INDENT}{judged.at(part.begin, with_date=True)}  {duration(part.end - part.begin):>7}  {part.line}"
        for part in judged.course
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


def _head(judged: Judgement, style: Style) -> list[str]:
    """Return the verdict, the logs it is about, and the notes."""
    graded = grade(judged)
    lines = [style.paint(tone(judged), judged.sentence) + (f" ({graded})" if graded else "")]
    lines += [about(judged), mostly(judged), *(f"Note: {note}" for note in notes(judged))]
    return [line for line in lines if line]


def _against(against: Comparison, style: Style) -> list[str]:
    """Return the comparison with the log before: arguments and figures that differ."""
    lines = [_INDENT + words for words in changed_words(against["changed_args"])]
    for figure in against["figures"]:
        words = " → ".join(amount(figure[when], figure["unit"]) for when in ("before", "after"))
        change = figure["change"]
        painted = style.paint(_CHANGES[change], change) if change in _CHANGES else ""
        lines.append(f"{_INDENT}{figure['name']:<34} {words:<22} {painted}".rstrip())
    return [style.paint("bold", f"Against {few(against['against'])}: {against['words']}"), *lines]


def _finding(number: int, finding: Finding, judged: Judgement, style: Style) -> list[str]:
    """Return a finding: its headline, then evidence, changes with their reasons, and times."""
    severity = style.paint(finding.tone, finding.severity)
    title = f"{number}. {style.paint('bold', finding.headline)} [{severity}, confidence {finding.confidence}]"
    first, *others = [*evidence(finding), ""] if finding.more else ["", *evidence(finding)]
    lines = [first, quotation(finding), *others]
    for change, earlier in changes(finding, judged):
        if earlier is not None:
            again = f"{change.line.rstrip('.')}, as for finding {judged.findings.index(earlier) + 1}"
            lines.append(style.paint("bold", again))
        else:
            lines.append(style.paint("bold", change.line))
            lines += [f"{label} {reason}".lstrip() for label, reason in change.reasons.items()]
    lines += [*remarks(finding, judged), guide(finding) if finding.guide else "", times(finding, judged)]
    return [title, *(_INDENT + line for line in lines if line)]


def _command(judged: Judgement, style: Style) -> Iterator[str]:
    """Give the command line with the changes, ready to paste, and its notes."""
    if judged.command:
        title = f"The command line with {'this change' if len(judged.command_changes) == 1 else 'these changes'}"
        changed = (f"{flag} {old} → {new}" for flag, old, new in judged.command_changes)
        yield style.paint("bold", ", ".join((title, *changed)) + ":")
        # A value in quotes is not broken, and broken lines can be pasted into a shell.
        words = [f" {piece}" if number else piece for number, piece in enumerate(judged.command)]
        yield style.fill(words, _INDENT, end=" \\") + "\0"
    yield from (_INDENT + note for note in judged.command_notes)


def _starts(judged: Judgement) -> Iterator[str]:
    """Give each start with its figures, its memory and its changed arguments."""
    for number, start in enumerate(judged.starts, 1):
        name = start_name(start, judged)
        figures = ", ".join(f"{words} {value}" for words, value in start_figures(start).items())
        release = f" (SGLang {start.release})" if start.release else ""
        end = f"; {start.end}" if start.end else ""
        yield f"{_INDENT}{number}. {name}{release}: {figures or 'nothing was served'}{end}"
        memory = memory_line(start)
        if memory and not any(memory in stretch.words for stretch in judged.course):
            yield f"{_INDENT}{_INDENT}{memory}"
        yield from (f"{_INDENT}{_INDENT}{words}" for words in changed_words(changed_args(start.changed))[:8])


def _section(title: str, lines: Iterable[str], style: Style) -> list[str]:
    """Return lines below a title; nothing where there are none."""
    body = list(lines)
    more = [f"{_INDENT}and {len(body) - _MOST_LINES} more"] if len(body) > _MOST_LINES else []
    return [style.paint("bold", title), *body[:_MOST_LINES], *more] if body else []
