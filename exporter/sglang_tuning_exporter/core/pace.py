"""How fast a scheduler works, by its batch lines: when the next line is due, and how long prompts take. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import inf

OVERDUE = 2.5  # intervals between two lines; then nothing is decoded any more
LEAST_HOLD_SECONDS = 2.0  # printed times are whole seconds
MOST_HOLD_SECONDS = 300.0
USUAL_STEP_SECONDS = 0.05  # until the log shows it
USUAL_PREFILL_RATE = 1000.0  # tokens a second, until the log shows it
CHUNK_STEP = 64  # sizes of chunks are multiples of it
SAME_CHUNK = 3  # lines with exactly the most tokens show the size of a chunk
STEP_SECONDS = 1.0  # between two step times: SGLang prints whole seconds
NEARLY_SAME = 0.1  # of the mean batch, between two decode lines: the mean is off by half as much at most


class Pace:
    """The intervals between the last lines, the time of a step, and the most prompt tokens of any second."""

    def __init__(self) -> None:
        self.decoded_at: float | None = None
        self.prefilled_at = -inf
        self.rate = USUAL_PREFILL_RATE  # the most prompt tokens of any second
        # Decode lines that show the time of a step, of the last ten minutes: time, batch, seconds, tokens per request.
        self.steps: deque[tuple[float, float, float, float]] = deque(maxlen=600)
        self._step_due = -inf
        self._intervals: deque[float] = deque(maxlen=5)  # seconds between decode lines, by their throughput
        self._gaps: deque[float] = deque(maxlen=5)  # seconds between lines, by their times
        self._second = (-inf, 0.0)  # the last printed second, and its prompt tokens
        self._due: float | None = None  # seconds from a line to the next; None until the log shows it

    def take_decode(self, now: float, interval: float | None, *, paused: bool) -> None:
        """Take a decode line.

        `interval`: seconds since the line before, by its throughput. `paused`: the scheduler paused in them.
        """
        if self.decoded_at is None:
            self._gaps.clear()  # those of prefill lines
        if not paused:
            if interval is not None:
                self._intervals.append(interval)
            if self.decoded_at is not None and now > self.decoded_at:
                self._gaps.append(now - self.decoded_at)
        self.decoded_at = now
        self._update_due()

    def take_prefill(self, now: float, printed: int, tokens: float) -> None:
        """Take a prefill line. `printed`: the second that it prints, even if the line comes late."""
        known, second = self._second
        second = second + tokens if printed == known else tokens
        self._second = (printed, second)
        self.rate = max(self.rate, second)
        if self.decoded_at is None and -inf < self.prefilled_at < now:
            self._gaps.append(now - self.prefilled_at)
            self._update_due()
        self.prefilled_at = now

    def take_page(self, tokens_per_second: float) -> None:
        """Take the prompt tokens a second between two pages."""
        self.rate = max(self.rate, tokens_per_second)

    def _update_due(self) -> None:
        shortest = min(self._intervals, default=None)
        if shortest is None:
            self._due = max(self._gaps, default=None)
        else:
            self._due = min(filter(None, (shortest, min(self._gaps, default=None))), default=None)

    def hold_seconds(self, tokens: float, steps_between_lines: float) -> float:
        """Return how long a moment is valid in which so many prompt tokens are computed."""
        due = steps_between_lines * USUAL_STEP_SECONDS if self._due is None else self._due
        return min(max(OVERDUE * (due + tokens / self.rate), LEAST_HOLD_SECONDS), MOST_HOLD_SECONDS)

    def is_step_due(self, now: float) -> bool:
        """Whether a decode line may add the time of a step."""
        return now >= self._step_due

    def add_step(
        self, now: float, figures: Mapping[str, float], before: Mapping[str, float], *, speculates: bool
    ) -> None:
        """Add the time of a step that two decode lines with nearly the same batch show.

        A line's throughput is over the time since the line before it.
        """
        running, speed, accepted = figures.get("running"), figures.get("throughput"), figures.get("accept_length")
        ran = before.get("running")
        if not running or not ran or not speed:
            return
        batch = (ran + running) / 2
        if abs(ran - running) > NEARLY_SAME * batch:
            return
        self._step_due = now + STEP_SECONDS
        if accepted or not speculates:
            tokens = accepted or 1.0
            self.steps.append((now, batch, batch * tokens / speed, tokens))


class ChunkSize:
    """The size of a chunk where the start is not known: a size that returns, and that no prefill batch exceeds."""

    def __init__(self) -> None:
        self.largest = 0.0  # tokens of a prefill batch
        self._as_large = 0  # batches with as many tokens
        self._continued = 0  # of these, batches after which a prompt continued

    def take_batch(self, tokens: float, running: float, before: Mapping[str, float] | None) -> None:
        """Take a prefill batch. `before`: the figures of the line before it, if that was a prefill line, too.

        A prompt continues after a batch if fewer requests run than joined. Prompts of one length may fill a batch and
        leave a rest that fits no other prompt: a largest batch that its sequences divide shows no chunk.
        """
        if tokens > self.largest:
            self.largest, self._as_large, self._continued = tokens, 0, 0
        self._as_large += tokens == self.largest
        if before is not None and before.get("tokens") == self.largest:
            sequences = before.get("sequences", 0.0)
            may_be_whole = sequences > 1 and self.largest % sequences == 0
            self._continued += not may_be_whole and running < before.get("running", 0.0) + sequences

    @property
    def most(self) -> float | None:
        """The most tokens of a batch, if several batches had as many and a chunk may have."""
        return self.largest if self._as_large >= SAME_CHUNK and self.largest % CHUNK_STEP == 0 else None

    @property
    def seen(self) -> float | None:
        """The most tokens of a batch, if these cannot be prompts of one length."""
        return self.most if self._continued >= SAME_CHUNK else None
