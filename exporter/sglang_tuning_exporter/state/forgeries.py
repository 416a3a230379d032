"""Whether a line in the log is an event of the server or only looks like one. Pure; times are seconds on the caller's clock.

SGLang prints some words of others raw: a tool's name that holds a newline puts a byte-perfect line into the log. So a retraction asks the server's
own counter, where there is one. Where there is none, a line that comes soon after raw words is believed only for what a real event has: other TP
ranks repeat it, the pool can have been full at that moment, its rank exists. What is not believed moves no counter but is counted.
Failures and starts: `claims`.

What this cannot tell: a forger who repeats a line in the names of other ranks, in a log without metrics; and one that stands near words
of others, on a server whose pool may be full, where only the log tells: of those one is believed for each decode line.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

from sglang_tuning_exporter.sglang.events import MOST_RANKS, DecodeBatch, PrefillBatch, Rank, Retraction
from sglang_tuning_exporter.state.facts import ServerFacts
from sglang_tuning_exporter.state.kv_cache import USAGE_ROUNDING, PoolMemory

# A scrape of ours is a scrape of SGLang, and the counter is written with the line; this long it may lag behind.
CONFIRM_SECONDS = 15.0
CONFIRM_SCRAPES = 2
GIVE_UP_SECONDS = 30.0
REPEAT_SECONDS = 10.0
# What the first scrape shows may hold lines that are still on their way through the file: its base is not sharp.
BASE_SECONDS = 5.0
# What the counter gained and no line has claimed so long is claimed by none any more.
DISAGREE_SECONDS = 60.0
# A line that never came is spoken of as long as a finding looks back.
DISAGREEMENT_HOLDS_SECONDS = 600.0
# How far two neighbouring batch lines lie apart at most, for a suspect one to be believed: usage, requests queued, or share of them.
NEAR_USAGE = 0.15
NEAR_QUEUE, NEAR_QUEUE_SHARE = 16.0, 0.5
MOST_PENDING = 256
MOST_REQUESTS = 2**31

_Scheduler = tuple[int | None, int | None]  # DP and PP rank


@dataclass(slots=True)
class _Pending:
    at: float
    event: Retraction
    scrapes: int = 0


class Account:
    """One scheduler's counter of retracted requests beside the lines that claim what it gained. Figures are requests.

    A claim never lies further ahead than the counter. What no line has claimed for a minute is struck: a forged line of later must not live on it.
    """

    def __init__(self, now: float, counter: float | None = None) -> None:
        self.base_at = self._believed_at = now
        self.counter = counter  # of the server, at its last scrape
        self._gained = 0.0
        self._struck = 0.0
        self._gains: deque[tuple[float, float]] = deque()  # when, and all that had been gained by then
        self._claimed = 0.0
        self.missed_at: float | None = None  # when log and counter last proved to differ

    def saved(self) -> list[float | None]:
        """Give the server's counter, and what it gained that no line has claimed."""
        return [self.counter, self._gained - self._claimed]

    @classmethod
    def restored(cls, counter: float, unclaimed: float, now: float) -> Account:
        """Go on from what `saved` gave: what the counter gains until the next scrape is known, so the base is sharp."""
        account = cls(-inf, counter)
        account.gain(max(unclaimed, 0.0), now)
        account._claimed = max(-unclaimed, 0.0)
        account._believed_at = now
        return account

    def gain(self, requests: float, now: float) -> None:
        """The counter grew."""
        self._strike(now)
        if requests > 0:
            self._gained += requests
            self._gains.append((now, self._gained))

    def _strike(self, now: float) -> None:
        while self._gains and now - self._gains[0][0] > DISAGREE_SECONDS:
            at, self._struck = self._gains.popleft()
            # Lines that came with the base have claimed nothing.
            if self._struck > self._claimed and not self._from_base(at):
                self.missed_at = now
        # Nor must a line that was believed without asking cost a later one its due for ever.
        most = self._gained if now - self._believed_at > DISAGREE_SECONDS else inf
        if self._claimed > most:
            self.missed_at = now
        self._claimed = min(max(self._claimed, self._struck), most)

    def _from_base(self, at: float) -> bool:
        return at - self.base_at <= BASE_SECONDS + CONFIRM_SECONDS

    def blurred(self, at: float) -> bool:
        """Whether the base may hold a line that was read at `at`."""
        return at - self.base_at <= BASE_SECONDS

    def believe(self, line: Retraction, at: float) -> None:
        """A line is counted without asking: what the counter gains for it is spoken for."""
        if not self.blurred(at):
            self._claimed += line.requests
            self._believed_at = max(at, self._believed_at)

    def claim(self, line: Retraction, now: float) -> bool:
        """Whether the counter has gained what the line tells."""
        self._strike(now)
        if self._claimed + line.requests > self._gained:
            return False
        self._claimed += line.requests
        return True


