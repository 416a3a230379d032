"""A server that misses its latency objective now is not healthy: the exporter's own window against the limits of the burn-rate alerts."""

from __future__ import annotations

from math import inf

from sglang_tuning_exporter.diagnosis.evidence import past_of
from sglang_tuning_exporter.diagnosis.findings import Judgement, judge
from sglang_tuning_exporter.sglang.events import RankFigures, Scrape
from sglang_tuning_exporter.sglang.metrics.histograms import Histogram
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.server import ServerState

BOUNDS = (0.2, 2.0, 8.0, inf)  # the online profile's first token may take 2 s


def judged(late: float, *, minutes: int = 15, requests: float = 20.0) -> Judgement:
    """Judge a server without a queue whose part `late` of first tokens takes longer than the objective.

    So many requests come in each ten seconds; no other latency is exposed.
    """
    state = ServerState(PROFILES["online"], 0.0)
    for step in range(minutes * 6 + 1):
        count = requests * step
        first = Histogram(BOUNDS, (0.0, count * (1 - late), count, count), count)
        figures = RankFigures(running=40, queued=0, grammar_queued=0, full_usage=0.6, used_tokens=step)
        page = Scrape([figures], progress=1000.0 * step, started_requests=count, time_to_first_token=first)
        state.observe_scrape(page, 10.0 * step)
    return judge(past_of(state, minutes * 60.0))


def ids(judgement: Judgement) -> set[str]:
    return {finding.diagnosis.id for finding in judgement.findings}


def test_a_verdict_is_as_urgent_as_the_missed_objective_that_follows_from_it() -> None:
    found = judged(0.3)
    [missed] = [f for f in found.findings if f.diagnosis.id == "time_to_first_token_burning_fast"]
    assert missed.because == (found.verdict,) == ("latency_long_prompts",)
    assert found.severity == "critical"


def test_a_missed_objective_that_nothing_explains_is_the_verdict_and_a_warning_while_it_is_missed_slowly() -> None:
    found = judged(0.08)
    assert (found.verdict, found.severity) == ("time_to_first_token_burning_slow", "warning")


def test_within_the_budget_the_server_is_healthy() -> None:
    found = judged(0.005)
    assert found.verdict == "healthy"


def test_a_few_late_requests_of_few_are_no_burn_rate() -> None:
    assert not ids(judged(0.3, requests=0.2)) & {"time_to_first_token_burning_fast", "time_to_first_token_burning_slow"}


def test_the_first_minutes_of_an_exporter_are_not_judged() -> None:
    assert "time_to_first_token_burning_fast" not in ids(judged(0.3, minutes=5))


def test_the_figure_is_the_share_and_its_limit() -> None:
    [found] = [f for f in judged(0.3).findings if f.diagnosis.id == "time_to_first_token_burning_fast"]
    assert found.evidence[0].words() == "30 %"
    assert found.evidence[0].words(found.evidence[0].threshold) == "14 %"
