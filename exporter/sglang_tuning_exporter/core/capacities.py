"""What each scheduler of a server can do: its measured speeds, and what the KV cache and the running limit allow. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import floor

from sglang_tuning_exporter import capacity
from sglang_tuning_exporter.core.server import Server

MOST_FITS = 64


@dataclass(frozen=True, slots=True)
class RankCapacity:
    """The speed of one scheduler; an unknown figure is None.

    `tokens_per_request`: KV cache tokens that a running request holds. `most_requests`: how many such requests fit and may run.
    """

    dp: int | None
    speeds: capacity.Speeds = capacity.Speeds()  # noqa: RUF009 - an immutable tuple
    waiting_tokens: float | None = None
    running: float | None = None
    tokens_per_request: float | None = None
    most_requests: int | None = None
    pool_tokens: float | None = None
    running_limit: float | None = None
    no_step: str = ""  # why the step time is unknown

    @property
    def backlog_seconds(self) -> capacity.Estimate | None:
        """Seconds of prefill that the waiting prompts need."""
        speed, waiting = self.speeds.prefill, self.waiting_tokens
        return None if speed is None or waiting is None else speed.dividing(waiting)

    @property
    def decode_limit(self) -> capacity.Estimate | None:
        """Generated tokens a second with as many requests as fit and may run, without prefill."""
        return None if self.most_requests is None else self.decode_speed(self.most_requests)

    def decode_speed(self, batch: float) -> capacity.Estimate | None:
        """Return the generated tokens a second at a batch, without prefill."""
        step = self.speeds.step
        seconds = None if step is None else step.at(batch)
        return None if step is None or seconds is None else seconds.dividing(batch * step.tokens_per_request)


def capacities(server: Server, measured: capacity.Measured | None, now: float) -> list[RankCapacity]:
    """Return the capacity of each scheduler, from `/v1/loads` where the release counts steps, else from the log's decode lines.

    Tokens held and running requests are means over all schedulers, in the window of the profile.
    """
    only, of_lines = len(server.schedulers) == 1, step_of_lines(server, now)
    totals = server.window(server.profile.window_seconds, now)
    running, usage = totals.mean("running"), totals.mean("usage")
    found = []
    for dp in server.schedulers:
        counted = None if measured is None else measured.scheduler(dp, now, only=only)
        if counted is not None:
            speeds, no_step = counted.speeds, "too few decode steps were seen: watch for longer, under load"
        else:
            speeds, no_step = capacity.Speeds(None if isinstance(of_lines, str) else of_lines), str(of_lines)
        pool, limit, held, most = server.facts.pool(dp), server.facts.limit(dp), None, None
        if pool and running and usage and totals[f"serves/{dp}"] >= capacity.LEAST_SERVING_SECONDS:
            held = usage * pool / running
            most = max(floor(min(pool / held, limit or pool)), 1)  # with the limit alone nothing is known
        waiting = None if counted is None else counted.waiting
        no_step = "" if speeds.step else no_step
        found.append(RankCapacity(dp, speeds, waiting, running, held, most, pool, limit, no_step))
    return found


def step_of_lines(server: Server, now: float) -> capacity.StepTime | str:
    """Return the step time from the decode lines of all schedulers, or why there is none.

    It is less exact than counters: a line is the mean of some forty steps. The schedulers run the same model on the same kind of GPU,
    and with DP attention each step together. A speculative step gives each request several tokens, so a line must show how many.
    """
    schedulers = server.schedulers.values()
    if server.facts.role == "prefill":
        return "the prefill side of disaggregation decodes nothing"
    if not any(each.decoded_at is not None for each in schedulers):
        return "no decode steps were seen: /v1/loads counts them from 0.5.18 on, and a log shows them under load"
    begin = now - server.profile.window_seconds
    steps = sorted((step for each in schedulers for step in each.steps if step[0] >= begin), key=lambda step: step[0])
    if not steps and server.facts.is_on("speculative_algorithm") and server.totals["accepted:n"] == 0:
        return "the decode lines do not show how many tokens a speculative step gives (accept len)"
    if steps and steps[-1][0] < now - capacity.STALE_SECONDS:
        steps = []
    return fit_of_lines(tuple(sums for _, sums in steps))


@lru_cache(maxsize=MOST_FITS)
def fit_of_lines(lines: tuple[capacity.StepSums, ...]) -> capacity.StepTime | str:
    """Return the step time from decode lines, each as one step, or why there is none; cached, because one page needs a fit several times."""
    least = capacity.LEAST_LINES
    return capacity.fit(lines, least=least, source="log") or (
        f"{len(lines)} decode lines of the last ten minutes show the time of a step (one a second at most, and none after a prefill or"
        f" another batch), and {least} are needed: give a longer log, or ask the server itself (--sglang-url, from 0.5.18 on)"
    )
