"""The step time: sums over decode steps in, the fitted step time with its interval out, or the reason for no fit."""

from __future__ import annotations

import tarfile
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.capacity import Measured, Readings, Sums, capacities, fit, total
from sglang_tuning_exporter.core.events import Event, Rank
from sglang_tuning_exporter.core.server import Server
from sglang_tuning_exporter.sglang.metrics import RankFigures
from sglang_tuning_exporter.sglang.server_info import parse_loads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CAPTURES = Path(__file__).parent / "captures"


def of(batches: Sequence[float], step: Callable[[float], float]) -> Sums:
    """The sums that a server would have counted over these steps, one token a request."""
    return total(Sums.of_line(batch, step(batch)) for batch in batches)


def synthetic(
    fixed: float, slope: float, *, parts: int = 20, batches: Sequence[int] = range(4, 13), noise: float = 0.0
) -> list[Sums]:
    """Intervals of fifty steps whose batches are drawn from `batches`; `noise` is relative."""
    random = Random(f"{fixed} {slope} {noise}")
    return [
        of(
            [random.choice(batches) for _ in range(50)],
            lambda batch: (fixed + slope * batch) * (1 + random.uniform(-noise, noise)),
        )
        for _ in range(parts)
    ]


@given(fixed=st.floats(0.001, 0.1), share=st.floats(0.01, 0.5), noise=st.floats(0.0, 0.05))
@settings(max_examples=60)
def test_a_known_line_is_fitted_within_three_times_its_interval(fixed: float, share: float, noise: float) -> None:
    slope = fixed * share
    step = fit(synthetic(fixed, slope, noise=noise))
    assert step is not None
    if step.line is None:
        assert noise > 0  # without noise there is no reason to refuse
        return
    for estimate, truth in zip(step.line, (fixed, slope), strict=True):
        assert abs(estimate.value - truth) <= 1.5 * (estimate.high - estimate.low) + 1e-9


finite = st.floats(0, 1e15, allow_nan=False)


@given(
    st.lists(
        st.builds(
            RankFigures,
            dp=st.integers(0, 3) | st.none(),
            waiting_tokens=st.integers(0, 10**9) | st.none(),
            counted=st.tuples(*[finite] * 9) | st.none(),
        ),
        max_size=12,
    )
)
def test_any_counters_give_plausible_figures_or_none(loads: list[RankFigures]) -> None:
    measured, server = Measured(600.0), served()
    for second, load in enumerate(loads):
        measured.take([load], float(second))
    for each in capacities(server, measured, float(len(loads))):
        speed, step = each.prefill, each.step
        assert speed is None or speed.value > 0
        assert each.prefill_share is None or 0 <= each.prefill_share <= 1
        if step is not None and step.line is not None:
            assert step.line[1].value > 0
            assert step.line[0].low > 0


def decode(
    at: float, running: int = 8, *, dp: int | None = None, speed: float = 1000.0, accepted: float | None = None
) -> Event:
    figures = {"running": float(running), "queued": 0.0, "tokens": 5000.0, "usage": 0.5, "throughput": speed}
    return Event("decode", at, Rank(dp), figures | ({} if accepted is None else {"accept_length": accepted}))


def server_of(*events: Event, **arguments: object) -> Server:
    server = Server(PROFILES["offline"])
    if arguments:
        server.take(Event("arguments", 0.0, arguments=arguments))
    for event in events:
        server.take(event)
    return server


def served(running: int = 8, *, pool: int = 10_000, limit: int = 64) -> Server:
    """A scheduler whose decode lines show for a minute that `running` requests use half of the KV cache."""
    limits = Event("limits", 0.0, figures={"max_total_num_tokens": float(pool), "max_running_requests": float(limit)})
    return server_of(limits, *(decode(float(second), running) for second in range(60)))


def counted(measured: Measured, *, dp: int = 0, begin: float = 0.0, end: float = 60.0) -> None:
    """Answers every five seconds of a scheduler that decodes 4 to 12 requests at 4 ms + 0.5 ms a request, a fifth of it prefill."""
    random, moments = Random(dp), Sums()
    at = begin
    while at <= end:
        moments = total(
            (moments, of([random.randint(4, 12) for _ in range(100)], lambda batch: 0.004 + 0.0005 * batch))
        )
        microseconds = moments._replace(seconds=1e6 * moments.seconds, batch_seconds=1e6 * moments.batch_seconds)
        measured.take(
            [
                RankFigures(
                    dp=dp,
                    waiting_tokens=6000,
                    counted=(1e9 + at, 600 * (at - begin), 2e5 * (at - begin), *microseconds[3:]),
                )
            ],
            at,
        )
        at += 5.0


def test_a_scheduler_that_counts_its_steps_has_every_figure() -> None:
    measured = Measured(600.0)
    counted(measured)
    (rank,) = capacities(served(), measured, 60.0)
    assert rank.step is not None
    assert rank.step.source == "v1_loads"
    assert rank.prefill is not None
    assert rank.prefill.value == pytest.approx(3000.0)
    assert rank.prefill_share == pytest.approx(0.2)
    assert rank.backlog_seconds is not None
    assert rank.backlog_seconds.value == pytest.approx(2.0)
    assert rank.tokens_per_request == pytest.approx(625.0)
    assert rank.most_requests == 16
    assert rank.decode_limit is not None
    assert rank.decode_limit.value == pytest.approx(16 / 0.012, rel=0.01)