class ForgeryFilter:
    """Decides which lines are believed, and remembers those that wait for a confirmation."""

    def __init__(self) -> None:
        self.suspicious: Counter[str] = Counter()
        self._pending: list[_Pending] = []
        self._accounts: dict[int | None, Account] = {}
        # The counter can be asked, though it may not be there before its first event.
        self._counting: set[int | None] = set()
        self._confirming: set[int | None] = set()  # it is there

    def accepts_batch(
        self, line: DecodeBatch | PrefillBatch, facts: ServerFacts, *, queued: float | None, usage: float | None
    ) -> bool:
        """Whether a batch line's figures fit the server and its neighbours. Only lines after a raw sink are asked.

        `queued` and `usage` (0-1) are the scheduler's last figures, None where there are none.
        """
        if not line.suspect:
            return True
        known = queued is not None and usage is not None
        fits = self._fits(line, facts, neighbour=known) and _near(line, queued, usage)
        if not fits:
            self.suspicious["batch"] += 1
        return fits

    @staticmethod
    def _fits(line: DecodeBatch | PrefillBatch, facts: ServerFacts, *, neighbour: bool) -> bool:
        limit, pool = facts.scheduler_limit(line.rank.dp), facts.kv_pool_tokens.get(line.rank.dp)
        if limit is not None and (line.running or 0) > limit:
            return False
        if not rank_exists(line.rank, facts):
            return False
        if isinstance(line, PrefillBatch):
            return True
        if pool is None or line.tokens is None or line.full_usage is None:
            return neighbour  # a log without its start: the line before is all there is to compare with
        return abs(line.tokens / pool - line.full_usage) <= USAGE_ROUNDING

    def retraction(
        self, line: Retraction, *, pool: PoolMemory | None, facts: ServerFacts, now: float
    ) -> list[Retraction]:
        """The events to count now: `line` itself, or none while it waits or is not believed."""
        dp = line.rank.dp
        account = self._accounts.get(dp)
        raw = line.suspect or line.beside_words
        if raw and not ((pool is None or pool.can_be_full(facts, dp, now)) and rank_exists(line.rank, facts)):
            return self._refuse()
        # Where the last request was aborted instead, none was put back: the counter stands, and has nothing to say.
        asked = dp in self._confirming and line.requests > 0
        if account is not None and asked and account.claim(line, now):
            return [line]
        counted = dp in self._counting and line.requests > 0
        if counted and not (account is not None and account.blurred(now)):
            return self._wait(line, now)
        if raw:
            # Only a server of several TP ranks prints which one speaks.
            alone = expected_ranks(facts) == 1 if "tp_size" in facts.args else line.rank.tp is None
            if not alone:
                return self._wait(line, now)
            if line.suspect or dp in self._counting or pool is None or not pool.vouch():
                return self._refuse()
        if account is not None:
            account.believe(line, now)
        return [line]

    def _refuse(self) -> list[Retraction]:
        self.suspicious["retraction"] += 1
        return []

    def _wait(self, line: Retraction, now: float) -> list[Retraction]:
        if len(self._pending) >= MOST_PENDING:
            if line.suspect or line.beside_words:
                return self._refuse()
            if (account := self._accounts.get(line.rank.dp)) is not None:
                account.believe(line, now)
            return [line]
        self._pending.append(_Pending(now, line))
        return []

    def repeated(self, line: Retraction, facts: ServerFacts) -> list[Retraction]:
        """Another TP or PP rank printed the same: what waited for that is believed, unless the server's own counter is asked."""
        asked = line.rank.dp in self._confirming and line.requests > 0
        if asked or not rank_exists(line.rank, facts):
            return []
        believed = [each for each in self._pending if _figures(each.event) == _figures(line)]
        self._drop(believed)
        account = self._accounts.get(line.rank.dp)
        for each in believed:
            if account is not None:
                account.believe(each.event, each.at)
        return [each.event for each in believed]

    def scraped(
        self, dp: int | None, now: float, counter: float | None, gained: float | None, *, counts: bool
    ) -> list[Retraction]:
        """A scrape: the server's counter of retracted requests is `counter` (None: not there) and grew by `gained` since the last
        (None: the first of this process).

        `counts`: the server has such a counter, there or not yet. Returns what the counter confirms.
        """
        confirms = counter is not None
        account = self._accounts.get(dp)
        if account is not None and gained is None and account.counter is not None and counter is not None:
            gained = counter - account.counter  # since the last scrape of an earlier process
        if account is None or (gained is not None and gained < 0):
            self._accounts[dp] = account = Account(now)
        else:
            account.gain(gained or 0.0, now)
        account.counter = counter
        for flag, asked in ((counts, self._counting), (counts and confirms, self._confirming)):
            if flag:
                asked.add(dp)
        mine = [each for each in self._pending if each.event.rank.dp == dp]
        for each in mine:
            each.scrapes += 1
        if dp not in self._confirming:
            return []
        mine.sort(key=lambda each: (each.event.suspect, each.event.beside_words))
        confirmed = [each for each in mine if each.event.requests and account.claim(each.event, now)]
        self._drop(confirmed)
        return [each.event for each in confirmed]

    def disagrees(self, now: float) -> bool | None:
        """Whether log and counter have lately differed for a minute, either way; None when the server does not count."""
        if not self._confirming:
            return None
        missed = [self._accounts[dp].missed_at for dp in self._confirming if dp in self._accounts]
        return any(at is not None and now - at <= DISAGREEMENT_HOLDS_SECONDS for at in missed)

    def unscraped(self) -> list[Retraction]:
        """SGLang could not be scraped: its counter confirms nothing until it answers again. What nothing raw can have produced is believed."""
        self._confirming.clear()
        self._counting.clear()
        return self._believe_sure()

    def _believe_sure(self) -> list[Retraction]:
        believed = [each for each in self._pending if not (each.event.suspect or each.event.beside_words)]
        self._drop(believed)
        for each in believed:
            if (account := self._accounts.get(each.event.rank.dp)) is not None:
                account.believe(each.event, each.at)
        return [each.event for each in believed]

    def _drop(self, settled: list[_Pending]) -> None:
        gone = {id(each) for each in settled}
        self._pending = [each for each in self._pending if id(each) not in gone]

    def tick(self, now: float) -> None:
        """Refuse what waited long enough and nobody bore out."""
        if not self._pending:
            return
        refused = []
        for each in self._pending:
            age, asked = now - each.at, each.event.rank.dp in self._counting
            told = asked and age > CONFIRM_SECONDS and each.scrapes >= CONFIRM_SCRAPES
            if told or age > (GIVE_UP_SECONDS if asked else REPEAT_SECONDS):
                refused.append(each)
                self._refuse()
                account = self._accounts.get(each.event.rank.dp)
                if account is not None and not each.event.suspect:
                    account.missed_at = now
        self._drop(refused)

    def restarted(self) -> list[Retraction]:
        """The server started anew and its counter with it: nobody will bear out what waits. What nothing raw can have produced is believed."""
        believed = self._believe_sure()
        self.suspicious["retraction"] += len(self._pending)
        self._pending.clear()
        self._confirming.clear()
        self._counting.clear()
        self._accounts.clear()
        return believed

    def saved(self) -> dict[str, Any]:
        """Give what still waits, and what was refused, as plain JSON."""
        return {
            "suspicious": dict(self.suspicious),
            "retractions": [
                [[*_scheduler(line.rank), line.rank.tp], *_told(line), [line.suspect, line.beside_words]]
                for line in (each.event for each in self._pending)
            ],
            "accounts": [[dp, *account.saved()] for dp, account in self._accounts.items() if dp in self._confirming],
        }

    def restore(self, saved: object, now: float) -> None:
        """Go on from what `saved` gave; what cannot be read is left out."""
        document = saved if isinstance(saved, dict) else {}
        self.suspicious.update(counts(document.get("suspicious")))
        for entry in _lists(document.get("retractions"))[:MOST_PENDING]:
            line = _retraction(entry)
            if line is not None:
                self._pending.append(_Pending(now, line))
        for entry in _lists(document.get("accounts"))[:MOST_RANKS]:
            dp, *figures = entry
            if (dp is None or _is_number(dp)) and len(figures) == 2 and all(map(_is_number, figures)):
                self._accounts[dp] = Account.restored(figures[0], figures[1], now)
                self._counting.add(dp)
                self._confirming.add(dp)


