"""What limits a server over a stretch of time, and what to change. A pipeline, read top down:

measure every row -> leave out what another row explains -> rank -> advise -> word. Nothing downstream measures again. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

from sglang_tuning_exporter.config.profiles import Profile
from sglang_tuning_exporter.core import suspects
from sglang_tuning_exporter.core.advice import (
    CEILING,
    advise,
    by_sglang,
    costly_settings,
    differing,
    figures_of,
    fill,
    typed_settings,
    way_of,
)
from sglang_tuning_exporter.core.endings import CAUSE, CLASSES, Explanation, quoted, shortened
from sglang_tuning_exporter.core.findings import (
    URGENCY,
    Change,
    Check,
    Confidence,
    Figure,
    Finding,
    Judgement,
    Severity,
)
from sglang_tuning_exporter.core.ledger import FAST, SLOW
from sglang_tuning_exporter.core.rows import (
    BY_ID,
    KILLS,
    OUT_OF_MEMORY,
    ROW_OF_WAIT,
    ROWS,
    STATE_WORDS,
    WHY_REQUESTS_WAIT,
    Row,
    When,
)
from sglang_tuning_exporter.core.server import BUCKET_SECONDS, WAITS, Server, Totals
from sglang_tuning_exporter.core.suspects import LATE_TIMES, SLOW_BURN_TIMES
from sglang_tuning_exporter.core.view import SHARING, SHORTEST_TIMEOUT, View, explained
from sglang_tuning_exporter.sglang.args.refusals import objection
from sglang_tuning_exporter.sglang.metrics.histograms import Histogram

NO_LIMIT, IDLE, NOT_ENOUGH, STARTING = "no_limit_in_log", "idle", "not_enough_data", "starting"
HEALTHY, UNEXPLAINED, STOPPED = "healthy", "unexplained", "stopped"
SENTENCES = {
    HEALTHY: "Nothing limits this server: requests end with their answers, and none waits longer than it should.",
    UNEXPLAINED: "Most requests are given up by their clients; the cause is not known.",
    NO_LIMIT: "Nothing limits this server as far as its log shows; whether clients got their answers is not in a log.",
    IDLE: "The server is idle: no request comes.",
    STARTING: "The server is starting.",
    STOPPED: "The server was stopped: its log says that it was asked to end.",
}
BUT_MUTED = "Nothing limits this server but what is muted."
PAST_SECONDS = 120.0  # what was not seen for so long is over
SURVIVED_SECONDS = 60.0  # of work after a failure: it did not end by it
LONG = 180.0  # seconds that are said in minutes
HIGH, MEDIUM = 120.0, 60.0  # seconds of serving time for this confidence
OFTEN_DOWN, MANY_OUTAGES = 0.1, 3  # of two hours; outages in them
LEAST_WAITED = 10.0  # seconds of waiting that show what requests wait for
RARE_WAIT = 0.1  # of the time, on the least busy DP rank
TRANSFERS_A_MINUTE, RARELY_FAILED = 0.5, 0.01  # failed ones; of the requests
LEAST_DRAFTED, DRAFT_COST, USUAL_DRAFTS = (
    0.99,
    0.014,
    3.0,
)  # tokens a step; of a pass of the model for each draft step; draft steps
FEW = 5  # requests that failed for other reasons are no finding
MANY_FAILED = 0.05  # of the requests
SMALL_MODEL_GB, SMALL_BATCH = 20.0, 32.0  # of all weights; the default of --torch-compile-max-bs
ROOM_FOR_POOL, USUAL_FRACTION, LARGE_WEIGHTS = 0.3, 0.88, 0.3  # of a GPU's memory
NO_SHARING = 0.02
SEVERAL_EACH = 1.5  # requests of the scheduler for each over HTTP
# Prompt tokens for each late gap, from which on prefill makes it.
LONG_PREFILL = 512.0
MANY_GIVEN_UP, NEARLY_ALL_GIVEN_UP = 0.333, 0.5  # of the requests that ended
LARGE_BATCH, RARELY = 32.0, 0.25  # requests; of the time
RECOMMENDS = "sglang_recommends"
MOST_QUOTED = 2  # decisions of SGLang's, in one finding
DP_ATTENTION_GPUS = 8
_MOE = re.compile(r"moe|mixtral|deepseek-?_?(?:v[23]|r1)|-a\d+(?:\.\d+)?b\b|kimi-k2|gpt-oss|grok|dbrx", re.IGNORECASE)
_LATENT = re.compile(r"deepseek-?_?(?:v[23]|r1)|kimi-k2", re.IGNORECASE)
_QUANTIZED = re.compile(
    r"fp8|fp4|awq|gptq|int[48]|w[48]a\d|bnb|gguf|marlin|quant|deepseek-?_?(?:v3|r1)|kimi-k2|gpt-oss", re.IGNORECASE
)


# What is measured


def _retractions(view: View) -> Figure | None:
    if not view.has_enough_load:
        return None
    return Figure(
        "retractions per minute of serving time",
        view.retractions_a_minute,
        "per_minute",
        view.retractions_tolerated,
        "above",
    )


def _at_ceiling(view: View) -> Figure | None:
    return _retractions(view) if (view.facts.number("schedule_conservativeness") or 0.0) > CEILING else None


def _graph_memory(view: View) -> Figure | None:
    failed, reserve = view.totals["out_of_memory.graph_capture"], view.facts.reserve_gb
    if failed or reserve is None or view.facts.without_graph:
        return Figure("out-of-memory failures in graph capture", failed, "count", 0.0, "above")
    return Figure("available_gpu_mem after graph capture", reserve, "GB", view.profile.reserve_least_gb, "below")


def _hang(view: View) -> Figure | None:
    if view.stuck is not None:
        return Figure(
            "seconds in which requests were there and nothing moved", view.stuck.seconds, "seconds", 0.0, "above"
        )
    longest = max((hang.seconds for hang in view.hangs), default=0.0) if view.totals["hangs"] else 0.0
    if view.totals["watchdogs"] and not longest:
        return Figure("watchdog timeouts", view.totals["watchdogs"], "count", 0.0, "above")
    longest = max(longest, view.silent_seconds if view.totals["health_failures"] else 0.0)
    return Figure("longest time in which requests were there and nothing moved", longest, "seconds", 0.0, "above")


def _prefill(view: View) -> Figure | None:
    """Requests wait while prompts are computed. Where throughput counts, an empty queue beside them is no sign of slow clients."""
    if not view.has_enough_load:
        return None
    value, waits = view.share("admission", "prefill_bound") or 0.0, _waited_share(view) > view.profile.frequent_share
    if view.profile.queue_lower is not None or waits:
        value = max(value, view.full_steps)
        if not waits or view.facts.is_on("disable_radix_cache"):  # else what they wait for is known better
            value = max(value, view.prefill_share)
    return Figure("serving time in which prompts were computed", value, "share", view.profile.frequent_share, "above")


def _imbalance(view: View) -> Figure | None:
    waited = view.waited()
    if len(waited) < 2 or min(waited.values()) >= RARE_WAIT:
        return None
    return Figure(
        "time in which requests waited on the busiest DP rank",
        max(waited.values()),
        "share",
        view.profile.frequent_share,
        "above",
    )


def _waited_share(view: View) -> float:
    empty = view.share("queue", "empty")
    return 0.0 if empty is None else 1.0 - empty


def _unexplained(view: View) -> Figure | None:
    """Requests wait most of the time, and longer than the profile allows; priorities let some wait by design."""
    if not view.has_enough_load or view.facts.is_on("enable_priority_scheduling"):
        return None
    healthy = ("empty", "in_range") if view.profile.queue_lower is None else ("empty", "in_range", "below_range")
    waited = 1.0 - (view.share("queue", *healthy) or 0.0)
    if view.profile.queue_lower is not None:  # the guide's range is about a full cache
        waited = max(waited, view.share("admission", "held_back", "unknown") or 0.0)
    return Figure("serving time in which requests waited", waited, "share", view.profile.frequent_share, "above")


def _failed(view: View) -> Figure | None:
    posts = view.totals["generation_posts"]
    failed = view.totals["server_errors"] + (view.totals["failed_requests"] if posts else 0.0)
    failed = failed if failed >= FEW else 0.0
    asked = posts or view.totals["sequences"] + failed
    return (
        Figure("share of the requests that ended in an exception", failed / asked, "share", MANY_FAILED, "above")
        if failed
        else None
    )


def _refused(view: View) -> Figure | None:
    refused = view.totals["refused"] if view.totals["refused"] >= FEW else 0.0
    asked = max(view.totals["sequences"], refused)
    return (
        Figure("share of the requests that were refused", refused / asked, "share", MANY_FAILED, "above")
        if refused
        else None
    )


def _transfers(view: View) -> Figure | None:
    """Requests that failed between the two servers of a pair, by the minute."""
    totals, failed = view.totals, view.failed_transfers
    if not failed and not view.facts.role:
        return None
    requests = max(totals["finished_requests"], totals["started"], failed)
    value = view.per_minute(failed)
    value = value if failed > RARELY_FAILED * requests else min(value, TRANSFERS_A_MINUTE)
    name = "requests per minute of serving time that failed between prefill and decode server"
    return Figure(name, value, "per_minute", TRANSFERS_A_MINUTE, "above")


def _speculation(view: View) -> Figure | None:
    """Tokens of a verified step, below what the drafts cost at least: even the smallest draft takes a part of a pass for each draft step."""
    steps, lines = view.facts.size("speculative_num_steps") or USUAL_DRAFTS, view.totals["accepted:n"]
    if not view.has_enough_load or lines < view.profile.enough_observations:
        return None
    length = view.totals["accepted"] / lines
    if length < LEAST_DRAFTED:
        return None  # another figure than the mean with the token that needs no draft
    return Figure(
        "tokens a verified step gives; 1 without speculation", length, "ratio", 1.0 + DRAFT_COST * steps, "below"
    )


def _hicache(view: View) -> Figure | None:
    if view.hicache is None:
        return None
    stays = view.hicache.word == "kernel"  # it was printed once, and holds until the next start
    return Figure(
        "lines about what HiCache could not do", view.totals["hicache"] or float(stays), "count", 0.0, "above"
    )


def _costly_settings(view: View) -> Figure | None:
    """Settings of a start that slow every load down, until there is a load to judge by."""
    if view.has_enough_load or not view.facts.arguments or view.facts.is_cpu:
        return None
    return Figure(
        "settings of the start that slow every request down", float(len(costly_settings(view))), "count", 0.0, "above"
    )


def _sharing(view: View) -> float | None:
    """Return the cached share of prompt tokens, without what retracted requests and further answers find of their own."""
    if not view.has_enough_load or _waited_share(view) <= view.profile.frequent_share or view.cached_share is None:
        return None
    totals, cached = view.totals, view.cached_share
    own = totals["repeated"] / totals["cached"] if totals["cached"] else 0.0
    came_back = totals["retracted"] * (view.prompt or 0.0) / max(totals["computed"] + totals["cached"], 1.0)
    if view.facts.is_on("enable_priority_scheduling"):
        return None  # preempted requests find their own prompts, and nothing counts them
    if totals["generation_posts"] and totals["started"] > SEVERAL_EACH * totals["generation_posts"]:
        return None  # several answers to one prompt find it cached
    return max(cached * (1.0 - (1.0 if own > 0.5 else own)) - came_back, 0.0)


def _shared_prefixes(view: View) -> Figure | None:
    shared = _sharing(view)
    if (
        view.facts.arguments.get("schedule_policy") != "fcfs"
        or shared is None
        or (view.cached_share or 0.0) >= SHARING[1]
    ):
        return None
    return Figure("share of prompt tokens from the prefix cache", shared, "share", SHARING[0], "above")


def _no_prefixes(view: View) -> Figure | None:
    if view.facts.arguments.get("schedule_policy") not in ("lpm", "dfs-weight") or _sharing(view) is None:
        return None
    return Figure(
        "share of prompt tokens from the prefix cache", view.cached_share or 0.0, "share", NO_SHARING, "below"
    )


def _fits_one_gpu(view: View) -> Figure | None:
    facts, weights, capacity = view.facts, view.facts.weights_gb, view.facts.capacity_gb
    shards = facts.number("tp_size") or 1.0
    if shards <= 1 or facts.pipeline_stages > 1 or facts.is_cpu or weights is None or not capacity:
        return None
    spread = (
        facts.number("dp_size"),
        facts.number("ep_size"),
        facts.number("moe_dense_tp_size"),
        float(facts.attention_ranks),
    )
    if any((each or 1.0) > 1 for each in spread) or facts.is_on("enable_ep_moe"):
        return None
    model, usage = weights * facts.shards, view.mean("usage")
    if usage is not None and facts.pools_gb:
        left = 1.0 - (model - weights) / facts.pools_gb
        if usage > view.profile.token_usage_target * left:
            return None
    return Figure("weights of the whole model", model, "GB", (USUAL_FRACTION - ROOM_FOR_POOL) * capacity, "below")


def _replicas(view: View) -> Figure | None:
    facts = view.facts
    replicas = facts.number("dp_size")
    if facts.is_cpu or facts.is_on("enable_dp_attention") or facts.attention_ranks > 1 or replicas is None:
        return None
    return Figure("replicas in one server", replicas, "count", 1.0, "above")


def _small_batches(view: View) -> Figure | None:
    facts, batch, weights = view.facts, view.batch(), view.facts.weights_gb
    if facts.is_cpu or facts.without_graph or facts.number("enable_torch_compile") != 0 or not view.has_enough_load:
        return None
    if (
        batch is None
        or weights is None
        or weights * facts.shards >= SMALL_MODEL_GB
        or (facts.is_first_edition and facts.word("quantization"))
    ):
        return None
    return Figure("requests running together, 99 % of the time", batch, "count", SMALL_BATCH + 1, "below")


def _is_short(view: View) -> bool:
    full = (view.share("admission", "pool_full") or 0.0) > view.profile.frequent_share
    return view.has_enough_load and (full or view.retractions_a_minute > view.retractions_tolerated)


def _large_weights(view: View) -> Figure | None:
    facts, weights, capacity = view.facts, view.facts.weights_gb, view.facts.capacity_gb
    if facts.is_cpu or facts.arguments.get("quantization", "?") is not None or _QUANTIZED.search(facts.model):
        return None
    if weights is None or not capacity or not _is_short(view):
        return None
    return Figure(
        "share of a GPU's memory taken by its part of the weights", weights / capacity, "share", LARGE_WEIGHTS, "above"
    )


def _experts(view: View) -> Figure | None:
    facts = view.facts
    if facts.is_cpu or not _MOE.search(facts.model) or "tp_size" not in facts.arguments:
        return None
    if (facts.number("ep_size") or 1.0) > 1 or facts.is_on("enable_ep_moe") or facts.is_on("enable_deepep_moe"):
        return None
    return Figure("GPUs that share every expert", facts.number("tp_size") or 1.0, "count", 1.0, "above")


def _latent_pool_full(view: View) -> Figure | None:
    facts = view.facts
    if facts.is_cpu or not _LATENT.search(facts.model) or (facts.number("tp_size") or 1.0) < DP_ATTENTION_GPUS:
        return None
    full = view.share("admission", "pool_full")
    if facts.is_on("enable_dp_attention") or facts.attention_ranks > 1 or not view.has_enough_load or full is None:
        return None
    return Figure("serving time with a full KV cache", full, "share", view.profile.frequent_share, "above")


def _settings(view: View) -> Figure | None:
    if not view.facts.knows_arguments or not view.has_enough_load:
        return None
    return Figure(
        "settings other than the guide's for this workload", float(len(differing(view))), "count", 0.0, "above"
    )


def _suspects(view: View) -> Figure | None:
    named = suspects.likely(view)
    return (
        None
        if named is None
        else Figure(
            "flags that differ from SGLang's defaults and can cause this", float(len(named)), "count", 0.0, "above"
        )
    )


def _recommended(view: View) -> Figure | None:
    """What SGLang itself recommends in the lines of its start, for a flag that this release has."""
    count = len(view.facts.recommended())
    return (
        Figure("recommendations of SGLang's own at its start", float(count), "count", 0.0, "above") if count else None
    )


# What only the server's own metrics show


def _down(view: View) -> Figure | None:
    if not view.down and not view.scraped:
        return None
    return Figure("scrapes without an answer", 1.0 if view.down else 0.0, "count", 0.0, "above")


def _trouble(name: str) -> Callable[[View], Figure | None]:
    def of(view: View) -> Figure:
        return Figure("trouble with a source", float(name in view.troubles), "count", 0.0, "above")

    return of


def _late(
    view: View, latency: str, objective: float | None, budgets: float, because: Callable[[Histogram], bool]
) -> Figure | None:
    """Return the share of observations above the objective; at its limit at most where something else is the reason."""
    seen = view.latency(latency)
    if objective is None or seen is None or not view.has_enough_load or view.hung:
        return None
    if seen.observations < view.profile.enough_observations:
        return None
    share, limit = seen.above(objective) / seen.observations, view.profile.late_bound(budgets)
    name = f"share of {latency.replace('_', ' ')} observations above {objective:g} s"
    return Figure(name, share if share <= limit or because(seen) else limit, "share", limit, "above")


def _is_waiting(view: View, first_tokens: Histogram) -> bool:
    """Whether requests wait most of the time, or spend most of the time to their first token in the queue."""
    wait, mean = view.wait, first_tokens.mean_seconds
    share = view.profile.frequent_share
    return _waited_share(view) > share or (wait is not None and mean is not None and wait > share * mean)


def _late_by_queue(view: View) -> Figure | None:
    objective = view.profile.time_to_first_token_seconds
    return _late(view, "time_to_first_token", objective, LATE_TIMES, lambda seen: _is_waiting(view, seen))


def _late_by_prompts(view: View) -> Figure | None:
    objective = view.profile.time_to_first_token_seconds

    def because(seen: Histogram) -> bool:
        tokens, late = view.totals["computed"], seen.above(objective or 0.0)
        return not _is_waiting(view, seen) and (not tokens or tokens >= LONG_PREFILL * late)

    return _late(view, "time_to_first_token", objective, LATE_TIMES, because)


def _late_between(view: View) -> Figure | None:
    objective = view.profile.inter_token_seconds

    def because(seen: Histogram) -> bool:
        late, steps = seen.above(objective or 0.0) / seen.observations, view.steps
        usual = seen.quantile(0.25) or 0.0
        return (
            bool(late and steps)
            and view.totals["computed"] / (late * steps) >= LONG_PREFILL
            and usual <= (objective or 0.0)
        )

    return _late(view, "inter_token", objective, SLOW_BURN_TIMES, because)


def _given_up(view: View) -> Figure | None:
    share = view.given_up_share
    if share is None or not view.has_enough_load or view.totals["finished_requests"] < view.profile.enough_observations:
        return None
    if view.hung:  # then clients have a reason
        share = 0.0
    limit = view.profile.aborted_share if "aborted_share" in view.profile.overridden else MANY_GIVEN_UP
    return Figure("share of the ended requests that were given up", share, "share", limit, "above")


def _timeouts(view: View) -> Figure | None:
    figure, ages = _given_up(view), view.given_up_ages
    if figure is None:
        return None
    is_timeout = ages is not None and ages[1] >= SHORTEST_TIMEOUT and not view.cancels
    return figure if is_timeout else replace(figure, value=min(figure.value, figure.limit or 0.0))


def _step_of_a_large_batch(view: View) -> float | None:
    """Return the seconds between two tokens, where decoding alone takes them: the batch is large and prompts take little of the time."""
    batch = view.batch(0.5)
    if (
        not view.has_enough_load
        or batch is None
        or batch < LARGE_BATCH
        or view.totals["prefilling"] > RARELY * view.known["queue"]
    ):
        return None
    return view.step_seconds


def _burning(latency: str, rate: str) -> Callable[[View], Figure | None]:
    times = {"fast": FAST, "slow": SLOW}[rate].times
    name = "share of the observations that missed the objective, in both windows"

    def of(view: View) -> Figure | None:
        share = view.burning.get((latency, rate))
        return (
            None
            if share is None
            else Figure(name, 0.0 if view.hung else share, "share", view.profile.late_bound(times), "above")
        )

    return of


def _often_down(view: View) -> Figure | None:
    if view.down_share is None:
        return None
    often = view.outages >= MANY_OUTAGES
    return Figure(
        "share of the last two hours in which it was down",
        view.down_share if often else 0.0,
        "share",
        OFTEN_DOWN,
        "above",
    )


FACTS: dict[str, Callable[[View], Figure | None]] = {
    "retractions": _retractions, "retractions_at_ceiling": _at_ceiling, "graph_memory": _graph_memory, "hang": _hang,
    "prefill": _prefill, "imbalance": _imbalance, "transfers": _transfers, "speculation": _speculation, "hicache": _hicache,
    "costly_settings": _costly_settings, "not_sglang": _trouble("not_sglang"),
    "unexplained": _unexplained, "requests_failed": _failed, "requests_refused": _refused, "shared_prefixes": _shared_prefixes,
    "no_prefixes": _no_prefixes, "fits_one_gpu": _fits_one_gpu, "replicas": _replicas, "small_batches": _small_batches,
    "recommended": _recommended,
    "down": _down, "timeouts": _timeouts, "given_up": _given_up, "late_by_queue": _late_by_queue, "late_by_prompts": _late_by_prompts,
    "late_between": _late_between, "metrics_disabled": _trouble("metrics_disabled"), "log_silent": _trouble("log_silent"),
    "disagree": _trouble("sources_disagree"),
    "often_down": _often_down,
    **{f"burning_{latency}_{rate}": _burning(latency, rate) for latency in ("time_to_first_token", "inter_token") for rate in ("fast", "slow")},
    "large_weights": _large_weights, "experts": _experts, "latent_pool_full": _latent_pool_full, "settings": _settings, "suspects": _suspects,
}  # fmt: skip
LEVELS: dict[str, Callable[[View], float | None]] = {
    "reserve": lambda view: view.facts.reserve_gb,
    "step_seconds": _step_of_a_large_batch,
    "starts": lambda view: view.totals["starts_recently"],
}


def _is_enough(row: Row, view: View) -> bool:
    """Whether so much was seen that a row can be judged; where a flag switches graphs off, a few batches are enough."""
    if row.any_load or view.has_enough_load:
        return True
    off = row.id == "cuda_graph_off" and view.facts.without_graph == "disabled" and view.facts.knows_arguments
    return off and view.served > 0 and view.totals["lines"] >= view.profile.enough_observations


def measure(row: Row, view: View) -> Figure | None:  # noqa: PLR0911 - one for each kind of condition
    """Return the figure that decides a row; None where the log does not show it, or too little was seen."""
    when = row.when
    limit = getattr(view.profile, when.limit) if isinstance(when.limit, str) else when.limit
    if row.profiles and view.profile.name not in row.profiles:
        return None
    if when.kind == "fact":
        return FACTS[when.figure](view)
    if when.kind == "event":
        return _figure(when, sum(view.totals[name] for name in when.states), limit)
    if when.kind == "level":
        return _figure(when, LEVELS[when.figure](view), limit)
    if not _is_enough(row, view):
        return None
    if when.kind == "rate":
        return _figure(when, view.per_minute(view.totals[when.figure]), limit)
    if when.figure == "admission" and when.states[0] in WAITS:
        limit = view.reason_limit
    return _figure(when, view.share(when.figure, *when.states), limit)


def _figure(when: When, value: float | None, limit: float | None) -> Figure | None:
    return None if value is None or limit is None else Figure(when.name, value, when.unit, limit, when.side)


# The pipeline


@dataclass(frozen=True, slots=True)
class Measured:
    """Every row that holds over a view, causes first, without those that another one explains."""

    view: View
    figures: Mapping[str, Figure]  # of all rows that were measured
    holding: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """The diagnosis that limits the server, or the word for why there is none."""
        limits = [row for row in self.holding if is_limit(row, self)]
        if limits:
            return min(limits, key=self.place)
        view = self.view
        if view.starting:
            return STARTING
        if view.stopped:
            return STOPPED
        if view.has_enough_load:
            if not view.scraped:
                return NO_LIMIT
            return HEALTHY if is_served(view) else NOT_ENOUGH if view.hung else UNEXPLAINED
        idle = view.idle > 0 and view.idle >= view.served and not view.busy
        return IDLE if idle and view.served < view.profile.enough_serving_seconds else NOT_ENOUGH

    def causes(self, row: Row) -> tuple[str, ...]:
        """Return the rows that this one can follow from, here: no failure ends a server that nothing shows, or that it survived."""
        if row.id not in DEATHS:
            return row.causes
        return tuple(each for each in row.causes if not (each in KILLS and self._is_harmless(each, row)))

    def place(self, row: str) -> tuple[bool, int, int]:
        """Return what rows are ranked by: a server that is down has its end first, beside what is not known to have ended it."""
        death = "server_down" if "server_down" in self.holding else "crashed" if self.view.has_ended else ""
        unproven = death in self.holding and row in KILLS and row not in self.causes(BY_ID[death])
        return unproven, -URGENCY[BY_ID[row].severity], _ORDER[row]

    def _is_harmless(self, failure: str, death: Row) -> bool:
        """Whether a failure is only feared, or the server served for a minute between it and its end."""
        if failure == "graph_memory_short" and not self.view.totals["out_of_memory.graph_capture"]:
            return True
        if death.id not in {"crashed", "server_down"}:
            return False
        last = self.view.last
        failed = max((last.get(name, -inf) for name in _SIGNS[failure]), default=-inf)
        worked = last.get("work before the end" if death.id == "crashed" else "work", -inf)
        begun = last.get("starts", -inf)
        return failed > -inf and worked - (begun if failed < begun <= worked else failed) >= SURVIVED_SECONDS


def is_served(view: View) -> bool:
    """Whether clients get their answers: requests end without being given up, or tokens are delivered while requests run."""
    share = view.given_up_share
    if view.silent_seconds or (share is not None and share > NEARLY_ALL_GIVEN_UP and not view.cancels):
        return False
    counted = "finished_requests" in view.totals
    return (
        view.totals["finished_requests"] > view.totals["aborted_requests"] or view.totals["decoded"] > 0 or not counted
    )


_ORDER = {row.id: place for place, row in enumerate(ROWS)}
DEATHS = frozenset({"crashed", "server_down", "often_down", "restart_loop"})
_SIGNS: Mapping[str, tuple[str, ...]] = {
    **{row: BY_ID[row].when.states for row in KILLS},
    "graph_memory_short": ("out_of_memory.graph_capture",),
    "scheduler_stuck": ("hangs", "watchdogs", "health_failures"),
}


def weigh(view: View) -> Measured:
    """Measure every row and leave out what another one explains: all that the passing of time needs."""
    view = suspects.explained(explained(view))
    figures = {row.id: figure for row in ROWS if _is_enough(row, view) and (figure := measure(row, view)) is not None}
    holds = {name for name, figure in figures.items() if figure.holds}
    if view.explanation is not None and view.explanation.denies_memory and "crashed" in holds:
        holds -= {*OUT_OF_MEMORY} - {"graph_memory_short"}
    if view.stopped:  # it was asked to end: everything is over
        return Measured(view, figures, ())
    left = tuple(
        row.id
        for row in ROWS
        if row.id in holds - view.profile.accepts and holds.isdisjoint(row.unless) and not _is_excused(row, view, holds)
    )
    measured = Measured(view, figures, left)
    return (
        measured
        if _is_worth_saying(measured)
        else replace(measured, holding=tuple(each for each in left if each != RECOMMENDS))
    )


def _is_worth_saying(measured: Measured) -> bool:
    """Whether what SGLang recommends at its start matters: under a load that nothing limits, it does not."""
    view, others = measured.view, [each for each in measured.holding if each != RECOMMENDS]
    if not view.has_enough_load or len(others) == len(measured.holding):
        return True
    return any(
        is_limit(each, measured) or (BY_ID[each].remedy.arg and view.facts.recommended(BY_ID[each].remedy.arg))
        for each in others
    )


def _is_excused(row: Row, view: View, holds: set[str]) -> bool:
    """Whether the best advice is to change nothing, or what holds is what the profile calls good."""
    if row.id == "client_too_slow":
        return (view.share("token_usage", "at_target") or 0.0) > view.profile.frequent_share
    if row.id == "running_far_below_limit" and "shared_prefixes_unused" in holds:
        return True  # in another order the same cache holds more
    return row.id == "dp_imbalanced" and "retracting_too_often" in holds


def is_limit(name: str, measured: Measured) -> bool:
    """Whether a finding can be the verdict: a full KV cache only where its queue is not what the profile calls good."""
    row, view = BY_ID[name], measured.view
    waits = _waited_share(view) > view.profile.frequent_share
    if name == "flags_away_from_defaults":  # a flag that figures show to be the cause
        return waits and any(rows for _, rows in suspects.named(view))
    if name == "shared_prefixes_unused":  # prefixes are computed again and again because the cache loses them
        fine = (view.share("queue", "in_range") or 0.0) > view.profile.frequent_share
        return waits and not fine and (view.share("admission", "pool_full") or 0.0) > view.profile.frequent_share
    if row.chance:
        return False
    if name == "running_far_below_limit":
        named = bool(suspects.explaining("running_far_below_limit", view))
        below = (view.share("queue", "below_range") or 0.0) > view.profile.frequent_share
        elsewhere = (
            view.totals["elsewhere"] > view.profile.frequent_share * view.known["queue"]
        )  # of the other side of a pair
        unknown = view.known["queue"] == 0  # how long they wait is not in a log of decode lines alone
        retracts = view.totals["retractions"] > 1 and view.profile.queue_lower is None
        return named or elsewhere or unknown or retracts or (below and view.profile.queue_lower is not None)
    return True


def judge(view: View) -> Judgement:
    """Return the findings of one stretch, and what limits the server in it."""
    measured = weigh(view)
    return judgement_of(measured, findings(measured))


def judgement_of(measured: Measured, found: tuple[Finding, ...]) -> Judgement:
    """Return the judgement with these findings."""
    return Judgement(
        *_verdict(measured, found), found, _checks(measured), muted(measured.view.profile, measured.figures)
    )


def muted(profile: Profile, figures: Mapping[str, Figure]) -> tuple[str, ...]:
    """Say what the user accepts and why, and whether it is so."""
    return tuple(
        f"Muted: {BY_ID[name].summary} Why: {reason}."
        + (" It is so now." if name in figures and figures[name].holds else "")
        for name, reason in profile.accepted
    )


def _verdict(measured: Measured, found: tuple[Finding, ...]) -> tuple[str, str, Severity | Literal["none"]]:
    first = next((each for each in found if each.is_limit), None)
    if first is not None:
        return first.diagnosis, first.headline, first.severity
    verdict = replace(measured, holding=()).verdict
    if verdict in {HEALTHY, NO_LIMIT} and any(
        measured.figures[name].holds for name in measured.view.profile.accepts & measured.figures.keys()
    ):
        return verdict, BUT_MUTED, "none"
    view = measured.view
    mostly = f"The server was idle most of the time: requests ran for {view.served:.0f} s."
    sentence = mostly if verdict == IDLE and view.served >= 1 and not view.scraped else SENTENCES.get(verdict)
    return verdict, said_at_once(verdict, found) or sentence or short_load(view), "none"


def said_at_once(verdict: str, found: tuple[Finding, ...]) -> str:
    """Return the fact that heads what is said of too little load; empty where there is none."""
    facts = (each.headline for each in found if BY_ID[each.diagnosis].at_once)
    return next(facts, "") if verdict == NOT_ENOUGH else ""


def short_load(view: View) -> str:
    """Say what a load too short for a verdict showed."""
    queued, usage = view.totals["most_queued"], view.totals["most_usage"]
    if view.silent_seconds:
        return f"Requests run, and no token has been sent for {view.silent_seconds:.0f} s."
    if not view.served and view.scraped:
        return "There was no load in the last ten minutes."
    if not view.totals["decode_lines"] and not view.totals["prefill_lines"]:
        words = "There is no batch line in this log"
    elif not view.served and not view.now:
        words = "Its batches have no time, so their load cannot be judged"
    else:
        served = f"{view.served:.0f} s" if view.served >= 1 else "less than 1 s"
        words = f"The load of {served} was too short for a verdict"
        if queued:
            longest = view.wait
            words += f": {f'mean wait {longest:.1f} s, ' if longest else ''}queue up to {queued:,.0f}"
        if usage >= view.profile.token_usage_target:
            words += f"{', ' if queued else ': '}the KV cache up to {100 * usage:.0f} % full"
    if retracted := view.totals["retractions"]:
        words += ", and SGLang retracted running requests " + (f"{retracted:,.0f} times" if retracted > 1 else "once")
    return words + "."


def _checks(measured: Measured) -> tuple[Check, ...]:
    profile = measured.view.profile.name
    return tuple(
        Check(row.id, measured.figures.get(row.id), row.when.needs)
        for row in ROWS
        if not row.profiles or profile in row.profiles
    )


def findings(measured: Measured, also: frozenset[str] = frozenset()) -> tuple[Finding, ...]:
    """Advise and word what holds: causes first, chances last, no flag set two ways. `also` held at other times, and protects as well."""
    holding = frozenset(measured.holding) | also
    ordered = sorted(
        measured.holding,
        key=lambda name: (
            BY_ID[name].chance,
            not is_limit(name, measured),
            measured.place(name),
        ),
    )
    changes: dict[str, tuple[Change, ...]] = {}
    advised: dict[str, object] = {}
    found: list[Finding] = []
    for name in sorted(ordered, key=lambda each: (BY_ID[each].chance, _ORDER[each])):
        changes[name] = _changes(BY_ID[name], measured, holding, changes, advised)
    for name in ordered:
        row = BY_ID[name]
        if not changes[name] and row.needs_advice:
            continue
        because = tuple(
            each
            for each in measured.causes(row)
            if changes.get(each) or (each in changes and not BY_ID[each].needs_advice)
        )
        found.append(_worded(row, measured, changes[name], because))
    return tuple(found)


def _changes(
    row: Row,
    measured: Measured,
    holding: frozenset[str],
    earlier: Mapping[str, tuple[Change, ...]],
    advised: dict[str, object],
) -> tuple[Change, ...]:
    """Return the changes of a row: of its causes where it borrows, else its own, without what others set or protect."""
    view = measured.view
    if row.id == "server_down":  # a flag that ended it comes before the restart
        named = (tuple(change for change in earlier.get(cause, ()) if change.flag) for cause in measured.causes(row))
        return (*next(filter(None, named), ()), *_own(row, measured, holding, advised))
    if row.borrows:
        given = [(cause, earlier[cause]) for cause in row.causes if earlier.get(cause) and not BY_ID[cause].chance]
        flagged = [
            (cause, each) for cause, changes in given if (each := tuple(change for change in changes if change.flag))
        ]
        cause, taken = next(iter(flagged or given), ("", ()))
        if taken:  # where memory is short, fewer requests help as well
            return (*taken, *_own(row, measured, holding, advised)) if cause == "running_far_below_limit" else taken
        waits = cause_of_waits(view)
        if waits is not None and waits not in holding:
            own = tuple(change for change in _own(BY_ID[waits], measured, holding, advised) if change.flag)
            if own:
                return own
    return _own(row, measured, holding, advised)


def cause_of_waits(view: View) -> str | None:
    """Return the row of the reason that held for most of the time in which requests waited; None where there is none."""
    waited = view.known["admission"] - view.totals["admission/no_queue"]
    if waited < LEAST_WAITED:
        return None
    shares = {wait: view.waiting_share(wait) or 0.0 for wait in WAITS}
    most = max(shares, key=shares.__getitem__)
    return ROW_OF_WAIT.get(most) if shares[most] > view.profile.frequent_share else None


def _own(row: Row, measured: Measured, holding: frozenset[str], advised: dict[str, object]) -> tuple[Change, ...]:
    view = measured.view
    proven = suspects.explaining(row.id, view)
    instead = any(change.arg in suspects.INSTEAD for change in proven)  # while it is set, nothing else helps
    offered = proven if instead else [*proven, *advise(row, view, holding)]
    if not row.any_load:
        offered = _after_sglang(row, view, offered)
    if row.id == "flags_away_from_defaults":
        offered = suspects.likely(view) or []
    kept: list[Change] = []
    for change in offered:
        if change.arg and any(each.arg == change.arg for each in kept):
            continue
        is_said_again = row.borrows or change.arg == row.remedy.arg  # by a finding whose own flag it is
        if change.arg and change.arg in advised and not (is_said_again and advised[change.arg] == change.to):
            continue
        if change.arg and (_is_protected(change, holding, row) or not _is_accepted_beside(change, advised, view)):
            continue
        kept.append(change)
    if offered and not kept and not row.needs_advice:
        kept = [Change("", "", None, None, _LATER)]
    if not row.chance:
        advised.update(
            {change.arg: change.to for change in kept if change.arg and (change.to is not None or change.removes)}
        )
    return tuple(kept)


def _after_sglang(row: Row, view: View, offered: list[Change]) -> list[Change]:
    """Put what SGLang itself recommends in its start about a row's flag before the row's own change, and leave out what it contradicts.

    Where it recommends the same, ours stands: it has a value.
    """
    arg, ways = row.remedy.arg, {change.direction for change in offered if change.arg == row.remedy.arg}
    about = [said for said in view.facts.recommended(arg) if arg and way_of(said, arg) not in ways]
    says = [change for said in about for change in by_sglang(row, view, said)]
    against = {
        (each.arg, _OTHER_WAY.get(each.direction))
        for said in view.facts.recommended()
        for each in by_sglang(row, view, said)
    }
    own = [change for change in offered if (change.arg, change.direction) not in against]
    return [*says, *(change for change in own if not says or change.arg != arg)]


_OTHER_WAY = {"raise": "lower", "lower": "raise", "add": "drop", "drop": "add"}


def _is_accepted_beside(change: Change, advised: Mapping[str, object], view: View) -> bool:
    release = view.facts.release
    if release is None or (change.to is None and not change.removes):
        return True
    return objection(release, typed_settings(view), {**advised, change.arg: change.to}) is None


_LATER = "change nothing for it yet: what another finding asks for comes first"
# What a change takes: memory, or room for more requests.
_TAKES: dict[str, tuple[str, str]] = {
    "mem_fraction_static": ("raise", "memory"), "max_total_tokens": ("raise", "memory"), "chunked_prefill_size": ("raise", "memory"),
    "max_prefill_tokens": ("raise", "memory"), "cuda_graph_max_bs": ("raise", "memory"), "cuda_graph_max_bs_decode": ("raise", "memory"),
    "disable_cuda_graph": ("drop", "memory"), "disable_decode_cuda_graph": ("drop", "memory"), "enable_torch_compile": ("add", "memory"),
    "max_running_requests": ("raise", "requests"), "schedule_conservativeness": ("lower", "requests"),
}  # fmt: skip


def _is_protected(change: Change, holding: frozenset[str], row: Row) -> bool:
    """Whether a finding forbids the change: after an out-of-memory failure nothing takes memory, while requests are retracted none are added."""
    direction, takes = _TAKES.get(change.arg, ("", ""))
    if change.direction != direction:
        return False
    return any(BY_ID[name].protects == takes for name in holding if name != row.id)


# Words


def confidence_of(view: View) -> Confidence:
    """Return the confidence in a judgement over so much serving time."""
    return "high" if view.served >= HIGH else "medium" if view.served >= MEDIUM else "low"


def amount(figure: Figure) -> str:
    """Return a figure's value in words."""
    value = figure.value
    if figure.unit == "share":
        return f"{100 * value:.0f} %"
    if figure.unit == "GB":
        return f"{value:.4g} GB"
    if figure.unit == "seconds":
        return f"{value:.3g} s" if value < LONG else f"{value / 60:.0f} min"
    if figure.unit == "ratio":
        return f"{value:.2f}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}".removesuffix(".0")


