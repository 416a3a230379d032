"""What a rule may ask of Prometheus, so that one missed scrape changes nothing. Pure text.

A failed scrape marks every series of its target as stale: a plain selector then finds nothing, and a pending alert starts
anew. So a gauge is asked as it was last known, an earlier value as the largest of some minutes, a count over a window that
is widened where too few scrapes came.
"""

from __future__ import annotations

import re
from functools import cache

SECONDS_IN = {"s": 1.0, "m": 60.0, "h": 3600.0}
# As long as Prometheus itself would go on with a value (its look-back), had no scrape failed.
KNOWN = "5m"
# An excuse is asked for a shorter time: what hid an alert must not hide it for minutes after it is gone.
EXCUSED = "2m"
ON = "on (job, instance)"
# The windows of a share and of a rate: long enough to mean something, and lately enough to say that it goes on. The next
# one is taken where one has fewer than two samples: scrapes two minutes apart, or missed ones.
LONG = ("10m", "20m")
LATELY = ("2m", "5m", "10m")
SHORT = ("5m", "10m")
# An event that happened longer ago is no news, even where its counter has only now been scraped.
NEWS_SECONDS = 1800
NEWS = "10m"
REMEMBERED = "6h"
# Whether something was there at all is asked over a longer time than an exporter is usually away.
WHILE = "20m"
# The longest time that a rule asks back, for whether a target was an exporter at all.
EVER = "24h"


@cache
def duration(text: str) -> float:
    """Read a duration of the table, such as `5m`, in seconds."""
    match = re.fullmatch(r"(\d+)([smh])", text)
    if match is None:
        raise ValueError(f"{text!r} is no duration such as 5m")
    return int(match[1]) * SECONDS_IN[match[2]]


def one_of(label: str, values: tuple[str, ...]) -> str:
    """Write the matcher of a label: a pattern only where there is a choice."""
    return f'{label}="{values[0]}"' if len(values) == 1 else f'{label}=~"{"|".join(values)}"'


def known(series: str, window: str = KNOWN) -> str:
    """Write a gauge as it was last known."""
    return f"last_over_time({series}[{window}])"


def before(series: str, ago: str, window: str = KNOWN) -> str:
    """Write the largest value that was known some time ago, within `window` before that."""
    return f"max_over_time({series}[{window}] offset {ago})"


def threshold(signal: str, bound: str) -> str:
    """Write a threshold in force as it was last known (a recorded series)."""
    return f'instance:sglang_tuning_threshold:last5m{{signal="{signal}", bound="{bound}"}}'


def argument(arg: str) -> str:
    """Write an argument of the server as it was last known (a recorded series)."""
    return f'instance:sglang_tuning_server_arg:last5m{{arg="{arg}"}}'


def above(limit: str) -> str:
    """Write the comparison with a figure that each server has one of."""
    return f"> {ON} group_left () {limit}"


def asked(metric: str, comparison: str = "", *, newest: bool = False, **labels: str) -> str:
    """Write the query of a template, about the server of an alert."""
    fixed = "".join(f", {name}='{value}'" for name, value in labels.items())
    series = known(f"{metric}{{job=%q, instance=%q{fixed}}}")
    return f'printf "{f"topk(1, {series})" if newest else series}{comparison}" $labels.job $labels.instance | query'


def otherwise(query: str, found: str, words: str) -> str:
    """Write what a template says where a query has found something, and else."""
    return f"{{{{ with {query} }}}}{found}{{{{ else }}}}{words}{{{{ end }}}}"


def firing(alert: str) -> str:
    """Write that an alert of the same server fired when the rules were evaluated last."""
    return f'ALERTS{{alertname="{alert}", alertstate="firing"}}'


def widened(expression: str, windows: tuple[str, ...]) -> list[str]:
    """Write an expression over the first of the windows that has samples enough; `{window}` stands for it, `{minutes}` for its length."""
    lines = [expression.replace("{window}", window).replace("{minutes}", window.rstrip("m")) for window in windows]
    return [lines[0], *("or " + line for line in lines[1:])]


def risen(counter: str, age: str, of: str) -> list[str]:
    """Write that something happened within the last minutes; the value is how often.

    Told as well: what happened while nobody scraped, and what a counter was born with, where its exporter was known before or
    says that it is fresh. Not told: what it says happened long ago, such as the events of a log read from its start. `age` is
    its gauge for that, `of` the label by which events are told apart.
    """
    last, on_event = known(counter), f"on (job, instance, {of})"
    earlier = f"last_over_time({counter}[{REMEMBERED}] offset {NEWS})"
    exporter = before(threshold("share", "upper"), NEWS)
    return [
        f"sum without ({of}) (",
        f"  (increase({counter}[{NEWS}]) > 0",
        f"  or {last} - {earlier} > 0",
        f"  or {last} > 0 unless {earlier} and {ON} {exporter}",
        f"  or {last} > 0 unless {earlier} and {on_event} {known(age)} < {NEWS_SECONDS})",
        f"  unless {on_event} {known(age)} > {NEWS_SECONDS}",
        ")",
    ]
