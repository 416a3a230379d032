"""The board of one server: what limits it and since when, the guide's figures, throughput and latency."""

from __future__ import annotations

from sglang_tuning_exporter.mixin import board as layout
from sglang_tuning_exporter.mixin import panels as p
from sglang_tuning_exporter.mixin import queries as q
from sglang_tuning_exporter.mixin.board import Chapter, PanelRow
from sglang_tuning_exporter.mixin.boards import answers, client_latency, figures
from sglang_tuning_exporter.mixin.boards.common import (
    NO_EXPORTER,
    SERVER,
    TITLES,
    links,
    marks,
    variables,
)
from sglang_tuning_exporter.mixin.boards.words import LEVELS, SIGNAL_TITLES, STATE_WORDS, verdict_looks
from sglang_tuning_exporter.state.signals import STATES, Signal


def board() -> p.Json:
    """Build the board of one server."""
    return layout.board(
        SERVER,
        TITLES[SERVER],
        description="What limits this SGLang server now, and which flag to change: the figures of SGLang's tuning"
        " guide, read all the time.",
        chapters=(
            Chapter("", (answers.verdict_strip(), answers.answer(), answers.figures(), _since())),
            Chapter("The guide's figures and what is healthy", figures.panel_rows()),
            Chapter("Throughput and latency", (_throughput(), client_latency.lines())),
            Chapter("Data sources", (_health(), _starts()), closed=True),
        ),
        variables=variables(),
        annotations=marks(),
        links=links(SERVER),
    )


# --- since when ------------------------------------------------------------------------------------------------------


def _since() -> PanelRow:
    numbers = {state: index for index, state in enumerate(STATE_WORDS)}

    def number(state: str) -> str:
        """An empty queue is below the range of a profile that has one."""
        if state != "empty":
            return str(numbers[state])
        below = numbers["below_range"]
        return f"on () group_left () (0 * {q.threshold('queue', 'lower')} + {below} or vector({numbers[state]}))"

    def row(signal: Signal) -> p.Query:
        cases = (
            f"({q.ranked('sglang_tuning_state', q.is_('signal', signal), q.is_('state', state))} == 1) * {number(state)}"
            for state in STATES[signal]
        )
        return p.Query(q.per_rank(" or ".join(cases)), SIGNAL_TITLES[signal] + "{{rank}}")

    limits = p.state_timeline(
        "What limited it",
        p.Query(q.verdict(), "{{verdict}}"),
        no_value=NO_EXPORTER,
        metric="sglang_tuning_verdict",
        mappings=p.texts({level: (" ", colour) for level, (_, colour) in LEVELS.items()}),
        names=verdict_looks(),
        words_inside=False,
        description="One line for each verdict of the time shown: what the guide would change, and from when to when."
        " Red: act now; amber: requests are held back; blue: could be better; green: nothing to change.",
    )
    states = p.state_timeline(
        "What it was doing",
        *(row(signal) for signal in STATES),
        no_value=NO_EXPORTER,
        metric="sglang_tuning_state",
        mappings=p.texts({str(number): STATE_WORDS[state] for state, number in numbers.items()}),
        description="One line for each thing the guide looks at. Green is fine, amber holds requests back, red must be acted"
        " on, blue is information, grey is idle.",
    )
    return PanelRow(6, (limits, states), (10, 14))


# --- throughput ------------------------------------------------------------------------------------------------------


def _throughput() -> PanelRow:
    computed, cached = q.prompt_tokens("computed"), q.prompt_tokens("cached")
    tokens = p.timeseries(
        "Tokens per second",
        p.Query(computed, "prompt, computed", p.painted(p.NEUTRAL)),
        p.Query(cached, "prompt, from the prefix cache", p.painted("light-blue")),
        p.Query(f"sum({q.generated_tokens()})", "generated", p.painted(p.GOOD)),
        metric="sglang_tuning_generation_tokens_per_second",
        description="Tokens read and written: what every change of a flag should be judged by. The guide tunes for"
        " throughput, and this is it.",
    )
    requests = p.timeseries(
        "Requests per second",
        p.Query(f"sum({q.rate(q.native('sglang:num_requests_total'))})", "finished", p.painted(p.NEUTRAL)),
        p.Query(f"sum({q.rate(q.own('sglang_tuning_aborted_requests_total'))})", "aborted", p.painted(p.WATCH)),
        p.Query(f"sum({q.rate(q.own('sglang_tuning_rejected_requests_total'))})", "rejected", p.painted(p.BAD)),
        metric="sglang:num_requests_total",
        description="Requests that ended, were aborted by their clients, or were turned away because the queue was"
        " full. The guide slows the clients down before it comes to that.",
    )
    return PanelRow(7, (tokens, requests))


# --- data sources -------------------------------------------------------------------------------------


def _health() -> PanelRow:
    unknown, read = q.own("sglang_tuning_log_unrecognised_total"), q.own("sglang_tuning_log_lines_total")
    kinds = f"sum by (kind) ({q.rate(read)})"
    seen = f"sum by (kind) (increase({read}[$__range])) > 0"  # no legend for kinds that never occurred
    lines = p.timeseries(
        "Log lines per second",
        p.Query(f"{kinds} and on (kind) ({seen})", "{{kind}}"),
        p.Query(f"sum({q.rate(unknown)})", "not recognised", p.painted(p.BAD)),
        no_value="No log is read",
        metric="sglang_tuning_log_lines_total",
        description="Lines read, by kind; only kinds that were seen in the time shown. The guide's figures are in the decode and prefill lines; lines that look"
        " like them and are not recognised mean a newer SGLang than this exporter supports.",
    )
    age = p.stat(
        "Last log line",
        p.Query(f"time() - max({q.last_known(q.own('sglang_tuning_log_last_line_timestamp_seconds'))})", "ago"),
        unit="s",
        text="value",
        no_value="No log is read",
        decimals=0,
        metric="sglang_tuning_log_last_line_timestamp_seconds",
        description="Time since the last line. The guide reads the log as it grows: silent for minutes under load,"
        " and the file is the wrong one or the server is stuck.",
    )
    return PanelRow(6, (lines, age), (18, 6))


def _starts() -> PanelRow:
    failed = f"sum by (phase) (increase({q.own('sglang_tuning_out_of_memory_total')}[$__range]))"
    never = f'label_replace(sum({failed}) == 0, "verdict", "in this time", "", "")'
    memory = p.stat(
        "Out of GPU memory",
        p.Query(f'label_replace({failed} > 0, "verdict", "in $1", "phase", "(.*)") or on () {never}', "{{verdict}}"),
        decimals=0,
        no_value="No log is read",
        mappings=p.texts({"0": ("never", p.QUIET)}),
        metric="sglang_tuning_out_of_memory_total",
        names={
            f"in {phase}": p.painted(p.BAD) for phase in ("prefill", "decode", "graph_capture", "startup", "unknown")
        },
        description="Times the server ran out of GPU memory in the time shown. The guide answers prefill with smaller"
        " chunks, decode with fewer running requests.",
    )
    starts = p.stat(
        "Starts of the server",
        p.Query(f"sum(increase({q.own('sglang_tuning_server_starts_total')}[$__range]))", "starts"),
        decimals=0,
        text="value",
        no_value=NO_EXPORTER,
        mappings=p.texts({"0": ("none", p.QUIET)}),
        metric="sglang_tuning_server_starts_total",
        description="Starts seen in the time shown, after the first. Every change the guide advises needs one; one"
        " that nobody made is a crash.",
    )
    return PanelRow(6, (answers.server(), memory, starts), (12, 6, 6))
