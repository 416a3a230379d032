"""PromQL as the boards need it: selectors for the chosen servers, sums by rank, words for a figure. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_tuning_exporter.guide.table import DIAGNOSES

if TYPE_CHECKING:
    from collections.abc import Sequence

PLACE = ("job", "instance")  # what tells one exporter, and so one server, from another
# Nobody's row in the table of diagnoses is needed for these: Prometheus or the exporter is what is missing.
_SEVERITY = {row.id: row.severity for row in DIAGNOSES}
_LONGEST_NAME = 5  # underscores in the longest argument that is ever advised


# --- selectors -------------------------------------------------------------------------------------------------------


def is_(label: str, value: str) -> str:
    """Match a label that has this value."""
    return f'{label}="{value}"'


def is_not(label: str, value: str) -> str:
    """Match a label that has another value; the empty one: a label that is there."""
    return f'{label}!="{value}"'


def own(metric: str, *matchers: str) -> str:
    """Select a series of the exporter for the chosen servers."""
    chosen = ", ".join(('job=~"$job"', 'instance=~"$instance"', *matchers))
    return f"{metric}{{{chosen}}}"


def ranked(metric: str, *matchers: str) -> str:
    """Select a series that carries `dp_rank` where there are DP ranks; "All" also matches one without the label."""
    return own(metric, *matchers, 'dp_rank=~"$dp_rank"')


def native(metric: str, *matchers: str) -> str:
    """Select a series of SGLang that the exporter passes through, for the chosen model."""
    return own(metric, *matchers, 'model_name=~"$model"')


def threshold(signal: str, bound: str) -> str:
    """Ask what the profile in force calls healthy; no sample where the profile has no such bound."""
    series = own("sglang_tuning_threshold", f'signal="{signal}"', f'bound="{bound}"')
    return f"max({series})"


def rate(selector: str) -> str:
    """Give a counter's rate per second over the interval that Grafana proposes."""
    return f"rate({selector}[$__rate_interval])"


# --- shapes ----------------------------------------------------------------------------------------------------------


def by_server(expr: str, of: str = "max") -> str:
    """Bring `expr` down to one sample for each server."""
    return f"{of} by ({', '.join(PLACE)}) ({expr})"


def per_rank(expr: str, *, by: Sequence[str] = (), of: str = "max") -> str:
    """Split `expr` by DP rank, with a label `rank` for legends that stays away where the server has no ranks."""
    labels = ", ".join((*by, "dp_rank"))
    return f'label_replace({of} by ({labels}) ({expr}), "rank", " on rank $1", "dp_rank", "(.+)")'


def words(value: str, *cases: tuple[str, str], otherwise: str) -> str:
    """Give `value` a label `verdict`: the words of the first case (condition, words) whose condition has a sample."""
    said = [f'label_replace({value} and on () ({condition}), "verdict", "{text}", "", "")' for condition, text in cases]
    return " or on () ".join([*said, f'label_replace({value}, "verdict", "{otherwise}", "", "")'])


def labelled(expr: str, **labels: str) -> str:
    """Add labels of a fixed value."""
    for name, value in labels.items():
        expr = f'label_replace({expr}, "{name}", "{value}", "", "")'
    return expr


def ratio(part: str, whole: str, by: str = "") -> str:
    """Divide two sums of rates; no point, and not NaN, where the whole is nothing."""
    return f"sum{by} ({part}) / (sum{by} ({whole}) > 0)"


# --- latency ---------------------------------------------------------------------------------------------------------


def buckets(metric: str, *older: str, by: str = "le") -> str:
    """Sum the rates of a native histogram's buckets, under the first of its names that this release exposes."""
    rates = (f"sum by ({by}) ({rate(native(name + '_bucket'))})" for name in (metric, *older))
    return " or on () ".join(rates)


def quantile(share: str, metric: str, *older: str) -> str:
    """Give a quantile in the histogram's unit; `>= 0` drops the NaN of a time without requests."""
    return f"histogram_quantile({share}, {buckets(metric, *older)}) >= 0"


# --- retractions -----------------------------------------------------------------------------------------------------


