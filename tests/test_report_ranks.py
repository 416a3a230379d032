"""Which batch lines a report counts: those of one rank of each scheduler, whatever order they came in."""

from __future__ import annotations

import pytest

from sglang_tuning_exporter.report.analysis import Analysis
from sglang_tuning_exporter.sglang.events import NO_RANK, DecodeBatch, PrefillBatch, Rank
from sglang_tuning_exporter.state.profiles import PROFILES


def counted(kind: str, *lines: DecodeBatch | PrefillBatch) -> int:
    analysis = Analysis(PROFILES["online"])
    for place, line in enumerate(lines):
        analysis.take(1e9 + place, line)
    return analysis.batches(kind)


def decode(rank: Rank) -> DecodeBatch:
    return DecodeBatch(None, rank, running=4, queued=0, tokens=10, full_usage=0.1)


UNRANKED, FIRST = [decode(NO_RANK)] * 2, [decode(Rank(tp=0))] * 3


@pytest.mark.parametrize("lines", [UNRANKED + FIRST, FIRST + UNRANKED], ids=["without first", "with first"])
def test_lines_without_a_rank_stand_before_those_of_tp0(lines: list[DecodeBatch]) -> None:
    assert counted("decode", *lines) == 2


def test_repetitions_of_a_higher_tp_rank_are_not_counted() -> None:
    assert counted("decode", *(decode(Rank(tp=tp)) for tp in (1, 0, 1, 0))) == 2


def test_each_dp_rank_is_counted() -> None:
    assert counted("decode", *(decode(Rank(dp=dp, tp=tp)) for dp in (0, 1) for tp in (0, 1))) == 2


def test_a_kind_that_only_a_higher_rank_printed_is_counted_there() -> None:
    prefill = PrefillBatch(None, Rank(tp=1), new_sequences=1, new_tokens=8, cached_tokens=0, running=0, queued=0)
    assert counted("prefill", decode(Rank(tp=0)), prefill) == 1
    assert counted("decode", decode(Rank(tp=0)), prefill) == 1
