"""`feed_runs` gives what `feed` gives, with the usual batch lines of one second put together."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from sglang_tuning_exporter.sglang.events import Event, PrefillBatch, Rank
from sglang_tuning_exporter.sglang.log.fast_path import BatchRun
from sglang_tuning_exporter.sglang.log.reader import LogReader

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
    run = only_run(AT + DECODE % (1, b"True") + AT + DECODE % (2, b"True") + AT + DECODE % (3, b"True"))
    assert (run.decodes, run.graph, run.graph_device, run.prefills) == (3, True, "cuda", 0)
    assert (run.running, run.queued, run.usage, run.time) == (3, 7, 0.9, 1_763_638_813.0)
    assert run.decode is not None
    assert run.decode.running == 3


def test_all_decode_lines_of_a_run_have_the_same_graph() -> None:
    text = b"".join(AT + DECODE % (1, flag) for flag in (b"True", b"True", b"False", b"True"))
    found = [run for run in runs(text) if isinstance(run, BatchRun)]
    assert [(run.decodes, run.graph) for run in found] == [(2, True), (1, False), (1, True)]


def test_requests_join_the_batch_in_the_prefill_lines_after_the_last_decode_line() -> None:
    before, after = AT + PREFILL % (4, 100), AT + PREFILL % (2, 50) + AT + PREFILL % (1, 17)
    run = only_run(before + AT + DECODE % (3, b"True") + after)
    assert (run.prefills, run.new_sequences, run.joined_sequences, run.new_tokens) == (3, 7, 1, 17)
    assert [line.new_sequences for line in run.joined] == [2, 1]
    assert (run.running, run.queued, run.usage) == (0, 0, 0.38)


def test_a_health_probe_is_not_part_of_a_run() -> None:
    found = runs(AT + DECODE % (3, b"True") + AT + PREFILL % (1, 1) + AT + DECODE % (3, b"True"))
    assert [type(each).__name__ for each in found] == ["BatchRun", "PrefillBatch", "BatchRun"]
    assert isinstance(found[1], PrefillBatch)
    assert found[1].is_health_probe


def test_a_prompt_of_one_token_beside_a_queue_is_no_probe() -> None:
    assert only_run(AT + (PREFILL % (1, 1)).replace(b"#queue-req: 0", b"#queue-req: 03")).prefills == 1


def test_access_lines_of_any_time_and_rank_lie_within_a_run() -> None:
    access = b'[2025-11-20 11:40:%d] INFO:     10.0.0.7:80 - "POST /generate HTTP/1.1" 200 OK\n'
    reader = LogReader()
    found = reader.feed_runs(AT + DECODE % (1, b"True") + access % 13 + access % 14 + AT + DECODE % (2, b"True"))
    assert [run.decodes for run in found if isinstance(run, BatchRun)] == [2]
    assert (reader.counts["access"], reader.counts["decode"]) == (2, 2)


@pytest.mark.parametrize("quoted", [DECODE % (9, b"True"), PREFILL % (9, 9)])
def test_a_request_that_quotes_a_batch_line_is_not_counted_as_one(quoted: bytes) -> None:
    access = b'[2025-11-20 11:40:13] INFO:     10.0.0.7:80 - "GET /' + quoted
    reader = LogReader()
    found = reader.feed_runs(AT + DECODE % (1, b"True") + access + AT + DECODE % (2, b"True"))
    assert sum(run.decodes + run.prefills for run in found if isinstance(run, BatchRun)) == 2
    assert (reader.counts["access"], reader.counts["decode"], reader.counts["prefill"]) == (1, 2, 0)


@pytest.mark.parametrize(
    "end",
    [
        b", ",
        b", #pending-token: 7, cpu graph: False, input throughput (token/s): 12.50",
        b", input throughput (token/s): 12.50, cpu graph: False",
    ],
)
def test_a_prefill_line_ends_as_its_release_lets_it(end: bytes) -> None:
    text = AT + (PREFILL % (2, 50)).replace(b"\n", end + b"\n")
    run = only_run(text)
    alone: list[Event] = []
    LogReader()._read(text.rstrip(b"\n"), alone)
    assert (list(run.events()), run.new_sequences) == (alone, 2)


def test_a_line_with_more_behind_its_usual_end_is_read_alone() -> None:
    longer = AT + (DECODE % (2, b"True")).replace(b"\n", b", #new-key: 5\n")
    found = runs(AT + DECODE % (1, b"True") + longer)
    assert [type(each).__name__ for each in found] == ["BatchRun", "DecodeBatch"]
    assert isinstance(found[0], BatchRun)
    assert (found[0].running, found[0].decodes) == (1, 1)


def test_a_new_second_begins_a_new_run() -> None:
    assert [run.time for run in runs(AT + DECODE % (1, b"True") + NEXT + DECODE % (2, b"True"))] == [
        1_763_638_813.0,
        1_763_638_814.0,
    ]


def test_another_rank_has_a_run_of_its_own() -> None:
    other = b"[2025-11-20 11:40:13 TP1] "
    found = runs(AT + DECODE % (1, b"True") + 2 * (other + DECODE % (2, b"True")))
    assert [(run.rank, run.decodes) for run in found if isinstance(run, BatchRun)] == [(Rank(tp=0), 1), (Rank(tp=1), 2)]


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
    assert [line for each in found for line in (each.events() if isinstance(each, BatchRun) else [each])] == events
    usual = [each for each in found if isinstance(each, BatchRun)]
    assert len(usual) > 10
    for run in usual:
        lines = list(run.events())
        prefills = [line for line in lines if isinstance(line, PrefillBatch)]
        assert (run.prefills, run.decodes) == (len(prefills), len(lines) - len(prefills))
        assert run.new_sequences == sum(line.new_sequences or 0 for line in prefills)
        assert run.computed_tokens == sum(line.new_tokens or 0 for line in prefills)
        assert run.cached_tokens == sum(line.cached_tokens or 0 for line in prefills)
        pending = [line.pending_tokens for line in prefills if line.pending_tokens is not None]
        assert run.pending == (b"%d" % pending[-1] if pending else b"")
        assert (run.running, run.queued, run.usage) == (lines[-1].running, lines[-1].queued, lines[-1].full_usage)


@pytest.mark.parametrize("path", RECORDED, ids=[path.parent.name for path in RECORDED])
def test_a_recorded_log_is_read_alike_line_by_line_and_at_once(path: Path) -> None:
    text = gzip.decompress(path.read_bytes())
    whole, single = LogReader(), LogReader()
    by_line = [event for line in text.splitlines(keepends=True) for event in single.feed(line)]
    assert (whole.feed(text), whole.counts) == (by_line, single.counts)


@pytest.mark.parametrize("usage", [b"0.90", b"1.07", b"2.00", b"2.01", b"9.00"])
def test_a_usage_that_cannot_be_is_read_in_runs_as_alone(usage: bytes) -> None:
    text = (AT + DECODE % (1, b"True") + AT + PREFILL % (2, 9)) * 2
    text = text.replace(b"0.90", usage).replace(b"0.38", usage)
    events: list[Event] = []
    for line in text.splitlines():
        LogReader()._read(line, events)  # as a line is read that is not usual
    found = runs(text)
    assert [line for each in found for line in (each.events() if isinstance(each, BatchRun) else [each])] == events


def test_more_layouts_than_are_remembered_are_read_all_the_same() -> None:
    access = b"".join(AT + b'INFO:     10.0.0.7:80 - "GET /%s HTTP/1.1" 200 OK\n' % (b"a" * n) for n in range(300))
    reader = LogReader()
    for letter in b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMN":
        reader.feed_runs(access.replace(b"/a", b"/" + bytes([letter])))
    assert reader.counts["access"] == 12_000
    assert len(reader._fast_path._known_shapes) <= 8192