def retractions(window: str = "$__rate_interval", by: str = "") -> str:
    """Retractions per minute: events where the log tells them, requests thrown back where only the metrics do."""
    counters = (
        ranked("sglang_tuning_retraction_events_total"),
        ranked("sglang_tuning_retracted_requests_total"),
    )
    told = (f"sum{by and f' by ({by})'} (rate({counter}[{window}])) * 60" for counter in counters)
    return f" or on ({by}) ".join(told)


# --- prompts ---------------------------------------------------------------------------------------------------------


def prompt_tokens(source: str) -> str:
    """Prompt tokens per second that were "computed" or "cached": as counted by the server (0.5.7 on), else by the log.

    Where every TP and PP rank has its own series they tell the same tokens, so that the first speaks for all.
    """
    mode = {"computed": "prefill_compute", "cached": "prefill_cache"}[source]
    first = ('tp_rank=~"0|"', 'pp_rank=~"0|"', 'dp_rank=~"$dp_rank"')
    counted = rate(native("sglang:realtime_tokens_total", is_("mode", mode), *first))
    logged = rate(ranked("sglang_tuning_prompt_tokens_total", is_("source", source)))
    return f"(sum({counted}) or on () sum({logged}))"


# --- what limits a server --------------------------------------------------------------------------------------------


def _verdict(expr: str, diagnosis: str) -> str:
    return labelled(by_server(expr), verdict=diagnosis, severity=_SEVERITY.get(diagnosis, "warning"))


def verdict() -> str:
    """Ask for what limits each chosen server now: labels `verdict` and `severity`, one sample a server.

    The exporter tells it; who does not answer Prometheus cannot.
    """
    said = f"max by ({', '.join(PLACE)}, verdict, severity) ({own('sglang_tuning_verdict')} == 1)"
    return f"{_verdict(own('up') + ' == 0', 'exporter_down')} or on ({', '.join(PLACE)}) {said}"


def urgency() -> str:
    """Give each chosen server a figure to sort by: 4 the exporter is gone, 3 critical, 2 warning, 1 info, 0 none of these."""
    steps = [f"{by_server(own('up') + ' == 0')} + 4"]
    for place, severity in ((3, "critical"), (2, "warning"), (1, "info"), (0, "none")):
        said = own("sglang_tuning_verdict", f'severity="{severity}"')
        steps.append(f"{by_server(said + ' == 1')} * {place}")
    return f" or on ({', '.join(PLACE)}) ".join(steps)


def flagged(expr: str) -> str:
    """Turn the label `arg` into `flag`, as it is typed: schedule_policy becomes --schedule-policy."""
    expr = f'label_replace({expr}, "flag", "--$1", "arg", "(.*)")'
    for _ in range(_LONGEST_NAME):  # RE2 replaces one underscore at a time
        expr = f'label_replace({expr}, "flag", "$1-$2", "flag", "(.*)_(.*)")'
    return expr


def advice() -> str:
    """Ask for every change that is advised now, in words: a label `advice` such as `--flag: now 0.1, try 1.3`.

    Labels beside it: job, instance, diagnosis. The value is the figure to try, 1 for words.
    """
    on = f"{', '.join(PLACE)}, diagnosis, arg"
    advised, present = own("sglang_tuning_recommended_arg"), own("sglang_tuning_recommended_arg_current")
    # A figure becomes a label by being counted; multiplied by one, it stays the value too, so that rows can be ranked.
    tried = f'max by ({on}) ({advised}) * on ({on}) group_left (try) count_values by ({on}) ("try", {advised})'
    known = f'{tried} * on ({on}) group_left (now) count_values by ({on}) ("now", {present})'
    # What people should do has no argument, and is no flag to show.
    word = own("sglang_tuning_recommended_setting_info", 'arg!=""')
    setting = f"max by ({on}, value) ({word})"
    setting = f'label_replace({setting}, "try", "$1", "value", "(.*)")'
    rows = labelled(f"({known} or on ({on}) {tried} or on ({on}) {setting})", b=", ", c="try ")
    rows = f'label_replace({rows}, "a", ": now $1", "now", "(.+)")'
    rows = f'label_replace({rows}, "b", ": ", "now", "")'
    rows = f'label_join({flagged(rows)}, "advice", "", "flag", "a", "b", "c", "try")'
    return f"max by ({', '.join(PLACE)}, diagnosis, advice) ({rows})"
