"""PromQL of the boards: selectors for the chosen servers, sums by rank, words for a figure. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_tuning_exporter.diagnosis import promql
from sglang_tuning_exporter.diagnosis.table import DIAGNOSES

if TYPE_CHECKING:
    from collections.abc import Sequence

PLACE = ("job", "instance")  # labels of one exporter, and so of one server
ON = ", ".join(PLACE)
# Without a successful scrape for this long, the exporter is down; enough for scrapes two minutes apart.
SILENT = "2m"
LOOK_STEP = "1m"  # resolution of the times at which series start and end
LONGEST_LOOKBACK = "1d:5m"  # how far back a target was an exporter, in steps of five minutes
# Urgency of a verdict: by the severity of its diagnosis, without a diagnosis, and of a healthy or idle server.
URGENCY = {"critical": 4, "warning": 3, "info": 2, "none": 1, "well": 0}
VERDICT = "sglang_tuning_verdict"
_WELL = "healthy|idle"
_FIRING = ('alertname=~"SGLang.+"', 'alertstate="firing"')
_EXPORTER_DOWN = next(row for row in DIAGNOSES if row.about == "exporter")
_LONGEST_NAME = 5  # underscores in the longest argument of any advice


# --- selectors -------------------------------------------------------------------------------------------------------


def is_(label: str, value: str) -> str:
    """Return the matcher of a label with this value."""
    return f'{label}="{value}"'


def is_not(label: str, value: str) -> str:
    """Return the matcher of a label with another value; an empty value: any that is set."""
    return f'{label}!="{value}"'


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
    return f"max({promql.last_known(series)})"


def drawn_threshold(signal: str, bound: str) -> str:
    """Return a threshold to draw: only where the server served in the last 10 minutes, and not while it is down."""
    serving = own("sglang_tuning_state", is_("signal", "activity"), is_("state", "serving"))
    return while_there(f"({threshold(signal, bound)} and on () (max(max_over_time({serving}[10m])) > 0))", "")


def rate(selector: str, window: str = "$__rate_interval") -> str:
    """Return a counter's rate per second, by default over the interval that Grafana proposes."""
    return f"rate({selector}[{window}])"


def last_known(selector: str) -> str:
    """Select a gauge, as last known while a scrape of its exporter is missing: a tile must not go blank for that."""
    return f"({selector} or ({promql.last_known(selector)} unless on ({ON}) sglang_tuning_build_info))"


def shown(selector: str) -> str:
    """Select a gauge for a tile: as `last_known`, and where the data ended before the time shown does, its last value.

    A server that is down, or was at the end, has none: old figures would look like present ones.
    """
    ended = f"{_last(selector)} unless on () {_EXPORTERS} unless on ({ON}) {_WAS_DOWN}"
    return f"({while_there(last_known(selector))} or ({ended}))"


def latest(selector: str) -> str:
    """As `shown`, of a server that is down too; only series that were still there when the data ended."""
    return f"({last_known(selector)} or {_at_the_end(selector)})"


def _at_the_end(selector: str) -> str:
    """Select the series that were there when the data ended, where it ended before the time shown does."""
    there = f"{_last(selector)} and {_last_seen(selector)} >= on ({ON}) group_left () {_END}"
    return f"({there} unless on () {_EXPORTERS})"


def _last(selector: str) -> str:
    return f"last_over_time({selector}[$__range])"


def _last_seen(selector: str) -> str:
    """Return the time of each series' last sample in the time range."""
    return f"max_over_time(timestamp({selector})[$__range:{LOOK_STEP}])"


# The targets at the end of the time shown that were exporters in it: none where a back-filled log ended before.
_EXPORTERS = (
    f"(last_over_time({own('up')}[{promql.LOOKBACK}])"
    f" and on ({ON}) last_over_time({own('sglang_tuning_build_info')}[$__range]))"
)
# The last sample of each server.
_END = f"max by ({ON}) ({_last_seen(own('sglang_tuning_build_info'))})"
_WAS_DOWN = f"({_last_seen(own(VERDICT, is_('verdict', 'server_down')))} >= on ({ON}) group_left () {_END})"


# --- shapes ----------------------------------------------------------------------------------------------------------


def by_server(expr: str, of: str = "max") -> str:
    """Aggregate `expr` to one sample for each server."""
    return f"{of} by ({ON}) ({expr})"