def _worded(row: Row, measured: Measured, changes: tuple[Change, ...], because: tuple[str, ...]) -> Finding:
    view, figure = measured.view, measured.figures[row.id]
    figures = figures_of(view)
    explained_by = explanation_of(row.id, measured)
    said = {"crashed": _how(view.ended), "server_down": view.down, **view.troubles}.get(row.id) or _said(row, view)
    value = said or amount(figure)
    seen = row.seen if row.id != "scheduler_stuck" or figure.unit == "seconds" else "{value} " + figure.name
    sentence = (
        fill(seen, figures).replace("{value}", value).replace("{s}", "" if value in {"1", "at least one"} else "s")
    )
    if row.id == "scheduler_stuck" and view.stuck is not None:
        sentence = view.stuck.sentence
    if row.id == "crashed" and explained_by is not None and explained_by.ending != "unknown":
        sentence = f"{CLASSES[explained_by.ending].what}{f' ({explained_by.where})' if explained_by.where else ''}"
    confidence = confidence_of(view)
    notes = list(_notes(row, view))
    if row.id == "admission_too_conservative" and view.facts.may_reserve_in_full:
        confidence = "low"
        notes.append(
            "It does nothing where requests set ignore_eos, which this release reserves in full: then more memory is the cure."
            if view.facts.release else
            "It does nothing where requests set ignore_eos and the release reserves those in full (0.5.22 on): then more memory is the cure."
        )  # fmt: skip
    if row.any_load and not row.chance:
        confidence = "high"
    contradicts = any(
        change.arg == row.remedy.arg and {change.direction, row.remedy.direction} == {"raise", "lower"}
        for change in changes
    )
    evidence = (replace(figure, name=fill(figure.name, figures)), *_supporting(row, view))
    return Finding(
        row.id, row.alert, row.severity, is_limit(row.id, measured), _in_its_words(row, _headline(row, view), explained_by), sentence,
        _guide(_OPPOSITE if contradicts else fill(row.guide, figures)), confidence, evidence, changes, because, notes=tuple(notes), explained_by=explained_by,
    )  # fmt: skip


