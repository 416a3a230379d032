"""PromQL for rules, such that one missed scrape changes nothing. Pure text.

A failed scrape marks every series of its target as stale: a plain selector then returns nothing, and a pending alert
starts again. So a gauge is queried by its last known value, an earlier value as the largest of some minutes, and a
count over a window that is widened if it has too few samples.
"""

from __future__ import annotations

import re
from functools import cache

SECONDS_IN = {"s": 1.0, "m": 60.0, "h": 3600.0}
# Prometheus' own look-back: as long as a value lasts without a failed scrape.
LOOKBACK = "5m"
# For exceptions of a rule, which must end soon after their reason has gone.
SHORT_LOOKBACK = "2m"
ON = "on (job, instance)"
# Windows of shares and rates: a long one, and a short one that shows that it continues. The next one is used if one
# has fewer than two samples, because scrapes are two minutes apart or were missed.
LONG_WINDOWS = ("10m", "20m")
RECENT_WINDOWS = ("2m", "5m", "10m")
SHORT_WINDOWS = ("5m", "10m")
# An event that happened longer ago does not notify, even if its counter was scraped only now.
OLDEST_EVENT_SECONDS = 1800
EVENT_WINDOW = "10m"
COUNTER_LOOKBACK = "6h"
# Longer than an exporter is usually down.
OUTAGE_LOOKBACK = "20m"
# The longest look-back of a rule: whether a target was an exporter at all.
LONGEST_LOOKBACK = "24h"


@cache
def duration(text: str) -> float:
    """Return a duration such as `5m` in seconds."""
    match = re.fullmatch(r"(\d+)([smh])", text)
    if match is None:
        raise ValueError(f"{text!r} is no duration such as 5m")
    return int(match[1]) * SECONDS_IN[match[2]]


def one_of(label: str, values: tuple[str, ...]) -> str:
    """Return the matcher of a label: a regular expression only for several values."""
    return f'{label}="{values[0]}"' if len(values) == 1 else f'{label}=~"{"|".join(values)}"'


def last_known(series: str, window: str = LOOKBACK) -> str:
    """Return the last known value of a gauge."""
    return f"last_over_time({series}[{window}])"


def largest_before(series: str, ago: str, window: str = LOOKBACK) -> str:
    """Return the largest value some time ago, within `window` before that."""
    return f"max_over_time({series}[{window}] offset {ago})"


def threshold(signal: str, bound: str) -> str:
    """Return the last known value of a threshold in force (a recorded series)."""
    return f'instance:sglang_tuning_threshold:last5m{{signal="{signal}", bound="{bound}"}}'


def argument(arg: str) -> str:
    """Return the last known value of a server argument (a recorded series)."""
    return f'instance:sglang_tuning_server_arg:last5m{{arg="{arg}"}}'


def above(limit: str) -> str:
    """Return the comparison with a series that has one sample for each server."""
    return f"> {ON} group_left () {limit}"


def query_in_template(metric: str, comparison: str = "", *, newest: bool = False, **labels: str) -> str:
    """Return the query of a template about the server of an alert."""
    fixed = "".join(f", {name}='{value}'" for name, value in labels.items())
    series = last_known(f"{metric}{{job=%q, instance=%q{fixed}}}")
    return f'printf "{f"topk(1, {series})" if newest else series}{comparison}" $labels.job $labels.instance | query'


def if_found(query: str, found: str, words: str) -> str:
    """Return a template: `found` if the query has a result, else `words`."""
    return f"{{{{ with {query} }}}}{found}{{{{ else }}}}{words}{{{{ end }}}}"


def firing(alert: str) -> str:
    """Return the selector for an alert of the same server that fired at the last evaluation."""
    return f'ALERTS{{alertname="{alert}", alertstate="firing"}}'


def over_windows(expression: str, windows: tuple[str, ...]) -> list[str]:
    """Return an expression over the first window that has enough samples; `{window}` and `{minutes}` are its placeholders."""
    lines = [expression.replace("{window}", window).replace("{minutes}", window.rstrip("m")) for window in windows]
    return [lines[0], *("or " + line for line in lines[1:])]


def events_increased(counter: str, age: str, of: str) -> list[str]:
    """Return an expression that holds if something happened within the last minutes; its value is how often.

    Counted as well: what happened while nobody scraped, and the first value of a new counter if its exporter was
    known before or its `age` gauge is recent. Not counted: old events, such as those of a log read from its start.
    `of` is the label of the kind of event.
    """
    last, on_event = last_known(counter), f"on (job, instance, {of})"
    earlier = f"last_over_time({counter}[{COUNTER_LOOKBACK}] offset {EVENT_WINDOW})"
    exporter = largest_before(threshold("share", "upper"), EVENT_WINDOW)
    return [
        f"sum without ({of}) (",
        f"  (increase({counter}[{EVENT_WINDOW}]) > 0",
        f"  or {last} - {earlier} > 0",
        f"  or {last} > 0 unless {earlier} and {ON} {exporter}",
        f"  or {last} > 0 unless {earlier} and {on_event} {last_known(age)} < {OLDEST_EVENT_SECONDS})",
        f"  unless {on_event} {last_known(age)} > {OLDEST_EVENT_SECONDS}",
        ")",
    ]
