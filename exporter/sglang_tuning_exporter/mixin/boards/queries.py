"""PromQL for the panels: selectors for the chosen servers, sums by rank, latencies, retractions, tokens. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from sglang_tuning_exporter.core.ledger import Rate
from sglang_tuning_exporter.mixin.boards.looks import COLOURS, NEUTRAL, WATCH, fixed_colour, threshold_line

TARGET_LABELS = ("job", "instance")  # labels of one exporter, and so of one server
ON = ", ".join(TARGET_LABELS)
FIRST_TOKEN = ("sglang:time_to_first_token_seconds",)
INTER_TOKEN = (
    "sglang:inter_token_latency_seconds",
    "sglang:time_per_output_token_seconds",
)  # the older name: until 0.4.3
LARGEST = 5  # more lines cannot be distinguished
SUBQUERY_STEP = "1m"  # resolution of the times at which series start and end
LONGEST_LOOKBACK = "1d:5m"  # how far back a target was an exporter, in steps of five minutes
LOOKBACK = "5m"  # Prometheus' own: as long as a value lasts without a failed scrape
VERDICT = "sglang_tuning_verdict_info"


# --- selectors -------------------------------------------------------------------------------------------------------


def is_(label: str, value: str) -> str:
    """Return the matcher of a label with this value."""
    return f'{label}="{value}"'


def is_not(label: str, value: str) -> str:
    """Return the matcher of a label with another value; an empty value: any that is set."""
    return f'{label}!="{value}"'


def one_of(label: str, values: Sequence[str]) -> str:
    """Return the matcher of a label with one of these values."""
    return f'{label}=~"{"|".join(values)}"'


def own(metric: str, *matchers: str) -> str:
    """Select a series of the exporter for the chosen servers."""
    chosen = ", ".join(('job=~"$job"', 'instance=~"$instance"', *matchers))
    return f"{metric}{{{chosen}}}"


def ranked(metric: str, *matchers: str) -> str:
    """Select a series with `dp_rank` where there are DP ranks; "All" also matches one without the label."""
    return own(metric, *matchers, 'dp_rank=~"$dp_rank"')


def native(metric: str, *matchers: str) -> str:
    """Select a series of SGLang that the exporter passes through, for the chosen model."""
    return own(metric, *matchers, 'model_name=~"$model"')


def threshold(signal: str, bound: str) -> str:
    """Return the threshold in force, as last known; no sample where the profile has no such bound."""
    series = own("sglang_tuning_threshold", f'signal="{signal}"', f'bound="{bound}"')
    return f"max({_recent(series)})"


def drawn_threshold(signal: str, bound: str) -> str:
    """Return a threshold to draw: only where the server served in the last 10 minutes, and not while it is down."""
    serving = own("sglang_tuning_state", is_("signal", "activity"), is_("state", "serving"))
    return unless_down(f"({threshold(signal, bound)} and on () (max(max_over_time({serving}[10m])) > 0))", "")


def rate(selector: str, window: str = "$__rate_interval") -> str:
    """Return a counter's rate per second, by default over the interval that Grafana proposes."""
    return f"rate({selector}[{window}])"


def last_known(selector: str) -> str:
    """Select a gauge, as last known while a scrape of its exporter is missing: a tile must not go blank for that."""
    return f"({selector} or ({_recent(selector)} unless on ({ON}) sglang_tuning_build_info))"


def last_in_range(selector: str) -> str:
    """Select a gauge for a tile: as `last_known`, and where the data ended before the time shown does, its last value.

    A server that is down, or was at the end, has none: old figures would look like present ones.
    """
    ended = f"{_last(selector)} unless on () {EXPORTERS_AT_END} unless on ({ON}) {_WAS_DOWN}"
    return f"({unless_down(last_known(selector))} or ({ended}))"


def last_in_range_or_down(selector: str) -> str:
    """As `last_in_range`, of a server that is down too; only series that were still there when the data ended."""
    return f"({last_known(selector)} or {present_at_end(selector)})"


def present_at_end(selector: str) -> str:
    """Select the series that were there when the data ended, where it ended before the time shown does."""
    there = f"{_last(selector)} and {last_seen(selector)} >= on ({ON}) group_left () {LAST_SAMPLE}"
    return f"({there} unless on () {EXPORTERS_AT_END})"


def _recent(selector: str) -> str:
    return f"last_over_time({selector}[{LOOKBACK}])"


def _last(selector: str) -> str:
    return f"last_over_time({selector}[$__range])"


def last_seen(selector: str) -> str:
    """Return the time of each series' last sample in the time range."""
    return f"max_over_time(timestamp({selector})[$__range:{SUBQUERY_STEP}])"


