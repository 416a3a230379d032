"""The board of one server's scheduler: admission, GPU memory, queues, prefill, speculative decoding."""

from __future__ import annotations

from sglang_tuning_exporter.mixin import board as layout
from sglang_tuning_exporter.mixin import panels as p
from sglang_tuning_exporter.mixin import queries as q
from sglang_tuning_exporter.mixin.board import Chapter, PanelRow
from sglang_tuning_exporter.mixin.boards import details
from sglang_tuning_exporter.mixin.boards.common import (
    NO_WORK,
    SCHEDULING,
    TITLES,
    links,
    marks,
    variables,
)
from sglang_tuning_exporter.mixin.boards.words import STATE_WORDS
from sglang_tuning_exporter.state.profiles import GIGABYTE
from sglang_tuning_exporter.state.signals import STATES, Signal

AMBERS = (p.WATCH, "#8f3f08", "#f0a36b", "#d98032", "#6b3410", "#b98a5e", "#e8c39e", "#ffd9b3")
QUEUES = {
    "grammar": "grammar",
    "bootstrap": "bootstrap (prefill side)",
    "inflight": "in flight (prefill side)",
    "prealloc": "pre-allocation (decode side)",
    "transfer": "transfer (decode side)",
    "host_receive": "host receive (decode side)",
    "retracted": "retracted (decode side)",
}


def board() -> p.Json:
    """Build the board of KV cache and scheduling."""
    return layout.board(
        SCHEDULING,
        TITLES[SCHEDULING],
        description="Why requests wait: admission, GPU memory, other queues, prefill, speculative decoding.",
        chapters=(
            Chapter("", (_shares(),)),
            Chapter("Admission", (_admission(),)),
            Chapter("Prefill", (_prefill(),)),
            details.speculation(),
        ),
        variables=variables(),
        annotations=marks(),
        links=links(SCHEDULING),
    )


# --- what holds requests back ----------------------------------------------------------------------------------------


def _share(signal: Signal, title: str, says: str) -> p.Json:
    seconds = q.ranked("sglang_tuning_state_seconds_total", f'signal="{signal}"', 'state!~"idle|unknown"')
    spent = f"increase({seconds}[$__rate_interval])"
    seen = f"sum by (state) (increase({seconds}[$__range])) > 0"  # no legend for states that never occurred
    share = f"sum by (state) ({spent}) / on () group_left () (sum({spent}) > 0)"
    shades = iter(AMBERS)  # shades of the colour for waiting requests, to distinguish them
    looks: dict[str, p.Style] = {
        state: p.named(words, next(shades) if colour == p.WATCH else colour)
        for state in STATES[signal]
        if state not in ("idle", "unknown")
        for words, colour in (STATE_WORDS[state],)
    }
    return p.timeseries(
        title,
        p.Query(f"{share} and on (state) ({seen})", "{{state}}"),
        stacked=True,
        ceiling=1,
        unit="percentunit",
        no_value=NO_WORK,
        names=looks,
        metric="sglang_tuning_state_seconds_total",
        description=f"{says} Only what was seen in the time shown.",
    )


def _shares() -> PanelRow:
    share = _share(
        "admission",
        "Serving time by what admission waited for",
        "Why waiting requests did not run: the KV cache was full (the guide wants that for throughput), the running"
        " limit was reached, prompts filled every batch, another queue holds them, or none of these (held"
        " back: admission is too cautious).",
    )
    return PanelRow(8, (share, _memory()), (14, 10))


# --- KV cache --------------------------------------------------------------------------------------------------------


def _memory() -> p.Json:
    def gigabytes(metric: str, of: str = "max") -> str:
        return f"{of}({q.last_known(q.own(f'sglang_tuning_{metric}_bytes'))}) / {GIGABYTE}"

    return p.bars(
        "Where the GPU memory went",
        p.Query(gigabytes("weights"), "weights", p.painted("purple")),
        p.Query(gigabytes("kv_pool"), "KV cache", p.painted(p.NEUTRAL)),
        p.Query(gigabytes("cuda_graph_memory"), "CUDA graphs", p.painted("light-blue")),
        p.Query(gigabytes("available_gpu_memory", "min"), "left for the work", p.painted(p.QUIET)),
        unit="suffix: GB",
        decimals=1,
        no_value="Not reported: no GPU, or no start seen",
        metric="sglang_tuning_kv_pool_bytes",
        description="Memory of one GPU after start-up. The guide: memory = weights + KV cache + CUDA graphs +"
        " activations; the first two are --mem-fraction-static, the last must fit into what is left.",
    )


# --- admission and retractions ---------------------------------------------------------------------------------------


def _admission() -> PanelRow:
    conservativeness = q.own("sglang_tuning_server_arg", 'arg="schedule_conservativeness"')
    start = f"clamp_max(0.7 * max({conservativeness}), 1)"  # SGLang's init_new_token_ratio
    estimate = p.timeseries(
        "New token ratio",
        p.Query(start, "starts at", p.bound_line(p.QUIET)),
        p.Query(q.per_rank(q.ranked("sglang_tuning_new_token_ratio")), "ratio{{rank}}", p.measured()),
        unit="percentunit",
        ceiling=1,
        metric="sglang_tuning_new_token_ratio",
        description="Share of its max_new_tokens for which each running request is budgeted: what the guide's"
        " conservativeness scales. It jumps after a retraction and decays slowly; high long after the"
        " last one, it holds requests back.",
    )
    waiting = q.ranked("sglang_tuning_waiting_requests")
    ever = f"(sum by (queue) (max_over_time({waiting}[$__range])) > 0)"  # no legend for queues that were always empty
    others = p.timeseries(
        "Other queues",
        p.Query(f"sum by (queue) ({waiting}) and on (queue) {ever}", "{{queue}}"),
        names={queue: p.named(said, colour) for (queue, said), colour in zip(QUEUES.items(), p.COLOURS, strict=True)},
        fill=0,
        metric="sglang_tuning_waiting_requests",
        no_value="None waited elsewhere, or not reported",
        description="Requests that wait although the KV cache has room: their grammar is being compiled, or, on a disaggregated"
        " server, the other side or the transfer holds them. Only queues that held some in the time shown. The guide's flags of this server"
        " do not help them.",
    )
    return PanelRow(7, (estimate, others))


# --- prefill ---------------------------------------------------------------------------------------------------------


def _prefill() -> PanelRow:
    backlog = p.timeseries(
        "Prompt tokens waiting",
        p.Query(q.per_rank(q.ranked("sglang_tuning_pending_tokens")), "waiting{{rank}}", p.measured()),
        metric="sglang_tuning_pending_tokens",
        description="Tokens of the prompts in the queue. High with few decode batches, the server is bound by prompts:"
        " the guide raises --chunked-prefill-size, memory allowing.",
    )
    batches = q.ranked("sglang_tuning_decode_batches_total")
    decode = p.timeseries(
        "Decode batches per second",
        p.Query(
            f"sum by (graph) ({q.rate(batches)})",
            "{{graph}}",
        ),
        names={"replayed": p.named("graph replayed", p.NEUTRAL), "eager": p.named("without graph", "purple")},
        metric="sglang_tuning_decode_batches_total",
        description="Decode batches with and without a captured CUDA graph; where the server does not count them, one in"
        " 40. Few of them beside a long backlog mean that prompts take the time; the guide cares for both.",
    )
    return PanelRow(7, (backlog, decode))
