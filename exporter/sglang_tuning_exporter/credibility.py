"""Whether a line in the log is an event of the server or only looks like one. Pure; times are seconds on the caller's clock.

SGLang prints some words of others raw: a tool's name that holds a newline puts a byte-perfect line into the log (CENSUS §5; the same f-string in every
release from 0.4.3 on). So a line is believed for what only a real event has: the server's own counter moves with it, other TP ranks repeat it, the
pool can have been full at that moment, its rank exists. What is not believed moves no counter but is counted.

What this cannot tell: a forger who knows pool and batch, in a log without metrics, between lines of a server that really is full.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from sglang_tuning_exporter.server import ServerFacts
from sglang_tuning_exporter.sglang.events import DecodeBatch, OutOfMemory, PrefillBatch, Retraction

# A scrape of ours is a scrape of SGLang, and the counter is written with the line; this long it may lag behind.
CONFIRM_SECONDS = 15.0
CONFIRM_SCRAPES = 2
# The server may die of what it printed: then nobody confirms, and a line that nothing speaks against is believed.
GIVE_UP_SECONDS = 30.0
REPEAT_SECONDS = 10.0
# A failure for want of memory ends its process; a rank that goes on decoding this long afterwards did not have one.
SURVIVAL_SECONDS = 2.0
FATAL_SECONDS = 5.0
DISAGREE_SECONDS = 60.0
USAGE_ROUNDING = 0.011  # `token usage` is printed with two decimals
FULL_SHARE = 0.9
DEFAULT_LOG_INTERVAL = 40  # decode steps between two decode lines
MOST_PENDING = 256


@dataclass(slots=True)
class _Pending:
    at: float
    event: Retraction
    scrapes: int = 0


class PoolMemory:
    """What is known of one scheduler's pool since its last decode line: whether it can be full by now."""

    def __init__(self) -> None:
        self._tokens: float | None = None
        self._running = 0.0
        self._joined = 0.0

    def see_decode(self, line: DecodeBatch) -> None:
        """A decode line tells the tokens in use."""
        hybrid = line.swa_usage is not None or line.mamba_usage is not None
        transferred = "transfer" in line.queues or "prealloc" in line.queues
        self._tokens = None if hybrid or transferred or line.tokens is None else float(line.tokens)
        self._running, self._joined = float(line.running or 0), 0.0

    def see_prefill(self, line: PrefillBatch) -> None:
        """Prompts computed and prefixes locked since then."""
        self._joined += (line.new_tokens or 0) + (line.cached_tokens or 0)
        self._running += line.new_sequences or 0

    def can_be_full(self, facts: ServerFacts, dp: int | None) -> bool:
        """Whether tokens in use, prompts since, and one log interval of generation can have filled the pool; True when not told."""
        pool = facts.kv_pool_tokens.get(dp)
        if self._tokens is None or not pool or facts.args.get("speculative_algorithm"):
            return True
        steps = 2 * (facts.arg("decode_log_interval") or DEFAULT_LOG_INTERVAL)
        slack = self._running * (facts.arg("page_size") or 1)
        return self._tokens + self._joined + steps * self._running + slack >= FULL_SHARE * pool


