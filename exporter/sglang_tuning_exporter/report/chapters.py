"""The course of a run as plain JSON: its phases, its starts, the alerts that would have fired, and a comparison. Pure."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any

from sglang_tuning_exporter.diagnosis.json_findings import Document, iso, number
from sglang_tuning_exporter.report.earlier import CRASH, troubles

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sglang_tuning_exporter.report.alarms import FiredAlert
    from sglang_tuning_exporter.report.analysis import Analysis
    from sglang_tuning_exporter.report.comparison import ArgChange, Comparison, RunFigures
    from sglang_tuning_exporter.report.phases import Phase, Run
    from sglang_tuning_exporter.report.runs import JudgedRun
    from sglang_tuning_exporter.state.facts import ServerFacts


def phases_document(analysis: Analysis) -> list[Document]:
    """Write the phases in time order; `at` is seconds since the log began, known without dates too."""
    return [_phase(phase, analysis.begin) for phase in analysis.course.phases]


def _phase(phase: Phase, begin: float | None) -> Document:
    return {
        "phase": phase.kind,
        **_stretch(phase.start, phase.end, begin),
        "run": phase.run,
        "serving_seconds": number(round(phase.served, 3)),
        "detail": phase.detail or None,
    }


def alerts_document(spans: Iterable[FiredAlert], begin: float | None) -> list[Document]:
    """Write when which alert would have fired, and for how long."""
    return [
        {
            "alert": span.alert,
            "diagnosis": span.diagnosis,
            "severity": span.severity,
            **_stretch(span.start, span.end, begin),
            "ongoing": span.ongoing,
        }
        for span in spans
    ]


def _stretch(start: float, end: float, begin: float | None) -> Document:
    return {
        "start": iso(start),
        "end": iso(end),
        "at": number(round(start - (begin or 0.0), 3)),
        "seconds": number(round(end - start, 3)),
    }


def starts_document(analysis: Analysis) -> list[Document]:
    """Write what each start was like; the first may have begun before the log."""
    return [_start(run, analysis.begin) for run in analysis.runs]


def judged_document(judged: JudgedRun, analysis: Analysis) -> Document:
    """Write which start the verdict, findings, shares and command line are about."""
    run = judged.run
    begin = analysis.begin or 0.0
    return {
        "run": None if run is None else run.number,
        **_stretch(
            begin if run is None else run.begin, begin + analysis.seconds if run is None else run.end, analysis.begin
        ),
        "serving_seconds": number(round(judged.served, 3)),
    }


def earlier_document(judged: JudgedRun, analysis: Analysis) -> list[Document]:
    """Write what limited the other starts, and whether it is over."""
    return [
        {
            "diagnosis": None if trouble.what == CRASH else trouble.what,
            "run": trouble.first,
            "last_run": trouble.last,
            "over": trouble.is_over,
            "fixed_by": [_changed(change) for change in trouble.fixed_by],
            "words": trouble.words,
        }
        for trouble in troubles(analysis.runs, judged)
    ]


def _start(run: Run, begin: float | None) -> Document:
    return {
        "run": run.number,
        "start": iso(run.start),
        "end": iso(run.end),
        "at": number(round(run.begin - (begin or 0.0), 3)),
        "seconds": number(round(max(run.end - run.begin, 0.0), 3)),
        "started_in_log": run.start is not None,
        "ready_after_seconds": None
        if run.ready is None or run.start is None
        else number(round(run.ready - run.start, 3)),
        "ending": run.ending,
        "memory": run.memory,
        "verdict": run.verdict,
        "figures": None if run.figures is None else figures_document(run.figures),
        "changed_args": [_changed(change) for change in run.changed],
        "against_last": None if run.against_last is None else change_document(run.against_last),
    }


def memory_document(facts: ServerFacts) -> Document | None:
    """Write the GPU memory of a start by use (on a CPU: host memory), in GB, of one rank, as far as its lines show it.

    A figure below 0 comes from rounding and is written as 0.
    """
    left = min((facts.available_gb or facts.left_gb).values(), default=None)
    used = {
        "before_weights_gb": facts.memory_before_weights_gb,
        "weights_gb": facts.rank_weights_gb,
        "kv_pool_gb": facts.pools_gb,
        "graphs_gb": facts.graph_gb,
        "left_gb": left,
    }
    if all(figure is None for name, figure in used.items() if name != "graphs_gb"):
        return None
    written = {name: None if figure is None else number(max(figure, 0.0)) for name, figure in used.items()}
    return {"device": "cpu" if facts.is_cpu else "gpu", **written}


def figures_document(figures: RunFigures) -> Document:
    """Write a run's figures."""
    known: dict[str, float | None] = {
        "serving_seconds": figures.serving_seconds,
        "generated_tokens_per_second": figures.throughput,
        "prompt_tokens_per_second": figures.prompt_tokens,
        "mean_running_requests": figures.running,
        "mean_queued_requests": figures.queued,
        "mean_token_usage": figures.usage,
        "share_waiting": figures.waiting,
        "share_queue_above_range": figures.above_range,
        "retractions_per_minute": figures.retractions,
        "cuda_graph_coverage": figures.coverage,
        "out_of_memory": figures.out_of_memory,
        "rejections_per_minute": figures.rejections,
        "mean_prompt_tokens": figures.prompt_length,
        "mean_generated_tokens": figures.answer_length,
        "share_cached": figures.cached,
    }
    return {name: _rounded(value) for name, value in known.items()}


def _rounded(value: float | None) -> float | None:
    return None if value is None or not isfinite(value) else number(round(value, 4))


def _changed(change: ArgChange) -> dict[str, Any]:
    return {"arg": change.arg, "flag": change.flag, "before": change.before, "after": change.after}


def change_document(change: Comparison) -> Document:
    """Write how a server changed from one run to another."""
    return {
        "overall": change.overall,
        "cause": change.cause,
        "words": change.words,
        "changed_args": [_changed(each) for each in change.changed],
        "figures": [
            {
                "name": row.name,
                "before": _rounded(row.before),
                "after": _rounded(row.after),
                "unit": row.unit,
                "change": row.direction,
            }
            for row in change.rows
        ],
    }
