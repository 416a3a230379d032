"""A stretch of a server's time, made of figures: what advice, suspects and judgements look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.events import NO_RANK
from sglang_tuning_exporter.core.facts import Facts
from sglang_tuning_exporter.core.sums import Totals, is_declared
from sglang_tuning_exporter.core.view import View

SECONDS = 200.0
BOUNDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0, 20.0, inf)


@dataclass
class Load:
    """Figures that hold all the time.

    `why` is what `share` of the time requests wait for; `more` are further totals.
    """

    running: float = 20.0
    queued: float | None = None
    usage: float = 0.5
    why: str = "no_queue"
    share: float = 1.0
    queue: str = ""  # the queue's state, where it is not that of its length
    seconds: float = SECONDS
    prompt: float = 0.0  # mean tokens, 0 where unknown
    answer: float = 0.0
    started: float = 380.0
    ran: float | None = None  # the batch, where it is not `running`
    more: Mapping[str, float] = field(default_factory=dict)

    def totals(self) -> Totals:
        """Return what a server adds up meanwhile."""
        waits = self.why != "no_queue"
        queued = self.queued if self.queued is not None else 30.0 * waits
        queue = self.queue or ("in_range" if queued else "empty")
        made = Totals({
            "lines": self.seconds / 2, "decode_lines": self.seconds / 2, "prefill_lines": self.seconds / 2,
            "serves/None": self.seconds,
            f"admission/{self.why}": self.share * self.seconds, f"queue/{queue}": self.seconds,
            f"token_usage/{'at' if self.usage >= 0.9 else 'below'}_target": self.seconds,
            "cuda_graph/replayed": self.seconds,
            f"batch/{self.ran or self.running:.0f}": self.seconds,
        })  # fmt: skip
        made["admission/no_queue"] += (1 - self.share) * self.seconds
        for name, value in (("running", self.running), ("queued", queued), ("usage", self.usage)):
            made[name], made[f"{name}:s"] = value * self.seconds, self.seconds
        if waits:
            made["waits/None"] = self.share * self.seconds
        if self.prompt:
            made["admitted_requests"] = made["sequences"] = self.started
            made["computed_tokens"], made["decoded_tokens"] = self.started * self.prompt, self.started * self.answer
        made.update(self.more)
        undeclared = [name for name in made if not is_declared(name)]
        assert not undeclared
        return made


def seen(load: Load, profile: str = "online", version: str | None = None, **arguments: Any) -> View:
    """Return the view of a load; `arguments` are as the server prints them.

    Names in capitals are sizes: POOL, LIMIT, LEFT and so on.
    """
    sizes = {name: arguments.pop(name) for name in [*arguments] if name.isupper()}
    facts = Facts(arguments={"model_path": "/models/x", **arguments}, version=version)
    if "POOL" in sizes:
        facts.pools[None] = sizes["POOL"]
    for dp, limit in enumerate(sizes.get("LIMITS", ())):
        facts.limits[dp] = limit
    if "LIMIT" in sizes:
        facts.limits[None] = sizes["LIMIT"]
    if "LEFT" in sizes:
        facts.available[None] = sizes["LEFT"]
    taken = {name: sizes[key] for key, name in (("WEIGHTS", "weights"), ("POOL_GB", "pool")) if key in sizes}
    if "GRAPHS" in sizes:
        taken["graph"] = taken["decode_graph"] = sizes["GRAPHS"]
    facts.memory[NO_RANK] = taken | ({"before": sizes["BEFORE"]} if "BEFORE" in sizes else {})
    return View(load.totals(), facts, PROFILES[profile], load.seconds)


def late(
    name: str, seconds: float, count: float = 400.0, *, share: float = 1.0, quick: float = 0.01
) -> dict[str, float]:
    """Return totals of a latency of which this share of observations takes so many seconds, the others are `quick`."""
    made = {
        f"{name}/{bound}": count * (share * (bound >= seconds) + (1 - share) * (bound >= quick)) for bound in BOUNDS
    }
    return {**made, f"{name}:s": count * (share * seconds + (1 - share) * quick)}
