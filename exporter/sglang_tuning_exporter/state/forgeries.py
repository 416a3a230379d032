"""Decide which log lines count: raw text may be printed between the server's own lines. Pure; times are seconds on the caller's clock.

SGLang prints some text of models and clients raw: a tool's name with a newline in it puts a perfect line into the log. So a
retraction is compared with the server's own counter, where there is one. Where there is none, a line near raw text counts only with
what a real event has: other TP ranks repeat it, the KV cache can be full, its rank exists. What does not count moves no counter, and
the number of such lines is exposed. Failures and starts: `confirmation`. What cannot be decided: SECURITY.md.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import inf
from typing import Any

from sglang_tuning_exporter.sglang.event_json import is_figure, is_rank
from sglang_tuning_exporter.sglang.events import MOST_RANKS, DecodeBatch, PrefillBatch, Rank, Retraction
from sglang_tuning_exporter.state.deduplication import same_in_all_ranks
from sglang_tuning_exporter.state.facts import ServerFacts
from sglang_tuning_exporter.state.kv_cache import USAGE_ROUNDING, PoolMemory
from sglang_tuning_exporter.state.retraction_account import CONFIRM_SECONDS, RetractionAccount
from sglang_tuning_exporter.state.saved import counts, lists

# Reasons: docs/decisions.md, "Log lines that may be forged".
CONFIRM_SCRAPES = 2
GIVE_UP_SECONDS = 30.0
REPEAT_SECONDS = 10.0
DISAGREEMENT_HOLDS_SECONDS = 600.0
NEAR_USAGE = 0.15
NEAR_QUEUE, NEAR_QUEUE_SHARE = 16.0, 0.5
MOST_PENDING = 256
MOST_REQUESTS = 2**31


@dataclass(slots=True)
class _Pending:
    at: float
    event: Retraction
    scrapes: int = 0

    @property
    def is_raw(self) -> bool:
        """Whether raw text may be the line."""
        return self.event.suspect or self.event.near_raw_text


class ForgeryFilter:
    """Decides which batch lines and retractions count, and keeps those that wait for evidence."""

    def __init__(self) -> None:
        self.suspicious: Counter[str] = Counter()
        self._pending: list[_Pending] = []
        self._accounts: dict[int | None, RetractionAccount] = {}  # by DP rank
        self._counting: set[int | None] = (
            set()
        )  # the server counts, though the counter may be absent until its first event
        self._confirming: set[int | None] = set()  # the counter is there

    def accepts_batch(
        self, line: DecodeBatch | PrefillBatch, facts: ServerFacts, *, queued: float | None, usage: float | None
    ) -> bool:
        """Whether the figures of a batch line fit the server and the line before; only lines near raw text can fail.

        `queued` and `usage` (0-1) are the scheduler's last figures, None where there are none.
        """
        if not line.suspect:
            return True
        known = queued is not None and usage is not None
        fits = _fits(line, facts, has_neighbour=known) and _is_near(line, queued, usage)
        if not fits:
            self.suspicious["batch"] += 1
        return fits

    def retraction(
        self, line: Retraction, *, pool: PoolMemory | None, facts: ServerFacts, now: float
    ) -> list[Retraction]:
        """Return the events to count now: the line, or none while it waits or where it is refused."""
        dp, pending = line.rank.dp, _Pending(now, line)
        if pending.is_raw and not (
            rank_exists(line.rank, facts) and (pool is None or pool.can_be_full(facts, dp, now))
        ):
            return self._refuse()
        if self._matches(pending, now):
            return [line]
        account = self._accounts.get(dp)
        counted = dp in self._counting and line.requests > 0
        if counted and (account is None or not account.is_blurred(now)):
            return self._wait(pending)
        return self._judge_raw(pending, pool, facts) if pending.is_raw else self._accept([pending])

    def _judge_raw(self, pending: _Pending, pool: PoolMemory | None, facts: ServerFacts) -> list[Retraction]:
        """Decide on a line near raw text without the server's counter: by its repetition, else one counts per decode line."""
        rank = pending.event.rank
        # Only a server with several TP ranks prints the rank.
        is_alone = expected_ranks(facts) == 1 if "tp_size" in facts.args else rank.tp is None
        if not is_alone:
            return self._wait(pending)
        if pending.event.suspect or rank.dp in self._counting or pool is None or not pool.vouch():
            return self._refuse()
        return self._accept([pending])

    def _matches(self, pending: _Pending, now: float) -> bool:
        """Whether the server's counter confirms a line.

        A line without requests is one whose last request was aborted: none was put back, so the counter does not move.
        """
        dp, line = pending.event.rank.dp, pending.event
        account = self._accounts.get(dp)
        return account is not None and dp in self._confirming and line.requests > 0 and account.match(line, now)

    def _refuse(self) -> list[Retraction]:
        self.suspicious["retraction"] += 1
        return []

    def _accept(self, accepted: list[_Pending]) -> list[Retraction]:
        """Count lines without the counter."""
        for each in accepted:
            if (account := self._accounts.get(each.event.rank.dp)) is not None:
                account.accept(each.event, each.at)
        return [each.event for each in accepted]

    def _wait(self, pending: _Pending) -> list[Retraction]:
        if len(self._pending) < MOST_PENDING:
            self._pending.append(pending)
            return []
        return self._refuse() if pending.is_raw else self._accept([pending])

    def _drop(self, settled: list[_Pending]) -> None:
        gone = {id(each) for each in settled}
        self._pending = [each for each in self._pending if id(each) not in gone]

    def repeated(self, line: Retraction, facts: ServerFacts) -> list[Retraction]:
        """Return the events to count after another TP or PP rank printed the same, unless the server's counter decides."""
        by_counter = line.rank.dp in self._confirming and line.requests > 0
        if by_counter or not rank_exists(line.rank, facts):
            return []
        confirmed = [each for each in self._pending if same_in_all_ranks(each.event) == same_in_all_ranks(line)]
        self._drop(confirmed)
        return self._accept(confirmed)

    def scraped(
        self, dp: int | None, now: float, counter: float | None, gained: float | None, *, counts: bool
    ) -> list[Retraction]:
        """Return what a scrape confirms.

        `counter` is the server's counter of retracted requests (None: absent), `gained` what it gained since the last scrape (None:
        the first scrape of this process), `counts` whether the server has such a counter, absent or not.
        """
        account = self._accounts.get(dp)
        if account is not None and gained is None and account.counter is not None and counter is not None:
            gained = counter - account.counter  # since the last scrape of an earlier process
        if account is None or (gained is not None and gained < 0):
            self._accounts[dp] = account = RetractionAccount(now)
        else:
            account.gain(gained or 0.0, now)
        account.counter = counter
        if counts:
            self._counting.add(dp)
            if counter is not None:
                self._confirming.add(dp)
        mine = [each for each in self._pending if each.event.rank.dp == dp]
        for each in mine:
            each.scrapes += 1
        mine.sort(key=lambda each: (each.event.suspect, each.event.near_raw_text))
        confirmed = [each for each in mine if self._matches(each, now)]
        self._drop(confirmed)
        return [each.event for each in confirmed]

    def disagrees(self, now: float) -> bool | None:
        """Whether log and counter have lately differed for a minute, either way; None where the server does not count."""
        if not self._confirming:
            return None
        missed = [self._accounts[dp].missed_at for dp in self._confirming if dp in self._accounts]
        return any(at is not None and now - at <= DISAGREEMENT_HOLDS_SECONDS for at in missed)

    def unscraped(self) -> list[Retraction]:
        """Return what counts after a failed scrape: the counter confirms nothing, so all lines without raw text near them."""
        self._confirming.clear()
        self._counting.clear()
        sure = [each for each in self._pending if not each.is_raw]
        self._drop(sure)
        return self._accept(sure)

    def restarted(self) -> list[Retraction]:
        """Return what counts after a start of the server, whose counter began again; what waits otherwise is refused."""
        sure = self.unscraped()
        self.suspicious["retraction"] += len(self._pending)
        self._pending.clear()
        self._accounts.clear()
        return sure

    @property
    def waits(self) -> bool:
        """Whether anything waits for evidence."""
        return bool(self._pending)

    def tick(self, now: float) -> None:
        """Refuse what waited long enough without evidence."""
        refused = []
        for each in self._pending:
            age, has_counter = now - each.at, each.event.rank.dp in self._counting
            is_denied = has_counter and age > CONFIRM_SECONDS and each.scrapes >= CONFIRM_SCRAPES
            if is_denied or age > (GIVE_UP_SECONDS if has_counter else REPEAT_SECONDS):
                refused.append(each)
                self._refuse()
                account = self._accounts.get(each.event.rank.dp)
                if account is not None and not each.event.suspect:
                    account.missed_at = now
        self._drop(refused)

    def saved(self) -> dict[str, Any]:
        """Return what waits, and how much was refused, as plain JSON."""
        return {
            "suspicious": dict(self.suspicious),
            "retractions": [_saved(each.event) for each in self._pending],
            "accounts": [[dp, *account.saved()] for dp, account in self._accounts.items() if dp in self._confirming],
        }

    def restore(self, saved: object, now: float) -> None:
        """Go on from what `saved` returned; what cannot be read is left out."""
        document = saved if isinstance(saved, dict) else {}
        self.suspicious.update(counts(document.get("suspicious")))
        found = map(_restored, lists(document.get("retractions"))[:MOST_PENDING])
        self._pending.extend(_Pending(now, line) for line in found if line is not None)
        for dp, *figures in filter(None, lists(document.get("accounts"))[:MOST_RANKS]):
            if is_rank(dp) and len(figures) == 2 and all(map(is_figure, figures)):
                self._accounts[dp] = RetractionAccount.restored(figures[0], figures[1], now)
                self._counting.add(dp)
                self._confirming.add(dp)