def explanation_of(row: str, measured: Measured) -> Explanation | None:
    """Return the line of the log that explains a finding about an end; None where none does, or a failure beside it has it."""
    view, said = measured.view, measured.view.explanation
    if said is None or row not in {*DEATHS, *KILLS}:
        return None
    if row == "graph_memory_short" and not view.totals["out_of_memory.graph_capture"]:
        return None  # what is left is short, and the line is about another failure
    if row in KILLS:
        return said if said.ending == ("hang" if row == "scheduler_stuck" else "memory") else None
    if any(
        explanation_of(each, measured) is not None
        for each in KILLS
        if each in measured.causes(BY_ID[row]) and each in measured.holding
    ):
        return None
    if row == "server_down":
        return view.explains_now
    return said if view.has_ended or view.totals["ends"] else None


def _in_its_words(row: Row, headline: str, said: Explanation | None) -> str:
    """Add to the headline of an end the words of the line that explains it, if that is more than that it ended."""
    if said is None or row.id not in {"crashed", "server_down"} or CLASSES[said.ending].weight < CAUSE:
        return headline
    words = said.words if said.words.endswith(("?", "!")) else said.words.rstrip(".") + "."
    return f"{headline.rstrip('.')}: {words}"


def _headline(row: Row, view: View) -> str:
    """Return the summary of a row; a server that ended while it started did not start."""
    said = view.explanation
    served = view.facts.ready or view.scraped or view.down or "work" in view.last or view.totals["retractions"]
    begun = (
        view.starting
        or view.facts.memory
        or (said is not None and (said.is_of_a_start or _IN_START.search(said.place)))
    )
    return (
        "SGLang did not start." if row.id == "crashed" and begun and not served else fill(row.summary, figures_of(view))
    )


