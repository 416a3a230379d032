"""`feed_runs` gives what `feed` gives, with the usual batch lines of one second put together."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from sglang_tuning_exporter.sglang.events import DecodeBatch, Event, PrefillBatch, Rank
from sglang_tuning_exporter.sglang.lines import LogReader
from sglang_tuning_exporter.sglang.usual import BatchRun

RECORDED = sorted((Path(__file__).parent / "recordings").glob("*/server.log.gz"))
DECODE = (
    b"Decode batch, #running-req: %d, #token: 900, token usage: 0.90, cuda graph: %b, "
    b"gen throughput (token/s): 87.00, #queue-req: 7\n"
)
PREFILL = b"Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: 0, token usage: 0.38, #running-req: 0, #queue-req: 0\n"
AT = b"[2025-11-20 11:40:13 TP0] "
NEXT = b"[2025-11-20 11:40:14 TP0] "


def runs(block: bytes) -> list[Event | BatchRun]:
    return LogReader().feed_runs(block)


def only_run(block: bytes) -> BatchRun:
    (run,) = runs(block)
    assert isinstance(run, BatchRun)
    return run


def test_the_lines_of_a_second_are_counted_and_the_last_is_kept() -> None:
    run = only_run(AT + DECODE % (1, b"True") + AT + DECODE % (2, b"False") + AT + DECODE % (3, b"True"))
    assert (run.decodes, run.replayed, run.eager, run.prefills) == (3, 2, 1, 0)
    assert run.decode is not None
    assert (run.decode.running, run.decode.graph, run.time) == (3, True, 1_763_638_813.0)


def test_what_joins_the_batch_is_what_was_prefilled_after_the_last_decode_line() -> None:
    before, after = AT + PREFILL % (4, 100), AT + PREFILL % (2, 50) + AT + PREFILL % (1, 1)
    run = only_run(before + AT + DECODE % (3, b"True") + after)
    assert run.prefill_last
    assert (run.prefills, run.new_sequences, run.probes) == (3, 7, 1)
    assert [line.new_sequences for line in run.joined] == [2, 1]
    assert run.prefill is not None
    assert run.prefill.is_health_probe


def test_a_new_second_begins_a_new_run() -> None:
    assert [run.time for run in runs(AT + DECODE % (1, b"True") + NEXT + DECODE % (2, b"True"))] == [
        1_763_638_813.0,
        1_763_638_814.0,
    ]


def test_another_rank_has_a_run_of_its_own() -> None:
    other = b"[2025-11-20 11:40:13 TP1] "
    found = runs((AT + DECODE % (1, b"True") + other + DECODE % (2, b"True")) * 3)
    assert [(run.rank, run.decodes) for run in found if isinstance(run, BatchRun)] == [(Rank(tp=0), 3), (Rank(tp=1), 3)]


def test_any_other_event_ends_a_run() -> None:
    retraction = AT + b"KV cache pool is full. Retract requests. #retracted_reqs: 1\n"
    found = runs(AT + DECODE % (1, b"True") + retraction + AT + DECODE % (2, b"True"))
    assert [type(each).__name__ for each in found] == ["BatchRun", "Retraction", "BatchRun"]


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("path", RECORDED, ids=[path.parent.name for path in RECORDED])
def test_a_recorded_log_has_the_same_lines_in_runs_and_alone(path: Path, newline: bytes) -> None:
    text = gzip.decompress(path.read_bytes()).replace(b"\n", newline)
    alone, together = LogReader(), LogReader()
    events, found = alone.feed(text), together.feed_runs(text)
    assert (alone.counts, alone.unrecognised) == (together.counts, together.unrecognised)
    usual = [each for each in found if isinstance(each, BatchRun)]
    rest = [each for each in found if isinstance(each, DecodeBatch | PrefillBatch)]
    decodes = [each for each in events if isinstance(each, DecodeBatch)]
    prefills = [each for each in events if isinstance(each, PrefillBatch)]
    assert sum(run.decodes + run.prefills for run in usual) + len(rest) == len(decodes) + len(prefills)
    assert sum(run.eager for run in usual) <= sum(line.graph is False for line in decodes)
    assert all(run.decode in decodes for run in usual if run.decode)
    assert all(run.prefill in prefills for run in usual if run.prefill)
    assert sum(run.probes for run in usual) == sum(line.is_health_probe for line in prefills)
