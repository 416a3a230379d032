"""A server's state is the same whether it takes batch lines one by one or all lines of a second at once."""

from __future__ import annotations

import gzip
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_tuning_exporter.diagnosis.evidence import past_of
from sglang_tuning_exporter.diagnosis.findings import judge
from sglang_tuning_exporter.recordings.replay import packaged
from sglang_tuning_exporter.sglang.events import Event
from sglang_tuning_exporter.sglang.log.fast_path import BatchRun
from sglang_tuning_exporter.sglang.log.reader import LogReader
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.server import ServerState
from sglang_tuning_exporter.state.totals import Totals

RECORDED = sorted((Path(__file__).parent / "recordings").glob("*/server.log.gz"))
ARGS = b"server_args=ServerArgs(model_path='m', chunked_prefill_size=%d, disable_cuda_graph=%b, page_size=1)\n"
LIMITS = (
    b"max_total_num_tokens=1000, chunked_prefill_size=%d, max_prefill_tokens=16384, max_running_requests=%d, "
    b"context_len=4096, available_gpu_mem=7.00 GB\n"
)
ACCESS = b'INFO:     10.0.0.7:80 - "POST /generate HTTP/1.1" 200 OK\n'
RETRACTION = b"KV cache pool is full. Retract requests. #retracted_reqs: %d, #new_token_ratio: 0.30 -> 0.57\n"
OUT_OF_MEMORY = b"Prefill out of memory. Try to lower your batch size.\n"
TOOL = b"Model attempted to call undefined function: f\n"


def fed(events: list[Event] | list[Event | BatchRun], profile: str) -> ServerState:
    state = ServerState(PROFILES[profile], 0.0)
    now = 0.0
    for event in events:
        now = now if event.time is None else event.time
        state.observe(event, now)
    state.settle(now + 7.0)
    return state


def counted(totals: Totals) -> dict[str, float]:
    """The counts, without the estimate of decoded tokens: of a second's lines only the last one's batch is read for it."""
    return {name: count for name, count in totals.counts.items() if count and name != "decoded"}


def snapshot(state: ServerState) -> dict[str, Any]:
    """Everything that readers of a state use."""
    now = state._now
    totals, recent = state.totals(), state.recent(now, 120.0)
    return {
        "seconds": dict(totals.seconds),
        "running seconds": dict(totals.running_seconds),
        "integrals": dict(totals.integrals),
        "counts": counted(totals),
        "recent seconds": dict(recent.seconds),
        "recent counts": counted(recent),
        "failures": +state.out_of_memory,
        "starts": state.starts,
        "suspicious": +state.forgeries.suspicious,
        "findings": [(finding.diagnosis.id, finding) for finding in judge(past_of(state, now)).findings],
        "graph device": state.facts.graph_device,
        "ranks": {
            dp: {
                "states": rank.states,
                "running": rank.running,
                "queued": rank.queued,
                "usages": rank.usages,
                "graph": rank.graph,
                "throughput": rank.generation_throughput,
                "ratio": rank.new_token_ratio,
                "pending": rank.pending_tokens,
                "prompts logged": rank.prompts.are_logged,
                "wait": rank.queue_wait_seconds(now),
                "full": rank.pool.can_be_full(state.facts, dp, now),
                "samples": rank.samples.since(-inf),
                "coverage": rank.window.recent(now, rank.totals).coverage,
            }
            for dp, rank in state.ranks.items()
        },
    }


