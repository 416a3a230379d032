"""A report does not depend on how a log is cut into files, on ranks that repeat its lines, or on the clock that it was
printed by.

The recordings are real logs (tests/recordings).
"""

from __future__ import annotations

import gzip
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from nights import later
from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core import report
from sglang_tuning_exporter.core.inputs import Logs
from truth.recording import read

RECORDINGS, CAPTURES = Path(__file__).parent / "recordings", Path(__file__).parent / "captures"
NAMES = ["restart_append", "v0.5.9-retract", "early-limit"]
FAILURE = b"""\
[2026-11-20 19:40:44] Scheduler hit an exception: Traceback (most recent call last):
  File "/srv/sglang/scheduler.py", line 3012, in run_scheduler_process
    scheduler.event_loop_overlap()
  File "/srv/sglang/model_runner.py", line 2100, in forward_extend
    return self.model.forward(batch)
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.75 GiB. GPU 0 has a total capacity of 79.11 GiB.
"""
BATCH = re.compile(
    rb"^(\[[^\]\n]{19})(\] (?:Decode|Prefill) batch|\] (?:KV cache pool|Decode out of memory))", re.MULTILINE
)


@cache
def text_of(name: str) -> bytes:
    packed = RECORDINGS / name / "server.log.gz"
    text = gzip.decompress(packed.read_bytes()) if packed.exists() else read(CAPTURES / f"{name}.tar.xz").text
    return text.removesuffix(b"\n") + b"\n" + (FAILURE if name == "restart_append" else b"")


def document(*logs: Path) -> dict[str, Any]:
    found = report.document(report.judge_logs(Logs([str(log) for log in logs]), PROFILES["online"])[0])
    for each in found["findings"]:  # where the line of an end stands is not the same
        each["explained_by"] = each["explained_by"] and {**each["explained_by"], "file": "", "line": 0}
    return {key: value for key, value in found.items() if key != "sources"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("whole")
    found = {}
    for name in NAMES:
        (folder / f"{name}.log").write_bytes(text_of(name))
        found[name] = document(folder / f"{name}.log")
    return found


SHARES = st.sets(st.floats(0, 1), min_size=1, max_size=4)  # of the lines, where a file ends
SLOW = settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.mark.parametrize("name", NAMES)
@SLOW
@example(how=({0.515625}, (False,) * 5, [0, 1, 2, 3, 4]))  # a file begins with a line before the start that it holds
@given(how=st.tuples(SHARES, st.tuples(*[st.booleans()] * 5), st.permutations(range(5))))
def test_a_log_says_the_same_wherever_it_is_cut_into_files(
    name: str,
    whole: dict[str, dict[str, Any]],
    tmp_path: Path,
    *,
    how: tuple[set[float], tuple[bool, ...], list[int]],
) -> None:
    shares, packed, order = how
    lines = text_of(name).splitlines(keepends=True)
    cuts = sorted({1 + round(share * (len(lines) - 2)) for share in shares})
    logs = []
    for number, (begin, end) in enumerate(zip([0, *cuts], [*cuts, len(lines)], strict=True)):
        part = b"".join(lines[begin:end])
        log = tmp_path / f"part{number}.log{'.gz' if packed[number] else ''}"
        log.write_bytes(gzip.compress(part) if packed[number] else part)
        logs.append(log)
    found = document(*[logs[number] for number in order if number < len(logs)])
    for log in logs:
        log.unlink()
    assert found == whole[name]


def test_a_failure_whose_traceback_goes_on_in_the_next_file_keeps_its_phase(
    whole: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    text = text_of("restart_append")
    assert whole["restart_append"]["counts"]["out_of_memory"]["prefill"] == 1
    for number, place in enumerate(match.end() for match in re.finditer(rb"\n", FAILURE)):
        cut = len(text) - len(FAILURE) + place
        if cut == len(text):
            continue
        first, second = tmp_path / f"{number}a.log", tmp_path / f"{number}b.log"
        first.write_bytes(text[:cut])
        second.write_bytes(text[cut:])
        assert document(second, first) == whole["restart_append"]


def judged(found: dict[str, Any]) -> dict[str, Any]:
    """Keep the parts of a report that do not depend on times or ranks."""
    counts = {key: value for key, value in found["counts"].items() if key != "lines"}
    flags = [[advice["typed"] for advice in finding["advice"]] for finding in found["findings"]]
    return {
        "counts": counts,
        "verdict": found["verdict"],
        "findings": [finding["diagnosis"] for finding in found["findings"]],
        "flags": flags,
        "shares": found["shares"],
        "starts": [(start["run"], start["at"], start["seconds"]) for start in found["starts"]],
        "last": found["last"],
    }


@pytest.mark.parametrize("kind", [b"TP", b"PP"])
@pytest.mark.parametrize("name", NAMES)
@SLOW
@given(ranks=st.permutations(range(3)))
def test_lines_that_other_ranks_repeat_count_once(
    name: str, kind: bytes, whole: dict[str, dict[str, Any]], tmp_path: Path, ranks: list[int]
) -> None:
    def repeated(line: bytes) -> bytes:
        if not BATCH.match(line):
            return line
        return b"".join(BATCH.sub(rb"\1 " + kind + str(rank).encode() + rb"\2", line) for rank in ranks)

    log = tmp_path / "server.log"
    log.write_bytes(b"".join(repeated(line) for line in text_of(name).splitlines(keepends=True)))
    assert log.stat().st_size > 1.1 * len(text_of(name))
    assert judged(document(log)) == judged(whole[name])


@pytest.mark.parametrize("name", NAMES)
@SLOW
@given(seconds=st.integers(-20_000_000, 20_000_000))
def test_a_log_says_the_same_whenever_it_was_printed(
    name: str, whole: dict[str, dict[str, Any]], tmp_path: Path, seconds: int
) -> None:
    log = tmp_path / "server.log"
    log.write_bytes(later(text_of(name), seconds))
    assert judged(document(log)) == judged(whole[name])
