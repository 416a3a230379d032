"""Which stage of a server hangs: requests come in at the tokenizer, the scheduler computes, the detokenizer gives out.

Each stage has progress of its own. Pure; `now` is seconds on the caller's clock. What the constants rest on: docs/decisions.md, "Liveness".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

Stage: TypeAlias = Literal["tokenizer", "scheduler", "detokenizer"]
STAGES: tuple[Stage, ...] = get_args(Stage)

HANG_SECONDS = 60.0
PROVEN_SECONDS = 20.0  # so long nothing may come out after tokens that must have, where nothing has for a minute
IDLE_SECONDS = 10.0  # so long the schedulers must have had nothing to do while requests were open
# Decode steps after which every running request must have given tokens out: the forced interval, and some more.
STEPS_TO_OUTPUT = 60.0
# A health check is in vain after 20 s; the next one belongs to the same hang when it is in vain within the second figure.
CHECK_SECONDS, VAIN_SECONDS = 20.0, 90.0
# The exporter asks for a health check of its own when requests have stood still so long.
SUSPECT_SECONDS = 30.0

_WORDS: dict[Stage, str] = {
    "tokenizer": "requests come in and none is passed on",
    "scheduler": "requests run or wait, and no token is generated",
    "detokenizer": "tokens are generated and not sent",
}


@dataclass(frozen=True, slots=True)
class Hang:
    """A stage that does nothing, for how many seconds, and how many requests wait for it where that is known."""

    stage: Stage
    seconds: float
    requests: float | None = None

    @property
    def sentence(self) -> str:
        """What is seen, without a capital and a full stop."""
        waiting = f" ({self.requests:.0f} requests)" if self.requests else ""
        return f"the {self.stage} hangs: {_WORDS[self.stage]} for {self.seconds:.0f} s{waiting}"


@dataclass(slots=True)
class Look:
    """What one scrape says about the stages; counters are the server's own, cumulative.

    `steps` are decode steps since the look before, as far as counted or logged, `lag` how many of them may be older than
    that; `idle`: no scheduler has anything to do.
    """

    sent: float | None
    scheduled: float | None
    steps: float = 0.0
    lag: float = 0.0
    tokens: float = 0.0  # decoded since the look before, for all requests together
    joined: float = 0.0  # requests that began to run since the look before
    interval: float = 0.0  # decode steps after which a running request gives out tokens, where an argument sets it
    aborted: float | None = None
    requests: float | None = None  # that the HTTP server has open
    works: float | None = None  # requests that run or wait, as the schedulers say
    figures: tuple[float | None, ...] = ()  # gauges that a scheduler refreshes while it works
    idle: bool = False
    excused: bool = False  # what the requests wait for lies outside: a grammar, the other half of a pair


class Stages:
    """Takes one look after the other, and the signs of life in the log."""

    def __init__(self) -> None:
        self._vain: tuple[float, float] | None = None  # since when health checks are in vain, and the last one
        self.batch_at: float | None = None  # the last batch line
        self._seen: Look | None = None
        self._sent_at: float | None = None
        self._forget()

    def _forget(self) -> None:
        self._stretch = 0.0  # decode steps without a request being given up
        self._tokens = self._joined = self._works = 0.0  # decoded; requests that began to run; most that ran or waited
        self._proven_at: float | None = (
            None  # since when requests are known to have decoded so long that they must have given out tokens
        )
        self._decoded_at: float | None = None  # the first decode step of which nothing came out
        self._open_at: float | None = None  # since when requests are open and nothing comes out
        self._idle_at: float | None = None  # since when the schedulers have nothing to do, and requests are open
        self._scheduled = False  # the scheduler has moved since something came out
        self._gave_up = 0.0
        self._busy = False  # requests ran or waited when something came out last

    def restarted(self) -> None:
        """Begin anew with a new server."""
        self._vain = None
        self._seen = self._sent_at = None
        self._forget()

    def batch(self, now: float) -> None:
        """Note a batch line: the scheduler works, and the log is written."""
        self.batch_at = now

    def vain_check(self, now: float, lasted: float = CHECK_SECONDS) -> None:
        """Note a health check that got no answer from the detokenizer, in the log or of the exporter's own."""
        goes_on = self._vain is not None and now - self._vain[1] <= VAIN_SECONDS
        self._vain = (self._vain[0] if goes_on and self._vain else now - lasted, now)

    def answered_check(self) -> None:
        """Note a health check that was answered.

        A scheduler that is busy answers it alone; one that is idle hands it through all stages.
        """
        self._vain, self._gave_up = None, 0.0
        if self._idle_at is not None or self._open_at is None:
            self._open_at = self._idle_at = None

    def came_out(self, sent: float | None) -> bool:
        """Whether the detokenizer has given something out since the last look; health checks count nowhere."""
        before = None if self._seen is None else self._seen.sent
        return before is not None and sent is not None and sent > before

    def see(self, look: Look, now: float) -> None:
        """Take one scrape."""
        before, self._seen = self._seen, look
        if look.sent is None:
            return
        if before is None or before.sent is None or look.sent != before.sent:
            self._sent_at = now
            if before is not None and before.sent is not None:
                self._vain = None
            self._forget()
            self._busy = bool(look.works or look.requests or (before is not None and before.works))
            return
        aborted = (look.aborted or 0.0) - (before.aborted or 0.0)
        moved = look.scheduled is not None and before.scheduled is not None and look.scheduled != before.scheduled
        refreshed = bool(look.works) and look.figures != before.figures
        self._scheduled = self._scheduled or moved or refreshed or look.steps > 0
        self._gave_up += max(aborted, 0.0)
        if look.steps > 0 or look.tokens > 0:
            self._decoded_at = now if self._decoded_at is None else self._decoded_at
            if self._must_have_sent(look, gave_up=aborted > 0) and self._proven_at is None:
                self._proven_at = now
        self._see_open(look, now)

    def _must_have_sent(self, look: Look, *, gave_up: bool) -> bool:
        """Say whether a request has decoded so long that it must have given out tokens."""
        least = max(STEPS_TO_OUTPUT, 1.2 * look.interval)
        # Those that decode after others gave up may be younger.
        self._stretch = 0.0 if gave_up else self._stretch + look.steps
        self._tokens += look.tokens
        self._joined += look.joined
        self._works = max(self._works, look.works or 0.0)
        # More tokens than all requests together may have had before any of them gave one out.
        enough = least * (self._joined + self._works) + look.lag * self._works
        return self._stretch >= least + look.lag or self._tokens > enough > 0

    def _see_open(self, look: Look, now: float) -> None:
        waits = bool(look.requests) and not look.excused
        self._open_at = (self._open_at or now) if waits else None
        self._idle_at = (self._idle_at or now) if waits and look.idle else None

    @property
    def left_in_vain(self) -> bool:
        """Whether requests were given up, nothing has come out since, and no health check was answered: perhaps it hangs."""
        return self._gave_up > 0

    def suspicious(self, now: float) -> bool:
        """Whether a health check would tell what the counters do not: requests are there, or left in vain, and nothing moves."""
        if self._sent_at is None or now - self._sent_at < SUSPECT_SECONDS:
            return False
        opened = self._open_at is not None and now - self._open_at >= SUSPECT_SECONDS
        failing = self._vain is not None and now - self._vain[1] <= VAIN_SECONDS
        return opened or self.left_in_vain or failing

    def hang(self, now: float, stuck_since: float | None = None) -> Hang | None:
        """Say which stage hangs, if any; `stuck_since` is since when a scheduler's own figures stand still beside work."""
        look = self._seen
        requests = None if look is None else look.requests or look.works
        if self._proven_at is not None and self._decoded_at is not None and self._sent_at is not None:
            long = now - self._sent_at >= HANG_SECONDS and now - self._proven_at >= PROVEN_SECONDS
            if long or now - self._decoded_at >= HANG_SECONDS:
                return Hang("detokenizer", now - (self._sent_at if self._busy else self._decoded_at), requests)
        if stuck_since is not None:
            return Hang("scheduler", now - stuck_since, requests)
        # The schedulers have done what there was to do and are idle, and the requests are still open.
        idle = self._idle_at is not None and now - self._idle_at >= IDLE_SECONDS
        if idle and self._scheduled and self._open_at is not None and now - self._open_at >= HANG_SECONDS:
            return Hang("detokenizer", now - self._open_at, requests)
        return self._unchecked(now, requests)

    def _unchecked(self, now: float, requests: float | None) -> Hang | None:
        if self._vain is None or self._vain[1] - self._vain[0] < HANG_SECONDS:
            return None
        since, last = self._vain
        # Of a server that is known by its log alone: nothing came after the last check, so nobody asks any more.
        last_word = self._seen is None and (self.batch_at is None or self.batch_at < last)
        if now - last > VAIN_SECONDS and not last_word:
            return None
        worked = self._scheduled or (self.batch_at is not None and self.batch_at >= since + CHECK_SECONDS)
        return Hang("detokenizer" if worked else "scheduler", now - since, requests)
