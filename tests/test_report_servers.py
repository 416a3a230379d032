"""Logs of one server are put together, logs of several are refused.

The lines are those of 0.5.23 as the released wheel formats them, with times and figures of our own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_tuning_exporter.cli import main
from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.report.inputs import Logs
from sglang_tuning_exporter.report.report import report
from sglang_tuning_exporter.state.profiles import PROFILES

READY = "The server is fired up and ready to roll!"


def at(seconds: int, text: str, ranks: str = "") -> str:
    return f"[2025-11-20 {10 + seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}{ranks}] {text}\n"


def start(seconds: int, **args: object) -> str:
    printed = {"model_path": "m", "host": "0.0.0.0", "port": 30000, "max_running_requests": 4, **args}
    return at(seconds, f"server_args=ServerArgs({', '.join(f'{name}={value!r}' for name, value in printed.items())})")


def decode(seconds: int, running: int = 4, queued: int = 0, ranks: str = "") -> str:
    return at(
        seconds,
        f"Decode batch, #running-req: {running}, #token: 925, token usage: 0.40, cuda graph: True, "
        f"gen throughput (token/s): 100.00, #queue-req: {queued}",
        ranks,
    )


def load(begin: int, end: int, **figures: Any) -> str:
    return "".join(decode(second, **figures) for second in range(begin, end, 5))


def files(tmp_path: Path, *texts: str) -> list[str]:
    paths = [tmp_path / f"{name}.log" for name in "abcdef"[: len(texts)]]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    return [str(path) for path in paths]


def document(logs: list[str]) -> dict[str, Any]:
    return report(Logs(logs), PROFILES["online"])


def test_two_replicas_that_print_at_the_same_time_are_refused_with_the_names_of_their_logs(tmp_path: Path) -> None:
    logs = files(tmp_path, load(0, 120), load(3, 120))
    with pytest.raises(UsageError, match="logs of two servers") as raised:
        document(logs)
    assert "a.log and" in str(raised.value)
    assert "b.log" in str(raised.value)
    assert "give one server's logs at a time" in str(raised.value)


def test_the_command_line_ends_with_status_2_and_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *files(tmp_path, load(0, 120), load(3, 120))]) == 2
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1


@pytest.mark.parametrize("args", [{}, {"port": 30001}, {"model_path": "another"}])
def test_a_replica_that_starts_while_an_idle_one_goes_on_is_refused(tmp_path: Path, args: dict[str, Any]) -> None:
    idle = (
        start(0)
        + at(30, READY)
        + at(300, "Prefill batch, #new-seq: 1, #new-token: 1, #cached-token: 0, token usage: 0.00")
    )
    with pytest.raises(UsageError, match="one goes on after the start"):
        document(files(tmp_path, idle, start(5, **args) + at(35, READY) + load(40, 400)))


def test_three_replicas_are_not_a_restart_loop(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="two servers"):
        document(files(tmp_path, *(start(n) + at(30 + n, READY) + load(40, 400) for n in range(3))))


def test_the_same_log_under_two_names_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the same lines twice"):
        document(files(tmp_path, start(0) + load(40, 100), start(0) + load(40, 100)))


def test_ranks_that_print_into_files_of_their_own_are_one_server(tmp_path: Path) -> None:
    first = start(0, dp_size=2) + at(30, READY) + load(40, 400, ranks=" DP0")
    found = document(files(tmp_path, first, load(41, 400, ranks=" DP1")))
    assert (found["counts"]["server_starts"], found["counts"]["decode_batches"]) == (1, 144)


def test_a_restart_into_a_new_file_is_a_second_start(tmp_path: Path) -> None:
    first = start(0) + at(30, READY) + load(40, 400)
    second = start(420) + at(450, READY) + load(460, 800)
    assert document(files(tmp_path, second, first))["counts"]["server_starts"] == 2


def test_a_file_that_goes_on_where_another_ends_may_overlap_by_some_lines(tmp_path: Path) -> None:
    found = document(files(tmp_path, load(0, 60), load(53, 120)))
    assert found["counts"]["decode_batches"] == 26


def node(rank: int, seconds: int) -> str:
    ranks = f" TP{4 * rank}"
    retractions = "".join(
        at(
            seconds + later,
            "KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_tokens_gained: 8950, "
            f"#new_token_ratio: 0.{later} -> 0.5783",
            ranks,
        )
        for later in range(100, 400, 30)
    )
    loaded = load(seconds + 40, seconds + 400, ranks=ranks) if not rank else ""
    text = start(seconds, nnodes=2, node_rank=rank, dist_init_addr="10.0.0.1:50000", tp_size=8) + at(
        seconds + 30, READY
    )
    return text + "".join(sorted((loaded + retractions).splitlines(keepends=True)))


@pytest.mark.parametrize("hours", [0, 1, 2])
def test_a_node_in_another_time_zone_is_no_second_start_and_repeats_no_retraction(tmp_path: Path, hours: int) -> None:
    found = document(files(tmp_path, node(0, 7200), node(1, 7203 - 3600 * hours)))
    assert (found["counts"]["server_starts"], found["counts"]["retraction_events"]) == (1, 10)
    assert found["span"]["seconds"] == 395
    assert len(found["notes"]) == (hours > 0)
    assert not hours or f"b.log: its clock is {hours} h behind that of" in found["notes"][0]


def test_prefill_and_decode_servers_of_one_pair_are_two_servers(tmp_path: Path) -> None:
    one = start(0, disaggregation_mode="prefill") + at(30, READY) + load(40, 400)
    other = start(2, disaggregation_mode="decode") + at(30, READY) + load(40, 400)
    with pytest.raises(UsageError, match="two servers"):
        document(files(tmp_path, one, other))


def mixed(*frames: str, starts: int = 2, ranks: tuple[str, ...] = ("", "")) -> str:
    """The lines of two servers in turn, each inside its frame at `{}`; `starts` of them print their start."""
    printed = ""
    for frame in frames[:starts]:
        printed += frame.format(start(0).rstrip("\n")) + "\n"
    for second in range(40):
        for frame, rank in zip(frames, ranks, strict=True):
            printed += frame.format(decode(second, ranks=rank).rstrip("\n")) + "\n"
    return printed


TWO_SOURCES = {
    "docker compose": ("sglang-1  | {}", "sglang-2  | {}"),
    "docker compose, colours": ("\x1b[36msglang-1  | \x1b[0m{}", "\x1b[33msglang-2  | \x1b[0m{}"),
    "kubectl logs --prefix --timestamps": (
        "[pod/llm-7c9-x1/sglang] 2025-11-20T10:00:00.123456789Z {}",
        "[pod/llm-7c9-x2/sglang] 2025-11-20T10:00:00.123456999Z {}",
    ),
    "stern": ("llm-7c9-x1 sglang {}", "llm-7c9-x2 sglang {}"),
    "Ray": ("(SGLangEngine pid=35555) {}", "(SGLangEngine pid=111711, ip=10.15.36.1) {}"),
    "JSON of a node's shipper": (
        '{{"log": "{}", "stream": "stderr", "kubernetes": {{"pod_name": "llm-0"}}, "time": "2025-11-20T10:00:00.1Z"}}',
        '{{"log": "{}", "stream": "stderr", "kubernetes": {{"pod_name": "llm-1"}}, "time": "2025-11-20T10:00:00.2Z"}}',
    ),
}


@pytest.mark.parametrize("source", TWO_SOURCES)
def test_one_log_with_the_lines_of_two_servers_is_refused_with_what_stands_before_them(
    tmp_path: Path, source: str
) -> None:
    with pytest.raises(UsageError, match="holds the lines of two servers") as raised:
        document(files(tmp_path, mixed(*TWO_SOURCES[source])))
    assert "grep -F" in str(raised.value)


@pytest.mark.parametrize("source", TWO_SOURCES)
def test_without_their_starts_a_note_warns_that_the_lines_may_be_of_two_servers(tmp_path: Path, source: str) -> None:
    (note,) = document(files(tmp_path, mixed(*TWO_SOURCES[source], starts=0)))["notes"][:1]
    assert "may hold the lines of two servers" in note
    assert note.endswith("then the figures are of both together")


def test_one_of_them_alone_is_read(tmp_path: Path) -> None:
    log = "".join(line for line in mixed(*TWO_SOURCES["stern"]).splitlines(keepends=True) if "x1" in line)
    assert document(files(tmp_path, log))["counts"]["decode_batches"] == 40


@pytest.mark.parametrize(
    ("frames", "ranks"),
    [
        (("[rank0]: {}", "[rank1]: {}"), (" TP0", " TP1")),  # torchrun
        (("0: {}", "1: {}"), (" DP0 TP0", " DP1 TP4")),  # srun -l
        (
            ("sglang-1  | {}", "sglang-1  | sglang-2  | {}"),
            ("", ""),
        ),  # a request's text looks like another server's line
    ],
)
def test_ranks_of_one_server_behind_prefixes_of_their_own_are_read(
    tmp_path: Path, frames: tuple[str, str], ranks: tuple[str, str]
) -> None:
    found = document(files(tmp_path, mixed(*frames, starts=1, ranks=ranks)))
    assert found["counts"]["decode_batches"] >= 40
    assert [note for note in found["notes"] if "two servers" in note] == []


def test_a_pod_that_another_one_replaces_is_no_second_server(tmp_path: Path) -> None:
    frames = TWO_SOURCES["stern"]
    log = "".join(frames[second // 40].format(decode(second)) for second in range(80))
    assert document(files(tmp_path, log))["counts"]["decode_batches"] == 80


def test_prefixes_that_count_lines_are_no_names(tmp_path: Path) -> None:
    log = "".join(f"{number}: {decode(number // 2)}" for number in range(200))
    assert document(files(tmp_path, log))["counts"]["decode_batches"] == 200


def together(*starts: str, ready: int, before: str = "") -> str:
    return before + "".join(starts) + ready * at(90, READY) + load(100, 400)


def test_servers_that_start_together_in_one_log_are_refused_with_their_ports(tmp_path: Path) -> None:
    log = together(start(0, port=31001), start(1, port=31002), ready=2)
    with pytest.raises(UsageError, match=r"several servers print into this log together \(--port 31001, 31002\)"):
        document(files(tmp_path, log))


@pytest.mark.parametrize(("first", "then"), [("prefill", "decode"), ("decode", "prefill")])
def test_both_sides_of_a_prefill_decode_pair_in_one_log_are_refused(tmp_path: Path, first: str, then: str) -> None:
    prefill = at(
        200,
        "Prefill batch, #new-seq: 1, #new-token: 512, #cached-token: 0, token usage: 0.01, #running-req: 0, #queue-req: 0, #bootstrap-req: 1,"
        " #inflight-req: 0, cuda graph: False, input throughput (token/s): 900.00",
    )
    log = (
        start(0, port=31000, disaggregation_mode=first)
        + at(60, READY)
        + start(61, port=31001, disaggregation_mode=then)
    )
    log += at(90, READY) + load(100, 200) + prefill + load(205, 300)
    with pytest.raises(UsageError, match="a prefill and a decode server print batches"):
        document(files(tmp_path, log))


def test_starts_one_after_the_other_are_of_one_server(tmp_path: Path) -> None:
    killed = together(start(0, port=31001), start(30, port=31002), ready=1)  # the first one ended without a word
    assert document(files(tmp_path, killed))["counts"]["server_starts"] == 2
    restarted = together(start(61, port=31002), ready=1, before=start(0, port=31001) + at(60, READY))
    assert document(files(tmp_path, restarted))["counts"]["server_starts"] == 2


def test_several_tokenizers_of_one_server_are_ready_each(tmp_path: Path) -> None:
    log = together(start(0, port=31001), start(30, port=31001, tokenizer_worker_num=4), ready=4)
    assert document(files(tmp_path, log))["counts"]["server_starts"] == 2


def test_nodes_of_one_server_in_one_log_are_one_start(tmp_path: Path) -> None:
    nodes = [start(rank, nnodes=2, node_rank=rank, dist_init_addr="10.0.0.1:5000") for rank in (0, 1)]
    assert document(files(tmp_path, together(*nodes, ready=1)))["counts"]["server_starts"] == 1


def test_forged_words_in_logged_text_are_no_second_server_that_is_ready(tmp_path: Path) -> None:
    log = together(start(0, port=31001), start(30, port=31002), ready=1)  # the first one ended without a word
    assert document(files(tmp_path, log + at(400, "Error in detect_and_parse: x") + at(400, READY) + load(401, 500)))


def test_a_forged_start_in_one_of_two_logs_does_not_make_the_other_one_another_server(tmp_path: Path) -> None:
    one = start(0) + at(60, READY) + load(100, 400, ranks=" TP0")
    forged = at(200, "Error in detect_and_parse: x", " TP1") + start(200, port=4)
    other = load(100, 200, ranks=" TP1") + forged + load(205, 400, ranks=" TP1")
    assert document(files(tmp_path, one, other))["counts"]["server_starts"] == 1