def once(expr: str) -> str:
    """Sum `expr`, which has one sample for each server, over the fleet; a server scraped by two jobs counts once."""
    return f"sum(max by (instance) ({expr}))"


def per_rank(expr: str, *, by: Sequence[str] = (), of: str = "max") -> str:
    """Split `expr` by DP rank, with a label `rank` for legends; absent where the server has no ranks."""
    labels = ", ".join((*by, "dp_rank"))
    return f'label_replace({of} by ({labels}) ({expr}), "rank", " on rank $1", "dp_rank", "(.+)")'


def words(value: str, *cases: tuple[str, str], otherwise: str) -> str:
    """Add a label `verdict` to `value`: the words of the first case (condition, words) whose condition has a sample."""
    said = [f'label_replace(group({condition}), "verdict", "{text}", "", "")' for condition, text in cases]
    said.append(f'label_replace(vector(1), "verdict", "{otherwise}", "", "")')
    return f"({value}) * on () group_left (verdict) ({' or on () '.join(said)})"


def ratio(part: str, whole: str, by: str = "") -> str:
    """Divide two sums of rates; no point, and not NaN, where the whole is 0."""
    return f"sum{by} ({part}) / (sum{by} ({whole}) > 0)"


# --- latency ---------------------------------------------------------------------------------------------------------


def buckets(metric: str, *older: str, window: str = "$__rate_interval") -> str:
    """Sum the rates of a histogram of SGLang, under the first of its names that this release exposes.

    Last comes the histogram without `_bucket`: so it is called where Prometheus converts classic histograms to native ones.
    """
    names = [f"{name}_bucket" for name in (metric, *older)] + [metric]
    return " or on () ".join(f"sum by (le) ({rate(native(name), window)})" for name in names)


def quantile(share: str, metric: str, *older: str, window: str = "$__rate_interval") -> str:
    """Return a quantile in the histogram's unit; `>= 0` drops the NaN of a time without requests."""
    return f"histogram_quantile({share}, {buckets(metric, *older, window=window)}) >= 0"


def quantiles(share: str, metric: str, *older: str, by: Sequence[str]) -> str:
    """Return a quantile over 5 minutes for each server."""
    names = [f"{name}_bucket" for name in (metric, *older)] + [metric]
    on = ", ".join(by)
    found = f" or on ({on}) ".join(f"sum by ({on}, le) ({rate(native(name), '5m')})" for name in names)
    return f"histogram_quantile({share}, {found}) >= 0"


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
    told = [] if ranks else [f"{sum_} ({own('instance:sglang_tuning_retractions:rate10m')})"]
    return f" or on ({', '.join(by)}) ".join((*told, f"{events} > 0", requests, events))


def present_retractions(*by: str) -> str:
    """Return retractions per minute for a tile: the figure of their diagnosis while it holds, so that both agree."""
    found = (is_("diagnosis", "retracting_too_often"), is_("unit", "per_minute"))
    labels = ", ".join(by)
    return f"max by ({labels}) ({last_known(own('sglang_tuning_diagnosis_evidence', *found))}) or on ({labels}) {retractions(*by)}"


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
    steps = by_server(rate(native("sglang:realtime_tokens_total", is_("mode", "decode"), *_FIRST_RANK), window), "sum")
    serving = ranked("sglang_tuning_state", is_("signal", "activity"), is_("state", "serving"))
    others = own("sglang_tuning_server_info", 'model_name!~"$model"')
    logged = (
        f"{last_known(ranked('sglang_tuning_generation_tokens_per_second'))}"
        f" and on ({ON}, dp_rank) {last_known(serving)} == 1"
        f" unless on ({ON}) present_over_time({own(total, of_rank)}[1h])"
        f" unless on ({ON}) {others}"
    )
    return f"({counted} or on ({ON}) {steps} or on ({ON}) {by_server(logged, 'sum')})"


# --- what limits a server --------------------------------------------------------------------------------------------


