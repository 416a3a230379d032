"""The scaling gauges on the exporter's page, for captures of real servers: present where the figures are known, else absent.

The captures are those of `tests/captures`; `truth/driver.py` moves the exporter's clock and reads its page as a scraper does.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest

from truth.cases import Answer
from truth.situations import cases
from truth.ways import ask

CASES = {case.name: case for case in cases()}
HELPS, RATIO = "sglang_tuning_scale_out_helps", "sglang_tuning_capacity_ratio"
STUCK = 'sglang_tuning_stuck_stage{stage="scheduler"}'


@cache
def moments(name: str) -> list[Answer]:
    return ask(CASES[name], "both")


def between(name: str, verdict: str) -> list[dict[str, float]]:
    """The gauges on each page after which the exporter gave that verdict, and gave it before."""
    answers = moments(name)
    pages = [after for before, after in pairwise(answers) if before.metrics is not after.metrics and after.metrics]
    found = [answer for answer in pages if answer.verdict == verdict]
    if verdict == "scheduler_stuck":  # it stays the verdict when the server works again
        found = [answer for answer in found if answer.metrics.get(STUCK)]
    assert found, f"{name} never was {verdict}"
    return [{gauge: answer.metrics[gauge] for gauge in (HELPS, RATIO) if gauge in answer.metrics} for answer in found]


@pytest.mark.parametrize(
    ("capture", "verdict", "helps"),
    [
        pytest.param("early-limit", "running_at_limit", 0.0, id="running limit: a flag first"),
        pytest.param("pool-600-prompts-300", "queue_too_long", 1.0, id="full KV cache: a replica"),
        pytest.param("early-limit", "idle", 0.0, id="clients idle: neither"),
        pytest.param("healthy-probes", "idle", 0.0, id="nothing but health checks: neither"),
    ],
)
def test_both_gauges_are_on_the_page_of_a_server_that_answers(capture: str, verdict: str, helps: float) -> None:
    for gauges in between(capture, verdict):
        assert gauges[HELPS] == helps
        assert gauges[RATIO] >= 0.0


@pytest.mark.parametrize(
    ("capture", "verdict"),
    [
        pytest.param("early-limit", "starting", id="starting"),
        pytest.param("stop-scheduler", "scheduler_stuck", id="stuck"),
        pytest.param("stop-main", "server_down", id="down: it answers nothing"),
        pytest.param("sigterm-idle", "stopped", id="stopped: it was asked to end"),
    ],
)
def test_no_gauge_is_on_the_page_of_a_server_that_is_away(capture: str, verdict: str) -> None:
    assert all(gauges == {} for gauges in between(capture, verdict))


def test_a_full_kv_cache_asks_for_more_than_one_server_and_an_idle_one_for_nothing() -> None:
    assert min(gauges[RATIO] for gauges in between("pool-600-prompts-300", "queue_too_long")) > 1.0
    assert max(gauges[RATIO] for gauges in between("healthy-probes", "idle")) == 0.0