def both(text: bytes, profile: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return snapshot(fed(LogReader().feed(text), profile)), snapshot(fed(LogReader().feed_runs(text), profile))


@pytest.mark.parametrize("profile", ["online", "offline"])
@pytest.mark.parametrize("path", RECORDED, ids=[path.parent.name for path in RECORDED])
def test_a_recorded_log_leads_to_the_same_state(path: Path, profile: str) -> None:
    alone, together = both(gzip.decompress(path.read_bytes()), profile)
    assert together == alone


@pytest.mark.parametrize("name", ["steady", "retract"])
def test_a_packaged_recording_leads_to_the_same_state(name: str) -> None:
    alone, together = both(gzip.decompress((packaged(name) / "server.log.gz").read_bytes()), "online")
    assert together == alone


# One line of a made log: which scheduler, how many seconds after the line before, and what it says.
RANKS = st.sampled_from([b"", b" TP0", b" TP1", b" DP0 TP0", b" DP1 TP0"])
FIGURES = st.tuples(
    st.integers(0, 40), st.sampled_from([0.0, 0.2, 0.89, 0.9, 0.97]), st.sampled_from([0, 0, 1, 7, 2500])
)
GRAPHS = st.sampled_from([b"cuda graph: True, ", b"cuda graph: False, ", b"cpu graph: False, ", b""])


def decode(figures: tuple[int, float, int], graph: bytes) -> bytes:
    running, usage, queued = figures
    return (
        b"Decode batch, #running-req: %d, #token: %d, token usage: %.2f, %bgen throughput (token/s): %d.50, "
        b"#queue-req: %d\n" % (running, int(1000 * usage), usage, graph, running * 11, queued)
    )


def prefill(
    figures: tuple[int, float, int], sequences: int, tokens: int, cached: int = 0, pending: bytes = b""
) -> bytes:
    running, usage, queued = figures
    return (
        b"Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: %d, token usage: %.2f, #running-req: %d, "
        b"#queue-req: %d%b\n" % (sequences, tokens, cached, usage, running, queued, pending)
    )


USUAL = st.builds(decode, FIGURES, GRAPHS) | st.builds(
    prefill,
    FIGURES,
    st.integers(0, 9),
    st.sampled_from([1, 17, 60, 64]),
    st.sampled_from([0, 0, 3, 4096, 70_000]),
    st.sampled_from([b"", b", #pending-token: 0", b", #pending-token: 8191"]),
)
PROBE = st.just(prefill((0, 0.0, 0), 1, 1))
UNUSUAL = USUAL.map(lambda line: line.replace(b"\n", b", #transfer-req: 3\n")) | USUAL.map(
    lambda line: line.replace(b"token usage", b"full token usage")
)
OTHER = st.one_of(
    st.just(ACCESS),
    st.builds(RETRACTION.__mod__, st.integers(1, 9)),
    st.just(OUT_OF_MEMORY),
    st.just(TOOL),
    st.just(b"a line of nobody's\n"),
    st.builds(lambda *given: ARGS % given, st.sampled_from([64, -1]), st.sampled_from([b"True", b"False"])),
    st.builds(lambda *given: LIMITS % given, st.sampled_from([64, -1]), st.integers(8, 50)),
)
MESSAGES = st.one_of(*[USUAL] * 6, st.just(ACCESS), PROBE, UNUSUAL, OTHER)
STEPS = st.sampled_from([0, 0, 0, 0, 1, 1, 2, 9, 30, 61, 130, -1])


@st.composite
def logs(draw: st.DrawFn) -> bytes:
    """Lines of one server's schedulers; which of them print is drawn once, so that runs have some length."""
    ranks = draw(st.lists(RANKS, min_size=1, max_size=3))
    now, text = 3600, b""
    for rank, step, message in draw(
        st.lists(st.tuples(st.sampled_from(ranks), STEPS, MESSAGES), min_size=1, max_size=60)
    ):
        now = max(now + step, 0)
        stamp = b"[2025-11-20 %02d:%02d:%02d" % (now // 3600 % 24, now // 60 % 60, now % 60)
        text += stamp + rank + b"] " + message
    return text


# In the second of a log's first prefill a rank decodes eagerly before it.
DECODE_THEN_PREFILL = (
    b"[2025-11-20 01:00:00 DP0 TP0] Decode batch, #running-req: 0, #token: 0, token usage: 0.00, cuda graph: False, "
    b"gen throughput (token/s): 0.50, #queue-req: 0\n"
    b"[2025-11-20 01:00:00 DP0 TP0] Prefill batch, #new-seq: 0, #new-token: 17, #cached-token: 0, token usage: 0.00, "
    b"#running-req: 0, #queue-req: 0\n"
)


@settings(max_examples=400)
@example(DECODE_THEN_PREFILL, "online")
@given(logs(), st.sampled_from(sorted(PROFILES)))
def test_any_log_leads_to_the_same_state(text: bytes, profile: str) -> None:
    alone, together = both(text, profile)
    assert together == alone


def at_once(text: bytes, profile: str, now: float | None) -> dict[str, Any]:
    """The snapshot of a state that took all events of a log at once."""
    events = LogReader().feed_runs(text)
    state = ServerState(PROFILES[profile], 0.0)
    state.observe_all(events, now)
    ended = next((event.time for event in reversed(events) if event.time is not None), 0.0) if now is None else now
    state.settle(ended + 7.0)
    return snapshot(state)


@settings(max_examples=200)
@given(logs(), st.sampled_from(sorted(PROFILES)))
def test_events_taken_together_lead_to_the_same_state_as_one_by_one(text: bytes, profile: str) -> None:
    assert at_once(text, profile, None) == both(text, profile)[0]


@settings(max_examples=100)
@given(logs(), st.sampled_from(sorted(PROFILES)))
def test_a_backlog_arrives_at_one_moment(text: bytes, profile: str) -> None:
    alone = ServerState(PROFILES[profile], 0.0)
    for event in LogReader().feed(text):
        alone.observe(event, 9.0)
    alone.settle(16.0)
    assert at_once(text, profile, 9.0) == snapshot(alone)


def test_the_prompt_tokens_of_all_prefill_lines_count_and_the_last_line_gives_the_queue() -> None:
    at = b"[2025-11-20 01:00:00] "
    (run,) = LogReader().feed_runs(
        at + prefill((0, 0.0, 0), 1, 60, 3, b", #pending-token: 900")
        + at + prefill((0, 0.0, 0), 2, 64, 70_000, b", #pending-token: 88")
        + at + prefill((0, 0.0, 0), 3, 17, 0)
    )  # fmt: skip
    assert isinstance(run, BatchRun)
    assert (run.computed_tokens, run.cached_tokens, run.pending) == (141, 70_003, b"88")
    state = ServerState(PROFILES["online"], 0.0)
    state.observe(run, 5.0)
    counts, rank = state.totals().counts, state.ranks[None]
    assert (counts["computed_tokens"], counts["cached_tokens"]) == (141, 70_003)
    assert (rank.prompts.are_logged, rank.pending_tokens) == (True, 88)


def samples_of(*lines: tuple[int, bytes]) -> list[tuple[float, float]]:
    """The decode samples after these lines: seconds, and what was printed in them. Both ways of reading give the same."""
    text = b"".join(b"[2025-11-20 01:00:%02d] %b" % line for line in lines)
    alone, together = (
        fed(events, "online").ranks[None].samples.since(-inf)
        for events in (LogReader().feed(text), LogReader().feed_runs(text))
    )
    assert together == alone
    return [(batch, speed) for _, batch, speed, _ in alone]


def of_batch(running: int) -> bytes:
    """A decode line with a throughput of 11 x batch + 0.5."""
    return decode((running, 0.2, 0), b"")


def test_a_decode_line_is_a_sample_where_the_batch_did_not_change() -> None:
    assert samples_of((1, of_batch(8)), (2, of_batch(8)), (3, of_batch(9)), (4, of_batch(9))) == [(8, 88.5), (9, 99.5)]


def test_a_decode_line_of_nearly_the_same_batch_is_a_sample_at_the_mean_batch() -> None:
    assert samples_of((1, of_batch(40)), (2, of_batch(37)), (3, of_batch(33))) == [(38.5, 407.5)]


def test_a_decode_line_after_a_prefill_line_is_no_sample() -> None:
    assert samples_of((1, of_batch(8)), (2, prefill((8, 0.2, 0), 1, 0)), (2, of_batch(8)), (3, of_batch(8))) == [
        (8, 88.5)
    ]


def test_of_the_lines_of_one_second_only_the_first_can_be_a_sample() -> None:
    assert samples_of((1, of_batch(1)), (2, of_batch(8)), (2, of_batch(8)), (2, of_batch(1))) == []
    assert samples_of((1, of_batch(8)), (2, of_batch(9)), (2, of_batch(8))) == []
    assert samples_of((1, of_batch(8)), (2, of_batch(8)), (2, of_batch(9))) == [(8, 88.5)]


def test_a_prefill_before_the_server_is_ready_does_not_end_its_start() -> None:
    at = b"[2025-11-20 01:00:00] "
    start = at + ARGS % (64, b"True") + at + prefill((0, 0.0, 0), 0, 17)
    alone, together = both(start + at + TOOL + at + LIMITS % (64, 8), "online")
    assert together == alone
    assert not together["suspicious"]


@settings(max_examples=200)
@given(logs(), st.data())
def test_any_log_gives_the_same_lines_however_it_is_cut(text: bytes, data: st.DataObject) -> None:
    lines = text.splitlines(keepends=True)
    cut = data.draw(st.integers(0, len(lines)))
    reader, whole = LogReader(), LogReader()
    parts = [*reader.feed_runs(b"".join(lines[:cut])), *reader.feed_runs(b"".join(lines[cut:]))]
    flat = [line for each in parts for line in (each.events() if isinstance(each, BatchRun) else [each])]
    assert flat == whole.feed(text)
    assert (reader.counts, reader.unrecognised) == (whole.counts, whole.unrecognised)
