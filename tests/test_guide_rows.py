"""Every row of the guide: when it is found, with which advice, and when it stays silent.

Each past is a few minutes of events, taken by the real state.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scenarios import (
    GRAMMAR,
    HANGING,
    Story,
    decoding,
    failed,
    prefilling,
    probed,
    repeated,
    retraction,
    scraped,
    started,
)
from sglang_tuning_exporter.diagnosis.evidence import Past, past_of
from sglang_tuning_exporter.diagnosis.findings import Judgement, judge
from sglang_tuning_exporter.diagnosis.table import BY_ID
from sglang_tuning_exporter.sglang.events import NO_RANK, Memory, PrefillBatch, RankFigures, Rejection, Scrape
from sglang_tuning_exporter.sglang.metrics.histograms import Histogram
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.server import ServerState

if TYPE_CHECKING:
    from collections.abc import Mapping

END = 200.0
# The two tables of the guide's reading, row by row: what it says, and the causes that look like one of its rows.
GUIDE_ROWS = (
    *("client_too_slow", "queue_too_long", "admission_too_conservative", "retracting_too_often"),
    *("memory_reserve_too_large", "memory_reserve_too_small"),
    *("out_of_memory_prefill", "out_of_memory_decode", "out_of_memory_any"),
    *("cuda_graph_not_covering", "cuda_graph_off", "data_parallel_would_fit"),
    *("shared_prefixes_unused", "prefix_policy_wasted", "torch_compile_candidate"),
    *("quantization_candidate", "expert_parallel_candidate", "dp_attention_candidate"),
    *("running_far_below_limit", "latency_batch_too_large", "latency_queue", "latency_long_prompts"),
    "metrics_disabled",
)
CAUSE_ROWS = (
    *("running_at_limit", "prefill_bound", "grammar_queue", "pd_queue", "hybrid_pool_full", "dp_imbalanced"),
    *("scheduler_stuck", "graph_memory_short", "conservativeness_ineffective", "admission_recovering"),
    "requests_rejected",
)
CALM: Mapping[str, float] = {}


class Case(NamedTuple):
    """A past that makes a row the finding, what it advises (flag, present value, value to try), and one in which the row stays silent."""

    story: Story
    advised: tuple[str, float | str | None, float | str | None]
    silent: Story
    profile: str = "online"
    end: float = END


def past(
    story: Story,
    profile: str = "online",
    end: float = END,
    version: str | None = None,
    thresholds: Mapping[str, float] = CALM,
) -> Past:
    state = ServerState(PROFILES[profile].with_thresholds(thresholds), 0.0)
    state.facts.version = version
    for at, what in sorted(story, key=lambda pair: pair[0]):
        if at > end:
            break
        if isinstance(what, Scrape):
            state.observe_scrape(what, at)
        else:
            state.observe(what, at)  # type: ignore[arg-type]  # the rest are events here
    state.advance(end)
    return past_of(state, end)


def judged(story: Story, profile: str = "online", end: float = END) -> Judgement:
    return judge(past(story, profile, end))


def found(judgement: Judgement) -> set[str]:
    return {finding.diagnosis.id for finding in judgement.findings}


def load(**figures: object) -> Story:
    return decoding(0.0, END, **figures)  # type: ignore[arg-type]  # the tests name figures of their own type


def weighing(gigabytes: float, **args: object) -> Story:
    return [*started(**args), (0.0, Memory(None, NO_RANK, "weights", used_gb=gigabytes))]  # type: ignore[arg-type]  # as above


def prompts(cached: int, **args: object) -> Story:
    line = PrefillBatch(None, NO_RANK, 1, 1000 - cached, cached, 4, 20, 0, 0.95)
    return started(**args) + repeated(line, 10.0)  # type: ignore[arg-type]  # as above


def slow(first: float, between: float, *, running: int = 40, queued: int = 0, usage: float = 0.95) -> Story:
    """Scrapes of a server whose answers all take this many seconds."""

    def histogram(seconds: float, count: float) -> Histogram:
        bounds = (0.05, 0.2, 1.0, 4.0, 20.0, inf)
        return Histogram(bounds, tuple(count * (bound >= seconds) for bound in bounds), count * seconds)

    story = started()
    for step in range(20):
        figures = RankFigures(running=running, queued=queued, grammar_queued=0, full_usage=usage, used_tokens=step)
        scrape = Scrape(
            [figures],
            progress=1000.0 * step,
            started_requests=20.0 * step,
            time_to_first_token=histogram(first, 20.0 * step),
            inter_token=histogram(between, 20.0 * step),
        )
        story.append((10.0 * step, scrape))
    return story


NOTHING: tuple[str, None, None] = ("", None, None)
RETRACTIONS = repeated(retraction(), 15.0)
CASES: dict[str, Case] = {
    "client_too_slow": Case(started() + load(), NOTHING, started() + load(queued=150, usage=0.95), "offline"),
    "queue_too_long": Case(
        started() + load(running=50, queued=2001, usage=0.95),
        NOTHING,
        started() + load(running=50, queued=2000, usage=0.95),
        "offline",
    ),
    "admission_too_conservative": Case(
        started() + load(queued=20, usage=0.89),
        ("--schedule-conservativeness", 1.0, 0.3),
        started() + load(queued=20, usage=0.9),
    ),
    "retracting_too_often": Case(
        started() + load(usage=0.95) + RETRACTIONS,
        ("--schedule-conservativeness", 1.0, 1.3),
        started() + load(usage=0.95) + repeated(retraction(), 65.0),
    ),
    "memory_reserve_too_large": Case(
        started(reserve=14.0) + load(), ("--mem-fraction-static", 0.85, 0.94), started(reserve=10.0) + load()
    ),
    "memory_reserve_too_small": Case(
        started(reserve=4.64) + load(), ("--mem-fraction-static", 0.85, 0.82), started(reserve=5.0) + load()
    ),
    "out_of_memory_prefill": Case(
        started() + load() + [(100.0, failed("prefill"))],
        ("--chunked-prefill-size", 8192.0, 4096.0),
        started() + load() + [(100.0, failed("decode"))],
    ),
    "out_of_memory_decode": Case(
        started() + load(running=40) + [(100.0, failed("decode"))],
        ("--max-running-requests", 64.0, 30.0),
        started() + load(running=40) + [(100.0, failed("prefill"))],
    ),
    "out_of_memory_any": Case(
        [*started(), (100.0, failed("startup"))],
        ("--mem-fraction-static", 0.85, 0.8),
        [*started(), (100.0, failed("graph_capture"))],
    ),
    "cuda_graph_not_covering": Case(
        started(max_running_requests=512) + load(running=300, graph=False),
        ("--cuda-graph-max-bs", 160.0, 320.0),
        started(max_running_requests=512) + load(running=160, graph=False),
    ),
    "cuda_graph_off": Case(
        started(disable_cuda_graph=True) + load(graph=False),
        ("--disable-cuda-graph", 1.0, 0.0),
        started(max_running_requests=512) + load(running=300, graph=False),
    ),
    "data_parallel_would_fit": Case(
        weighing(10.0, tp_size=2) + load(), ("", None, None), weighing(40.0, tp_size=2) + load()
    ),
    "shared_prefixes_unused": Case(
        prompts(300, schedule_policy="fcfs"), ("--schedule-policy", "fcfs", "lpm"), prompts(0, schedule_policy="fcfs")
    ),
    "prefix_policy_wasted": Case(
        prompts(0, schedule_policy="lpm"), ("--schedule-policy", "lpm", "fcfs"), prompts(300, schedule_policy="lpm")
    ),
    "torch_compile_candidate": Case(
        weighing(10.0, enable_torch_compile=False) + load(running=8),
        ("--enable-torch-compile", 0.0, 1.0),
        weighing(10.0, enable_torch_compile=False) + load(running=40),
    ),
    "quantization_candidate": Case(
        weighing(40.0, quantization=None) + load(queued=20, usage=0.95),
        ("--quantization", None, "fp8"),
        weighing(40.0, quantization="fp8") + load(queued=20, usage=0.95),
    ),
    "expert_parallel_candidate": Case(
        started(model_path="mistralai/Mixtral-8x7B", tp_size=8, ep_size=1) + load(),
        ("--ep-size", 1.0, 8.0),
        started(model_path="mistralai/Mistral-7B", tp_size=8, ep_size=1) + load(),
    ),
    "dp_attention_candidate": Case(
        started(model_path="deepseek-ai/DeepSeek-V3", tp_size=8) + load(queued=20, usage=0.95),
        ("--enable-dp-attention", 0.0, 1.0),
        started(model_path="deepseek-ai/DeepSeek-V3", tp_size=8) + load(usage=0.5),
    ),
    "running_far_below_limit": Case(
        started(kv_cache_dtype="auto") + load(running=20, queued=20, usage=0.95),
        ("--kv-cache-dtype", "auto", "fp8_e4m3"),
        started(kv_cache_dtype="auto") + load(running=40, queued=20, usage=0.95),
    ),
    "latency_batch_too_large": Case(slow(0.5, 0.3), ("--max-running-requests", 64.0, 13.0), slow(0.5, 0.04)),
    "latency_queue": Case(slow(9.0, 0.04, queued=30), NOTHING, slow(9.0, 0.04)),
    "latency_long_prompts": Case(slow(9.0, 0.04), ("--chunked-prefill-size", 8192.0, 16384.0), slow(0.5, 0.04)),
    "running_at_limit": Case(
        started() + load(running=64, queued=20, usage=0.3),
        ("--max-running-requests", 64.0, 160.0),
        started() + load(running=40, queued=20, usage=0.3),
    ),
    "prefill_bound": Case(
        started() + prefilling(0.0, END, queued=200),
        ("--chunked-prefill-size", 8192.0, 16384.0),
        started() + prefilling(0.0, END, tokens=1000, queued=200),
        "offline",
    ),
    "grammar_queue": Case(
        scraped(figures=GRAMMAR), ("--grammar-backend", None, None), scraped(figures=replace(GRAMMAR, grammar_queued=0))
    ),
    "pd_queue": Case(
        started() + load(queued=2, queues={"transfer": 30}), NOTHING, started() + load(queued=2, queues={"transfer": 1})
    ),
    "hybrid_pool_full": Case(
        started(swa_full_tokens_ratio=0.5) + load(queued=20, usage=0.4, swa=0.95),
        ("--swa-full-tokens-ratio", 0.5, 0.62),
        started(swa_full_tokens_ratio=0.5) + load(queued=20, usage=0.92, swa=0.95),
    ),
    "dp_imbalanced": Case(
        started(dp_size=2, load_balance_method="round_robin") + load(queued=20, dp=0) + load(dp=1),
        ("--load-balance-method", "round_robin", "total_requests"),
        started(dp_size=2, load_balance_method="round_robin") + load(queued=20, dp=0) + load(queued=20, dp=1),
    ),
    "scheduler_stuck": Case(
        scraped(0, 120, figures=HANGING) + scraped(120, 400, figures=HANGING, moves=False),
        NOTHING,
        scraped(0, 400, figures=HANGING),
        end=400.0,
    ),
    "graph_memory_short": Case(
        started(reserve=0.6) + load(running=100),
        ("--mem-fraction-static", 0.85, 0.8),
        started(reserve=1.0) + load(running=100),
    ),
    "conservativeness_ineffective": Case(
        started(schedule_conservativeness=1.5) + load(running=40, usage=0.95) + RETRACTIONS,
        ("--max-running-requests", 64.0, 32.0),
        started(schedule_conservativeness=1.43) + load(running=40, usage=0.95) + RETRACTIONS,
    ),
    "admission_recovering": Case(
        started(schedule_conservativeness=0.1) + load(queued=20) + [(5.0, retraction(ratio=0.9))],
        ("--schedule-conservativeness", 0.1, 1.0),
        started(schedule_conservativeness=0.1) + load(queued=20) + [(5.0, retraction(ratio=0.2))],
    ),
    "requests_rejected": Case(
        started() + load() + repeated(Rejection(None, NO_RANK), 15.0),
        NOTHING,
        started() + load() + repeated(Rejection(None, NO_RANK), 65.0),
    ),
}
HELD_BACK = "admission_too_conservative"
# Told apart from it: requests wait, usage is below 0.9, and it is something else.
MISTAKEN = (
    *("running_at_limit", "prefill_bound", "grammar_queue", "pd_queue", "hybrid_pool_full", "dp_imbalanced"),
    *("scheduler_stuck", "admission_recovering"),
)


def test_every_row_of_the_guide_is_in_the_table_and_has_its_case() -> None:
    assert {*GUIDE_ROWS, *CAUSE_ROWS} <= set(BY_ID)
    # Only a scrape shows that metrics are disabled: its scenarios are among those of the rules and of the sidecar.
    assert {*CASES, "metrics_disabled"} == {*GUIDE_ROWS, *CAUSE_ROWS}


@pytest.mark.parametrize("row", CASES)
def test_a_row_is_found_with_its_advice(row: str) -> None:
    case = CASES[row]
    findings = {finding.diagnosis.id: finding for finding in judged(case.story, case.profile, case.end).findings}
    assert row in findings
    advice = [(each.flag, each.current, each.suggested) for each in findings[row].advice]
    assert case.advised in advice


@pytest.mark.parametrize("row", CASES)
def test_a_row_stays_silent_just_outside_its_limits(row: str) -> None:
    case = CASES[row]
    assert row not in found(judged(case.silent, case.profile, case.end))


@pytest.mark.parametrize("row", MISTAKEN)
def test_another_cause_is_not_mistaken_for_a_conservative_admission(row: str) -> None:
    case = CASES[row]
    known = past(case.story, case.profile, case.end)
    usages = [known.recent.mean("usage")]
    assert all(usage is not None and (usage < 0.9 or row == "hybrid_pool_full") for usage in usages)
    assert (known.recent.mean("queued") or 0.0) > 0
    ids = found(judge(known))
    assert (row in ids, HELD_BACK in ids) == (True, False)
    assert judge(known).verdict == row


@pytest.mark.parametrize(
    ("queued", "version", "thresholds", "expected"),
    [
        (600, "0.4.1", {}, "queue_too_long"),
        (500, "0.4.1", {}, "no"),
        (600, "0.5.9", {}, "no"),
        (2001, "0.5.9", {}, "queue_too_long"),
        (600, "0.4.1", {"queue_upper": 700.0}, "no"),
        (300, "0.5.9", {"queue_upper": 200.0}, "queue_too_long"),
        (300, "0.4.1", {"queue_upper": 200.0}, "queue_too_long"),
    ],
)
def test_a_queue_is_judged_by_the_edition_of_the_server_and_the_user_before_both(
    queued: int, version: str, thresholds: dict[str, float], expected: str
) -> None:
    known = past(load(running=50, queued=queued, usage=0.95), "offline", version=version, thresholds=thresholds)
    assert ("queue_too_long" in found(judge(known))) is (expected == "queue_too_long")


@pytest.mark.parametrize(
    ("queued", "version", "state"),
    [(60, "0.4.1", "in_range"), (60, "0.5.9", "below_range"), (40, "0.4.1", "below_range"), (100, "0.5.9", "in_range")],
)
def test_the_lower_end_of_the_range_is_the_editions_too(queued: int, version: str, state: str) -> None:
    known = past(load(running=50, queued=queued, usage=0.95), "offline", version=version)
    assert known.recent.share("queue", state) == 1.0


@pytest.mark.parametrize(
    ("story", "profile", "word"),
    [
        (started() + load(), "online", "healthy"),
        (started() + load(running=50, queued=150, usage=0.95), "offline", "healthy"),
        (started() + probed(0.0, END), "online", "idle"),
        (started() + load(running=64, queued=20, usage=0.95), "online", "no_clear_bottleneck"),
        (started() + decoding(0.0, 10.0, queued=20), "online", "not_enough_data"),
        (started(), "online", "not_enough_data"),
    ],
)
def test_the_verdict_is_no_clear_bottleneck_where_nothing_limits(story: Story, profile: str, word: str) -> None:
    end = 15.0 if len(story) < 10 else END
    assert judge(past(story, profile, end)).verdict == word


@settings(max_examples=60)
@given(st.lists(st.sampled_from(sorted(CASES)), min_size=2, max_size=3), st.sampled_from(sorted(PROFILES)))
def test_two_rows_at_once_never_advise_opposite_changes_of_one_flag(rows: list[str], profile: str) -> None:
    story = [pair for row in rows for pair in CASES[row].story]
    judgement = judged(story, profile)
    turned = [each for finding in judgement.findings for each in finding.advice if each.arg]
    # What follows from a cause names the cause's flag, with the same value.
    assert len({each.arg for each in turned}) == len({(each.arg, each.suggested) for each in turned})
    lowers = any(each.arg == "schedule_conservativeness" and not each.raises for each in turned)
    assert not (lowers and "retracting_too_often" in found(judgement))
    limits = [each for each in turned if each.arg == "max_running_requests"]
    fewer = any(not each.raises for each in limits)
    assert not (fewer and (lowers or any(each.raises for each in limits)))


def gave_up(share: float, *, first_token: float = 0.05, queued: int = 0, answered: bool = True) -> Story:
    """Scrapes of a server that starts a request a second; clients cancel this many of them."""
    story: Story = []
    for step in range(20):
        done = 10.0 * step * (1 - share) if answered else 0.0
        first = Histogram(
            (0.1, 1.0, 4.0, inf), tuple(done * (bound >= first_token) for bound in (0.1, 1.0, 4.0, inf)), done
        )
        figures = RankFigures(running=3, queued=queued, grammar_queued=0, full_usage=0.3, used_tokens=step)
        scrape = Scrape(
            [figures], progress=1000.0 * step, aborted_requests=10.0 * step * share, time_to_first_token=first
        )
        scrape.started_requests = done if answered else None
        story.append((10.0 * step, scrape))
    return story


@pytest.mark.parametrize(
    ("story", "profile", "expected"),
    [
        (gave_up(1 / 6), "online", False),  # a chat, whose readers stop what they have seen enough of
        (gave_up(1 / 6), "offline", False),
        (gave_up(1 / 6, first_token=3.0), "online", True),  # first tokens come late
        (gave_up(1 / 6, first_token=3.0), "offline", False),  # offline, first tokens do not matter
        (gave_up(1 / 6, queued=30), "offline", True),  # they wait, and a client's own limit ends that
        (gave_up(0.8, queued=1), "online", True),  # most of them, and there is always a short queue
        (gave_up(0.3, queued=1), "online", False),  # fewer: a wait that the profile allows is no reason
        (gave_up(0.8), "online", False),  # nobody waits: an editor that drops a completion with the next key
        (gave_up(0.04, first_token=3.0), "online", False),  # too few
        (gave_up(1.0, queued=3000, answered=False), "online", True),  # everybody, and no answer was ever counted
    ],
)
def test_requests_that_clients_cancel_are_a_finding_only_with_a_cause(
    story: Story,
    profile: str,
    expected: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    assert ("requests_rejected" in found(judged(story, profile))) is expected


@pytest.mark.parametrize("end", [30.0, 50.0])
def test_a_consequence_is_not_found_before_its_cause_can_be(end: float) -> None:
    story = slow(9.0, 0.04, running=64, queued=30, usage=0.3)
    ids = found(judged(story, end=end))
    assert "latency_queue" not in ids or "running_at_limit" in ids


@pytest.mark.parametrize(("profile", "word"), [("multi_turn", "no_clear_bottleneck"), ("online", "healthy")])
def test_without_the_radix_cache_a_multi_turn_server_is_not_healthy(profile: str, word: str) -> None:
    judgement = judged(started(disable_radix_cache=True) + load(), profile)
    assert judgement.verdict == word
    assert judgement.changes == {}  # a chance, to be tried by itself


BETWEEN = "latency_prefill_between"


def interrupted(late: float, prompt: float, quick: float = 0.02, *, retracted: float = 0.0, **args: object) -> Story:
    """Scrapes of a server that ends a request of so many prompt tokens every second, and decodes fifty steps meanwhile.

    The share `late` of the gaps between tokens takes half a second, the others `quick`.
    """
    bounds = (0.01, 0.05, 0.1, 0.2, 1.0, inf)
    story = started(**args)  # type: ignore[arg-type]  # the tests name arguments of their own type
    for step in range(20):
        count = 10_000.0 * step
        below = tuple(count * ((1 - late) * (bound >= quick) + late * (bound >= 0.5)) for bound in bounds)
        figures = RankFigures(
            running=20,
            queued=0,
            grammar_queued=0,
            full_usage=0.5,
            used_tokens=step,
            graph_passes=500.0 * step,
            eager_passes=0.0,
        )
        figures.retracted_requests = retracted * step
        scrape = Scrape([figures], progress=count, started_requests=10.0 * step, finished_requests=10.0 * step)
        scrape.finished_prompt_tokens, scrape.finished_cached_tokens = 10.0 * step * prompt, 0.0
        scrape.inter_token = Histogram(bounds, below, count * ((1 - late) * quick + late * 0.5))
        story.append((10.0 * step, scrape))
    return story


def between(story: Story, version: str | None = "0.5.23", profile: str = "online") -> list[tuple[str, object, str]]:
    findings = judge(past(story, profile, version=version)).findings
    return [(a.flag, a.suggested, a.direction) for f in findings if f.diagnosis.id == BETWEEN for a in f.advice]


@pytest.mark.parametrize(
    ("version", "args", "expected"),
    [
        ("0.5.23", {"prefill_decode_interval": 0}, [("--prefill-decode-interval", 17.0, "raise")]),
        ("0.5.23", {"prefill_decode_interval": 4}, [("--prefill-decode-interval", 17.0, "raise")]),
        ("0.5.23", {"prefill_decode_interval": 17}, [("", None, "set")]),
        ("0.5.9", {}, [("--enable-mixed-chunk", 1.0, "add"), ("--chunked-prefill-size", 2048.0, "lower")]),
        ("0.4.9.post6", {"enable_mixed_chunk": True}, [("--chunked-prefill-size", 2048.0, "lower")]),
        ("0.5.9", {"enable_mixed_chunk": True, "chunked_prefill_size": 512}, [("", None, "set")]),
    ],
)  # fmt: skip
def test_tokens_that_are_late_because_of_prompts_in_between_get_decode_steps_between_the_chunks(
    version: str, args: dict[str, object], expected: list[tuple[str, object, str]]
) -> None:
    assert between(interrupted(0.08, 30_000.0, **args), version) == expected  # type: ignore[arg-type]  # arguments of SGLang, by name


def test_the_finding_shows_how_much_is_computed_for_each_late_gap() -> None:
    (finding,) = judge(past(interrupted(0.08, 3000.0), version="0.5.23")).findings
    assert finding.diagnosis.id == BETWEEN
    evidence = {each.name: each.words() for each in finding.evidence}
    assert evidence["prompt tokens prefilled for each late gap"] == "750"
    assert evidence["median inter-token latency"].startswith("0.0")


@pytest.mark.parametrize(
    ("story", "profile"),
    [
        pytest.param(interrupted(0.05, 3000.0), "online", id="few-gaps-are-late"),
        pytest.param(interrupted(0.08, 300.0), "online", id="prompts-are-short"),
        pytest.param(interrupted(0.08, 0.0), "online", id="nothing-is-computed"),
        pytest.param(interrupted(0.08, 3000.0, quick=0.15), "online", id="every-step-is-slow"),
        pytest.param(interrupted(0.08, 3000.0, retracted=3.0), "online", id="requests-are-retracted"),
        pytest.param(interrupted(0.08, 3000.0), "offline", id="no-objective"),
        pytest.param(started() + prefilling(0.0, END) + load(), "online", id="gaps-are-not-exposed"),
    ],
)
def test_without_long_prompts_between_late_tokens_the_finding_is_absent(story: Story, profile: str) -> None:
    assert between(story, profile=profile) == []


def test_mixed_chunks_make_every_step_late_and_the_batch_is_not_blamed() -> None:
    story = interrupted(0.9, 60_000.0, quick=0.15, enable_mixed_chunk=True)
    ids = found(judge(past(story, version="0.5.9")))
    assert BETWEEN in ids
    assert "latency_batch_too_large" not in ids
    assert "latency_batch_too_large" in found(judge(past(interrupted(0.9, 60_000.0, quick=0.15), version="0.5.9")))


def test_a_missed_latency_objective_is_not_healthy() -> None:
    # Every gap between tokens is three times as long as the objective.
    judgement = judged(slow(0.5, 0.3))
    assert judgement.verdict == "latency_batch_too_large"
    small = judged(slow(0.5, 0.3, running=4, usage=0.2))
    assert small.verdict == "no_clear_bottleneck"  # no flag would help, and it is not healthy


@pytest.mark.parametrize("every", [50.0, 60.0, 59.7])
def test_about_one_retraction_a_minute_is_fine(every: float) -> None:
    story = started() + load(queued=5, usage=0.95)
    story += decoding(END, 720.0, queued=5, usage=0.95) + repeated(retraction(), every, end=717.0)
    judgement = judged(story, end=720.0)
    assert "retracting_too_often" not in found(judgement)


def test_three_retractions_in_two_minutes_are_more_than_about_one_a_minute() -> None:
    story = started() + decoding(0.0, 720.0, queued=5, usage=0.95) + repeated(retraction(), 40.0, end=720.0)
    assert "retracting_too_often" in found(judged(story, end=720.0))


@pytest.mark.parametrize("seconds", [20.0, END])
def test_late_first_tokens_have_no_cause_where_it_is_not_known_whether_requests_waited(seconds: float) -> None:
    # Gauges that were read between two batches: the latencies are known, the queue is not.
    latencies = [
        (at, replace(what, ranks=[RankFigures(grammar_queued=0)]))
        for at, what in slow(9.0, 0.04)
        if isinstance(what, Scrape)
    ]
    judgement = judged([*started(), *latencies], end=seconds)
    assert found(judgement).isdisjoint({"latency_queue", "latency_long_prompts"})
    unknown = {check.diagnosis.id for check in judgement.checks if check.passed is None}
    assert {"latency_queue", "latency_long_prompts"} <= unknown


@pytest.mark.parametrize(
    ("running", "row"),
    [(40, "admission_too_conservative"), (64, "running_at_limit")],
)
def test_no_more_are_let_in_while_each_step_takes_too_long_because_of_those_that_run(running: int, row: str) -> None:
    # Seen on a real engine: one command line that both admitted more and lowered --max-running-requests.
    quick = judged(slow(9.0, 0.04, running=running, queued=20, usage=0.5))
    assert row in found(quick)
    late = judged(slow(9.0, 0.3, running=running, queued=20, usage=0.5))
    assert row not in found(late)
    assert late.changes["max_running_requests"] == running // 3
    assert "schedule_conservativeness" not in late.changes


@pytest.mark.parametrize(("limit", "raised"), [(2, 8), (8, None)])
def test_while_a_small_batch_misses_the_objective_the_limit_is_raised_to_a_small_batch_at_most(
    limit: int, raised: int | None
) -> None:
    # Otherwise the next advice would be to lower it again.
    figures = slow(9.0, 0.3, running=limit, queued=20, usage=0.1)[len(started()) :]
    late = judged(started(max_running_requests=limit) + figures)
    assert late.changes.get("max_running_requests") == raised