_IN_START = re.compile(r" in (?:__init__|_?init_\w+|load_\w+|_?launch_\w+|_wait_for_\w+|main)$")  # a frame


def _said(row: Row, view: View) -> str:
    """Return what was seen, where more than the figure is known."""
    facts, totals = view.facts, view.totals
    if row.id == "kv_transfer_failing":
        failed = view.failed_transfers
        why = shortened(quoted(view.transfer.text)).rstrip(".") if view.transfer is not None else ""
        side = f" on this {view.transfer.word} server" if view.transfer is not None and view.transfer.word else ""
        rate = amount(Figure("", view.per_minute(failed), "per_minute"))
        return f"{failed:,.0f} request{'' if failed == 1 else 's'} failed{side}{f', with: {why}' if why else ''}; {rate}/min"
    if row.id == "no_kv_cache" and facts.no_pool is not None:
        weights, left = facts.weights_gb, facts.beside_weights_gb
        words = f"SGLang computes a KV cache of {facts.no_pool:,.0f} tokens"
        beside = f", which leaves {left:.4g} GB" if left is not None else ""
        return words + (f": the weights take {weights:.5g} GB of each GPU{beside}" if weights is not None else "")
    if row.id == "speculation_rejected":
        drafts = facts.size("speculative_num_draft_tokens") or facts.size("speculative_num_steps")
        of = f" of {drafts:g} draft tokens" if drafts else ""
        return f"accept length {totals['accepted'] / totals['accepted:n']:.2f}{of}; a step without speculation gives 1"
    if row.id == "hicache_degraded" and view.hicache is not None:
        return shortened(quoted(view.hicache.text)).rstrip(".")
    if row.id == "costly_settings":
        return " and ".join(words for _, words in costly_settings(view))
    return ""


