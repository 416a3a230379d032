"""PromQL of what limits each server, what to change, and the present states. Pure."""

from __future__ import annotations

from sglang_tuning_exporter.diagnosis.promql import one_of
from sglang_tuning_exporter.diagnosis.table import DIAGNOSES
from sglang_tuning_exporter.mixin.boards.queries import (
    EXPORTERS_AT_END,
    LAST_SAMPLE,
    ON,
    SUBQUERY_STEP,
    VERDICT,
    is_,
    is_not,
    last_in_range,
    last_in_range_or_down,
    last_known,
    last_seen,
    own,
    per_rank,
    present_at_end,
    ranked,
    threshold,
)
from sglang_tuning_exporter.mixin.boards.words import LEVELS, SIGNAL_TITLES, STATE_NUMBERS
from sglang_tuning_exporter.state.signals import STATES, Signal

# Without a successful scrape for this long, the exporter is down; enough for scrapes two minutes apart.
SILENT = "2m"
LONGEST_LOOKBACK = "1d:5m"  # how far back a target was an exporter, in steps of five minutes
# Urgency of a verdict: by the severity of its diagnosis, without a diagnosis, and of a healthy or idle server.
URGENCY = {"critical": 4, "warning": 3, "info": 2, "none": 1, "well": 0}
_WELL = "healthy|idle"
_FIRING = ('alertname=~"SGLang.+"', 'alertstate="firing"')
_EXPORTER_DOWN = next(row for row in DIAGNOSES if row.about == "exporter")
_LONGEST_NAME = 5  # underscores in the longest argument of any advice


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


def _firing_urgency(*, at_end: bool = True) -> str:
    """Return the urgency of the alerts that fire; with `at_end` also of those that did when the data ended."""
    firing = own("ALERTS", *_FIRING)
    return _urgency(f"({firing} or {present_at_end(firing)})" if at_end else firing)


def verdict(*, at_end: bool = False) -> str:
    """Return what limits each chosen server: a label `verdict`, one sample a server; the value is its urgency.

    A dead exporter ranks above a milder verdict. An alert that fires is the verdict where the exporter found no diagnosis (a
    burn rate, a server that is not ready for too long), and makes the exporter's own diagnosis as urgent. `at_end`: where the
    data ended before the time range does, the last verdict.
    """
    # minus 0.1: of two with the same urgency, the exporter's own verdict is shown
    fired = f"({_firing_urgency(at_end=at_end)} - 0.1)"
    found = own(VERDICT, 'severity!="none"')
    every = (
        f"{_urgency((last_in_range_or_down if at_end else last_known)(own(VERDICT)))}"
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
        f"min by ({ON}, verdict) (min_over_time(timestamp({series})[$__range:{SUBQUERY_STEP}]))"
        for series in (own(VERDICT), of_alerts)
    )
    seen = last_seen(own(VERDICT))
    present = f"({own_first} and on ({ON}, verdict) {seen} >= on ({ON}) group_left () {LAST_SAMPLE})"
    other = f"max by ({ON}) ({seen} < on ({ON}) group_left () {LAST_SAMPLE})"
    known_since = f"0 * {present} + on ({ON}) group_left () {other} or {present} or on ({ON}, verdict) {first_fired}"
    return f"1000 * (({known_since}) and on ({ON}, verdict) {verdict(at_end=True)} or on ({ON}) {LAST_SAMPLE})"


def until() -> str:
    """Return when the data of a server ended, in milliseconds; no sample where it reaches the end of the time range."""
    return f"1000 * ({LAST_SAMPLE} unless on () {EXPORTERS_AT_END})"


# The unit of an evidence -> how it is written.
_FIGURES = {"share": " %", "time": " % of the time", "per_minute": "/min", "seconds": " s", "GB": " GB"}
_SHARES_OF_TIME = "|".join(row.id for row in DIAGNOSES if row.condition.title_unit == "of the time")


