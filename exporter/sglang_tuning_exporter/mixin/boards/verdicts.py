"""PromQL of what limits each server, what to change, and the present states. Pure."""

from __future__ import annotations

from sglang_tuning_exporter.core.rows import CHANCES, FAILURES, ROWS, Row
from sglang_tuning_exporter.core.runbooks import BY_ALERT
from sglang_tuning_exporter.core.server import STATES
from sglang_tuning_exporter.core.text import GOOD
from sglang_tuning_exporter.mixin.boards.queries import (
    EXPORTERS_AT_END,
    LAST_SAMPLE,
    LONGEST_LOOKBACK,
    ON,
    VERDICT,
    is_,
    is_not,
    last_in_range,
    last_in_range_or_down,
    last_known,
    one_of,
    own,
    per_rank,
    present_at_end,
    ranked,
    threshold,
)
from sglang_tuning_exporter.mixin.boards.words import LEVELS, SIGNAL_TITLES, STATE_NUMBERS

# Without a successful scrape for this long, the exporter is down; enough for scrapes two minutes apart.
SILENT = "2m"
# Urgency of a verdict: by its level, and of a server that needs nothing.
URGENCY = {"critical": 4, "warning": 3, "info": 2, "none": 1, "good": 0}
_GOOD = "|".join(sorted(GOOD))
_FIRING = ('alertname=~"SGLang.+"', 'alertstate="firing"')
# The one verdict that no exporter can say.
EXPORTER_DOWN = BY_ALERT["SGLangTuningExporterDown"]


# --- what limits a server --------------------------------------------------------------------------------------------


def _labelled(expr: str, **labels: str) -> str:
    """Give an expression more labels, each with a fixed value."""
    for label, value in labels.items():
        expr = f'label_replace({expr}, "{label}", "{value}", "", "")'
    return expr


def down() -> str:
    """Return the exporters that do not answer: targets that were exporters and whose scrapes fail."""
    up = own("up")
    firing = own("ALERTS", is_("alertname", EXPORTER_DOWN.alert), is_("alertstate", "firing"))
    return (
        f"({up} == 0 unless on ({ON}) max_over_time({up}[{SILENT}]) > 0"
        f" and on ({ON}) (max_over_time({own('sglang_tuning_build_info')}[{LONGEST_LOOKBACK}]) or on ({ON}) {firing}))"
    )


def _urgency(series: str) -> str:
    """Return the urgency of series with the value 1, by their label `level`."""
    table = " or ".join(_labelled(f"vector({of})", level=level) for level, of in URGENCY.items())
    by_level = f'label_replace({series}, "level", "good", "verdict", "{_GOOD}")'
    return f"({by_level} * on (level) group_left () ({table}))"


def _firing_urgency(*, at_end: bool = True) -> str:
    """Return the urgency of the alerts that fire; with `at_end` also of those that did when the data ended."""
    firing = own("ALERTS", *_FIRING)
    present = f"({firing} or {present_at_end(firing)})" if at_end else firing
    return _urgency(f'label_replace({present}, "level", "$1", "severity", "(.*)")')


def verdict(*, at_end: bool = False) -> str:
    """Return what limits each chosen server: labels `verdict` and `sentence`, one sample a server; the value is its urgency.

    The exporter says it. An alert that fires makes it as urgent, and is the verdict where the exporter has none (a burn rate);
    a dead exporter ranks above a milder verdict. `at_end`: where the data ended before the time range does, the last verdict.
    """
    # minus 0.1: of two with the same urgency, the exporter's own verdict is shown
    fired = f"({_firing_urgency(at_end=at_end)} - 0.1)"
    found = own(VERDICT, is_not("level", "none"))
    by = f"{ON}, verdict, sentence"
    of_alert = f'label_replace({fired}, "verdict", "$1", "diagnosis", "(.+)")'
    every = (
        f"{_urgency((last_in_range_or_down if at_end else last_known)(own(VERDICT)))}"
        f' or label_replace({of_alert}, "sentence", "$1 fires.", "alertname", "(.+)") unless on ({ON}) {found}'
        f" or 0 * max by ({by}) ({found}) + on ({ON}) group_left () max by ({ON}) ({fired})"
        f" or {_labelled(down(), verdict=EXPORTER_DOWN.id, sentence=EXPORTER_DOWN.summary)} + {URGENCY[EXPORTER_DOWN.severity]}"
    )
    return f"ceil(topk by ({ON}) (1, max by ({by}) ({every})))"