def expected_ranks(facts: ServerFacts) -> int:
    """Return how many ranks print a scheduler's retraction: all of its attention group, in every pipeline stage."""
    return facts.shards // facts.attention_ranks


def rank_exists(rank: Rank, facts: ServerFacts) -> bool:
    """Whether the server has a rank, as far as its arguments show."""
    if (schedulers := facts.dp_ranks) is not None:
        known = rank.dp is None or (1 < schedulers > rank.dp)
    else:
        known = rank.dp in facts.kv_pool_tokens or not facts.kv_pool_tokens
    sizes = ((rank.tp, "tp_size"), (rank.pp, "pp_size"))
    return known and all(number is None or number < (facts.arg(size) or inf) for number, size in sizes)


def _fits(line: DecodeBatch | PrefillBatch, facts: ServerFacts, *, has_neighbour: bool) -> bool:
    """Whether a batch line fits the limits, ranks and KV cache of the server."""
    limit, pool = facts.scheduler_limit(line.rank.dp), facts.kv_pool_tokens.get(line.rank.dp)
    if limit is not None and (line.running or 0) > limit:
        return False
    if not rank_exists(line.rank, facts):
        return False
    if isinstance(line, PrefillBatch):
        return True
    if pool is None or line.tokens is None or line.full_usage is None:
        return has_neighbour  # a log without its start: only the line before can be compared
    return abs(line.tokens / pool - line.full_usage) <= USAGE_ROUNDING