def with_figure(verdicts: str) -> str:
    """Give verdicts a label `figure`: " (12.4/min)", ": how it ended" of a dead server, or a blank where there is neither."""
    _, _, *others = _FIGURES
    shares, rest = (
        last_in_range_or_down(own("sglang_tuning_diagnosis_evidence", one_of("unit", units)))
        for units in (("share",), tuple(others))
    )
    shares = f'label_replace({shares}, "unit", "time", "diagnosis", "{_SHARES_OF_TIME}")'
    number = f'count_values by ({ON}, diagnosis, unit) ("number", round(100 * {shares}) or round({rest}, 0.1))'
    figure = f'label_join({number}, "figure", " ", "number", "unit")'
    for unit, written in _FIGURES.items():
        figure = f'label_replace({figure}, "figure", " ($1{written})", "figure", "(.+) {unit}")'
    death = f'label_replace({how_it_ended()}, "figure", ": $1", "advice", "(.+)")'
    found = f'label_replace({death} or {figure}, "verdict", "$1", "diagnosis", "(.+)")'
    one = f"topk by ({ON}, verdict) (1, {found})"
    blank = f'label_replace({verdicts}, "figure", " ", "", "")'
    return f"{verdicts} * on ({ON}, verdict) group_left (figure) {one} or on ({ON}) {blank}"


# --- what to change --------------------------------------------------------------------------------------------------


def with_flag(expr: str) -> str:
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
    said = (
        f"topk by ({ON}, diagnosis) (1, {last_in_range_or_down(own('sglang_tuning_recommendation_timestamp_seconds'))})"
    )
    return f"group by ({ON}, diagnosis, flag, current, suggested) ({said})"


def how_it_ended() -> str:
    """Return how a server ended, by its log, as advice about a server that is down."""
    said = f'label_replace({last_in_range_or_down(own("sglang_tuning_end_info"))}, "advice", "$1", "how", "(.*)")'
    return f'group by ({ON}, diagnosis, advice) (label_replace({said}, "diagnosis", "server_down", "", ""))'


def alerts() -> str:
    """Return the alerts that fire, or did when the data ended, by server; the most severe has the largest value."""
    return f"max by ({ON}, alertname, severity) ({_firing_urgency()})"


def advice() -> str:
    """Return the first change that each diagnosis advises, in words: labels job, instance, diagnosis and `advice`.

    Of a server that is down: how its log says that it ended.
    """
    return f"({how_it_ended()} or on ({ON}, diagnosis) ({_in_words(_recommended())}))"


def every_advice() -> str:
    """Return every change that is advised now: some diagnoses change two flags together."""
    on = f"{ON}, diagnosis, arg"
    # count_values makes a label of a figure.
    tried, now = (
        f'count_values by ({on}) ("{label}", {last_in_range_or_down(own(gauge))})'
        for label, gauge in (
            ("suggested", "sglang_tuning_recommended_arg"),
            ("current", "sglang_tuning_recommended_arg_current"),
        )
    )
    figure = f"{tried} * on ({on}) group_left (current) ({now} or on ({on}) {tried})"
    word = last_in_range_or_down(own("sglang_tuning_recommended_setting_info", is_not("arg", "")))
    setting = f'label_replace(max by ({on}, value) ({word}), "suggested", "$1", "value", "(.*)")'
    more = with_flag(f"({figure} or on ({on}) {setting})")
    return _in_words(f"({_recommended()} or on ({ON}, diagnosis, flag) {more})")