class Witness:
    """Decides which lines are believed, and remembers those that wait for a confirmation."""

    def __init__(self) -> None:
        self.suspicious: Counter[str] = Counter()
        self._pending: list[_Pending] = []
        self._failures: list[tuple[float, OutOfMemory]] = []
        self._counted: dict[int | None, float] = {}
        self._told: dict[tuple[int | None, int | None], float] = {}
        self._scraped: set[int | None] = set()
        self._confirming: set[int | None] = set()
        self._agreed: dict[int | None, float] = {}

    def believes_batch(self, line: DecodeBatch | PrefillBatch, facts: ServerFacts) -> bool:
        """Whether a batch line's figures fit the server. Only lines after a raw sink are asked."""
        if not line.suspect:
            return True
        fits = self._fits(line, facts)
        if not fits:
            self.suspicious["batch"] += 1
        return fits

    @staticmethod
    def _fits(line: DecodeBatch | PrefillBatch, facts: ServerFacts) -> bool:
        limit, pool = facts.running_limit(line.rank.dp), facts.kv_pool_tokens.get(line.rank.dp)
        if limit is not None and (line.running or 0) > limit:
            return False
        if isinstance(line, PrefillBatch):
            return True
        if pool is None or line.tokens is None or line.full_usage is None:
            return False
        return abs(line.tokens / pool - line.full_usage) <= USAGE_ROUNDING

    def retraction(
        self, line: Retraction, *, pool_can_be_full: bool, facts: ServerFacts, now: float
    ) -> list[Retraction]:
        """The events to count now: `line` itself, or none while it waits or is not believed."""
        key = (line.rank.dp, line.rank.pp)
        if not pool_can_be_full:
            return self._refuse()
        if line.rank.dp in self._confirming:
            if self._spend(key, line.requests):
                return [line]
            return self._wait(line, now)
        if line.suspect and expected_ranks(facts) < 2:
            return self._refuse()
        if line.suspect:
            return self._wait(line, now)
        if line.rank.dp in self._scraped:
            self._told[key] = self._told.get(key, 0.0) + line.requests
        return [line]

    def _refuse(self) -> list[Retraction]:
        self.suspicious["retraction"] += 1
        return []

    def _wait(self, line: Retraction, now: float) -> list[Retraction]:
        if len(self._pending) >= MOST_PENDING:
            return self._refuse()
        self._pending.append(_Pending(now, line))
        return []

    def _spend(self, key: tuple[int | None, int | None], requests: float) -> bool:
        told = self._told.get(key, 0.0)
        if told + requests > self._counted.get(key[0], 0.0):
            return False
        self._told[key] = told + requests
        return True

    def repeated(self, line: Retraction) -> list[Retraction]:
        """Another TP rank printed the same: what waited for that is believed, unless the server's own counter is asked."""
        if line.rank.dp in self._confirming:
            return []
        return self._take([each for each in self._pending if _figures(each.event) == _figures(line)])

    def scraped(self, dp: int | None, now: float, gained: float | None, *, confirms: bool) -> list[Retraction]:
        """A scrape: the server's counter of retracted requests grew by `gained` since the last (None: the first). Returns what it confirms."""
        self._scraped.add(dp)
        self._counted[dp] = self._counted.get(dp, 0.0) + (gained or 0.0)
        if confirms:
            self._confirming.add(dp)
        told = max((requests for (rank, _), requests in self._told.items() if rank == dp), default=0.0)
        if told >= self._counted[dp] or not confirms:
            self._agreed[dp] = now
        mine = [each for each in self._pending if each.event.rank.dp == dp]
        for each in mine:
            each.scrapes += 1
        if dp not in self._confirming:
            return []
        return self._take([each for each in mine if self._spend((dp, each.event.rank.pp), each.event.requests)])

    def disagrees(self, now: float) -> bool | None:
        """Whether the server has counted retractions for a minute that its log does not show; None when it does not count them."""
        if not self._confirming:
            return None
        return any(now - self._agreed.get(dp, now) > DISAGREE_SECONDS for dp in self._confirming)

    def unscraped(self) -> None:
        """SGLang could not be scraped: its counter confirms nothing until it answers again."""
        self._confirming.clear()

    def _take(self, believed: list[_Pending]) -> list[Retraction]:
        self._pending = [each for each in self._pending if each not in believed]
        return [each.event for each in believed]

    def tick(self, now: float) -> list[Retraction]:
        """What waited long enough: believed when nobody could say anything and nothing speaks against it, else refused."""
        believed: list[_Pending] = []
        for each in list(self._pending):
            age, dp = now - each.at, each.event.rank.dp
            if dp in self._confirming:
                if age > CONFIRM_SECONDS and each.scrapes >= CONFIRM_SCRAPES:
                    self._pending.remove(each)
                    self._refuse()
                elif age > GIVE_UP_SECONDS and each.scrapes == 0:
                    believed += self._settle(each)
            elif age > REPEAT_SECONDS:
                believed += self._settle(each)
        return self._take(believed)

    def _settle(self, each: _Pending) -> list[_Pending]:
        if each.event.suspect:
            self._pending.remove(each)
            self._refuse()
            return []
        return [each]

    def failure(self, line: OutOfMemory, now: float) -> list[OutOfMemory]:
        """The failures to count now. One after a raw sink waits whether its process really ends."""
        if not line.suspect:
            return [line]
        if len(self._failures) < MOST_PENDING:
            self._failures.append((now, line))
        return []

    def survived(self, dp: int | None, now: float) -> None:
        """This scheduler decodes: a failure it is said to have had some seconds ago was none."""
        kept = [
            (at, line)
            for at, line in self._failures
            if not (now - at > SURVIVAL_SECONDS and line.rank.dp in {dp, None})
        ]
        self.suspicious["out_of_memory"] += len(self._failures) - len(kept)
        self._failures = kept

    def ended(self, now: float, *, certain: bool = False) -> list[OutOfMemory]:
        """Failures that nothing has contradicted: those older than five seconds, or all once a process is known to have died."""
        due = [line for at, line in self._failures if certain or now - at > FATAL_SECONDS]
        self._failures = [(at, line) for at, line in self._failures if line not in due]
        return due

    def believable(self) -> list[Retraction]:
        """What waits and nothing speaks against."""
        return [each.event for each in self._pending if not each.event.suspect]

    def restarted(self) -> list[Retraction]:
        """The server started anew and its counter with it: what waits is believed unless something speaks against it."""
        believed = self.believable()
        self.suspicious["retraction"] += len(self._pending) - len(believed)
        self._pending.clear()
        self._confirming.clear()
        return believed


def expected_ranks(facts: ServerFacts) -> int:
    """How many TP ranks print one scheduler's retraction: all of its attention group."""
    tp, dp = facts.arg("tp_size") or 1, facts.arg("dp_size") or 1
    return int(tp // dp) if facts.arg("enable_dp_attention") and dp else int(tp)


def _figures(line: Retraction) -> tuple[object, ...]:
    return (
        line.rank.dp,
        line.rank.pp,
        line.requests,
        line.aborted,
        line.new_tokens_gained,
        line.ratio_before,
        line.ratio_after,
    )
