"""Alert rules over SGLang's own series, for servers without the exporter: the guide's limits in plain PromQL, and the flag of each.

SGLang names its series `sglang:…`; agents that send them elsewhere write `sglang_…`. Selectors take both.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

from sglang_tuning_exporter.config import profiles
from sglang_tuning_exporter.core import rows
from sglang_tuning_exporter.mixin._rendering import POOL, filled, listed, render

if TYPE_CHECKING:
    from sglang_tuning_exporter.mixin.wishes import Wishes

FILE = "alerts/rules-without-exporter/sglang-native.rules.yml"
_SERVER = listed((*POOL, "instance"))
# Every rank of a scheduler says the same; with priorities the total has none.
_RANKS = "tp_rank, pp_rank, moe_ep_rank, priority"


class Native(NamedTuple):
    """One alert: the row whose limit and flag it has, what it asks, and its words; `{value}` is the figure."""

    alert: str
    row: str
    expr: str
    seen: str
    form: str = "humanizePercentage"
    wait: str = "5m"
    also: str = ""  # what the row's flag does not do alone


def _of(name: str, labels: str = "") -> str:
    """Write a selector of a series of SGLang in both spellings."""
    return f'{{__name__=~"sglang[:_]{name}"{labels}}}'


def _sum(of: str) -> str:
    """Write the sum over a server's schedulers; the ranks of one count once."""
    return f"sum by ({_SERVER}) (max without ({_RANKS}) ({of}))"


def _lasting(name: str, bound: str) -> str:
    """Write 1 or 0 for each scheduler."""
    return f"max without ({_RANKS}) ({_of(name)}) {bound}"


def _quantile(share: float, name: str, labels: str = "") -> str:
    """Write the time within which this share of a histogram's observations was."""
    rate = f"sum by ({_SERVER}, le) (rate({_of(f'{name}_bucket', labels)}[10m]))"
    return f"histogram_quantile({share:g}, {rate})"