def down() -> str:
    """Return the exporters that do not answer: targets that were exporters and whose scrapes fail."""
    up, alert = own("up"), is_("alertname", _EXPORTER_DOWN.alert)
    firing = own("ALERTS", alert, is_("alertstate", "firing"))
    return (
        f"({up} == 0 unless on ({ON}) max_over_time({up}[{SILENT}]) > 0"
        f" and on ({ON}) (max_over_time({own('sglang_tuning_build_info')}[{LONGEST_LOOKBACK}]) or on ({ON}) {firing}))"
    )


def _urgency(series: str) -> str:
    """Return the urgency of verdicts or alerts, which have the value 1, by their severity."""
    table = " or ".join(f'label_replace(vector({of}), "level", "{level}", "", "")' for level, of in URGENCY.items())
    by_severity = f'label_replace({series}, "level", "$1", "severity", "(.*)")'
    by_level = f'label_replace({by_severity}, "level", "well", "verdict", "{_WELL}")'
    return f"({by_level} * on (level) group_left () ({table}))"


def _fired(*, ended: bool = True) -> str:
    """Return the urgency of the alerts that fire; with `ended` also of those that did when the data ended."""
    firing = own("ALERTS", *_FIRING)
    return _urgency(f"({firing} or {_at_the_end(firing)})" if ended else firing)


def verdict(*, ended: bool = False) -> str:
    """Return what limits each chosen server: a label `verdict`, one sample a server; the value is its urgency.

    A dead exporter ranks above a milder verdict. An alert that fires is the verdict where the exporter found no diagnosis (a
    burn rate, a server that is not ready for too long), and makes the exporter's own diagnosis as urgent. `ended`: where the
    data ended before the time range does, the last verdict.
    """
    # minus 0.1: of two with the same urgency, the exporter's own verdict is shown
    fired = f"({_fired(ended=ended)} - 0.1)"
    found = own(VERDICT, 'severity!="none"')
    every = (
        f"{_urgency((latest if ended else last_known)(own(VERDICT)))}"
        f' or label_replace({fired}, "verdict", "$1", "diagnosis", "(.+)") unless on ({ON}) {found}'
        f" or 0 * max by ({ON}, verdict) ({found}) + on ({ON}) group_left () max by ({ON}) ({fired})"
        f' or label_replace({down()}, "verdict", "{_EXPORTER_DOWN.id}", "", "") + {URGENCY[_EXPORTER_DOWN.severity]}'
    )
    return f"ceil(topk by ({ON}) (1, max by ({ON}, verdict) ({every})))"


def since() -> str:
    """Return since when the present verdict holds, in milliseconds.

    That is the end of the verdict before it, else its first sample; of a dead exporter its last answer.
    """
    fired = own("ALERTS", *_FIRING, is_not("alertname", _EXPORTER_DOWN.alert))
    of_alerts = f'label_replace({fired}, "verdict", "$1", "diagnosis", "(.+)")'
    own_first, first_fired = (
        f"min by ({ON}, verdict) (min_over_time(timestamp({series})[$__range:{LOOK_STEP}]))"
        for series in (own(VERDICT), of_alerts)
    )
    seen = _last_seen(own(VERDICT))
    present = f"({own_first} and on ({ON}, verdict) {seen} >= on ({ON}) group_left () {_END})"
    other = f"max by ({ON}) ({seen} < on ({ON}) group_left () {_END})"
    known_since = f"0 * {present} + on ({ON}) group_left () {other} or {present} or on ({ON}, verdict) {first_fired}"
    return f"1000 * (({known_since}) and on ({ON}, verdict) {verdict(ended=True)} or on ({ON}) {_END})"


def until() -> str:
    """Return when the data of a server ended, in milliseconds; no sample where it reaches the end of the time range."""
    return f"1000 * ({_END} unless on () {_EXPORTERS})"


# The unit of an evidence -> how it is written.
_FIGURES = {"share": " %", "time": " % of the time", "per_minute": "/min", "seconds": " s", "GB": " GB"}
_SHARES_OF_TIME = "|".join(row.id for row in DIAGNOSES if row.condition.title_unit == "of the time")


