"""What is known of a server is the same whether its logs were read line by line or a second's batch lines at once.

The recordings are real logs of 0.5.23 (tests/recordings and the package's own), the lines of tests/data/logs are those
of the released wheels. Made logs have figures on both sides of every bound that a diagnosis is judged by.
"""

from __future__ import annotations

import gzip
import io
import re
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_tuning_exporter.diagnosis.evidence import past_of
from sglang_tuning_exporter.diagnosis.findings import judge
from sglang_tuning_exporter.diagnosis.json_findings import shares
from sglang_tuning_exporter.recordings.replay import packaged
from sglang_tuning_exporter.report.analysis import Analysis
from sglang_tuning_exporter.report.inputs import Logs
from sglang_tuning_exporter.sglang.events import Event
from sglang_tuning_exporter.sglang.log.fast_path import BatchRun
from sglang_tuning_exporter.sglang.log.reader import LogReader
from sglang_tuning_exporter.state.profiles import PROFILES

HERE = Path(__file__).parent
RECORDED = [
    *sorted((HERE / "recordings").glob("*/server.log.gz")),
    *(packaged(name) / "server.log.gz" for name in ("steady", "retract")),
]
RELEASES = sorted((HERE / "data" / "logs").glob("*.log"))
ONE_AFTER_THE_OTHER = [log for log in RECORDED if log.parent.name != "v0.5.9-retract"]
# Two of them were recorded at the same time: two servers, which no report puts together.
PAIRS = [pair for pair in permutations(RECORDED, 2) if {log.parent.name for log in pair} != {"dp2", "v0.5.9-retract"}]
DP_RANK = re.compile(rb"\[[^\]]{0,40} DP(\d)")
TIME = re.compile(rb"^\[\d{4}-\d\d-\d\d (?=\d\d:\d\d:\d\d)", re.MULTILINE)


class LineByLine(LogReader):
    def feed_runs(self, block: bytes, arrived: float | None = None) -> list[Event | BatchRun]:
        runs = super().feed_runs(block, arrived)
        return [event for each in runs for event in (each.events() if isinstance(each, BatchRun) else (each,))]