def _how(ended: str) -> str:
    """Say how a server ended; an error is said in its own words."""
    return ended if ": " in ended else f"that {ended or 'it ended'}"


_OPPOSITE = "not in SGLang's guide, which says the opposite: here SGLang's own error names the change"


def _guide(words: str) -> str:
    return words if words.startswith(("not in", "the guide has")) else f"SGLang's tuning guide, {words}"


def _supporting(row: Row, view: View) -> list[Figure]:
    """Return the figures beside the one that decided, also those that speak against it."""
    target = view.profile.token_usage_target
    usage = view.mean("usage")
    shown: list[Figure] = []
    if row.id in {"retracting_too_often", "conservativeness_ineffective"}:
        known = view.totals["usage_before:n"]
        if known:
            shown.append(
                Figure(
                    f"token usage just before retractions, mean of {known:.0f} of {view.totals['retractions']:.0f}",
                    view.totals["usage_before"] / known,
                    "ratio",
                    target,
                )
            )
        elif usage is not None:
            shown.append(Figure("mean token usage", usage, "ratio", target))
    elif row.id in {*WHY_REQUESTS_WAIT, "queue_too_long", "unexplained", "requests_rejected"}:
        wait, queued = view.wait, view.sum("queued")
        if queued is not None:
            shown.append(Figure("requests waiting, mean", queued, "count"))
        if wait is not None:
            shown.append(Figure("mean wait in the queue", wait, "seconds", view.profile.queue_wait_seconds))
        if usage is not None:
            shown.append(Figure("mean token usage", usage, "ratio", target))
    if row.id == "running_at_limit" and view.mean("running") is not None:
        shown.append(
            Figure(
                "running requests, mean",
                view.mean("running") or 0.0,
                "count",
                view.facts.least_limit or view.totals["limit_seen"] or None,
            )
        )
    return shown


