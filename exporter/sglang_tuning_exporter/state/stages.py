"""Which stage of a server hangs: the tokenizer takes requests, the scheduler computes, the detokenizer sends tokens.

Each stage has its own progress. Pure; `now` is seconds on the caller's clock. Reasons for the constants: docs/decisions.md, "Liveness".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from sglang_tuning_exporter.sglang.events import Pause, Scrape
from sglang_tuning_exporter.state.counters import increase
from sglang_tuning_exporter.state.facts import ServerFacts
from sglang_tuning_exporter.state.rank import RankState

Stage: TypeAlias = Literal["tokenizer", "scheduler", "detokenizer"]
STAGES: tuple[Stage, ...] = get_args(Stage)

HANG_SECONDS = 60.0
PROVEN_SECONDS = 20.0  # without output after tokens that must have been sent
IDLE_SECONDS = 10.0  # of idle schedulers beside open requests
PAUSE_SECONDS = 600.0  # of /pause_generation, until it is a hang
STEPS_TO_OUTPUT = 60.0  # decode steps after which every running request must have sent tokens
CHECK_SECONDS = 20.0  # until a health check fails
FAILING_CHECK_SECONDS = 90.0  # between two failed checks of one hang
# With speculative decoding a step gives several tokens, and releases that send every fiftieth token may skip some of these.
SPECULATED_STEPS = 250.0
SUSPECT_SECONDS = 30.0  # without progress, until the exporter makes a health check of its own

_WORDS: dict[Stage, str] = {
    "tokenizer": "requests come in and none is passed on",
    "scheduler": "requests run or wait, and no token is generated",
    "detokenizer": "tokens are generated and not sent",
}


@dataclass(frozen=True, slots=True)
class Hang:
    """A stage that does nothing: for how many seconds, and how many requests wait, where that is known."""

    stage: Stage
    seconds: float
    requests: float | None = None
    is_pause: bool = False  # by /pause_generation

    @property
    def sentence(self) -> str:
        """What is seen, as a part of a sentence."""
        waiting = f" ({self.requests:.0f} requests)" if self.requests else ""
        if self.is_pause:
            return f"the server has been paused by /pause_generation for {self.seconds:.0f} s{waiting}"
        return f"the {self.stage} hangs: {_WORDS[self.stage]} for {self.seconds:.0f} s{waiting}"


@dataclass(slots=True)
class StageFigures:
    """What one scrape shows of the stages; counters are the server's own, cumulative."""

    sent: float | None  # moves when the detokenizer sends something; health checks do not count
    scheduled: float | None  # moves when the schedulers do something
    steps: float = 0.0  # decode steps since the scrape before, as far as counted or logged
    lag: float = 0.0  # how many of them may be older than that
    tokens: float = 0.0  # decoded since the scrape before, for all requests together
    joined: float = 0.0  # requests that began to run since the scrape before
    interval: float = 0.0  # decode steps after which a running request sends tokens, where an argument sets it
    aborted: float | None = None
    requests: float | None = None  # that the HTTP server has open
    works: float | None = None  # requests that run or wait in the schedulers
    gauges: tuple[float | None, ...] = ()  # those that a scheduler refreshes while it works
    idle: bool = False  # no scheduler has anything to do
    excused: bool = False  # the requests wait for something else: a grammar, the other half of a pair

    def has_sent_since(self, before: StageFigures | None) -> bool:
        """Whether something was sent since the scrape before."""
        return before is not None and None not in {before.sent, self.sent} and self.sent != before.sent

    def has_scheduled_since(self, before: StageFigures) -> bool:
        """Whether a scheduler did something since the scrape before."""
        moved = None not in {self.scheduled, before.scheduled} and self.scheduled != before.scheduled
        return moved or self.steps > 0 or (bool(self.works) and self.gauges != before.gauges)


class _Silence:
    """What happened since something was sent last."""

    def __init__(self, *, busy: bool) -> None:
        self.busy = busy  # requests ran or waited when something was sent last
        self.steps = 0.0  # decode steps without a request being given up
        self.tokens = self.joined = self.works = 0.0  # decoded; requests that began to run; most that ran or waited
        self.gave_up = 0.0  # requests
        self.decoded_at: float | None = None  # the first decode step whose tokens were not sent
        self.proven_at: float | None = None  # since when requests have decoded so long that they must have sent tokens
        self.open_at: float | None = None  # since when requests are open
        self.idle_at: float | None = None  # since when the schedulers are idle beside open requests
        self.scheduled = False  # a scheduler has done something

    def add(self, figures: StageFigures, before: StageFigures, now: float) -> None:
        """Add a scrape in which nothing was sent."""
        self.scheduled = self.scheduled or figures.has_scheduled_since(before)
        aborted = max((figures.aborted or 0.0) - (before.aborted or 0.0), 0.0)
        self.gave_up += aborted
        if figures.steps > 0 or figures.tokens > 0:
            self.decoded_at = now if self.decoded_at is None else self.decoded_at
            # Requests that decode after others gave up may be younger.
            self.steps = 0.0 if aborted else self.steps + figures.steps
            self.tokens += figures.tokens
            self.joined += figures.joined
            self.works = max(self.works, figures.works or 0.0)
            if self.proven_at is None and self._must_have_sent(figures):
                self.proven_at = now
        waits = bool(figures.requests) and not figures.excused
        self.open_at = (self.open_at or now) if waits else None
        self.idle_at = (self.idle_at or now) if waits and figures.idle else None

    def _must_have_sent(self, figures: StageFigures) -> bool:
        """Whether a request has decoded so long that it must have sent tokens."""
        least = max(STEPS_TO_OUTPUT, 1.2 * figures.interval)
        # More tokens than all requests together can have without one of them sending any.
        enough = least * (self.joined + self.works) + figures.lag * self.works
        return self.steps >= least + figures.lag or self.tokens > enough > 0


