"""What one scheduler can do: its measured speeds, and what the KV cache and the running limit allow. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import floor

from sglang_tuning_exporter.capacity.estimate import Estimate
from sglang_tuning_exporter.capacity.readings import Prefill
from sglang_tuning_exporter.capacity.step_time import LEAST_LINES, StepSums, StepTime, fit

STALE_SECONDS = 120.0  # older figures say nothing about now
LEAST_SERVING_SECONDS = 20.0
MOST_FITS = 64
NOT_MEASURED = Prefill(None, None)
DECODES_NOTHING = "the prefill side of disaggregation decodes nothing"
NO_DECODE_STEPS = "no decode steps were seen: /v1/loads counts them from 0.5.18 on, and a log shows them under load"
NO_ACCEPT_LENGTH = "the decode lines do not show how many tokens a speculative step gives (accept len)"


@dataclass(frozen=True, slots=True)
class RankCapacity:
    """The speed of one scheduler; an unknown figure is None.

    `tokens_per_request`: KV cache tokens that a running request holds. `most_requests`: how many such requests fit and may run.
    `prefill_per_token`: prompt tokens computed for each generated token, in the present mix.
    """

    dp: int | None
    step: StepTime | None = None
    prefill: Prefill = NOT_MEASURED
    waiting_tokens: float | None = None
    prefill_per_token: float | None = None
    running: float | None = None
    tokens_per_request: float | None = None
    most_requests: int | None = None
    pool_tokens: float | None = None
    running_limit: float | None = None
    no_step: str = ""  # why the step time is unknown

    @property
    def backlog_seconds(self) -> Estimate | None:
        """Seconds of prefill that the waiting prompts need."""
        speed, waiting = self.prefill.tokens_per_second, self.waiting_tokens
        return None if speed is None or waiting is None else speed.dividing(waiting)

    @property
    def decode_limit(self) -> Estimate | None:
        """Generated tokens a second with as many requests as fit and may run, without prefill."""
        return None if self.most_requests is None else self.decode_speed(self.most_requests)

    def decode_speed(self, batch: float) -> Estimate | None:
        """Return the generated tokens a second at a batch, without prefill."""
        step = None if self.step is None else self.step.at(batch)
        return None if step is None or self.step is None else step.dividing(batch * self.step.tokens_per_request)


def most_requests(pool: float | None, tokens_held: float | None, limit: float | None) -> int | None:
    """Return how many requests of `tokens_held` fit into the KV cache and may run; None where what fits is not known."""
    if pool is None or not tokens_held:
        return None  # with the limit alone nothing is known: the KV cache may hold far fewer
    fitting = pool / tokens_held
    return max(floor(fitting if limit is None else min(fitting, limit)), 1)


@lru_cache(maxsize=MOST_FITS)
def fit_of_lines(lines: tuple[StepSums, ...]) -> StepTime | str:
    """Return the step time from decode lines, each as one step, or why there is none; cached, because one page needs a fit several times."""
    return fit(lines, least=LEAST_LINES, source="log") or (
        f"{len(lines)} decode lines of the last ten minutes show the time of a step (one a second at most, and none after a prefill or"
        f" another batch), and {LEAST_LINES} are needed: give a longer log, or ask the server itself (--sglang-url, from 0.5.18 on)"
    )
