"""PromQL for the panels: what the exporter says of the chosen servers, by server or by DP rank. Pure.

Nothing here judges: conditions, alerts, advice and verdicts are the exporter's. `$chosen`, `$alerts`, `$exporter` and
`$target` are matchers: of the board's servers, of their alerts, of the exporters beside them, and of their targets
(`board.CHOSEN`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang_tuning_exporter.core import answer
from sglang_tuning_exporter.core.diagnoses import ALL
from sglang_tuning_exporter.core.diagnoses import EXPORTER as OF_EXPORTER
from sglang_tuning_exporter.mixin._rendering import SERVER, TARGET, listed
from sglang_tuning_exporter.mixin.boards.looks import LEVELS, NEUTRAL, SHADES, fixed_colour, limit

# An instance has one namespace and one pod, so those two need not be compared.
EXPORTER, ON = (
    listed(tuple(label for label in labels if label not in {"namespace", "pod"})) for labels in (TARGET, SERVER)
)
FIRST_TOKEN = ("sglang:time_to_first_token_seconds",)
INTER_TOKEN = (
    "sglang:inter_token_latency_seconds",
    "sglang:time_per_output_token_seconds",
)  # the older name: until 0.4.3
LARGEST = 5  # more lines cannot be distinguished
# How long the last word of an exporter holds while scrapes are missing: enough for scrapes two minutes apart.
HELD = "2m"
LONGEST_AWAY = "1d:5m"  # how far back an exporter that does not answer is looked for
VERDICT = "sglang_tuning_verdict_info"
SINCE = "sglang_tuning_verdict_since_timestamp_seconds"
END = "sglang_tuning_end_info"
ADVICE = "sglang_tuning_advice_timestamp_seconds"
_FINE = "|".join(sorted(answer.GOOD))
_SILENT = next(row.id for row in OF_EXPORTER if row.silences == "target")  # the verdict of an exporter that is gone


# --- selectors -------------------------------------------------------------------------------------------------------


def is_(label: str, value: str) -> str:
    """Return the matcher of a label with this value."""
    return f'{label}="{value}"'


def like(label: str, pattern: str) -> str:
    """Return the matcher of a label whose value matches a pattern."""
    return f'{label}=~"{pattern}"'


def own(metric: str, *matchers: str) -> str:
    """Select a series of the chosen servers."""
    return f"{metric}{{{', '.join(('$chosen', *matchers))}}}"


def last(selector: str, window: str = HELD) -> str:
    """Select a gauge, as last known while a scrape of its exporter is missing: a tile must not go blank for that."""
    return f"last_over_time({selector}[{window}])"


def at_end(selector: str) -> str:
    """Select the last value of each series in the time shown, at each of its moments."""
    return f"last_over_time({selector}[$__range] @ end())"


def threshold(signal: str, bound: str) -> str:
    """Return the limit of the profile in force; no sample where the profile has none."""
    return f"max({own('sglang_tuning_threshold', is_('signal', signal), is_('bound', bound))})"


def rate(selector: str, window: str = "$__rate_interval") -> str:
    """Return a counter's rate per second, by default over the interval that Grafana proposes."""
    return f"rate({selector}[{window}])"


# --- shapes ----------------------------------------------------------------------------------------------------------


def labelled(expr: str, label: str, value: str, source: str = "", pattern: str = "") -> str:
    """Set a label, where another one matches a pattern."""
    return f'label_replace({expr}, "{label}", "{value}", "{source}", "{pattern}")'


def by_server(expr: str, of: str = "max") -> str:
    """Aggregate `expr` to one sample for each server."""
    return f"{of} by ({ON}) ({expr})"


def per_rank(expr: str, *, by: Sequence[str] = ()) -> str:
    """Split `expr` by DP rank, with a label `rank` for legends; absent where the server has no ranks."""
    return labelled(f"max by ({', '.join((*by, 'dp_rank'))}) ({expr})", "rank", " on rank $1", "dp_rank", "(.+)")


def or_none(expr: str) -> str:
    """Return `expr`, and NaN where it has no sample: the newest value of a tile is then none, and not an older one."""
    return f"({expr}) or vector(NaN)"


def with_objective(expr: str, signal: str, *, times: int = 1, unit: str = "s") -> str:
    """Give a figure in seconds a label `objective`, the profile's, both in this unit."""
    newest = at_end(own("sglang_tuning_threshold", is_("signal", signal), is_("bound", "upper")))
    said = f'count_values("objective", {times} * max({newest}))'
    named = labelled(said, "objective", f" ≤${{1}}{unit}", "objective", "(.+)")
    return f"{times} * ({or_none(expr)}) * on () group_left (objective) ({named} or on () vector(1))"