def both(profile: str, *logs: Path, stdin: bytes | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is known by single lines, and by runs."""
    names = [str(log) for log in logs] + ["-"] * (stdin is not None)
    alone, together = (Logs(names, None if stdin is None else io.BytesIO(stdin)) for _ in range(2))
    alone.readers = [LineByLine() for _ in alone.readers]
    return known(alone, profile), known(together, profile)


def known(logs: Logs, profile: str) -> dict[str, Any]:
    """Read logs; return totals, facts and the judgement of all their time."""
    analysis = Analysis(PROFILES[profile])
    for moment, event in logs.events():
        analysis.take(moment, event)
    state = analysis.state
    state.settle(analysis.now)
    past = past_of(state, analysis.now, seconds=1e9)
    judgement = judge(past)
    totals = {rank.dp: rank.totals for rank in state.schedulers}
    return {
        "sources": logs.names,
        "lines": logs.lines_taken,
        "verdict": judgement.verdict,
        "findings": [
            (each.diagnosis.id, each.sentence, [(advice.flag, advice.suggested) for advice in each.advice])
            for each in judgement.findings
        ],
        "shares": shares(past.recent),
        "retractions": {dp: each.counts["retraction_events"] for dp, each in totals.items()},
        "seconds": {dp: {what: round(spent, 6) for what, spent in each.seconds.items()} for dp, each in totals.items()},
        "events": (state.starts, dict(state.out_of_memory), dict(state.liveness)),
        "last": {rank.dp: (rank.running, rank.queued, rank.usage) for rank in state.schedulers},
    }


def _out_of_order(found: dict[str, Any]) -> dict[str, Any]:
    """Leave out what hangs on the order within a second, which lines of several files do not have: how far the ratio had
    fallen when a retraction lifted it.
    """
    admission = found["shares"].get("admission", {})
    admission["held_back"] = round(admission.get("held_back", 0.0) + admission.pop("recovering", 0.0), 4)
    del found["seconds"]
    return found


def plain(log: Path) -> bytes:
    return gzip.decompress(log.read_bytes())


def without_dates(log: Path) -> bytes:
    return TIME.sub(b"[", plain(log))


def runs(*logs: Path) -> list[BatchRun]:
    return [event for _, event in Logs([str(log) for log in logs]).events() if isinstance(event, BatchRun)]


def test_a_log_is_read_by_seconds_not_by_lines() -> None:
    found = runs(*ONE_AFTER_THE_OTHER)
    assert sum(run.decodes + run.prefills for run in found) > 2 * len(found) > 200


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("log", RECORDED + RELEASES, ids=lambda log: log.parent.name + "-" + log.name)
def test_what_a_log_says_is_that_of_its_lines(log: Path, profile: str) -> None:
    alone, together = both(profile, log)
    assert together == alone


@pytest.mark.parametrize("profile", ["online", "offline"])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(log.parent.name for log in pair))
def test_what_two_logs_says_is_that_of_their_lines_in_any_order(pair: tuple[Path, Path], profile: str) -> None:
    alone, together = both(profile, *pair)
    assert together == alone


def test_what_all_logs_in_wrong_order_says_is_that_of_their_lines() -> None:
    alone, together = both("online", *reversed([*ONE_AFTER_THE_OTHER, RELEASES[0], RELEASES[-1]]))
    assert together == alone


def split(text: bytes, tmp_path: Path, parts: int, *, stretch: int) -> list[Path]:
    """Give each DP rank a file of its own and deal the lines of the HTTP server out to all, `stretch` at a time: the files
    overlap in time, and within seconds.
    """
    files = [tmp_path / f"node{number}.log" for number in range(parts)]
    dealt: list[list[bytes]] = [[] for _ in files]
    for at, line in enumerate(text.splitlines(keepends=True)):
        rank = DP_RANK.match(line)
        dealt[at // stretch % parts if b"] INFO: " in line else int(rank[1]) if rank else 0].append(line)
    for file, lines in zip(files, dealt, strict=True):
        file.write_bytes(b"".join(lines))
    return files


@pytest.mark.parametrize("stretch", [1, 3, 40])
@pytest.mark.parametrize("log", RECORDED, ids=lambda log: log.parent.name)
def test_what_logs_that_overlap_says_is_that_of_their_lines(log: Path, stretch: int, tmp_path: Path) -> None:
    files = split(plain(log), tmp_path, 3, stretch=stretch)
    alone, together = both("online", *reversed(files))
    assert _out_of_order(together) == _out_of_order(alone)
    assert together["lines"].total() == len(plain(log).splitlines())


def test_what_a_file_and_standard_input_that_overlap_says_is_that_of_their_lines(tmp_path: Path) -> None:
    one, other = split(plain(RECORDED[0]), tmp_path, 2, stretch=5)
    alone, together = both("online", one, stdin=other.read_bytes())
    assert together == alone


@pytest.mark.parametrize("log", RECORDED, ids=lambda log: log.parent.name)
def test_what_logs_without_dates_says_is_that_of_their_lines(log: Path, tmp_path: Path) -> None:
    text = without_dates(log)
    half = text.index(b"\n", len(text) // 2) + 1
    (tmp_path / "server.log").write_bytes(text[half:])
    (tmp_path / "server.log.1").write_bytes(text[:half])
    alone, together = both("online", tmp_path / "server.log", tmp_path / "server.log.1", RELEASES[0])
    assert together == alone
    # By the time of the day, the release's own log comes before some recordings and after others.
    halves = [source for source in together["sources"] if source != str(RELEASES[0])]
    assert halves == [str(tmp_path / "server.log.1"), str(tmp_path / "server.log")]


def test_two_logs_take_turns_second_by_second_as_their_lines_do(tmp_path: Path) -> None:
    def order(readers: type[LogReader]) -> list[tuple[float, object, object]]:
        logs = Logs([str(file) for file in split(plain(packaged("retract") / "server.log.gz"), tmp_path, 2, stretch=7)])
        logs.readers = [readers() for _ in logs.readers]
        return [
            (moment, type(line), line)
            for moment, event in logs.events()
            for line in (event.events() if isinstance(event, BatchRun) else [event])
        ]

    assert order(LogReader) == order(LineByLine)


def server(limit: int) -> bytes:
    return (
        b"[2025-11-20 10:00:00] server_args=ServerArgs(model_path='m', chunked_prefill_size=64, cuda_graph_max_bs=8)\n"
        b"[2025-11-20 10:00:00] max_total_num_tokens=1000, chunked_prefill_size=64, max_prefill_tokens=16384, "
        b"max_running_requests=%d, context_len=4096, available_gpu_mem=7.00 GB\n" % limit
    )


def decode(running: int, queued: int, usage: float, graph: bytes, throughput: float = 71.5) -> bytes:
    return (
        b"Decode batch, #running-req: %d, #token: 925, token usage: %.2f, %bgen throughput (token/s): %.2f, "
        b"#queue-req: %d\n" % (running, usage, graph, throughput, queued)
    )


def prefill(running: int, queued: int, usage: float, sequences: int, tokens: int) -> bytes:
    return (
        b"Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: 0, token usage: %.2f, #running-req: %d, "
        b"#queue-req: %d\n" % (sequences, tokens, usage, running, queued)
    )


RUNNING = st.sampled_from([1, 8, 9, 12])  # 8 is the largest captured batch
QUEUED = st.sampled_from([0, 0, 1, 7, 30, 2500])
USAGES = st.sampled_from([0.2, 0.89, 0.9])
GRAPHS = st.sampled_from([b"cuda graph: True, ", b"cuda graph: False, ", b""])
LINES = st.builds(decode, RUNNING, QUEUED, USAGES, GRAPHS, st.sampled_from([71.5, 400.0])) | st.builds(
    prefill, RUNNING, QUEUED, USAGES, st.sampled_from([1, 2, 9]), st.sampled_from([17, 57, 58, 64])
)
SWA = (
    b"Decode batch, #running-req: 9, #token: 9, full token usage: 0.10, swa token usage: 0.95, "
    b"gen throughput (token/s): 71.50, #queue-req: 9\n"
)
RETRACTION = b"KV cache pool is full. Retract requests. #retracted_reqs: 5, #new_token_ratio: 0.30 -> 0.57\n"
OTHER = st.sampled_from([SWA, RETRACTION, prefill(0, 0, 0.0, 1, 1)])
RANKS = st.sampled_from([(b"",), (b"",), (b" TP0",), (b" DP0 TP0", b" DP1 TP0"), (b" TP1", b" TP0")])


@st.composite
def busy_logs(draw: st.DrawFn) -> bytes:
    """A server with one load for a while, another before and after it, and a third one for parts of seconds."""
    quiet, steady = draw(LINES), draw(LINES)
    passing = st.lists(st.just(steady) | LINES | st.sampled_from([quiet, steady]) | OTHER, max_size=4)
    ranks = draw(RANKS)
    text = server(draw(st.sampled_from([9, 12, 400])))
    for second in range(48):
        calm = second < 8 or second >= 40
        for rank in ranks:
            for line in [*(draw(passing) if calm else ()), quiet if calm else steady]:
                text += b"[2025-11-20 10:00:%02d%b] %b" % (second, rank, line)
    return text


@settings(max_examples=200)
@given(busy_logs(), st.sampled_from(sorted(PROFILES)))
def test_what_any_log_says_is_that_of_its_lines(text: bytes, profile: str) -> None:
    alone, together = both(profile, stdin=text)
    assert together == alone


@pytest.mark.parametrize(("first", "second"), [(8, 8), (1, 8), (8, 1)])
@pytest.mark.parametrize("profile", ["long_context", "offline"])
def test_a_second_with_several_batches_gives_the_same_expected_throughput(
    first: int, second: int, profile: str
) -> None:
    text = server(9)
    for at in range(48):
        lines = [decode(1, 7, 0.9, b"")]
        if at in {5, 47}:
            lines = [
                decode(first, 0, 0.9, b"cuda graph: True, "),
                decode(second, 7, 0.89, b"cuda graph: True, "),
                *lines,
            ]
        text += b"".join(b"[2025-11-20 10:00:%02d] %b" % (at, line) for line in lines)
    alone, together = both(profile, stdin=text)
    assert together == alone