def unless_down(expr: str, on: str = ON) -> str:
    """Drop the samples of a server that is down: old figures would look like present ones."""
    return f"({expr} unless on ({on}) {last_known(own(VERDICT, is_('verdict', 'server_down')))})"


# The targets at the end of the time shown that were exporters in it: none where a back-filled log ended before.
EXPORTERS_AT_END = (
    f"(last_over_time({own('up')}[{LOOKBACK}])"
    f" and on ({ON}) last_over_time({own('sglang_tuning_build_info')}[$__range]))"
)
# The last sample of each server.
LAST_SAMPLE = f"max by ({ON}) ({last_seen(own('sglang_tuning_build_info'))})"
_WAS_DOWN = f"({last_seen(own(VERDICT, is_('verdict', 'server_down')))} >= on ({ON}) group_left () {LAST_SAMPLE})"


# --- shapes ----------------------------------------------------------------------------------------------------------


def by_server(expr: str, of: str = "max") -> str:
    """Aggregate `expr` to one sample for each server."""
    return f"{of} by ({ON}) ({expr})"


def fleet_sum(expr: str) -> str:
    """Sum `expr`, which has one sample for each server, over the fleet; a server scraped by two jobs counts once."""
    return f"sum(max by (instance) ({expr}))"


def per_rank(expr: str, *, by: Sequence[str] = ()) -> str:
    """Split `expr` by DP rank, with a label `rank` for legends; absent where the server has no ranks."""
    labels = ", ".join((*by, "dp_rank"))
    return f'label_replace(max by ({labels}) ({expr}), "rank", " on rank $1", "dp_rank", "(.+)")'


def judged(value: str, cases: Sequence[tuple[str, str]], otherwise: str) -> str:
    """Add a label `verdict` to `value`: the words of the first case (condition, words) whose condition has a sample."""
    said = [f'label_replace(group({condition}), "verdict", "{text}", "", "")' for condition, text in cases]
    said.append(f'label_replace(vector(1), "verdict", "{otherwise}", "", "")')
    return f"({value}) * on () group_left (verdict) ({' or on () '.join(said)})"


def largest(expr: str) -> list[dict[str, Any]]:
    """Return a query for each of the five servers with the largest mean in the time shown, the largest in the first colour."""
    mean = f"(avg by ({ON}) (avg_over_time(({expr})[$__range:{SUBQUERY_STEP}] @ end())) > 0)"
    places = [f"topk({place}, {mean})" for place in range(1, LARGEST + 1)]
    one = [places[0], *(f"({many} unless {fewer})" for fewer, many in pairwise(places))]
    return [
        {"legend": "{{instance}}", "expr": f"max by ({ON}) ({expr}) and on ({ON}) {each}", "look": fixed_colour(colour)}
        for each, colour in zip(one, COLOURS, strict=False)
    ]


def ratio(part: str, whole: str, by: str = "") -> str:
    """Divide two sums of rates; no point, and not NaN, where the whole is 0."""
    return f"sum{by} ({part}) / (sum{by} ({whole}) > 0)"


# --- latency ---------------------------------------------------------------------------------------------------------


def buckets(metric: str, *older: str, by: Sequence[str] = (), window: str = "$__rate_interval") -> str:
    """Sum the rates of a histogram of SGLang by these labels, under the first of its names that this release exposes.

    Last comes the histogram without `_bucket`: so it is called where Prometheus converts classic histograms to native ones.
    """
    names = [f"{name}_bucket" for name in (metric, *older)] + [metric]
    labels = ", ".join((*by, "le"))
    return f" or on ({', '.join(by)}) ".join(f"sum by ({labels}) ({rate(native(name), window)})" for name in names)


def quantile(share: str, metric: str, *older: str, by: Sequence[str] = (), window: str = "$__rate_interval") -> str:
    """Return a quantile in the histogram's unit, by these labels; `>= 0` drops the NaN of a time without requests."""
    return f"histogram_quantile({share}, {buckets(metric, *older, by=by, window=window)}) >= 0"


def latencies(metric: Sequence[str], *, objective: str = "") -> list[dict[str, Any]]:
    """Return queries of p50, p90 and p99 under a histogram's names, and of the objective in force."""
    lines = [
        {"legend": legend, "expr": quantile(share, *metric), "look": fixed_colour(colour, fillOpacity=0)}
        for share, legend, colour in (("0.5", "p50", "light-blue"), ("0.9", "p90", NEUTRAL), ("0.99", "p99", "purple"))
    ]
    if not objective:
        return lines
    # no line without latencies: the panel then shows its words for no value
    limit = f"{threshold(objective, 'upper')} and on () ({quantile('0.5', *metric)})"
    return [{"legend": "objective", "expr": limit, "look": threshold_line(WATCH)}, *lines]