def largest(expr: str) -> str:
    """Return the five servers with the largest mean in the time shown."""
    return f"{expr} and topk({LARGEST}, avg_over_time(({expr})[$__range:5m] @ end()) > 0)"


def ratio(part: str, whole: str, by: str = "") -> str:
    """Divide two sums of rates; no point, and not NaN, where the whole is 0."""
    return f"sum{by} ({part}) / (sum{by} ({whole}) > 0)"


# --- latency ---------------------------------------------------------------------------------------------------------


def buckets(metric: str, *older: str, by: str = "", window: str = "$__rate_interval") -> str:
    """Sum the rates of a histogram of SGLang by these labels, under the first of its names that this release exposes.

    Last comes the histogram without `_bucket`: so it is called where Prometheus converts classic histograms to native
    ones.
    """
    names = [f"{name}_bucket" for name in (metric, *older)] + [metric]
    labels = f"{by}, le" if by else "le"
    return f" or on ({by}) ".join(f"sum by ({labels}) ({rate(own(name), window)})" for name in names)


def quantile(share: str, *metric: str, by: str = "", window: str = "$__rate_interval") -> str:
    """Return a quantile in the histogram's unit, by these labels; `>= 0` drops the NaN of a time without requests."""
    return f"histogram_quantile({share}, {buckets(*metric, by=by, window=window)}) >= 0"


def latencies(metric: Sequence[str], *, objective: str = "") -> list[dict[str, Any]]:
    """Return queries of p50, p95 and p99 under a histogram's names, and of the objective in force."""
    lines = [
        {"legend": legend, "expr": quantile(share, *metric), "look": fixed_colour(colour, fillOpacity=0)}
        for share, legend, colour in (("0.5", "p50", "light-blue"), ("0.95", "p95", NEUTRAL), ("0.99", "p99", "purple"))
    ]
    if not objective:
        return lines
    # no line without latencies: the panel then shows its words for no value
    line = f"{threshold(objective, 'upper')} and on () ({quantile('0.5', *metric)})"
    return [{"legend": "objective", "expr": line, "look": limit()}, *lines]


def mean_wait(by: str = "", window: str = "$__rate_interval") -> str:
    """Return the mean time in the queue of the requests that left it."""
    spent, left = (rate(own(f"sglang:queue_time_seconds_{end}"), window) for end in ("sum", "count"))
    return ratio(spent, left, f" by ({by})" if by else "")


def missed(latency: str) -> list[dict[str, Any]]:
    """Return queries of the share of requests that missed an objective: now, as the exporter's alert sees it, and its
    limit.
    """
    breaches, observed = (
        rate(own(f"sglang_tuning_latency_{name}_total", is_("latency", latency)))
        for name in ("breaches", "observations")
    )
    name = {"time_to_first_token": latency, "inter_token": "inter_token_latency"}[latency]
    found = [
        {
            "legend": "missed",
            "expr": ratio(breaches, observed),
            "look": fixed_colour("light-blue", fillOpacity=0, lineWidth=1),
        }
    ]
    for end, window, colour in (("fast", "1 hour", NEUTRAL), ("slow", "6 hours", "purple")):
        diagnosis = is_("diagnosis", f"{name}_burning_{end}")
        condition, most = (f"max({own(f'sglang_tuning_condition{part}', diagnosis)})" for part in ("", "_limit"))
        found += [
            {"legend": f"missed in {window}", "expr": condition, "look": fixed_colour(colour, fillOpacity=0)},
            {"legend": f"limit of {window}", "expr": most, "look": limit(lineWidth=2 if end == "fast" else 1)},
        ]
    return found


# --- counts ----------------------------------------------------------------------------------------------------------


def retractions(by: str = "") -> str:
    """Return retractions per minute: events where a log is read, else retracted requests from the metrics."""
    events, requests = (
        f"sum by ({by}) ({rate(own(f'sglang_tuning_{name}_total'))})"
        for name in ("retraction_events", "retracted_requests")
    )
    return f"60 * ({events} or on ({by}) {requests})"


def generated_tokens(by: str = "", window: str = "$__rate_interval") -> str:
    """Return tokens generated per second: as the server counts them, else as last logged while it serves.

    The logged figure stands still on an idle server.
    """
    logged = last(own("sglang_tuning_generation_tokens_per_second"))
    serving = own("sglang_tuning_state", is_("signal", "activity"), is_("state", "serving"))
    counted = f"sum by ({by}) ({rate(own('sglang:generation_tokens_total'), window)})"
    return (
        f"({counted} or on ({by}) sum by ({by}) ({logged} and on ({ON}, dp_rank) max_over_time({serving}[{HELD}])"
        " == 1))"
    )


