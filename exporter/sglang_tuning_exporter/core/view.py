"""A stretch of a server's time, as conditions, advice and words look at it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, sqrt

from sglang_tuning_exporter.config import profiles
from sglang_tuning_exporter.core.events import Event
from sglang_tuning_exporter.core.facts import Facts
from sglang_tuning_exporter.core.progress import Hang
from sglang_tuning_exporter.core.scheduler import MOST_RESERVED
from sglang_tuning_exporter.core.server import Server
from sglang_tuning_exporter.core.sums import LATENCIES, SIGNALS, WAITS, Totals
from sglang_tuning_exporter.sglang.metrics import Histogram

# Of the waiting time with a batch of one size or one less: the running limit, where the start is not in the log.
CONSTANT_BATCH = 0.8
# At a limit the batch stays and the usage varies with the requests' lengths; a usage that stays too says nothing.
STILL_USAGE, ROUNDED_USAGE = 0.003, 0.1
FAST_PREFILL = 8192.0  # tokens a second: a full chunk, which a GPU computes in less
# Requests of one length that fill what is reserved for them: tokens at their end, of the cache; tokens so far, of an
# answer. Lengths that vary show themselves: those that run are then longer than the mean.
FILLED, EVEN = 0.88, 0.49
SOME_RETRACTIONS = 0.5  # a minute: evidence against a reservation that is too large
NEARLY_FULL = 0.85  # of the cache
HALF_FULL = 0.45  # of the cache: less is not what requests of one length leave
OF_ONE_AGE, SHORTEST_TIMEOUT = 0.8, 1.0  # share of the ends in two neighbouring buckets; seconds
# Share of the time in which full prefill batches were computed, above which requests wait for prefill whatever the
# cache holds.
MOSTLY_PREFILL = 0.5
# Of the prompt tokens from the cache under fcfs: with less, ordering is not worth it; with more, nothing is left to
# gain.
SHARING = (0.095, 0.9)
SMALL_GRAPHS = 8.0, 80.0  # the largest captured batch by itself, on the smallest and on the largest of small GPUs
LOWERED = 0.3  # conservativeness, by the guide
LEAST_GAIN = 0.06  # of the throughput: the estimate is above what the change brings
INITIAL_RATIO, LEAST_OF_INITIAL = 0.7, 0.14  # the new-token ratio at a conservativeness of 1; of that (srt/environ.py)
AT_RANDOM = 1.65  # standard deviations of a count that falls at random
ONE_OF_SEVERAL = 0.35  # of the serving time: two causes in turn
LEAST_MINUTE = 60.0  # less than a minute counts as a minute: one burst is no rate
ENOUGH_ON_A_RANK = 20.0  # seconds
# Burn rates: times the error budget, the share that may miss the objective (0.01 for 0.99), over a long and a short
# window in seconds. At 14.4 times 2 % of a month's budget are gone in an hour, at 6 times 5 % in six hours; the short
# window, a twelfth of the long one, shows that it goes on. (Google's SRE Workbook, alerting on SLOs.)
BURN_RATES = {"fast": (14.4, 3600.0, 300.0), "slow": (6.0, 6 * 3600.0, 1800.0)}
RECENTLY = 1800.0  # over which starts are counted


@dataclass(frozen=True)  # no slots, because of `cached_property`
class View:
    """Sums over a stretch, with the facts and thresholds in force. `now` is its end, unix seconds."""

    totals: Totals
    facts: Facts
    profile: profiles.Profile
    now: float
    ranks: Mapping[int | None, float] = field(default_factory=dict)  # DP ranks, and what each runs at last
    starting: bool = False
    stopping: bool = False
    ended: str = ""  # how it ended last
    has_ended: bool = False  # and it has not started again
    explanation: Event | None = None  # the line that explains the last end, or that of a failure it may end by
    hangs: tuple[Hang, ...] = ()
    last: Mapping[str, float] = field(default_factory=dict)  # when something happened last
    transfer: Event | None = None  # the line that says why a KV transfer failed
    hicache: Event | None = None  # the last line about what the host's cache could not do
    # Live
    scraped: bool = False  # SGLang's metrics are read
    down: str = ""  # why it could not be scraped; empty while it answers
    stopped: bool = False  # it was asked to end, and has
    stuck: Hang | None = None  # what pages show
    hung: bool = False  # now or in this stretch
    silent_seconds: float = 0.0  # no token was sent for so long, with requests running
    busy: bool = False  # requests run or wait now
    troubles: Mapping[str, str] = field(default_factory=dict)  # of the sources, by the row, in words
    burning: Mapping[tuple[str, str], float] = field(
        default_factory=dict
    )  # by latency and rate: the share that is late
    down_share: float | None = None  # of the last two hours; None where they are not known
    outages: int = 0

    @property
    def is_away(self) -> bool:
        """Whether the server has ended, does not answer, or starts."""
        return bool(self.down) or self.has_ended or self.starting

    @property
    def failed_transfers(self) -> float:
        """Requests that failed between the two servers of a pair; SGLang's counters have those of clients that gave up
        as well.
        """
        return max(self.totals["failed_transfers"] - self.totals["aborted_requests"], 0.0)

    @property
    def explains_now(self) -> Event | None:
        """The line that explains why it does not answer: none from before its last start."""
        line, started = self.explanation, self.last.get("server_starts", -inf)
        return None if line is None or (line.time is not None and line.time < started) else line

    @cached_property
    def counted(self) -> AbstractSet[str]:
        """The names of the sums that are not 0."""
        return {name for name, value in self.totals.items() if value}

    @cached_property
    def _by_head(self) -> Mapping[str, Mapping[str, float]]:
        """The sums that are named `head/…`, by head and the rest of their names."""
        by_head: dict[str, dict[str, float]] = {}
        for name, value in self.totals.items():
            head, slash, rest = name.partition("/")
            if slash:
                by_head.setdefault(head, {})[rest] = value
        return by_head

    def under(self, head: str) -> Mapping[str, float]:
        """Return what is named `head/…`, by the rest of its name."""
        return self._by_head.get(head, {})

    @cached_property
    def _latencies(self) -> Mapping[str, Histogram | None]:
        latencies: dict[str, Histogram | None] = dict.fromkeys(LATENCIES)
        for name in LATENCIES:
            counts = sorted((float(bound), count) for bound, count in self.under(name).items())
            if len(counts) > 1 and counts[-1][0] == inf and counts[-1][1] > 0:
                bounds, numbers = zip(*counts, strict=True)
                latencies[name] = Histogram(bounds, numbers, self.totals[f"{name}:s"])
        return latencies

    def latency(self, name: str) -> Histogram | None:
        """Return the observations of one of `LATENCIES`; None where the server exposes none, or none came."""
        return self._latencies[name]

    def late_share(self, name: str, objective: float | None) -> float:
        """Return the share of observations above an objective; 0 where none came, or there is no objective."""
        seen = self.latency(name)
        return 0.0 if objective is None or seen is None else seen.above(objective) / max(seen.observations, 1.0)

    @cached_property
    def paused_share(self) -> float | None:
        """Share of the time in which running answers wait longer than a usual step; None where no gaps are counted."""
        gaps = self.latency("inter_token")
        usual = gaps.quantile(0.5) if gaps is not None else None
        mean = gaps.mean_seconds if gaps is not None else None
        return max(1.0 - usual / mean, 0.0) if usual is not None and mean else None

    @property
    def given_up_share(self) -> float | None:
        """Share of the requests that ended because their clients gave up; None where nothing is counted."""
        ended, given_up = self.totals.get("finished_requests"), self.totals.get("aborted_requests")
        if given_up is None:
            return None
        return min(given_up / max(ended or 0.0, given_up), 1.0) if given_up else 0.0

    @cached_property
    def given_up_ages(self) -> tuple[float, float] | None:
        """Between which ages, in seconds, nearly all requests end: in two neighbouring buckets; None where they end at
        all ages.
        """
        ended = self.latency("request_latency")
        if ended is None:
            return None
        if self.cancels:
            return 0.0, SHORTEST_TIMEOUT
        counts = [now - before for now, before in zip(ended.counts, (0.0, *ended.counts), strict=False)]
        spans = [(place, place + width) for width in (1, 2) for place in range(len(counts) - width + 1)]
        enough = OF_ONE_AGE * ended.observations
        first, end = next(((first, end) for first, end in spans if sum(counts[first:end]) >= enough), (0, 0))
        if not end:
            return None
        upper = ended.bounds[end - 1] if ended.bounds[end - 1] != inf else ended.bounds[end - 2]
        return (ended.bounds[first - 1] if first else 0.0), upper

    @cached_property
    def cancels(self) -> bool:
        """Whether nearly all requests end within a second: what is given up then is cancelled, as by an editor that
        completes code.
        """
        ended = self.latency("request_latency")
        return ended is not None and ended.above(SHORTEST_TIMEOUT) <= (1 - OF_ONE_AGE) * ended.observations

    @cached_property
    def known(self) -> Mapping[str, float]:
        """Seconds in which something ran or waited, for each signal."""
        return {signal: self.totals.known(signal) for signal in SIGNALS}

    def share(self, signal: str, *states: str) -> float | None:
        """Return the share of states in the known serving time; None without any."""
        return self.totals.share(signal, *states)

    @property
    def waited_share(self) -> float:
        """Share of the serving time in which requests waited; 0 where it is not known."""
        empty = self.share("queue", "empty")
        return 0.0 if empty is None else 1.0 - empty

    @property
    def waits_unexplained_yet(self) -> bool:
        """Whether requests waited most of the time, and most of that while too few had ended to show why."""
        often, waited = self.profile.frequent_share, self.waited_share
        return waited > often and self.totals["early"] > often * waited * self.known["queue"]

    @cached_property
    def reason_limit(self) -> float:
        """The share of the serving time above which a reason for waiting is a finding; less where only several together
        make it up.
        """
        often, shares = self.profile.frequent_share, [self.share("admission", wait) or 0.0 for wait in WAITS]
        return min(ONE_OF_SEVERAL, often) if max(shares) <= often < sum(shares) else often

    @cached_property
    def served(self) -> float:
        """Seconds in which any scheduler served, of the one that served most."""
        return max(self.under("serves").values(), default=0.0)

    @cached_property
    def idle(self) -> float:
        """Seconds in which a scheduler had nothing to do, of the one that had least of it."""
        return self.totals["queue/idle"] / max(len(self.under("serves")), 1)

    @property
    def serving_ranks(self) -> float:
        """How many schedulers served at once, on average."""
        return max(sum(self.under("serves").values()) / self.served, 1.0) if self.served > 0 else 1.0

    @property
    def has_enough_load(self) -> bool:
        """Whether it served for 20 s and printed 10 batch lines."""
        profile = self.profile
        return self.served >= profile.enough_serving_seconds and self.totals["lines"] >= profile.enough_observations

    def mean(self, figure: str, when: str = "") -> float | None:
        """Return the mean of running, queued or usage of a scheduler, while it served."""
        return self.totals.mean(figure, when)

    def sum(self, figure: str) -> float | None:
        """Return the mean of running or queued over all schedulers together, micro batches included."""
        mean = self.totals.mean(figure)
        if mean is None:
            return None
        return mean * self.serving_ranks * (self.facts.micro_batches if figure == "running" else 1)

    @cached_property
    def _batches(self) -> list[tuple[float, float]]:
        """The sizes of the running batch, each with its seconds."""
        return sorted((float(number), value) for number, value in self.under("batch").items() if value > 0)

    def batch(self, share: float = 0.99) -> float | None:
        """Return the batch that is not exceeded for this share of the serving time."""
        seconds = self._batches
        left = share * sum(value for _, value in seconds)
        for number, value in seconds:
            left -= value
            if left <= 1e-9:
                return number
        return seconds[-1][0] if seconds else None

    def per_minute(self, count: float) -> float:
        """Return a count per minute of serving time."""
        return 60.0 * count / max(self.served, LEAST_MINUTE)

    @property
    def retractions_tolerated(self) -> float:
        """Retractions a minute that are still about as many as the threshold: they fall at random."""
        limit, minutes = (
            self.profile.retractions_per_minute,
            max(self.served, LEAST_MINUTE) / 60 if self.served else inf,
        )
        return limit + AT_RANDOM * sqrt(limit / minutes)

    @property
    def retractions_a_minute(self) -> float:
        """Retractions per minute of serving time."""
        return self.per_minute(self.totals["retraction_events"])

    @cached_property
    def prompt(self) -> float | None:
        """Tokens of a mean prompt, cached ones included."""
        return self._of_those_that_ended("finished_prompt_tokens") or _mean_prompt(self.totals)

    @cached_property
    def answer(self) -> float | None:
        """Decoded tokens for each request that started; None where unknown, or in a stretch that is short beside the
        answers.
        """
        started = self.totals["admitted_requests"]
        counted = self.totals["decoded_tokens"] / started if started and self.totals["decoded_tokens"] else None
        return self._of_those_that_ended("finished_answer_tokens") or counted

    def _of_those_that_ended(self, tokens: str) -> float | None:
        """Return the mean of what SGLang counts when a request ends; None where it does not, or most of those that
        started still run.
        """
        ended = self.totals["finished_requests"]
        return self.totals[tokens] / ended if ended and 2 * ended >= self.totals["admitted_requests"] else None

    @cached_property
    def wait(self) -> float | None:
        """The mean wait in seconds: queued requests over admissions per second, retracted ones again."""
        measured = self.latency("queue_time")
        if measured is not None and measured.mean_seconds is not None and measured.observations >= 10:
            return measured.mean_seconds
        queued, admitted = self.sum("queued"), self.totals["admitted_requests"]
        return queued * self.served / admitted if queued is not None and admitted else None

    @property
    def cached_share(self) -> float | None:
        """Share of the prompt tokens that came from the prefix cache."""
        tokens = self.totals["computed_tokens"] + self.totals["cached_tokens"]
        return (
            self.totals["cached_tokens"] / tokens if tokens and self.facts.number("disable_radix_cache") != 1 else None
        )

    @property
    def generated_per_second(self) -> float | None:
        """Generated tokens a second of serving time, the first ones of each answer included.

        By the decode steps: a decode line's throughput is over the time before it, not over the prefill that may
        follow. Without the start the steps between two lines are not known, and the throughput of the lines is taken.
        """
        generated = self.totals["decoded_tokens"] + self.totals["admitted_requests"]
        if self.facts.arguments and self.totals["decoded_tokens"] and self.served:
            return generated / self.served
        return self.sum("throughput")

    @property
    def step_seconds(self) -> float | None:
        """Mean seconds between two tokens of a request, by running requests and throughput of the decode lines."""
        running, throughput = self.mean("running"), self.mean("throughput")
        return running / throughput if running and throughput else None

    @cached_property
    def prefill_share(self) -> float:
        """Least share of the serving time in which prompts were computed: by the steps, each at least as long as one of
        decoding, or by the tokens.

        By the steps only full batches count. By the tokens, `FAST_PREFILL` or the most of any second is taken as the
        pace.
        """
        totals, seconds = self.totals, self.known["queue"]
        return max(
            self.full_steps, totals["computed_tokens"] / max(totals["peak"], FAST_PREFILL) / seconds if seconds else 0.0
        )

    @property
    def steps(self) -> float:
        """Decode steps."""
        return self.facts.steps_between_lines * self.totals["decode_lines"]

    @property
    def full_steps(self) -> float:
        """Share of the steps that computed a full prefill batch."""
        totals = self.totals
        steps = totals["prefill_lines"] + self.steps
        return totals["full_lines"] / steps if steps else 0.0

    @property
    def chunk_seen(self) -> float | None:
        """The size of a chunk by the batches, where the start is not known.

        Prompts continued after several of one size, and none was larger. None with several schedulers: with attention
        data parallelism each has a part of --chunked-prefill-size.
        """
        size = self.totals["chunk_seen"]
        return size if size and size >= self.totals["most_prefill"] and len(self.ranks) == 1 else None

    @property
    def may_exceed_small_graphs(self) -> bool:
        """Whether batches without a graph may be larger than what a small GPU captures: the start is not known, and
        none replayed.
        """
        least_eager = 1.0 / (self.totals["eager_inverse"] or inf)
        is_known = self.facts.largest_captured is not None or self.facts.without_graph or self.totals["replayed_most"]
        return not is_known and SMALL_GRAPHS[0] < least_eager <= SMALL_GRAPHS[1]

    @cached_property
    def fills_its_reservation(self) -> bool:
        """Whether requests of one length will fill all that is free: with ignore_eos they are reserved in full, and
        memory is what is short.
        """
        running, usage = self.mean("running", "held_back"), self.mean("usage", "held_back") or 0.0
        facts, pool, prompt, answer = self.facts, self.facts.pool(), self.prompt, self.answer
        if not facts.may_reserve_in_full or not running or usage < HALF_FULL or not pool or not prompt or not answer:
            return False
        each = pool / facts.micro_batches  # of the tokens for each running request
        fullest = self.totals["most_usage"] * each / max(self.totals["most_running"], running)
        at_end = max(prompt + answer, fullest)
        return running * at_end >= FILLED * each and usage * each / running - prompt < EVEN * (at_end - prompt)

    @cached_property
    def gains_by_lower_ratio(self) -> float | None:
        """The share of throughput that the guide's lower conservativeness would bring; None where it cannot be
        computed.

        SGLang starts a request if its prompt and max_new_tokens fit beside what runs and the new-token ratio of what
        may still come of it (`PrefillAdder`, srt/managers/schedule_policy.py). From the requests that ran so beside the
        free cache follows max_new_tokens, and from that how many would run at a lower ratio; prefill takes as long as
        before.
        """
        running, usage = self.mean("running", "held_back"), self.mean("usage", "held_back")
        pool, prompt, now = self.facts.pool(), self.prompt, self.facts.number("schedule_conservativeness")
        if not running or not usage or not pool or not prompt or now is None or now <= LOWERED:
            return None
        running *= self.facts.micro_batches
        held, ratio, lower = usage * pool / running, _least_ratio(now), _least_ratio(LOWERED)
        generated = max(held - prompt, 0.0)
        most = ((1.0 - usage) * pool - prompt + running * ratio * generated) / (running * ratio + 1)
        most = min(max(most, generated), MOST_RESERVED)
        more = (pool - prompt - most) / (held + lower * (most - generated)) / running
        share = min(self.prefill_share, 1.0)
        return 1.0 / (share + (1.0 - share) / more) - 1.0 if more > 0 else 0.0

    def waited(self) -> dict[str, float]:
        """Return the share of its serving time in which requests waited, for each DP rank; idle ranks have 0."""
        waits, serves = self.under("waits"), self.under("serves")
        if self.served < ENOUGH_ON_A_RANK:
            return {}
        return {dp: waits.get(dp, 0.0) / self.served for dp in {*serves, *map(str, self.ranks)} - {"None"}}


def _mean_prompt(totals: Totals) -> float | None:
    """Return the tokens of a mean prompt, cached ones included; None where unknown."""
    return (
        (totals["computed_tokens"] + totals["cached_tokens"]) / totals["admitted_requests"]
        if totals["admitted_requests"]
        else None
    )


def view_of(server: Server, seconds: float) -> View:
    """Return the last `seconds` of a server."""
    now, totals = server.now or 0.0, server.window(seconds)
    totals["starts_recently"] = server.alike_starts(now - RECENTLY)
    return View(
        totals, server.facts, server.profile, now,
        {dp: rank.shown.running or 0.0 for dp, rank in server.schedulers.items()},
        server.starting, server.stopping, server.how_ended, bool(server.ended),
        server.explanation or server.end_explanation,
        tuple(hang for hang in server.hangs if hang.until >= now - seconds), dict(server.last),
        server.transfer, server.hicache,
    )  # fmt: skip


def with_outage(view: View, server: Server) -> View:
    """Return the view of a server that is away with the failures since it was there, however long ago they were."""
    failures = server.outage if view.is_away else {}
    if not failures:
        return view
    totals = Totals(view.totals)
    for name, number in failures.items():
        totals[name] = max(totals[name], number)
    return replace(view, totals=totals)


def _least_ratio(conservativeness: float) -> float:
    """Return what the new-token ratio falls to while nothing is retracted."""
    return min(INITIAL_RATIO * conservativeness, 1.0) * LEAST_OF_INITIAL


def explained(view: View) -> View:
    """Return the view with the waits explained that one moment cannot explain.

    Where the running limit is not known, a batch that stays at one size while requests wait is at a limit.
    """
    view = _with_small_graphs(view)
    held_back = view.under("held")
    if not sum(held_back.values()):
        return view
    # Whatever the usage between them, retractions show that the cache fills up.
    retracts = view.totals["retraction_events"] > 1 and view.retractions_a_minute > SOME_RETRACTIONS
    gains = view.gains_by_lower_ratio
    if retracts or view.fills_its_reservation or (gains is not None and gains < LEAST_GAIN):
        return replace(view, totals=counted(view.totals, "held_back", "pool_full"))
    size = _size_of_a_limit(view, held_back)
    if size is None:
        return view
    totals = counted(view.totals, "held_back", "running_limit")
    totals["limit_seen"] = size
    return replace(view, totals=totals)


def _with_small_graphs(view: View) -> View:
    """Return the view with what the batches show of captured sizes, where the start is not in the log."""
    least_eager, replayed = 1.0 / (view.totals["eager_inverse"] or inf), view.totals["replayed_most"]
    if view.facts.largest_captured is None and replayed and least_eager > replayed:
        return replace(view, totals=counted(view.totals, "eager", "beyond_captured"))
    return view


def _size_of_a_limit(view: View, held_back: Mapping[str, float]) -> float | None:
    """Return the size that batches keep while requests wait, where it can only be a limit.

    `held_back`: seconds by size.
    """
    totals, waited = view.totals, sum(held_back.values())
    if view.facts.least_limit is not None or not waited or not totals["admission/held_back"]:
        return None

    def near(number: str) -> float:
        return held_back[number] + held_back.get(f"{float(number) - 1:.0f}", 0.0)

    size = max(held_back, key=near)
    usage = totals.mean("usage", "held_back") or 0.0
    spread = max(totals["usage2@held_back"] / totals["usage@held_back:s"] - usage**2, 0.0) ** 0.5
    varies = spread > STILL_USAGE or usage < ROUNDED_USAGE
    may_be_full = totals["most_usage"] >= NEARLY_FULL or usage + 2 * spread > view.profile.token_usage_target
    was_exceeded = totals["most_running"] > float(size) or bool(totals["retraction_events"])
    is_limit = near(size) >= CONSTANT_BATCH * waited and varies and not may_be_full and not was_exceeded
    return float(size) if is_limit else None


def counted(totals: Totals, old: str, new: str) -> Totals:
    """Return totals with one state counted as another, such as one reason for waiting."""
    renamed, ends = Totals(), (f"/{old}", f"@{old}", f"@{old}:s")
    for name, value in totals.items():
        renamed[name.replace(old, new) if name.endswith(ends) else name] += value
    return renamed
