"""Whether a replica helps, on the exporter's page, for captures of real servers: present where it is known, else absent.

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
HELPS = "sglang_tuning_scale_out_helps"
STUCK = 'sglang_tuning_stuck_stage{stage="scheduler"}'


@cache
def moments(name: str) -> list[Answer]:
    return ask(CASES[name], "both")


def between(name: str, verdict: str) -> set[float | None]:
    """The gauge on each page after which the exporter gave that verdict, and gave it before."""
    answers = moments(name)
    pages = [after for before, after in pairwise(answers) if before.metrics is not after.metrics and after.metrics]
    found = [answer for answer in pages if answer.verdict == verdict]
    if verdict == "scheduler_stuck":  # it stays the verdict when the server works again
        found = [answer for answer in found if answer.metrics.get(STUCK)]
    assert found, f"{name} never was {verdict}"
    return {answer.metrics.get(HELPS) for answer in found}


@pytest.mark.parametrize(
    ("capture", "verdict", "helps"),
    [
        pytest.param("early-limit", "running_at_limit", 0.0, id="running limit: a flag first"),
        pytest.param("pool-600-prompts-300", "queue_too_long", 1.0, id="full KV cache: a replica"),
        pytest.param("early-limit", "idle", 0.0, id="clients idle: neither"),
        pytest.param("healthy-probes", "idle", 0.0, id="nothing but health checks: neither"),
    ],
)
def test_it_is_on_the_page_of_a_server_that_answers(capture: str, verdict: str, helps: float) -> None:
    assert between(capture, verdict) == {helps}