# --- what limits a server --------------------------------------------------------------------------------------------


def newest() -> str:
    """Return the present verdict of each server, the value is when it was last seen.

    While a scrape is missing it is the one before; and where a series has no end, as of a back-filled log, the later
    one of two.
    """
    seen = f"max_over_time(timestamp({own(VERDICT)})[{HELD}:15s])"
    return f"({seen} == on ({ON}) group_left () max by ({ON}) ({seen}))"


def graded(expr: str) -> str:
    """Give a verdict that needs nothing the level `good`."""
    return labelled(expr, "level", "good", "verdict", _FINE)


def verdicts() -> str:
    """Return the verdict of each server (labels level, verdict, sentence); the value is
    for how many seconds it stands.
    """
    since = by_server(last(own(SINCE)))
    return graded(f"time() - (0 * {newest()} + on ({ON}) group_left () {since})")


def _silent() -> str:
    seen = f"max by ({ON}) (max_over_time(timestamp({own(SINCE)})[{LONGEST_AWAY}]))"
    return f"{seen} and on (job, instance) max_over_time(up{{$target}}[{HELD}]) == 0"


def silent(sentence: str = "") -> str:
    """Return the exporters that do not answer, as a verdict; the value is for how many seconds."""
    found = f"time() - ({_silent()})"
    said = {"level": "critical", "verdict": _SILENT, "sentence": sentence}
    for label in filter(said.get, said):
        found = labelled(found, label, said[label])
    return found


def ended() -> str:
    """Return the line of its log that explains why a server ended, as a sentence; the value is for how many seconds the
    verdict stands.
    """
    words = f"max by ({ON}, words) ({last(own(END))})"
    found = f"time() - (0 * {words} + on ({ON}) group_left () {by_server(last(own(SINCE)))})"
    said = labelled(labelled(found, "sentence", "In its log: $1", "words", "(.+)"), "level", "info")
    return f"max by ({ON}, level, sentence) ({said})"


def _as_diagnosis(expr: str) -> str:
    return labelled(expr, "diagnosis", "$1", "verdict", "(.+)")


def advised(said: str) -> str:
    """Give advice a label `change`: `--flag now → to`, or what people should do."""
    joined = f'label_join({said}, "change", " ", "flag", "current")'
    joined = f'label_join({joined}, "change", " → ", "change", "suggested")'
    return labelled(joined, "change", "$1", "change", " +→ (.+)")


def what_to_change() -> str:
    """Return the advice that stands (labels diagnosis, change, text); that of the verdict has the larger value.

    A change that several diagnoses advise stands once.
    """
    said = advised(last(own(ADVICE)))
    first = f"(0 * {said} + 2 and on ({ON}, diagnosis) {_as_diagnosis(last(own(VERDICT)))})"
    return f"topk by ({ON}, change) (1, {first} or 0 * {said} + 1)"


def alerts(name: str, *matchers: str) -> str:
    """Select the series of our alerts."""
    ours = ("$alerts", like("alertname", "SGLang.+"), *matchers)
    return f"{name}{{{', '.join(ours)}}}"


def firing() -> str:
    """Return the alerts that fire; the most severe has the largest value."""
    severities = (
        f"{times} * {alerts('ALERTS', is_('alertstate', 'firing'), like('severity', severity))}"
        for times, severity in ((3, "critical"), (2, "warning"), (1, "info|none|"))
    )
    return f"max by (alertname, severity) ({' or '.join(severities)})"


def firing_since() -> str:
    """Return since when each alert is active, in milliseconds."""
    return f"1000 * min by (alertname, severity) ({alerts('ALERTS_FOR_STATE')})"


# --- in the time shown -----------------------------------------------------------------------------------------------


def strip() -> str:
    """Return 1 for the verdict of each moment and 0 for the others of the time shown, so that a mean is a share."""
    others = f"0 * sum by (verdict) ({at_end(own(VERDICT))}) and on () {own(VERDICT)}"
    return f"sum by (verdict) (sgn({newest()})) or {others}"


def shares() -> str:
    """Return the share of the time shown that each verdict had (labels verdict, level)."""
    counted = f"count_over_time({own(VERDICT)}[$__range])"
    named = labelled(graded(f"sum by (verdict, level) ({counted})"), "diagnosis", "$1", "verdict", "(.+)")
    return f"{named} / on () group_left () (sum({counted}) > 0)"