def since() -> str:
    """Return since when the present verdict stands, in milliseconds: as the exporter says; of a dead one its last answer."""
    stood = last_in_range_or_down(own("sglang_tuning_verdict_since_timestamp_seconds"))
    present = verdict(at_end=True)
    said = f"0 * ({present} and on ({ON}, verdict) {last_in_range_or_down(own(VERDICT))})"
    pending = own("ALERTS_FOR_STATE", 'alertname=~"SGLang.+"', is_not("alertname", EXPORTER_DOWN.alert))
    fired = f'max by ({ON}, verdict) (label_replace({pending}, "verdict", "$1", "diagnosis", "(.+)"))'
    dead = _labelled(f"{LAST_SAMPLE} and on ({ON}) {down()}", verdict=EXPORTER_DOWN.id)
    found = f"{said} + on ({ON}) group_left () {stood} or on ({ON}, verdict) {fired} or on ({ON}, verdict) {dead}"
    return f"1000 * (({found}) and on ({ON}, verdict) {present})"


def until() -> str:
    """Return when the data of a server ended, in milliseconds; no sample where it reaches the end of the time range."""
    return f"1000 * ({LAST_SAMPLE} unless on () {EXPORTERS_AT_END})"


def _figure(row: Row) -> tuple[float, str] | None:
    """Return factor and unit of a row's condition in a sentence; None where the sentence has no figure."""
    if row.when.side == "below" or row not in _EXPOSED:
        return None
    if row.when.unit == "share":
        return 100.0, " % of the time" if row.when.kind == "share" else " %"
    return (1.0, "/min") if row.when.unit == "per_minute" else None


_EXPOSED = tuple(row for row in ROWS if row.alert)
_FIGURES = {
    how: tuple(row.id for row in _EXPOSED if _figure(row) == how)
    for how in dict.fromkeys(map(_figure, _EXPOSED))
    if how
}


def with_figure(verdicts: str) -> str:
    """Give verdicts a label `figure` where there is one: " (12.4/min)", or ": how it ended" of a dead server."""
    found = [f'label_replace({how_it_ended()}, "figure", ": $1", "advice", "(.+)")']
    for (times, unit), rows in _FIGURES.items():
        value = f"{times:g} * {last_in_range_or_down(own('sglang_tuning_condition', one_of('diagnosis', rows)))}"
        number = f'count_values by ({ON}, diagnosis) ("figure", round({value}, {0.1 if times == 1 else 1:g}))'
        found.append(f'label_replace({number}, "figure", " ($1{unit})", "figure", "(.+)")')
    named = f'label_replace({" or ".join(found)}, "verdict", "$1", "diagnosis", "(.+)")'
    one = f"topk by ({ON}, verdict) (1, {named})"
    sentences = f'label_replace({verdicts}, "sentence", "$1", "sentence", "(.*)[.]")'
    return f"{sentences} * on ({ON}, verdict) group_left (figure) {one} or on ({ON}) {sentences}"


# --- what to change --------------------------------------------------------------------------------------------------


def _in_words(rows: str) -> str:
    """Join the labels flag, current and suggested to one, `advice`: `--flag: now 0.1, try 1.3`, or advice to people."""
    rows = f'label_replace({rows}, "a", ": now $1", "current", "(.+)")'
    for words, label, pattern in ((", try ", "current", ".+"), (": try ", "current", ""), ("", "flag", "")):
        rows = f'label_replace({rows}, "b", "{words}", "{label}", "{pattern}")'
    return f'group by ({ON}, diagnosis, advice) (label_join({rows}, "advice", "", "flag", "a", "b", "suggested"))'