def _notes(row: Row, view: View) -> list[str]:
    totals = view.totals
    notes = []
    if row.id in {"retracting_too_often", "conservativeness_ineffective"} and totals["marked.retractions"]:
        notes.append(
            f"{totals['retractions']:.0f} retractions, {totals['marked.retractions']:.0f} of them beside text that clients can write."
        )
    is_assumed = row.id == "cuda_graph_off" or (
        row.id == "cuda_graph_not_covering" and not view.totals["replayed_most"]
    )
    if is_assumed and view.facts.largest_captured is None:
        notes.append(
            "The start is not in this log: that SGLang captured up to 160 to 256, as it does by itself, is an assumption."
        )
    decided = [said for arg in {row.remedy.arg} - {""} for said in view.facts.decided(arg)]
    notes += [f"SGLang decided at its start: “{said.text.rstrip('.')}”" for said in decided[:MOST_QUOTED]]
    if row.id == "unexplained":
        shares = [
            f"{100 * share:.0f} % {words}"
            for state, words in STATE_WORDS.items()
            if (share := view.share("admission", state) or 0.0) >= 0.1
        ]
        notes.append(f"Seen: {', '.join(shares)}." if shares else "No reason was seen for most of the time.")
    return notes


# What a row is about, where its condition does not name it.
_SEEN: dict[str, tuple[str, ...]] = {
    "retracting_too_often": ("retractions",), "conservativeness_ineffective": ("retractions",), "requests_failed": ("server_errors",),
    "requests_refused": ("refused",), "unexplained": ("queue/in_range", "queue/above_range", "queue/below_range"),
    "dp_imbalanced": ("queue/in_range", "queue/above_range", "queue/below_range"), "graph_memory_short": ("out_of_memory.graph_capture",),
    "latency_batch_too_large": ("decode_lines",), "restart_loop": ("starts",), "kv_transfer_failing": ("failed_transfers",),
    "hicache_degraded": ("hicache",), "speculation_rejected": ("decode_lines",),
}  # fmt: skip