class Stages:
    """Takes one scrape after the other, and the health checks and batch lines of the log."""

    def __init__(self) -> None:
        self.batch_at: float | None = None  # the last batch line
        self._counted: dict[int | None, tuple[float | None, ...]] = {}  # by scheduler, at the last scrape
        self.restarted()

    def restarted(self) -> None:
        """Begin with a new server."""
        self._failing_checks: tuple[float, float] | None = None  # since when health checks fail, and the last one
        self._seen: StageFigures | None = None
        self._sent_at: float | None = None
        self._silence = _Silence(busy=False)
        self._pauses: tuple[float, float] | None = None  # pauses and resumptions, at the last scrape
        self._paused_at: float | None = None
        self._resumed_at: float | None = None

    def batch(self, now: float) -> None:
        """Note a batch line: the scheduler works, and the log is written."""
        self.batch_at = now

    def see_pause(self, event: Pause, now: float) -> None:
        """Take a line of the access log, which text of a request may have forged, where the server does not count requests itself."""
        if not event.suspect and self._pauses is None:
            (self.resume if event.ends else self.pause)(now)

    def pause(self, now: float) -> None:
        """Note that an operator paused the server: it does nothing until it is resumed."""
        self._paused_at = now if self._paused_at is None else self._paused_at

    def resume(self, now: float) -> None:
        """Note that generation continues: health checks that failed during the pause say nothing."""
        self._paused_at, self._resumed_at = None, now
        self._failing_checks = None

    def fail_health_check(self, now: float, lasted: float = CHECK_SECONDS) -> None:
        """Note a health check without an answer from the detokenizer, in the log or of the exporter's own."""
        goes_on = self._failing_checks is not None and now - self._failing_checks[1] <= FAILING_CHECK_SECONDS
        self._failing_checks = (self._failing_checks[0] if goes_on and self._failing_checks else now - lasted, now)

    def answer_health_check(self) -> None:
        """Note a health check that was answered.

        A busy scheduler answers it alone; an idle one passes it through all stages.
        """
        silence = self._silence
        self._failing_checks, silence.gave_up = None, 0.0
        if silence.idle_at is not None or silence.open_at is None:
            silence.open_at = silence.idle_at = None

    def came_out(self, sent: float | None) -> bool:
        """Whether the detokenizer has sent something since the last scrape; health checks do not count."""
        before = None if self._seen is None else self._seen.sent
        return before is not None and sent is not None and sent > before

    def observe(self, scrape: Scrape, ranks: Mapping[int | None, RankState], facts: ServerFacts, now: float) -> None:
        """Take one scrape; the ranks have taken it already."""
        if scrape.posted_requests is not None:
            self._see_pauses(scrape.pauses or 0.0, scrape.resumptions or 0.0, now)
        steps, tokens, joined = self._done(ranks, facts.decode_log_interval)
        outside = sum((rank.grammar_queued or 0) + sum(rank.queues.values()) for rank in scrape.ranks)
        works = sum((rank.running or 0) + (rank.queued or 0) for rank in scrape.ranks)
        speculates = bool(facts.args.get("speculative_algorithm"))
        figures = StageFigures(
            scrape.sent,
            scrape.scheduled,
            steps,
            facts.decode_log_interval,
            tokens,
            joined,
            max(facts.arg("stream_interval") or 0.0, SPECULATED_STEPS if speculates else 0.0),
            scrape.aborted_requests,
            scrape.open_requests,
            works,
            tuple(
                gauge for rank in scrape.ranks for gauge in (rank.running, rank.used_tokens, rank.generation_throughput)
            ),
            idle=not works and any(rank.running is not None for rank in scrape.ranks),
            excused=outside > 0,
        )
        self._see(figures, now)

    def _done(self, ranks: Mapping[int | None, RankState], interval: float) -> tuple[float, float, float]:
        """Return decode steps, decoded tokens and requests that began to run since the last scrape.

        The server's own counters are used where it has them, else the lines of the log.
        """
        steps = tokens = joined = 0.0
        before, self._counted = self._counted, {}
        for dp, rank in ranks.items():
            counts = rank.totals.counts
            of_server = rank.counters.figure("decoded_tokens"), rank.counters.figure("admitted_requests")
            now = (counts["replayed"] + counts["eager"], counts["decoded"], counts["joined"], *of_server)
            batches, lines, sequences, decoded, admitted = map(increase, before.get(dp, now), now)
            self._counted[dp] = now
            steps = max(steps, batches)
            tokens += lines * interval if of_server[0] is None else decoded
            joined += sequences if of_server[1] is None else admitted
        return steps, tokens, joined

    def _see_pauses(self, pauses: float, resumptions: float, now: float) -> None:
        """Note whether the server is paused: an operator paused it, and did not resume it since."""
        before, self._pauses = self._pauses, (pauses, resumptions)
        if before is None:
            if pauses > resumptions:
                self.pause(now)
        elif resumptions > before[1]:
            self.resume(now)
        elif pauses > before[0]:
            self.pause(now)

    def _see(self, figures: StageFigures, now: float) -> None:
        before, self._seen = self._seen, figures
        if figures.sent is None:
            return
        if before is not None and before.sent == figures.sent:
            self._silence.add(figures, before, now)
            return
        if figures.has_sent_since(before):
            self._failing_checks = None
        self._sent_at = now
        self._silence = _Silence(busy=bool(figures.works or figures.requests or (before is not None and before.works)))

    @property
    def has_given_up_requests(self) -> bool:
        """Whether requests were given up, nothing was sent since, and no health check was answered: it may hang."""
        return self._silence.gave_up > 0

    def suspicious(self, now: float) -> bool:
        """Whether a health check may show more than the counters: requests are open, or were given up, and nothing moves."""
        if self._sent_at is None or now - self._sent_at < SUSPECT_SECONDS:
            return False
        opened = self._silence.open_at
        failing = self._failing_checks is not None and now - self._failing_checks[1] <= FAILING_CHECK_SECONDS
        return (opened is not None and now - opened >= SUSPECT_SECONDS) or self.has_given_up_requests or failing

    def hang(self, now: float, stuck_since: float | None = None) -> Hang | None:
        """Return which stage hangs, if any; `stuck_since` is since when a scheduler's own figures do not move beside work.

        A paused server hangs only if it stays paused for `PAUSE_SECONDS`.
        """
        found, paused_at = self._hang(now, stuck_since), self._paused_at
        if found is not None and paused_at is not None:
            paused = replace(found, stage="scheduler", seconds=now - paused_at, is_pause=True)
            return paused if paused.seconds >= PAUSE_SECONDS else None
        is_resumed = self._resumed_at is not None and now - self._resumed_at < HANG_SECONDS
        return None if is_resumed else found

    def _hang(self, now: float, stuck_since: float | None) -> Hang | None:
        requests = None if self._seen is None else self._seen.requests or self._seen.works
        held = self._held_tokens_since(now)
        if held is not None:
            return Hang("detokenizer", now - held, requests)
        if stuck_since is not None:
            return Hang("scheduler", now - stuck_since, requests)
        # The schedulers have done all there was to do and are idle, and the requests are still open.
        silence = self._silence
        idle = silence.idle_at is not None and now - silence.idle_at >= IDLE_SECONDS
        if idle and silence.scheduled and silence.open_at is not None and now - silence.open_at >= HANG_SECONDS:
            return Hang("detokenizer", now - silence.open_at, requests)
        return self._unchecked(now, requests)

    def _held_tokens_since(self, now: float) -> float | None:
        """Return since when the detokenizer keeps tokens that it must have sent; None where that is not proven."""
        silence, sent_at = self._silence, self._sent_at
        if silence.proven_at is None or silence.decoded_at is None or sent_at is None:
            return None
        is_long = now - sent_at >= HANG_SECONDS and now - silence.proven_at >= PROVEN_SECONDS
        if not is_long and now - silence.decoded_at < HANG_SECONDS:
            return None
        return sent_at if silence.busy else silence.decoded_at

    def _unchecked(self, now: float, requests: float | None) -> Hang | None:
        """Return the hang that failed health checks show."""
        if self._failing_checks is None or self._failing_checks[1] - self._failing_checks[0] < HANG_SECONDS:
            return None
        since, last = self._failing_checks
        # With the log alone: nothing came after the last check, so nobody checks any more.
        is_last_word = self._seen is None and (self.batch_at is None or self.batch_at < last)
        if now - last > FAILING_CHECK_SECONDS and not is_last_word:
            return None
        worked = self._silence.scheduled or (self.batch_at is not None and self.batch_at >= since + CHECK_SECONDS)
        return Hang("detokenizer" if worked else "scheduler", now - since, requests)