def expected_ranks(facts: ServerFacts) -> int:
    """How many ranks print one scheduler's retraction: all of its attention group, in every pipeline stage."""
    return facts.shards // facts.attention_ranks


def rank_exists(rank: Rank, facts: ServerFacts) -> bool:
    """Whether the server has such a rank, as far as its arguments tell."""
    if (schedulers := facts.dp_ranks) is not None:
        known = rank.dp is None or (1 < schedulers > rank.dp)
    else:
        known = rank.dp in facts.kv_pool_tokens or not facts.kv_pool_tokens
    sizes = ((rank.tp, "tp_size"), (rank.pp, "pp_size"))
    return known and all(number is None or number < (facts.arg(size) or inf) for number, size in sizes)


def _near(line: DecodeBatch | PrefillBatch, queued: float | None, usage: float | None) -> bool:
    """Whether a line tells about what the one before told; a prefill line, which has little else to be checked, needs one."""
    if queued is None or usage is None:
        return isinstance(line, DecodeBatch)
    told = max((u for u in (line.full_usage, line.swa_usage, line.mamba_usage) if u is not None), default=usage)
    most = max(NEAR_QUEUE, NEAR_QUEUE_SHARE * queued)
    return abs(told - usage) <= NEAR_USAGE and abs((line.queued or 0) - queued) <= most