def counts_of(row: Row) -> tuple[str, ...]:
    """Return the names of the sums that a row is about."""
    when = row.when
    return _SEEN.get(row.id) or (
        tuple(f"{when.figure}/{state}" for state in when.states) if when.kind == "share" else
        when.states if when.kind == "event" else (when.figure,) if when.kind == "rate" else ()
    )  # fmt: skip


def seen(row: Row, server: Server, begin: float, end: float) -> tuple[float, float] | None:
    """Return when what a row is about was first and last seen in a stretch; None where it was not."""
    buckets = [each for each in server.buckets if begin - BUCKET_SECONDS <= each[0] <= end]
    if row.id == "scheduler_stuck":
        signs = [at for at, totals in buckets if totals["watchdogs"] or totals["health_failures"]]
        spans = [(max(at, begin), min(at + BUCKET_SECONDS, end)) for at in signs]
        spans += [(each.begin, until) for each in server.hangs if (until := each.begin + each.seconds) >= begin]
        if spans:  # a hang that lines name lasts until it works again
            worked = not signs or any(totals["lines"] for at, totals in buckets if at > signs[-1])
            return min(spans)[0], max(until for _, until in spans) if worked else end
    for names in (
        counts_of(row),
        ("lines",),
    ):  # of figures of the whole, and what was explained otherwise: while it served
        times = [at for at, totals in buckets if any(totals[name] > 0 for name in names)]
        if times:
            return max(times[0], begin), min(times[-1] + BUCKET_SECONDS, end)
    return None


