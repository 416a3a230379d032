"""Deduplication: a line that several ranks repeat counts once; equal lines of different events count each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tuning_exporter.sglang.events import OutOfMemory, Rank, Retraction
from sglang_tuning_exporter.state.deduplication import REPEAT_SECONDS, OutOfMemoryLedger, RetractionLedger, StatsRanks

if TYPE_CHECKING:
    from random import Random

    from sglang_tuning_exporter.sglang.events import OutOfMemoryPhase


def retraction(tp: int | None = 0, *, dp: int | None = None, pp: int | None = None, gained: int = 8950) -> Retraction:
    return Retraction(
        None, Rank(dp, tp, pp), 5, new_tokens_gained=gained, ratio_before=0.6, ratio_after=0.9
    )  # figures as 0.5.7 prints them


def failure(phase: OutOfMemoryPhase, tp: int | None = 0) -> OutOfMemory:
    return OutOfMemory(None, Rank(tp=tp), phase)


def count(lines: list[tuple[float, Retraction]]) -> int:
    ledger = RetractionLedger()
    return sum(ledger.is_new(line, at) for at, line in lines)


def test_eight_tensor_parallel_ranks_that_print_one_retraction_are_one_event() -> None:
    assert count([(0.0, retraction(tp)) for tp in range(8)]) == 1


def test_two_equal_lines_of_one_rank_are_two_events() -> None:
    assert count([(0.0, retraction()), (0.5, retraction())]) == 2


def test_two_equal_retractions_of_interleaved_ranks_are_two_events() -> None:
    order = (0, 1, 0, 1, 2, 3, 2, 3)
    assert count([(0.0, retraction(tp)) for tp in order]) == 2


def test_one_rank_that_prints_both_its_lines_before_the_others_still_makes_two_events() -> None:
    assert count([(0.0, retraction(tp)) for tp in (0, 0, 1, 1)]) == 2


def test_ranks_that_arrive_seconds_apart_are_one_event() -> None:
    assert count([(3.0 * tp, retraction(tp)) for tp in range(8)]) == 1


def test_the_same_figures_a_minute_later_are_another_event() -> None:
    assert count([(0.0, retraction(0)), (60.0, retraction(1))]) == 2


def test_retractions_with_other_figures_are_other_events() -> None:
    assert count([(0.0, retraction(0)), (0.0, retraction(1, gained=1234))]) == 2


def test_data_parallel_ranks_retract_each_for_themselves() -> None:
    assert count([(0.0, retraction(0, dp=0)), (0.0, retraction(0, dp=1))]) == 2


def test_the_stages_of_a_pipeline_that_print_one_retraction_are_one_event() -> None:
    assert count([(0.0, retraction(tp, pp=pp)) for tp in (0, 1) for pp in (0, 1)]) == 1


def test_lines_without_a_rank_are_an_event_each() -> None:
    assert count([(0.0, retraction(None)), (0.0, retraction(None))]) == 2


@given(st.integers(1, 8), st.integers(1, 6), st.randoms(use_true_random=False))
def test_events_are_counted_whatever_the_order_in_which_ranks_print_them(
    ranks: int, events: int, random: Random
) -> None:
    lines = [retraction(tp) for tp in range(ranks) for _ in range(events)]
    random.shuffle(lines)
    assert count([(0.0, line) for line in lines]) == events


def test_the_ledger_keeps_a_bounded_number_of_events() -> None:
    ledger = RetractionLedger()
    for gained in range(2000):
        ledger.is_new(retraction(gained=gained), 0.0)
    assert len(ledger._seen) <= 512


def test_a_failure_that_eight_ranks_print_and_raise_again_is_one() -> None:
    ledger = OutOfMemoryLedger()
    judged = [ledger.classify(failure("decode", tp % 8), 0.1 * tp) for tp in range(16)]
    assert judged == ["new"] + 15 * ["repeated"]


def test_a_failure_of_unknown_phase_repeats_the_known_one_before_it() -> None:
    ledger = OutOfMemoryLedger()
    assert [ledger.classify(failure(phase), 0.0) for phase in ("prefill", "unknown", "unknown")] == [
        "new",
        "repeated",
        "repeated",
    ]


def test_a_known_phase_explains_the_unknown_failure_before_it_once() -> None:
    ledger = OutOfMemoryLedger()
    judged = [ledger.classify(failure(phase), 0.0) for phase in ("unknown", "unknown", "decode", "decode", "unknown")]
    assert judged == ["new", "repeated", "explained", "repeated", "repeated"]


def test_an_unknown_line_that_repeated_a_known_failure_is_not_explained_later() -> None:
    ledger = OutOfMemoryLedger()
    judged = [ledger.classify(failure("decode"), 0.0), ledger.classify(failure("unknown"), 9.0)]
    assert [*judged, ledger.classify(failure("prefill"), 12.0)] == ["new", "repeated", "new"]


def test_two_known_phases_are_two_failures() -> None:
    ledger = OutOfMemoryLedger()
    assert [ledger.classify(failure("prefill"), 0.0), ledger.classify(failure("decode"), 0.0)] == ["new", "new"]


def test_a_failure_long_after_the_last_is_a_new_one() -> None:
    ledger = OutOfMemoryLedger()
    ledger.classify(failure("decode"), 0.0)
    assert ledger.classify(failure("decode"), REPEAT_SECONDS + 0.1) == "new"


def test_a_failure_after_a_restart_repeats_nothing() -> None:
    ledger = OutOfMemoryLedger()
    ledger.classify(failure("startup"), 0.0)
    ledger.forget()
    assert ledger.classify(failure("startup"), 1.0) == "new"


@pytest.mark.parametrize("first", [0, 3])
def test_only_the_lowest_tensor_parallel_rank_that_prints_counts(first: int) -> None:
    ranks = StatsRanks()
    ranks.counts(Rank(tp=first))
    ranks.counts(Rank(tp=0))
    assert [tp for tp in range(4) if ranks.counts(Rank(tp=tp))] == [0]


def test_only_the_first_stage_of_a_pipeline_counts() -> None:
    ranks = StatsRanks()
    ranks.counts(Rank(pp=0))
    assert [pp for pp in range(4) if ranks.counts(Rank(pp=pp))] == [0]


def test_a_rank_that_is_known_before_it_prints_counts_from_the_first_batch_on() -> None:
    ranks = StatsRanks()
    for rank in (Rank(tp=3, pp=1), Rank(tp=0, pp=0), Rank(tp=2, pp=0)):
        ranks.exists(rank)
    assert [ranks.counts(rank) for rank in (Rank(tp=0, pp=1), Rank(tp=2, pp=0), Rank(tp=0, pp=0))] == [
        False,
        False,
        True,
    ]


def test_which_rank_counts_is_kept_over_a_restart_of_the_exporter() -> None:
    ranks, later = StatsRanks(), StatsRanks()
    ranks.counts(Rank(dp=1, tp=2, pp=0))
    later.restore(ranks.saved())
    assert [later.counts(Rank(dp=1, tp=2, pp=pp)) for pp in (1, 0)] == [False, True]


def test_a_server_without_tensor_parallel_ranks_counts_every_line() -> None:
    ranks = StatsRanks()
    assert [ranks.counts(Rank()) for _ in range(3)] == [True, True, True]


def test_every_data_parallel_rank_has_a_stats_rank_of_its_own() -> None:
    ranks = StatsRanks()
    assert all(ranks.counts(Rank(dp=dp, tp=4 * dp)) for dp in (0, 1))


def test_after_a_restart_another_rank_may_be_the_one_that_prints() -> None:
    ranks = StatsRanks()
    ranks.counts(Rank(tp=0))
    ranks.forget()
    assert ranks.counts(Rank(tp=4))
