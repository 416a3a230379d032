"""How long a batch line is valid: when the next one is due, and how long a prefill takes. Pure; seconds on the caller's clock.

SGLang prints a decode line every `--decode-log-interval` (40) decode steps, so the next one is due after 40 steps. Much later than
that, nothing is decoded any more. A prefill line is about its own tokens; decoding follows. All lines of one time are taken together:
printed times are whole seconds, and the order within one means nothing. Reasons for the constants: docs/decisions.md.
"""

from __future__ import annotations

from math import inf

from sglang_tuning_exporter.sglang.events import DecodeBatch
from sglang_tuning_exporter.sglang.log.fast_path import BatchRun

DECODE_LOG_INTERVAL = 40.0  # decode steps between two decode lines, the default of --decode-log-interval
OVERDUE = 2.5  # times the interval to the next line; after that the server is idle
LEAST_SECONDS = 2.0  # printed times are whole seconds
LEAST_ACTIVE_SECONDS = 0.5
USUAL_STEP_SECONDS = 0.05  # of a decode step, until the log shows it
SLOW_STEP_SECONDS = 1.5
MOST_OVERDUE_SECONDS = 300.0
USUAL_TOKENS_PER_SECOND = 1000.0  # of prefill, until the log shows it
DRAFTED_TOKENS = 4.0  # that one speculative step may accept, where no argument has it
# Of the most tokens in a batch: whole pages are filled, and the last one may not fit.
FULL_PREFILL_SHARE = 0.9
_JUMP_SECONDS = 60.0  # more than this is a clock that was set, not a late line
_FADES = 0.98  # of the lateness, with each delivery
_WEIGHT = 0.5  # of the newest prefill pace