def counts(saved: object) -> dict[str, int]:
    """The counts by name in a saved document; what cannot be one, or would not fit a float, is left out."""
    pairs = saved.items() if isinstance(saved, dict) else ()
    return {str(name): int(count) for name, count in pairs if _is_number(count) and 0 <= count <= 2**53}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and abs(value) <= 2**53 and isfinite(value)


def _lists(saved: object) -> list[list[Any]]:
    return [entry for entry in saved if isinstance(entry, list)] if isinstance(saved, list) else []


def _rank(saved: object) -> Rank | None:
    if not isinstance(saved, list) or len(saved) != 3 or not all(n is None or isinstance(n, int) for n in saved):
        return None
    return Rank(dp=saved[0], pp=saved[1], tp=saved[2])


def _retraction(entry: list[Any]) -> Retraction | None:
    flags = entry[6] if len(entry) == 7 else [True, False]  # those of older versions had none
    rank = _rank(entry[0]) if len(entry) in {6, 7} and isinstance(flags, list) and len(flags) == 2 else None
    if rank is None or not all(n is None or _is_number(n) for n in entry[2:6]) or not _is_number(entry[1]):
        return None
    if not 0 <= entry[1] <= MOST_REQUESTS:
        return None
    return Retraction(
        None,
        rank,
        int(entry[1]),
        aborted=entry[2],
        new_tokens_gained=entry[3],
        ratio_before=entry[4],
        ratio_after=entry[5],
        suspect=flags[0] is not False,
        beside_words=flags[1] is not False,
    )


def _scheduler(rank: Rank) -> _Scheduler:
    return rank.dp, rank.pp


def _told(line: Retraction) -> tuple[float | None, ...]:
    return line.requests, line.aborted, line.new_tokens_gained, line.ratio_before, line.ratio_after


def _figures(line: Retraction) -> tuple[object, ...]:
    return (line.rank.dp, *_told(line))