def _limits() -> tuple[Native, ...]:
    """Return the alerts, most urgent first."""
    profile, usage = profiles.DEFAULT, "(full_)?token_usage"
    started = _sum(f"rate({_of('queue_time_seconds_count')}[5m])")
    retracted = _sum(f"increase({_of('num_retracted_requests_total')}[10m])")
    queued = _sum(f"avg_over_time({_of('num_queue_reqs')}[5m])")
    older = f"sum by ({_SERVER}) (rate({_of('time_to_first_token_seconds_count')}[5m]))"
    eager = _of("cuda_graph_passes_total", ', mode="decode_none"')
    decoded = _of("cuda_graph_passes_total", ', mode=~"decode_.+"')
    return (
        Native(
            "SGLangDown",
            "server_down",
            f"up == 0 and max_over_time(up[5m]) == 0\nand on (job, instance) last_over_time({_of('num_running_reqs')}[1h])",
            "no scrape of its /metrics has succeeded for 5 minutes",
            wait="2m",
        ),
        Native(
            "SGLangStalled",
            "scheduler_stuck",
            f"min_over_time({_sum(_of('num_(running|queue)_reqs'))}[5m:30s]) > 0\n"
            f"and sum by ({_SERVER}) (increase({_of('time_to_first_token_seconds_count')}[5m])) == 0\n"
            f"unless sum by ({_SERVER}) (increase({_of('inter_token_latency_seconds_count')}[5m])) > 0\n"
            f"unless sum by ({_SERVER}) (increase({_of('realtime_tokens_total')}[5m])) > 0",
            "requests run or wait, and no token has come for 5 minutes",
            wait="1m",
        ),
        Native(
            "SGLangMemoryLeftTooSmall",
            "memory_reserve_too_small",
            f"min by ({_SERVER}) ({_of('startup_available_gpu_memory_gb')}) < {profile.reserve_lower_gb:g}",
            f"{{value}} GB were free on the GPU after the start, less than {profile.reserve_lower_gb:g}",
            'printf "%.1f"',
        ),
        Native(
            "SGLangRetracting",
            "retracting_too_often",
            f"{retracted} / 10 > {profile.retractions_per_minute:g}",
            f"{{value}} requests/min are retracted, more than {profile.retractions_per_minute:g}",
            'printf "%.1f"',
        ),
        Native(
            "SGLangQueueWait",
            "queue_too_long",
            f"{queued}\n/ ({started}\n   or {older})\n> {profile.queue_wait_seconds:g}",
            f"a request that comes now waits {{value}}, more than {profile.queue_wait_seconds:g} s",
            "humanizeDuration",
        ),
        Native(
            "SGLangKVCacheUnderused",
            "admission_too_conservative",
            f"avg_over_time((\n  ({_lasting('num_queue_reqs', '> bool 0')})\n"
            f"  * ({_lasting(usage, f'< bool {profile.token_usage_target:g}')})\n)[10m:30s]) > {profile.frequent_share:g}",
            f"{{value}} of the time requests waited and token usage was below {profile.token_usage_target:g}",
        ),
        Native(
            "SGLangDecodeWithoutCudaGraph",
            "cuda_graph_not_covering",
            f"{_sum(f'rate({eager}[10m])')}\n/ {_sum(f'sum without (mode) (rate({decoded}[10m]))')}\n"
            f"> {profile.frequent_share:g}",
            "{value} of the decode batches ran without a CUDA graph",
            also="or remove --disable-cuda-graph",
        ),
        Native(
            "SGLangTimeToFirstTokenHigh",
            "latency_queue",
            f"{_quantile(1 - profile.late_bound(rows.LATE_TIMES), 'time_to_first_token_seconds')} > {profile.time_to_first_token_seconds:g}",
            f"{100 * profile.late_bound(rows.LATE_TIMES):g} % of the first tokens came after {{value}} or later, the objective is"
            f" {profile.time_to_first_token_seconds:g} s",
            "humanizeDuration",
        ),
        Native(
            "SGLangInterTokenLatencyHigh",
            "latency_batch_too_large",
            f"{_quantile(1 - profile.late_bound(rows.SLOW_BURN_TIMES), 'inter_token_latency_seconds')} > {profile.inter_token_seconds:g}",
            f"{100 * profile.late_bound(rows.SLOW_BURN_TIMES):g} % of the gaps between two tokens were {{value}} or longer, the objective is"
            f" {profile.inter_token_seconds:g} s",
            "humanizeDuration",
        ),
        Native(
            "SGLangMemoryLeftTooLarge",
            "memory_reserve_too_large",
            f"min by ({_SERVER}) ({_of('startup_available_gpu_memory_gb')}) > {profile.reserve_upper_gb:g}",
            f"{{value}} GB were free on the GPU after the start, more than {profile.reserve_upper_gb:g}",
            'printf "%.1f"',
        ),
    )


NATIVE: tuple[Native, ...] = _limits()


def texts(native: Native) -> dict[str, str]:
    """Return the texts of an alert: what has happened, what was seen, and which flag it is about."""
    row = rows.BY_ID[native.row]
    flag, words = row.remedy.flag, filled(row.remedy.words)
    advice = f"{row.remedy.direction} {flag}" if flag else words
    return {
        "summary": filled(row.summary),
        "description": f"{{{{ $labels.instance }}}}: {native.seen.replace('{value}', f'{{{{ $value | {native.form} }}}}')}.",
        "advice": f"{advice}{f', {native.also}' if native.also else ''}"
        + ("; for the value, add the exporter." if flag else "; for the cause and the flag, add the exporter."),
    }


def text(wishes: Wishes) -> str:
    """Return the rule file."""
    kept = [native for native in NATIVE if not wishes.is_off(native.alert)]
    return render(
        "native.yml.j2",
        rules=[(native, rows.BY_ID[native.row], texts(native)) for native in kept],
        labels=lambda native, row: json.dumps(wishes.labels_of(native.alert, row.severity)),
    )
