"""Whether each stage of a server makes progress, by its pages. Pure; times are unix seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal, NamedTuple, TypeAlias, get_args

from sglang_tuning_exporter.core.counters import Counters, gauges_of
from sglang_tuning_exporter.core.facts import DECODE_LOG_INTERVAL
from sglang_tuning_exporter.core.reasons import STUCK_SECONDS
from sglang_tuning_exporter.sglang.metrics import Scrape

Stage: TypeAlias = Literal["tokenizer", "scheduler", "detokenizer"]
STAGES: tuple[Stage, ...] = get_args(Stage)
# Without output while requests run, or with open requests beside idle schedulers: latencies say nothing then.
UNUSUAL_SECONDS = 10.0
PROVEN_SECONDS = 20.0  # without output after tokens that must have been sent
PAUSE_SECONDS = 600.0  # of /pause_generation, until it is a hang
CHECK_SECONDS, CHECK_GAP_SECONDS = 20.0, 90.0  # a health check takes at most; between two that fail in a row
STEPS_TO_OUTPUT = 60.0  # decode steps after which every running request must have sent tokens
SPECULATED_STEPS = 250.0  # the same with speculative decoding, where a step gives several tokens
SUSPECT_SECONDS = 30.0  # without progress, until the exporter makes a health check of its own
_STAGE_WORDS: Mapping[Stage, str] = {
    "tokenizer": "requests come in and none is passed on",
    "scheduler": "requests run or wait, and no token is generated",
    "detokenizer": "tokens are generated and not sent",
}


class Hang(NamedTuple):
    """A time without progress, with work before it, and after it or waiting all through it."""

    begin: float
    seconds: float
    before: float  # requests that ran before; 0 where that is not known
    after: float  # and after
    stage: Stage | None = None  # which does nothing, where pages show it
    is_pause: bool = False  # by /pause_generation

    @property
    def until(self) -> float:
        """Its end."""
        return self.begin + self.seconds

    @property
    def sentence(self) -> str:
        """What pages show."""
        waiting = f" ({self.after:.0f} requests)" if self.after else ""
        if self.is_pause or self.stage is None:
            return f"the server has been paused by /pause_generation for {self.seconds:.0f} s{waiting}"
        return f"the {self.stage} hangs: {_STAGE_WORDS[self.stage]} for {self.seconds:.0f} s{waiting}"


@dataclass(slots=True)
class Progress:
    """Whether each stage of one start makes progress.

    The tokenizer takes requests, the scheduler computes, the detokenizer sends tokens.
    """

    sent_at: float | None = None  # something was sent last
    worked_at: float | None = None  # a scheduler did something last
    proven_at: float | None = None  # since when tokens must have been sent
    open_at: float | None = None  # since when requests are open, and nothing was sent
    idle_at: float | None = None  # since when the schedulers are idle beside them
    failing_since: float | None = None  # health checks
    failed_at: float = -inf
    paused_at: float | None = None
    resumed_at: float = -inf
    requests: float | None = None
    gave_up: float = 0.0  # requests, since something was sent
    _works: bool = False  # requests run or wait
    _steps: float = 0.0  # decode steps since something was sent, of requests that may have been there all the time
    _unsent: float = 0.0  # decode steps since something was sent
    _sent: float | None = None
    _shown: object = None  # what a scheduler shows
    _pauses: tuple[float, float] | None = None

    def take_page(
        self, page: Scrape, counters: Counters, *, logged_steps: float, speculates: bool, interval: float, now: float
    ) -> None:
        """Take a page. `logged_steps`: decode steps of the log since the page before; `interval`: --stream-interval."""
        if page.posted_requests is not None:
            self._take_pauses(page.pauses or 0.0, page.resumptions or 0.0, now)
        works = sum((rank.running or 0) + (rank.queued or 0) for rank in page.ranks)
        excused = any((rank.grammar_queued or 0) + sum(rank.queues.values()) > 0 for rank in page.ranks)
        steps = max([logged_steps, *(rank.steps for rank in counters.ranks)])
        self._works, self.requests = works > 0 and page.sent is not None, page.open_requests or works
        if self._shows_work(page, counters, steps) or not works or excused:
            self.worked_at = now
        if page.sent is None or page.sent != self._sent:
            self._note_sent(page.sent, now)
            return
        self._count_unsent(steps, counters.counts.get("aborted_requests", 0.0))
        enough = max(SPECULATED_STEPS if speculates else STEPS_TO_OUTPUT, 1.2 * interval) + DECODE_LOG_INTERVAL
        if self.proven_at is None and works and self._steps >= enough:
            self.proven_at = now
        self._note_open(now, waits=bool(page.open_requests) and not excused, works=works > 0)

    def _shows_work(self, page: Scrape, counters: Counters, steps: float) -> bool:
        """Whether a page shows that a scheduler did something since the page before it."""
        before, self._shown = self._shown, (page.scheduled, [gauges_of(rank) for rank in page.ranks])
        moved = page.scheduled is None and bool(counters.moved)
        return moved or steps > 0 or before != self._shown

    def _note_open(self, now: float, *, waits: bool, works: bool) -> None:
        """Note since when requests are open, and since when the schedulers are idle beside them."""
        self.open_at = (self.open_at or now) if waits else None
        self.idle_at = (self.idle_at or now) if waits and not works else None

    def _note_sent(self, sent: float | None, now: float) -> None:
        """Note that something was sent: all that counts since then begins again."""
        self._sent, self.sent_at = sent, now
        self._steps = self._unsent = self.gave_up = 0.0
        self.proven_at = self.open_at = self.idle_at = self.failing_since = None

    def _count_unsent(self, steps: float, aborted: float) -> None:
        """Count decode steps after which nothing was sent. Requests that decode after others gave up may be younger."""
        self.gave_up += aborted
        self._steps = 0.0 if aborted else self._steps + steps
        self._unsent += steps

    def _take_pauses(self, pauses: float, resumptions: float, now: float) -> None:
        before, self._pauses = self._pauses, (pauses, resumptions)
        if before is not None and resumptions > before[1]:
            self.paused_at, self.resumed_at, self.failing_since = None, now, None
        elif pauses > (resumptions if before is None else before[0]):
            self.paused_at = self.paused_at or now

    def check(self, now: float, *, answered: bool, lasted: float = CHECK_SECONDS) -> None:
        """Take a health check, one of the log or the exporter's own.

        A busy scheduler answers it alone, an idle one passes it on.
        """
        if answered:
            self.failing_since, self.gave_up = None, 0.0
            if self.idle_at is not None or self.open_at is None:
                self.open_at = self.idle_at = None
        else:
            if self.failing_since is None or now - self.failed_at > CHECK_GAP_SECONDS:
                self.failing_since = now - lasted
            self.failed_at = now

    def is_suspicious(self, now: float) -> bool:
        """Whether a health check may show more: requests are open or were given up, and nothing moves."""
        if self.sent_at is None or now - self.sent_at < SUSPECT_SECONDS:
            return False
        return _lasts(self.open_at, SUSPECT_SECONDS, now) or self.gave_up > 0 or self.failing_since is not None

    def silence(self, now: float) -> float:
        """Return for how many seconds nothing was sent although requests run; 0 for a while that is usual."""
        seconds = 0.0 if self.sent_at is None or not self._works else now - self.sent_at
        return seconds if seconds >= UNUSUAL_SECONDS else 0.0

    def stuck(self, now: float) -> Hang | None:
        """Return which stage hangs; a paused server hangs only if it stays paused."""
        stage, since = self._stands(now)
        if stage is None or now - self.resumed_at < STUCK_SECONDS:
            return None
        if self.paused_at is not None:
            if now - self.paused_at < PAUSE_SECONDS:
                return None
            stage, since = "scheduler", self.paused_at
        requests = self.requests or 0.0
        return Hang(since, now - since, requests, requests, stage, is_pause=self.paused_at is not None)

    def _stands(self, now: float) -> tuple[Stage | None, float]:
        """Return which stage does nothing, and since when."""
        if _lasts(self.proven_at, PROVEN_SECONDS, now):
            return "detokenizer", self.sent_at or now
        if _lasts(self.worked_at, STUCK_SECONDS, now):
            return "scheduler", self.worked_at or now
        if _lasts(self.open_at, STUCK_SECONDS, now) and _lasts(self.idle_at, UNUSUAL_SECONDS, now):
            return "detokenizer" if self._unsent else "tokenizer", self.open_at or now
        if _lasts(self.failing_since, STUCK_SECONDS, now) and now - self.failed_at <= CHECK_GAP_SECONDS:
            return "scheduler", self.failing_since or now
        return None, now


def _lasts(since: float | None, seconds: float, now: float) -> bool:
    return since is not None and now - since >= seconds