def how_it_ended() -> str:
    """Return how a server ended, by its log, as advice about a server that is down."""
    said = f'label_replace({last_in_range_or_down(own("sglang_tuning_end_info"))}, "advice", "$1", "how", "(.*)")'
    return f"group by ({ON}, diagnosis, advice) ({_labelled(said, diagnosis='server_down')})"


def alerts() -> str:
    """Return the alerts that fire, or did when the data ended, by server; the most severe has the largest value."""
    return f"max by ({ON}, alertname, severity) ({_firing_urgency()})"


def _advised() -> str:
    """Return the change that each diagnosis advises, in words: labels job, instance, diagnosis and `advice`."""
    # the newest: a back-filled series has no end, so that an older advice would stand beside it for five minutes
    said = f"topk by ({ON}, diagnosis) (1, {last_in_range_or_down(own('sglang_tuning_advice_timestamp_seconds'))})"
    return _in_words(f"group by ({ON}, diagnosis, flag, current, suggested) ({said})")


def advice() -> str:
    """Return the change that each diagnosis advises; of a server that is down, how its log says that it ended."""
    return f"({how_it_ended()} or on ({ON}, diagnosis) ({_advised()}))"


def what_to_change() -> str:
    """Return the change of each diagnosis that holds, the verdict's first: labels diagnosis and `advice`.

    Without a flag, `advice` is the diagnosis; the column's mapping has its words.
    """
    limits = f'label_replace({verdict(at_end=True)} * 0 + 2, "diagnosis", "$1", "verdict", "(.*)")'
    above = f"({last_in_range(own('sglang_tuning_condition'))} > {last_in_range(own('sglang_tuning_condition_limit'))})"
    # a server that hangs or fails is mended first
    chances = own("sglang_tuning_condition", one_of("diagnosis", tuple(row.id for row in CHANCES if row.alert)))
    urgent = own(VERDICT, one_of("verdict", tuple(row.id for row in FAILURES)))
    holds = f"({above} unless on ({ON}, diagnosis) ({chances} and on ({ON}) {urgent}))"
    found = f"max by ({ON}, diagnosis) ({limits} or on ({ON}, diagnosis) 0 * {holds} + 1)"
    in_words = f'label_replace({found}, "advice", "$1", "diagnosis", "(.*)")'
    advised = f"{_advised()} * on ({ON}, diagnosis) group_left () {found}"
    return f"topk by ({ON}, advice) (1, {advised} or on ({ON}, diagnosis) {in_words})"


# --- all servers -----------------------------------------------------------------------------------------------------


def servers_by_level() -> str:
    """Count the servers by the urgency of their verdicts; a sample for every level, unless there was never an exporter."""
    counted = f'count_values("level", topk by (instance) (1, {verdict(at_end=True)}))'
    seen = f"max_over_time({own('sglang_tuning_build_info')}[{LONGEST_LOOKBACK}])"
    tiles = " or ".join(_labelled(f"0 * group by (job) ({seen})", level=level) for level in LEVELS)
    return f"sum by (level) ({tiles} or {counted})"


def worst_servers() -> str:
    """Return each server's verdict and its change, a label `advice`. The value is the urgency plus the limited share of the time range.

    Without a flag, `advice` is the verdict; the column's mapping has its words.
    """
    found = verdict(at_end=True)
    limited, seen = (
        f"sum by ({ON}) (count_over_time({series}[$__range]))"
        for series in (own(VERDICT, one_of("level", ("critical", "warning"))), own(VERDICT))
    )
    lost = f"clamp_max({limited} / ({seen} > 0), 0.99)"
    advised = f'label_replace({advice()}, "verdict", "$1", "diagnosis", "(.*)")'
    one = f"topk by ({ON}, verdict) (1, {advised})"
    in_words = f'label_replace({found}, "advice", "$1", "verdict", "(.*)")'
    rows = f"({found} * on ({ON}, verdict) group_left (advice) {one} or on ({ON}) {in_words})"
    return f"{rows} + on ({ON}) group_left () {lost} or on ({ON}) {rows}"


# --- states ----------------------------------------------------------------------------------------------------------


def in_state(signal: str, state: str) -> str:
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
                    for state in (*states, "idle", "unknown")
                )
            ),
        }
        for signal, states in STATES.items()
    ]