def seen(end: str) -> str:
    """Return when each verdict was seen first (`min`) or last (`max`) in the time shown, in milliseconds."""
    return f"1000 * {end} by (verdict) ({end}_over_time(timestamp({own(VERDICT)})[$__range:1m]))"


def severities() -> str:
    """Return the order of the verdicts in the time shown by their level."""
    levels = {3: is_("level", "critical"), 2: is_("level", "warning"), 1: is_("level", "info")}
    return f"max by (verdict) ({_weighed(VERDICT, levels, '$__range')})"


def last_changes() -> str:
    """Return the last change that each verdict of the time shown advised: labels verdict, change."""
    said = labelled(advised(last(own(ADVICE), "$__range")), "verdict", "$1", "diagnosis", "(.+)")
    return f"topk by (verdict) (1, max by (verdict, change) ({said} and on (verdict) {last(own(VERDICT), '$__range')}))"


# --- the fleet -------------------------------------------------------------------------------------------------------

# The worst first, by verdict, and by alert: down, hung, out of memory, restarts, far too slow; then what is limited
# now.
_RANKS = {rank: "|".join(row.id for row in ALL if row.fleet == rank) for rank in (4, 3, 2, 1)}
_TOO_SLOW = "|".join(row.id for row in ALL if row.severity == "critical" and not row.fleet)
ORDER = {1000 * rank: like("verdict", names) for rank, names in _RANKS.items()} | {
    30: like("level", "critical|warning"),
    2: is_("level", "info"),
}
ALERT_ORDER = {100 + rank: like("diagnosis", names) for rank, names in _RANKS.items()} | {
    100: like("diagnosis", _TOO_SLOW),
    10: like("diagnosis", ".+"),
}


def _weighed(metric: str, order: Mapping[int, str], window: str = HELD) -> str:
    return " or ".join(f"{weight} * {last(own(metric, matcher), window)}" for weight, matcher in order.items())


def servers_by_state() -> list[dict[str, Any]]:
    """Return queries that count the servers of each level, the most urgent first, and the
    exporters that do not answer.
    """
    healthy = like("verdict", _FINE)
    matchers = {level: (is_("level", level),) for level in LEVELS} | {
        "none": (is_("level", "none"), healthy.replace("=~", "!~")),
        "good": (healthy,),
    }
    known = f"count_over_time({own(SINCE)}[{LONGEST_AWAY.split(':', maxsplit=1)[0]}] @ end())"
    away = f"max_over_time(up{{$target}}[{HELD}]) == 0 and on (job, instance) {known}"
    rows = [("✖ No answer", away, SHADES["critical"][1])]
    for level, (sign, words, colour) in LEVELS.items():
        rows.append((f"{sign} {words}", own(VERDICT, *matchers[level]), colour))
    return [
        {"legend": legend, "expr": f"count({expr}) or vector(0)", "look": fixed_colour(colour)}
        for legend, expr, colour in rows
    ]


def fleet() -> str:
    """Return one row for each server: its verdict, or that its exporter does not answer."""
    return f"{verdicts()} or on ({ON}) {silent()}"


def urgency() -> str:
    """Return where a server stands by its verdict."""
    gone = f"4000 + 0 * ({_silent()})"
    return f"max by ({ON}) ({_weighed(VERDICT, ORDER)} or {gone})"


def worst_alert() -> str:
    """Return the worst alert of each server, a label `alert`; the value is where it stands."""
    found = f"topk by ({ON}) (1, {_weighed('sglang_tuning_alert', ALERT_ORDER)}) > 0"
    return labelled(found, "alert", "$1", "diagnosis", "(.+)")


def lost() -> str:
    """Return the share of the time shown in which each server was limited."""
    limited, counted = (
        f"sum by ({ON}) (count_over_time({own(VERDICT, *matchers)}[$__range]))"
        for matchers in ((like("level", "critical|warning"),), ())
    )
    return f"{limited} / ({counted} > 0)"


def change_of_verdict() -> str:
    """Return what each server's verdict advises: a label `change`."""
    # held while a scrape is missing; of an old and a new advice only the new one
    present = f"({own(ADVICE)} or {last(own(ADVICE))} unless on ({ON}) {own(ADVICE)})"
    return f"max by ({ON}, change) ({advised(present)} and on ({ON}, diagnosis) {_as_diagnosis(newest())})"


def page() -> str:
    """Return where people reach the page of each exporter: a label `page`."""
    shown = f'label_join({last("sglang_tuning_web_info{$exporter}")}, "page", "://", "scheme", "instance")'
    return f"group by ({EXPORTER}, page) ({labelled(shown, 'page', '$1', 'external_url', '(.+)')})"