def burn_rate(latency: str, window: str) -> str:
    """Return the burn rate of the error budget over a window; no point without requests."""
    breaches, observations = (
        rate(own(f"sglang_tuning_latency_{counted}_total", is_("latency", latency)), window)
        for counted in ("breaches", "observations")
    )
    return f"{ratio(breaches, observations)} / ((1 - {threshold('latency', 'objective')}) > 0)"


def worst_burn_rate(window: str) -> str:
    """Return the higher one of the burn rates of both objectives."""
    rates = (
        f'label_replace({burn_rate(latency, window)}, "latency", "{latency}", "", "")'
        for latency in ("time_to_first_token", "inter_token")
    )
    return f"max({' or '.join(rates)})"


def notified_burn_rate(rate_: Rate) -> str:
    """Return the burn rate at which the exporter calls; capped, because it never asks for more missed requests than that."""
    most = threshold("share", "upper")
    return f"clamp_max({most} / ((1 - {threshold('latency', 'objective')}) > 0), {rate_.times:g})"


# --- retractions -----------------------------------------------------------------------------------------------------


def retractions(*by: str) -> str:
    """Return retractions per minute over 10 minutes, by these labels, as the alert's rule counts them.

    Events where they are in the log, else retracted requests from the metrics. Without the rules, and by DP rank, they are
    counted here.
    """
    ranks = "dp_rank" in by
    sum_ = f"sum by ({', '.join(by)})"
    events, requests = (
        f"{sum_} (increase({ranked(counter) if ranks else own(counter)}[10m]) / 10)"
        for counter in ("sglang_tuning_retraction_events_total", "sglang_tuning_retracted_requests_total")
    )
    without_ranks = [] if ranks else [f"{sum_} ({own('instance:sglang_tuning_retractions:rate10m')})"]
    return f" or on ({', '.join(by)}) ".join((*without_ranks, f"{events} > 0", requests, events))


def above_limit(*diagnoses: str) -> str:
    """Return the conditions of diagnoses that are above their limit."""
    condition, limit = (
        last_known(own(name, one_of("diagnosis", diagnoses)))
        for name in ("sglang_tuning_condition", "sglang_tuning_condition_limit")
    )
    return f"({condition} > {limit})"


def present_retractions(*by: str) -> str:
    """Return retractions per minute for a tile: the exporter's figure while it is above its limit, so that both agree."""
    found = above_limit("retracting_too_often", "conservativeness_ineffective")
    labels = ", ".join(by)
    return f"max by ({labels}) ({found}) or on ({labels}) {retractions(*by)}"


# --- tokens ----------------------------------------------------------------------------------------------------------

# TP and PP ranks report the same tokens: the first one is enough.
_FIRST_RANK = ('tp_rank=~"0|"', 'pp_rank=~"0|"', 'dp_rank=~"$dp_rank"')


def prompt_tokens(source: str) -> str:
    """Prompt tokens per second that were "computed" or "cached": as counted by the server (0.5.7 on), else by the log."""
    mode = {"computed": "prefill_compute", "cached": "prefill_cache"}[source]
    counted = rate(native("sglang:realtime_tokens_total", is_("mode", mode), *_FIRST_RANK))
    logged = rate(ranked("sglang_tuning_prompt_tokens_total", is_("source", source)))
    return f"(sum({counted}) or on () sum({logged}))"


def generated_tokens(window: str = "$__rate_interval") -> str:
    """Return tokens generated per second, by server: counted for all ranks or by rank (0.5.7 on), else as last logged.

    The logged figure does not change on an idle server and has no model. So it counts only while a rank serves, and not for
    a server that counts its tokens or serves another model.
    """
    total = "sglang:generation_tokens_total"
    of_rank = 'dp_rank=~"$dp_rank"'  # no series of all ranks has it where one rank is chosen
    counted = by_server(rate(native(total, of_rank), window), "sum")
    of_ranks = native("sglang:realtime_tokens_total", is_("mode", "decode"), *_FIRST_RANK)
    counted_by_rank = by_server(rate(of_ranks, window), "sum")
    serving = ranked("sglang_tuning_state", is_("signal", "activity"), is_("state", "serving"))
    others = own("sglang_tuning_server_info", 'model_name!~"$model"')
    logged = (
        f"{last_known(ranked('sglang_tuning_generation_tokens_per_second'))}"
        f" and on ({ON}, dp_rank) {last_known(serving)} == 1"
        f" unless on ({ON}) present_over_time({own(total, of_rank)}[1h])"
        f" unless on ({ON}) {others}"
    )
    return f"({counted} or on ({ON}) {counted_by_rank} or on ({ON}) {by_server(logged, 'sum')})"