def timed(finding: Finding, server: Server, begin: float, end: float, *, now: float, counts: Totals) -> Finding | None:
    """Return a finding with the times at which it was seen in a stretch; None where it was not.

    One that is over by `now` is said in the past tense; `counts` are those of the stretch.
    """
    row = BY_ID[finding.diagnosis]
    times = seen(row, server, begin, end)
    if times is None:
        return None
    since, until = times
    over = bool(row.past) and now - until > PAST_SECONDS
    headline = finding.headline
    if over:
        past = _past(row, until, sum(counts[name] for name in counts_of(row)))
        headline = _in_its_words(row, past, finding.explained_by)
    return replace(finding, headline=headline, since=since, until=until, over=over)


def _past(row: Row, until: float, number: float) -> str:
    minutes = int(until // 60) % (24 * 60)
    times = f"{number:,.0f} times" if number != 1 else "once"
    return row.past.replace("{until}", f"{minutes // 60:02}:{minutes % 60:02}").replace("{times}", times)


def past_without_figures(row: Row) -> str:
    """Return the summary of a row that is over, without a time or a count."""
    words = row.past.replace(" {times}", "").replace(", the last time at {until}", "")
    return words.replace("{until}", "a few minutes ago")


def going_on_first(found: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Return findings with those that go on before those that are over; what can only be better stays last."""
    return tuple(sorted(found, key=lambda each: (BY_ID[each.diagnosis].chance, not each.is_limit, each.over)))