class Cadence:
    """How fast the batch lines of one scheduler follow each other."""

    def __init__(self) -> None:
        self.interval = DECODE_LOG_INTERVAL  # decode steps between two lines, times the tokens that one step may give
        self.chunk: float | None = (
            None  # the most prompt tokens of one prefill batch where a prompt may go on in the next
        )
        self.full = False  # the last line is a full prefill batch
        self.goes_on = False  # and its last prompt continues in the next
        self._moment = -inf
        self._prefills = 0  # lines of this moment, as the next three
        self._tokens = self._sequences = self._started = 0.0
        self._follows = False  # the first prefill batch continues the last prompt of the one before
        self._moment_before = -inf
        self._tokens_before = 0.0  # of the moment before, where it had only prefill lines
        self._before = self._decoded_at = -inf  # the last two moments with decode lines
        self._decode_line: DecodeBatch | BatchRun | None = None
        self._decode_lines = 0  # in that last moment
        self._joined = True  # requests, between the last two moments with decode lines
        self._joins = True  # requests, since then
        self._woke_at = -inf  # when something ran again after a pause
        self._pace: float | None = None  # prefill seconds per token, of prefill batches that followed each other
        self._peak = 0.0  # most prompt tokens computed in one printed second
        self._second = -inf
        self._second_tokens = 0.0
        self._least_offset = inf  # between a line's printed time and its arrival
        self._late = 0.0

    def ended(self, tokens: float, most: float | None) -> bool:
        """Set the tokens of the last line, a prefill batch in which `most` fit, or 0; return whether it is full."""
        self.full = most is not None and 0 < FULL_PREFILL_SHARE * most <= tokens
        self.goes_on = self.full and self.chunk is not None and tokens >= FULL_PREFILL_SHARE * self.chunk
        return self.full

    def woke(self, now: float) -> None:
        """Note that something runs again after a pause."""
        self._woke_at = now

    def _begin(self, now: float) -> None:
        """Begin a new moment."""
        if self._follows and self._prefills and self._tokens_before > 0 and self._moment > self._moment_before:
            pace = (self._moment - self._moment_before) / self._tokens_before
            self._pace = pace if self._pace is None else _WEIGHT * pace + (1 - _WEIGHT) * self._pace
        self._moment_before, self._tokens_before = (
            self._moment,
            0.0 if self._decoded_at == self._moment else self._tokens,
        )
        self._moment, self._follows = now, self.goes_on
        self._prefills = 0
        self._tokens = self._sequences = self._started = 0.0
        self._late *= _FADES

    def decoded(self, now: float, lines: int, last: DecodeBatch | BatchRun) -> None:
        """Add `lines` decode lines; the figures of the `last` are read when they are needed."""
        if now != self._moment:
            self._begin(now)
        if now != self._decoded_at:
            self._before, self._decoded_at, self._decode_lines = self._decoded_at, now, 0
            self._joined, self._joins = self._joins, self._prefills > 0
        self._decode_lines += lines
        self._decode_line = last

    def prefilled(self, now: float, printed: float, tokens: float, sequences: float, lines: int) -> float:
        """Add prefill lines; return how many requests they started.

        A request whose prompt is longer than a full batch is in the next batch again, and is not new there.
        """
        if now != self._moment:
            self._begin(now)
        self._joins = True
        self._joined = self._joined or now == self._decoded_at
        self._prefills += lines
        self._tokens += tokens
        self._sequences += sequences
        second = printed // 1.0
        if second != self._second:
            self._second, self._second_tokens = second, 0.0
        self._second_tokens += tokens
        if self._second_tokens > self._peak:  # noqa: PLR1730 - max() takes three times as long
            self._peak = self._second_tokens
        again = float(self._follows)
        if self._prefills > 1 and self.chunk:
            again += min(self._prefills - 1, self._tokens // (FULL_PREFILL_SHARE * self.chunk))
        before = self._started
        self._started = self._sequences - again if self._sequences > again else 0.0
        return self._started - before

    def delivered(self, now: float, printed: float) -> None:
        """Compare a line's printed time with its arrival: a log that comes in blocks is late by up to a block."""
        if now != self._moment:
            self._begin(now)
        offset = now - printed
        if abs(offset - self._least_offset) > _JUMP_SECONDS:
            self._least_offset, self._late = offset, 0.0
        self._least_offset = min(self._least_offset, offset)
        self._late = max(offset - self._least_offset, self._late)

    @property
    def heard_at(self) -> float:
        """When the last batch line came."""
        return self._moment

    @property
    def prefill_seconds(self) -> float:
        """Estimated time to compute the prompt tokens of this moment."""
        if self._pace is not None:
            return self._tokens * self._pace
        return self._tokens / (self._peak if self._peak > 0 else USUAL_TOKENS_PER_SECOND)

    def hold_seconds(self) -> float:
        """Return how long the last batch line is valid."""
        due = self.interval * self._step_seconds() + self.prefill_seconds
        return max(OVERDUE * due, LEAST_SECONDS) + self._late

    def overdue_seconds(self) -> float:
        """Return how long after the last batch line a server at work has surely printed another one."""
        if self._decode_line is None:
            return min(self.interval * SLOW_STEP_SECONDS, MOST_OVERDUE_SECONDS)
        return min(self.hold_seconds(), MOST_OVERDUE_SECONDS)

    def _step_seconds(self) -> float:
        """Return how long a decode step takes, for each of its tokens.

        Where no request joined between two decode lines, the batch decoded all the time. Otherwise it follows from the throughput, which
        SGLang takes over the time since the decode line before, pauses included.
        """
        gap = self._decoded_at - self._before
        if not self._joined and self._before > -inf and gap > 0:
            return gap / self.interval
        last = self._decode_line
        if last is None:
            return USUAL_STEP_SECONDS
        running, throughput = (
            last.decoding if isinstance(last, BatchRun) else (last.running, last.generation_throughput)
        )
        if not running or not throughput:
            return USUAL_STEP_SECONDS
        if self._decode_lines == 1:
            if self._before == -inf:
                return USUAL_STEP_SECONDS  # it is over the time since the server started
            active = max(self._decoded_at - max(self._before, self._woke_at), LEAST_ACTIVE_SECONDS)
            throughput *= max(gap / active, 1.0)
        return running / throughput