def speed_of(batch: float) -> float:
    """The generation throughput of a batch at 4 ms + 0.5 ms a request."""
    return batch / (0.004 + 0.0005 * batch)


def test_without_counters_the_decode_lines_give_the_step_time() -> None:
    batches = [4 + block % 9 for block in range(100) for _ in range(3)]
    server = server_of(*(decode(2.0 * number, each, speed=speed_of(each)) for number, each in enumerate(batches, 1)))
    (rank,) = capacities(server, None, 600.0)
    assert rank.step is not None
    assert rank.step.source == "log"
    assert rank.step.line is not None
    assert rank.step.line[1].value == pytest.approx(0.0005, rel=0.03)


def decoding(*, accepted: float | None, **arguments: object) -> Server:
    """Nine minutes of eight requests at 100 decode steps a second."""
    speed = 800.0 * (accepted or 1.0)
    return server_of(*(decode(float(at), speed=speed, accepted=accepted) for at in range(60, 600)), **arguments)


def test_a_speculative_step_gives_each_request_as_many_tokens_as_the_line_shows() -> None:
    (rank,) = capacities(decoding(accepted=2.5, speculative_algorithm="EAGLE"), None, 600.0)
    assert rank.step is not None
    assert (rank.step.seconds.value, rank.step.tokens_per_request) == pytest.approx((0.01, 2.5))
    speed = rank.decode_speed(8.0)
    assert speed is not None
    assert speed.value == pytest.approx(2000.0)


def test_the_lines_of_all_dp_ranks_give_one_step_time() -> None:
    events = [
        decode(2.0 * block + line, batch, dp=dp, speed=speed_of(batch))
        for block in range(1, 25)
        for dp in range(4)
        for batch in [4 + (block + dp) % 9]
        for line in range(2)
    ]
    ranks = capacities(server_of(*sorted(events, key=lambda event: event.time or 0.0), dp_size=4), None, 50.0)
    assert len(ranks) == 4
    for rank in ranks:
        assert rank.step is not None
        assert rank.step.line is not None
        assert rank.step.line[1].value == pytest.approx(0.0005, rel=0.03)


# A line's throughput is over all the time since the line before.


def test_a_pause_is_no_part_of_a_step() -> None:
    events = [
        decode(30.0 * burst + second, speed=speed_of(8) if second else 10.0)
        for burst in range(1, 20)
        for second in range(5)
    ]
    (rank,) = capacities(server_of(*events), None, 600.0)
    assert rank.step is not None
    assert rank.step.seconds.value == pytest.approx(0.008)


def test_the_prefill_of_another_rank_is_no_part_of_a_step() -> None:
    prompt = {"sequences": 1.0, "tokens": 8000.0, "running": 8.0}
    events = [
        event
        for block in range(1, 20)
        for event in (
            Event("prefill", 30.0 * block - 0.5, Rank(1), prompt),
            *(decode(30.0 * block + second, dp=0, speed=speed_of(8) if second else 10.0) for second in range(29)),
        )
    ]
    ranks = capacities(server_of(*events, tp_size=2, dp_size=2, enable_dp_attention=True), None, 600.0)
    (step,) = (rank.step for rank in ranks if rank.dp == 0)
    assert step is not None
    assert step.seconds.value == pytest.approx(0.008)


def readings_of(capture: str) -> list[Sums]:
    """The moments between the answers of `/v1/loads` that a real server gave in a capture."""
    kept: dict[str, bytes] = {}
    with tarfile.open(CAPTURES / f"{capture}.tar.xz") as archive:
        for member in archive.getmembers():
            file = archive.extractfile(member)
            if "v1_loads" in member.name and file is not None:
                kept[member.name] = file.read()
    readings = Readings(600.0)
    for name in sorted(kept):
        for load in parse_loads(kept[name]):
            found = Sums.counted(load)
            assert found is not None
            readings.take(found)
    return readings.intervals


@pytest.mark.parametrize(
    ("capture", "why"),
    [
        ("impatient-clients", "hardly varied"),
        ("one-at-a-time", "hardly varied"),
        ("policy-lof", "hardly varied"),
        ("late-by-prefill", "below zero"),
        ("priorities-preempt", "disagree"),
        ("long-answers-tiny-pool", "disagree"),
    ],
)
def test_counters_of_a_real_server_that_allow_no_fit_are_refused(capture: str, why: str) -> None:
    step = fit(readings_of(capture))
    assert step is not None
    assert step.line is None
    assert why in step.refused


@pytest.mark.parametrize("capture", ["answers-by-schema", "late-by-prefill-interval-10"])
def test_counters_of_a_real_server_that_allow_a_fit_give_it(capture: str) -> None:
    step = fit(readings_of(capture))
    assert step is not None
    assert step.line is not None
    assert 0.003 < step.line[0].value < 0.006
    assert 0.0003 < step.line[1].value < 0.0006
