"""What each scheduler of a server can do: its measured speeds, and what the KV cache and the running limit allow. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import floor

from sglang_tuning_exporter.capacity.readings import LEAST_SERVING_SECONDS, STALE_SECONDS, Measured, Prefill, Speeds
from sglang_tuning_exporter.capacity.step_time import LEAST_LINES, Estimate, StepSums, StepTime, fit
from sglang_tuning_exporter.core.server import Server

TOO_FEW_STEPS = "too few decode steps were seen: watch for longer, under load"
MOST_FITS = 64
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
    prefill: Prefill = Prefill()  # noqa: RUF009 - an immutable tuple
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


def capacities(server: Server, measured: Measured | None, now: float) -> list[RankCapacity]:
    """Return the capacity of each scheduler, from `/v1/loads` where the release counts steps, else from the log's decode lines.

    Tokens held and running requests are means over all schedulers, in the window of the profile.
    """
    only, of_lines = len(server.schedulers) == 1, step_of_lines(server, now)
    totals = server.window(server.profile.window_seconds, now)
    running, usage = totals.mean("running"), totals.mean("usage")
    found = []
    for dp in server.schedulers:
        counted = None if measured is None else measured.scheduler(dp, now, only=only)
        speeds, no_step = Speeds(None if isinstance(of_lines, str) else of_lines), str(of_lines)
        if counted is not None:
            speeds, no_step = counted.speeds, TOO_FEW_STEPS
        pool, limit, held = server.facts.pool(dp), server.facts.limit(dp), None
        if pool and running and usage and totals[f"serves/{dp}"] >= LEAST_SERVING_SECONDS:
            held = usage * pool / running
        most = None  # with the limit alone nothing is known: the KV cache may hold far fewer
        if pool and held:
            most = max(floor(min(pool / held, limit or pool)), 1)
        found.append(
            RankCapacity(
                dp,
                speeds.step,
                speeds.prefill,
                None if counted is None else counted.waiting,
                speeds.per_token,
                running,
                held,
                most,
                pool,
                limit,
                "" if speeds.step else no_step,
            )
        )
    return found


def step_of_lines(server: Server, now: float) -> StepTime | str:
    """Return the step time from the decode lines of all schedulers, or why there is none.

    It is less exact than counters: a line is the mean of some forty steps. The schedulers run the same model on the same kind of GPU,
    and with DP attention each step together. A speculative step gives each request several tokens, so a line must show how many.
    """
    schedulers = server.schedulers.values()
    if server.facts.role == "prefill":
        return DECODES_NOTHING
    if not any(each.decoded_at is not None for each in schedulers):
        return NO_DECODE_STEPS
    begin = now - server.profile.window_seconds
    steps = sorted((step for each in schedulers for step in each.steps if step[0] >= begin), key=lambda step: step[0])
    if not steps and server.facts.is_on("speculative_algorithm") and server.totals["accepted:n"] == 0:
        return NO_ACCEPT_LENGTH
    if steps and steps[-1][0] < now - STALE_SECONDS:
        steps = []
    return fit_of_lines(tuple(sums for _, sums in steps))


@lru_cache(maxsize=MOST_FITS)
def fit_of_lines(lines: tuple[StepSums, ...]) -> StepTime | str:
    """Return the step time from decode lines, each as one step, or why there is none; cached, because one page needs a fit several times."""
    return fit(lines, least=LEAST_LINES, source="log") or (
        f"{len(lines)} decode lines of the last ten minutes show the time of a step (one a second at most, and none after a prefill or"
        f" another batch), and {LEAST_LINES} are needed: give a longer log, or ask the server itself (--sglang-url, from 0.5.18 on)"
    )