def _is_near(line: DecodeBatch | PrefillBatch, queued: float | None, usage: float | None) -> bool:
    """Whether a line has about the figures of the one before; a prefill line, which has few others, needs one before it."""
    if queued is None or usage is None:
        return isinstance(line, DecodeBatch)
    used = max((u for u in (line.full_usage, line.swa_usage, line.mamba_usage) if u is not None), default=usage)
    most = max(NEAR_QUEUE, NEAR_QUEUE_SHARE * queued)
    return abs(used - usage) <= NEAR_USAGE and abs((line.queued or 0) - queued) <= most


def _saved(line: Retraction) -> list[Any]:
    return [
        [line.rank.dp, line.rank.pp, line.rank.tp],
        *same_in_all_ranks(line)[1:],
        [line.suspect, line.near_raw_text],
    ]


def _restored(entry: list[Any]) -> Retraction | None:
    """Return the line that `_saved` wrote; None where it cannot be one."""
    match entry if len(entry) != 6 else [*entry, [True, False]]:  # older versions saved no flags
        case [[dp, pp, tp], requests, aborted, gained, before, after, [suspect, near_raw_text]]:
            pass
        case _:
            return None
    ranks, figures = (dp, pp, tp), (aborted, gained, before, after)
    if not all(map(is_rank, ranks)):
        return None
    if not is_figure(requests) or not 0 <= requests <= MOST_REQUESTS:
        return None
    if not all(figure is None or is_figure(figure) for figure in figures):
        return None
    return Retraction(
        None,
        Rank(dp=dp, pp=pp, tp=tp),
        int(requests),
        *figures,
        suspect=suspect is not False,
        near_raw_text=near_raw_text is not False,
    )
