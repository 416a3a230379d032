"""What SGLang exposes beside the guide's figures: time per stage, lengths, HTTP status, speculative decoding."""

from __future__ import annotations

from sglang_tuning_exporter.mixin import panels as p
from sglang_tuning_exporter.mixin import queries as q
from sglang_tuning_exporter.mixin.board import Chapter, PanelRow
from sglang_tuning_exporter.mixin.boards.client_latency import SECONDS

LENGTHS = {
    "prompt": ("sglang:prompt_tokens_histogram", "light-blue", p.NEUTRAL),
    "answer": ("sglang:generation_tokens_histogram", "light-purple", "purple"),
}
STAGES = ("prefill_forward", "chunked_prefill", "prefill_waiting", "request_process")
NOT_HERE = "No requests, or not exposed by this release"


def requests() -> Chapter:
    """Return the closed row about requests."""
    return Chapter(
        "Requests: stages, lengths, HTTP status", (PanelRow(8, (_stages(), _lengths(), _status())),), closed=True
    )


def speculation() -> Chapter:
    """Return the closed row about speculative decoding."""
    length, share = (f"avg({q.native(f'sglang:spec_accept_{name}')}) > 0" for name in ("length", "rate"))
    panel = p.timeseries(
        "Speculative decoding",
        p.Query(length, "accepted tokens per step", p.painted(p.NEUTRAL)),
        p.Query(
            share,
            "accepted share of drafts",
            p.painted("purple", axisPlacement="right") | {"unit": "percentunit", "max": 1},
        ),
        metric="sglang:spec_accept_length",
        no_value="No speculative decoding",
        description="Tokens that one step adds to a request, and the share of the draft tokens that were accepted. The guide has"
        " no figure for it; near 1 token a step, the draft model costs more than it gives.",
        fill=0,
    )
    return Chapter("Speculative decoding", (PanelRow(8, (panel,)),), closed=True)


def _stages() -> p.Json:
    metric = "sglang:per_stage_req_latency_seconds"
    whole, count = (q.rate(q.native(f"{metric}_{end}")) for end in ("sum", "count"))
    return p.timeseries(
        "Time per stage of a request",
        p.Query(q.ratio(whole, count, " by (stage)"), "{{stage}}"),
        unit=SECONDS,
        metric=metric,
        no_value=NOT_HERE,
        names={stage: p.painted(colour) for stage, colour in zip(STAGES, p.COLOURS, strict=False)},
        description="Mean time in each stage before the first token, by SGLang's names. A long wait in prefill_waiting is"
        " the queue; the guide's flags for prefill move chunked_prefill and prefill_forward.",
        fill=0,
    )


def _lengths() -> p.Json:
    return p.timeseries(
        "Prompt and answer lengths",
        *(
            p.Query(q.quantile(share, metric), f"{name} {words}", p.painted(colour, fillOpacity=0))
            for name, (metric, *colours) in LENGTHS.items()
            for share, words, colour in zip(("0.5", "0.99"), ("p50", "p99"), colours, strict=True)
        ),
        metric="sglang:prompt_tokens_histogram",
        no_value="Not exposed; until 0.5.9 only with --collect-tokens-histogram",
        description="Tokens of the prompts and of the answers of the requests that ended. Most of the guide's flags depend on"
        " them: long prompts fill the prefill batches, long answers the KV cache.",
    )


def _status() -> p.Json:
    answers = q.rate(q.own("sglang:http_responses_total", 'endpoint!~"/metrics|/health.*|/v1/loads"'))
    return p.timeseries(
        "HTTP responses per second",
        p.Query(f"sum by (status_code) ({answers})", "{{status_code}}"),
        metric="sglang:http_responses_total",
        no_value=NOT_HERE,
        names={"200": p.painted(p.NEUTRAL), "503": p.painted(p.WATCH)},
        description="Responses by HTTP status, without scrapes and health checks. 503: turned away, for which the guide slows"
        " the clients down; a rejected stream is a 200.",
        fill=0,
    )
