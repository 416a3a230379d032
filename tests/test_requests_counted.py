"""How many requests a server started and finished: all of them, not only those whose first token was streamed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_tuning_exporter.diagnosis.advice import SizingInput
from sglang_tuning_exporter.diagnosis.clients import advise_fewer
from sglang_tuning_exporter.diagnosis.demand import longest_answer, mean_prompt
from sglang_tuning_exporter.diagnosis.evidence import Past, past_of
from sglang_tuning_exporter.diagnosis.sizing.admission import tolerated
from sglang_tuning_exporter.sglang.metrics import page_figures as facts
from sglang_tuning_exporter.state.facts import ServerFacts
from sglang_tuning_exporter.state.latency import RecentLatency
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.server import ServerState
from sglang_tuning_exporter.state.totals import Totals

MINUTE = 60.0
# Lines of real servers on a CPU (0.5.23, 0.5.9, 0.4.9.post6) after a while of load; all other families are cut.
PAGES = {
    "0.5.23": """\
sglang:num_running_reqs{engine_type="unified",model_name="tiny",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 2.0
sglang:time_to_first_token_seconds_count{engine_type="unified",is_streaming="false",model_name="tiny"} 105.0
sglang:time_to_first_token_seconds_count{engine_type="unified",is_streaming="true",model_name="tiny"} 170.0
sglang:e2e_request_latency_seconds_count{engine_type="unified",is_streaming="false",model_name="tiny"} 105.0
sglang:e2e_request_latency_seconds_count{engine_type="unified",is_streaming="true",model_name="tiny"} 168.0
sglang:queue_time_seconds_count{engine_type="unified",model_name="tiny",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 280.0
sglang:prompt_tokens_total{engine_type="unified",is_streaming="false",model_name="tiny"} 11002.0
sglang:prompt_tokens_total{engine_type="unified",is_streaming="true",model_name="tiny"} 17341.0
""",
    "0.5.9": """\
sglang:num_running_reqs{engine_type="unified",model_name="tiny",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 2.0
sglang:queue_time_seconds_count{engine_type="unified",model_name="tiny",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 178.0
sglang:time_to_first_token_seconds_count{model_name="tiny"} 171.0
sglang:e2e_request_latency_seconds_count{model_name="tiny"} 169.0
sglang:prompt_tokens_total{model_name="tiny"} 18857.0
""",
    "0.4.9.post6": """\
sglang:num_running_reqs{engine_type="unified",model_name="tiny",pp_rank="0",tp_rank="0"} 2.0
sglang:prompt_tokens_total{model_name="tiny"} 27420.0
sglang:time_to_first_token_seconds_count{model_name="tiny"} 170.0
sglang:e2e_request_latency_seconds_count{model_name="tiny"} 169.0
""",
}
EMPTY = "sglang:num_running_reqs 0.0\n"


@pytest.mark.parametrize(
    ("release", "started", "finished", "prompts"),
    [("0.5.23", 275, 273, 28343), ("0.5.9", 171, 169, 18857), ("0.4.9.post6", 170, 169, 27420)],
)
def test_every_release_exposes_how_many_requests_started_and_ended(
    release: str, started: int, finished: int, prompts: int
) -> None:
    scrape = facts.read(PAGES[release])
    assert (scrape.started_requests, scrape.finished_requests) == (started, finished)
    assert scrape.finished_prompt_tokens == prompts


def scraped(*pages: str) -> Past:
    state = ServerState(PROFILES["online"], 0.0)
    for step, text in enumerate(pages):
        state.observe_scrape(facts.read(text), 10.0 * step)
    return past_of(state, 10.0 * len(pages))


def test_what_a_server_did_before_the_exporter_came_is_not_counted() -> None:
    past = scraped(PAGES["0.5.23"], PAGES["0.5.23"].replace(" 105.0", " 115.0"))
    assert (past.started_requests, past.finished_requests) == (10, 10)


def test_requests_that_are_not_streamed_count_as_started() -> None:
    past = scraped(EMPTY, PAGES["0.5.23"])
    assert past.started_requests == 275
    assert past.latency == {}  # no buckets in these pages


def test_a_server_that_starts_again_counts_from_nothing() -> None:
    again = PAGES["0.5.9"].replace(" 171.0", " 9.0").replace(" 169.0", " 7.0").replace(" 18857.0", " 800.0")
    past = scraped(PAGES["0.5.9"], again)
    assert (past.started_requests, past.finished_requests) == (9, 7)


def test_a_page_with_an_invalid_counter_counts_nothing_and_loses_nothing() -> None:
    spoiled = PAGES["0.5.9"].replace(" 171.0", " NaN")
    later = PAGES["0.5.9"].replace(" 171.0", " 181.0").replace(" 169.0", " 179.0")
    past = scraped(PAGES["0.5.9"], spoiled, later)
    assert (past.started_requests, past.finished_requests) == (10, 10)


def test_without_metrics_the_number_of_starts_is_unknown() -> None:
    past = past_of(ServerState(PROFILES["online"], 0.0), 10.0)
    assert (past.started_requests, past.finished_requests) == (None, None)


def test_a_mean_prompt_is_that_of_all_requests_that_ended() -> None:
    # Seventeen of 27 requests are streamed: for each of those there are more tokens than one prompt has.
    assert mean_prompt(scraped(EMPTY, PAGES["0.5.23"])) == pytest.approx(28343 / 273)


# One request in ten is streamed.
STREAMED = RecentLatency(observations=60.0, breaches=None, mean_seconds=1.0, p50_seconds=1.0, p99_seconds=1.0)


def loaded(*, started: float = 600.0, streamed: bool = True) -> Past:
    recent = Totals()
    for figure, value in (("running", 40.0), ("queued", 24.0), ("usage", 0.9)):
        recent.integrals[figure], recent.integrals[figure + "_seconds"] = MINUTE * value, MINUTE
    recent.seconds["activity", "serving"] = MINUTE
    recent.counts.update(started_requests=started, computed_tokens=500 * started)
    facts = ServerFacts(args={"schedule_conservativeness": 1.3})
    latency = {"time_to_first_token": STREAMED} if streamed else {}
    return Past(recent, {}, MINUTE, facts, PROFILES["online"], latency=latency)  # type: ignore[arg-type]


@pytest.mark.parametrize("streamed", [True, False])
def test_the_rate_of_starts_is_that_of_all_requests(streamed: bool) -> None:  # noqa: FBT001 - a case
    words = advise_fewer(loaded(started=180.0, streamed=streamed))
    assert "SGLang starts about 3 requests/s" in words


@pytest.mark.parametrize("streamed", [True, False])
def test_a_prompt_read_off_the_log_is_that_of_all_requests(streamed: bool) -> None:  # noqa: FBT001 - a case
    assert mean_prompt(loaded(streamed=streamed)) == 500


@pytest.mark.parametrize("streamed", [True, False])
def test_retractions_are_counted_for_each_request_not_for_each_streamed_one(streamed: bool) -> None:  # noqa: FBT001 - a case
    past = loaded(streamed=streamed)
    past.recent.counts["retraction_events"] = 12.0  # one request in fifty
    assert tolerated(SizingInput(past))


def test_without_streaming_the_longest_answer_is_still_known() -> None:
    slowest = RecentLatency(600.0, None, None, 9.0, 20.0)
    past = replace(loaded(streamed=False), latency={"request": slowest}, longest_answer=1700.0)
    assert longest_answer(past) == 1700.0