def with_figure(verdicts: str) -> str:
    """Give verdicts a label `figure`: " (12.4/min)", ": how it ended" of a dead server, or a blank where there is neither."""
    _, _, *others = _FIGURES
    shares, rest = (
        latest(own("sglang_tuning_diagnosis_evidence", promql.one_of("unit", units)))
        for units in (("share",), tuple(others))
    )
    shares = f'label_replace({shares}, "unit", "time", "diagnosis", "{_SHARES_OF_TIME}")'
    number = f'count_values by ({ON}, diagnosis, unit) ("number", round(100 * {shares}) or round({rest}, 0.1))'
    figure = f'label_join({number}, "figure", " ", "number", "unit")'
    for unit, written in _FIGURES.items():
        figure = f'label_replace({figure}, "figure", " ($1{written})", "figure", "(.+) {unit}")'
    death = f'label_replace({ended()}, "figure", ": $1", "advice", "(.+)")'
    found = f'label_replace({death} or {figure}, "verdict", "$1", "diagnosis", "(.+)")'
    one = f"topk by ({ON}, verdict) (1, {found})"
    blank = f'label_replace({verdicts}, "figure", " ", "", "")'
    return f"{verdicts} * on ({ON}, verdict) group_left (figure) {one} or on ({ON}) {blank}"


# --- what to change --------------------------------------------------------------------------------------------------


def flagged(expr: str) -> str:
    """Convert the label `arg` to `flag`, as it is typed: schedule_policy becomes --schedule-policy."""
    expr = f'label_replace({expr}, "flag", "--$1", "arg", "(.*)")'
    for _ in range(_LONGEST_NAME):  # RE2 replaces one underscore at a time
        expr = f'label_replace({expr}, "flag", "$1-$2", "flag", "(.*)_(.*)")'
    return expr


def _in_words(rows: str) -> str:
    """Join the labels flag, current and suggested to one, `advice`: `--flag: now 0.1, try 1.3`, or advice to people."""
    rows = f'label_replace({rows}, "a", ": now $1", "current", "(.+)")'
    for words, label, pattern in ((", try ", "current", ".+"), (": try ", "current", ""), ("", "flag", "")):
        rows = f'label_replace({rows}, "b", "{words}", "{label}", "{pattern}")'
    return f'group by ({ON}, diagnosis, advice) (label_join({rows}, "advice", "", "flag", "a", "b", "suggested"))'


def _recommended() -> str:
    # the newest: a back-filled series has no end, so that an older advice would stand beside it for five minutes
    said = f"topk by ({ON}, diagnosis) (1, {latest(own('sglang_tuning_recommendation_timestamp_seconds'))})"
    return f"group by ({ON}, diagnosis, flag, current, suggested) ({said})"


def ended() -> str:
    """Return how a server ended, by its log, as advice about a server that is down."""
    said = f'label_replace({latest(own("sglang_tuning_end_info"))}, "advice", "$1", "how", "(.*)")'
    return f'group by ({ON}, diagnosis, advice) (label_replace({said}, "diagnosis", "server_down", "", ""))'


def while_there(expr: str, on: str = ON) -> str:
    """Drop the samples of a server that is down: old figures would look like present ones."""
    return f"({expr} unless on ({on}) {last_known(own(VERDICT, is_('verdict', 'server_down')))})"


def alerts() -> str:
    """Return the alerts that fire, or did when the data ended, by server; the most severe has the largest value."""
    return f"max by ({ON}, alertname, severity) ({_fired()})"


def advice() -> str:
    """Return the first change that each diagnosis advises, in words: labels job, instance, diagnosis and `advice`.

    Of a server that is down: how its log says that it ended.
    """
    return f"({ended()} or on ({ON}, diagnosis) ({_in_words(_recommended())}))"


def every_advice() -> str:
    """Return every change that is advised now: some diagnoses change two flags together."""
    on = f"{ON}, diagnosis, arg"
    # count_values makes a label of a figure.
    tried, now = (
        f'count_values by ({on}) ("{label}", {latest(own(gauge))})'
        for label, gauge in (
            ("suggested", "sglang_tuning_recommended_arg"),
            ("current", "sglang_tuning_recommended_arg_current"),
        )
    )
    figure = f"{tried} * on ({on}) group_left (current) ({now} or on ({on}) {tried})"
    word = latest(own("sglang_tuning_recommended_setting_info", is_not("arg", "")))
    setting = f'label_replace(max by ({on}, value) ({word}), "suggested", "$1", "value", "(.*)")'
    more = flagged(f"({figure} or on ({on}) {setting})")
    return _in_words(f"({_recommended()} or on ({ON}, diagnosis, flag) {more})")