def what_to_change() -> str:
    """Return the changes of all diagnoses that hold, the verdict's first: labels diagnosis and `advice`.

    Without a flag, `advice` is the diagnosis; the column's mapping has its words.
    """
    limits = f'label_replace({verdict(at_end=True)} * 0 + 2, "diagnosis", "$1", "verdict", "(.*)")'
    holds = f"{last_in_range(own('sglang_tuning_diagnosis_active'))} == 1"
    # a server that hangs or fails is mended first
    chances, urgent = (
        own(metric, one_of(label, tuple(row.id for row in DIAGNOSES if getattr(row, kind))))
        for metric, label, kind in (
            ("sglang_tuning_diagnosis_active", "diagnosis", "is_chance"),
            (VERDICT, "verdict", "comes_first"),
        )
    )
    holds = f"({holds} unless on ({ON}, diagnosis) ({chances} and on ({ON}) {urgent}))"
    found = f"max by ({ON}, diagnosis) ({limits} or on ({ON}, diagnosis) ({holds}))"
    in_words = f'label_replace({found}, "advice", "$1", "diagnosis", "(.*)")'
    advised = f"{every_advice()} * on ({ON}, diagnosis) group_left () {found}"
    return f"topk by ({ON}, advice) (1, {advised} or on ({ON}, diagnosis) {in_words})"


# --- all servers -----------------------------------------------------------------------------------------------------


def servers_by_level() -> str:
    """Count the servers by the urgency of their verdicts; a sample for every level, unless there was never an exporter."""
    counted = f'count_values("level", topk by (instance) (1, {verdict(at_end=True)}))'
    seen = f"max_over_time({own('sglang_tuning_build_info')}[{LONGEST_LOOKBACK}])"
    tiles = " or ".join(f'label_replace(0 * group by (job) ({seen}), "level", "{level}", "", "")' for level in LEVELS)
    return f"sum by (level) ({tiles} or {counted})"


def worst_servers() -> str:
    """Return each server's verdict and its change, a label `advice`. The value is the urgency plus the limited share of the time range.

    Without a flag, `advice` is the verdict; the column's mapping has its words.
    """
    found = verdict(at_end=True)
    limited, seen = (
        f"sum by ({ON}) (count_over_time({series}[$__range]))"
        for series in (own(VERDICT, 'severity=~"critical|warning"'), own(VERDICT))
    )
    lost = f"clamp_max({limited} / ({seen} > 0), 0.99)"
    advised = f'label_replace({advice()}, "verdict", "$1", "diagnosis", "(.*)")'
    one = f"topk by ({ON}, verdict) (1, {advised})"
    in_words = f'label_replace({found}, "advice", "$1", "verdict", "(.*)")'
    rows = f"({found} * on ({ON}, verdict) group_left (advice) {one} or on ({ON}) {in_words})"
    return f"{rows} + on ({ON}) group_left () {lost} or on ({ON}) {rows}"


# --- states ----------------------------------------------------------------------------------------------------------


def in_state(signal: Signal, state: str) -> str:
    """Return a condition that has a sample while a signal of any DP rank is in this state."""
    return f"max({last_known(ranked('sglang_tuning_state', is_('signal', signal), is_('state', state)))}) == 1"


def graph_states_seen(states: str) -> str:
    """Return a condition on the use of CUDA graphs in the whole time range: at this moment the server may be idle."""
    seconds = ranked("sglang_tuning_state_seconds_total", is_("signal", "cuda_graph"), f'state=~"{states}"')
    return f"(sum(increase({seconds}[$__range])) > 0)"


def states_by_signal() -> list[dict[str, str]]:
    """Return a query for each signal; the value is the number of its state. An empty queue is below the range of a profile that has one."""
    below, empty = STATE_NUMBERS["below_range"], STATE_NUMBERS["empty"]
    lower = threshold("queue", "lower")
    numbers = STATE_NUMBERS | {"empty": f"on () group_left () (0 * {lower} + {below} or vector({empty}))"}
    return [
        {
            "legend": SIGNAL_TITLES[signal] + "{{rank}}",
            "expr": per_rank(
                " or ".join(
                    f"({ranked('sglang_tuning_state', is_('signal', signal), is_('state', state))} == 1) * {numbers[state]}"
                    for state in states
                )
            ),
        }
        for signal, states in STATES.items()
    ]
