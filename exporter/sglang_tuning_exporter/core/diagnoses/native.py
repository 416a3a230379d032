"""The rule of a diagnosis for servers without the exporter, and the PromQL that these rules are made of. Pure.

SGLang names its series `sglang:…`; agents that send them elsewhere write `sglang_…`. Selectors take both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Servers that are scraped as one job of one namespace of one cluster.
POOL = ("cluster", "namespace", "job")
_SERVER = ", ".join((*POOL, "instance"))
# Every rank of a scheduler reports the same; with priorities the total has none.
_RANKS = "tp_rank, pp_rank, moe_ep_rank, priority"


@dataclass(frozen=True, slots=True, kw_only=True)
class Native:
    """A rule over SGLang's own series, with the limits of the default profile. `{value}` in `seen` is the figure.

    A figure with a `limit`, such as `> 0.5`, is recorded, and must have been beyond it for five minutes. What waits in
    Prometheus's memory (`for`) begins anew when it restarts; recorded samples do not.
    """

    alert: str
    expr: str
    seen: str
    limit: str = ""
    form: str = "humanizePercentage"
    also: str = ""  # what the diagnosis's flag does not do alone

    @property
    def record(self) -> str:
        """The name of the recorded figure, such as `sglang_native:queue_wait`; empty for a rule without a limit."""
        words = re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z]+", self.alert.removeprefix("SGLang"))
        return f"sglang_native:{'_'.join(words).lower()}" if self.limit else ""

    @property
    def condition(self) -> str:
        """The expression of the alert."""
        if not self.limit:
            return self.expr
        name, nearest = self.record, "min" if self.limit.startswith(">") else "max"
        return (
            f"{name} {self.limit}\nand {nearest}_over_time({name}[5m]) {self.limit}\n"
            f"and last_over_time({name}[5m] offset 5m) {self.limit}"
        )


def series(name: str, labels: str = "") -> str:
    """Return a selector of a series of SGLang in both spellings."""
    return f'{{__name__=~"sglang[:_]{name}"{labels}}}'


def by_server(aggregation: str, vector: str) -> str:
    """Return the aggregation of a vector for each server."""
    return f"{aggregation} by ({_SERVER}) ({vector})"


def total(vector: str) -> str:
    """Return the sum over a server's schedulers; the ranks of one count once."""
    return by_server("sum", f"max without ({_RANKS}) ({vector})")


def is_so(name: str, bound: str) -> str:
    """Return 1 or 0 for each scheduler: whether its gauge is on a side of a bound, such as `> bool 0`."""
    return f"max without ({_RANKS}) ({series(name)}) {bound}"


def quantile(share: float, name: str, labels: str = "") -> str:
    """Return the time within which this share of a histogram's observations was."""
    rate = f"sum by ({_SERVER}, le) (rate({series(f'{name}_bucket', labels)}[10m]))"
    return f"histogram_quantile({share:g}, {rate})"
