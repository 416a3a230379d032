"""Lines as other programs wrap them, and the event that each must give."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tuning_exporter.sglang.events import (
    NO_RANK,
    DecodeBatch,
    Event,
    Limits,
    PrefillBatch,
    Rank,
    Retraction,
    ServerArgs,
)
from sglang_tuning_exporter.sglang.log.reader import LogReader
from test_log_wrapping import unmarked

if TYPE_CHECKING:
    from collections.abc import Callable

PREFIX = "[2025-11-20 11:40:13 TP0] "
WHEN = 1_763_638_813.0
DECODE = (
    "Decode batch, #running-req: 237, #token: 925941, token usage: 0.89, cuda graph: True, "
    "gen throughput (token/s): 4471.70, #queue-req: 4"
)
LINES = {
    "decode": DECODE,
    "prefill": "Prefill batch, #new-seq: 4, #new-token: 6120, #cached-token: 3584, token usage: 0.89, "
    "#running-req: 237, #queue-req: 4, ",
    "retraction": "KV cache pool is full. Retract requests. #retracted_reqs: 5, #new_tokens_gained: 8950, "
    "#new_token_ratio: 0.3002 -> 0.5783",
    "old_retraction": "Decode out of memory happened. #retracted_reqs: 5, #new_token_ratio: 0.3002 -> 0.5783",
    "pool": "Memory pool end. avail mem=11.93 GB",
    "kv": "KV Cache is allocated. #tokens: 1040384, K size: 19.84 GB, V size: 19.84 GB",
    "limits": "max_total_num_tokens=1040384, max_prefill_tokens=16384, max_running_requests=4096, context_len=131072",
    "ready": "The server is fired up and ready to roll!",
    "watchdog": "Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)",
    "oom": "Prefill out of memory. Try to lower your batch size.",
    "args": "server_args={'tp_size': 8, 'api_key': 'x', 'path': '/a \"b\"'}",
}
WRAPPERS: dict[str, Callable[[str], str]] = {
    "nothing": lambda line: line,
    "windows line end": lambda line: line + "\r",
    "docker json-file": lambda line: json.dumps(
        {"log": line + "\n", "stream": "stderr", "time": "2025-11-20T11:40:14.5Z"}
    ),
    "docker json-file, unescaped slashes": lambda line: json.dumps(
        {"log": line + "\r\n", "stream": "stdout", "attrs": {"a": "b"}, "time": "2025-11-20T11:40:14Z"},
        ensure_ascii=False,
        separators=(",", ":"),
    ),
    "docker --timestamps": lambda line: f"2025-11-20T11:40:14.123456789Z {line}",
    "kubernetes": lambda line: f"2025-11-20T11:40:14.123456789Z stderr F {line}",
    "kubernetes with a zone": lambda line: f"2025-11-20T19:40:14.123456789+08:00 stdout F {line}",
    "kubectl --prefix": lambda line: f"[pod/sglang-0/server] {line}",
    "journald": lambda line: f"Nov 20 11:40:14 gpu-01 sglang[4711]: {line}",
    "journald, single digit day": lambda line: f"Nov  2 11:40:14 gpu-01 python3[4711]: {line}",
    "journald short-iso": lambda line: f"2025-11-20T11:40:14+0000 gpu-01 sglang[4711]: {line}",
    "compose": lambda line: f"sglang-1  | {line}",
    "compose in colour": lambda line: f"\x1b[36msglang-1  | \x1b[0m{line}",
    "ray": lambda line: f"(SGLangEngine pid=123) {line}",
    "ray with its address": lambda line: f"\x1b[36m(SGLangEngine pid=123, ip=10.0.0.1)\x1b[0m {line}",
    "ray, repeated": lambda line: f"(SGLangEngine pid=123) {line} [repeated 8x across cluster]",
    "colour": lambda line: f"\x1b[32m{line}\x1b[0m",
    "progress bar": lambda line: f"\rCapturing batches (bs=1): 50%|##5  | 18/36 [00:10<00:10]\r{line}",
    "progress bar without its return": lambda line: (
        f"Capturing batches (bs=1 avail_mem=9.87 GB): 100%|#####| 36/36 [00:21<00:00,  1.69it/s]{line}"
    ),
    "sentence without an end": lambda line: f"See https://nanobind.readthedocs.io/en/latest/refleaks.html{line}",
    "NUL bytes of a truncated file": lambda line: "\0" * 300 + line,
    "byte order mark": lambda line: "\ufeff" + line,
    "compose in kubernetes": lambda line: f"2025-11-20T11:40:14.123456789Z stderr F server-1 | {line}",
    "ray in docker": lambda line: json.dumps({"log": f"(Engine pid=1) {line}\n", "stream": "stdout", "time": "x"}),
    "ray in journald": lambda line: f"Nov 20 11:40:14 gpu-01 ray[1]: (Engine pid=1, ip=10.0.0.2) {line}",
}


GLUED = ("progress bar", "progress bar without its return", "sentence without an end")


def read(*lines: str) -> list[Event]:
    return LogReader().feed(("\n".join(lines) + "\n").encode())


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("line", LINES)
def test_a_wrapped_line_gives_the_event_of_the_line(wrapper: str, line: str) -> None:
    bare = read(PREFIX + LINES[line])
    assert len(bare) == 1
    assert bare[0].time == WHEN
    assert bare[0].rank == Rank(tp=0)
    start = [PREFIX + LINES["args"]] if wrapper in GLUED else []
    assert read(*start, WRAPPERS[wrapper](PREFIX + LINES[line]))[len(start) :] == bare


@pytest.mark.parametrize("wrapper", GLUED)
@pytest.mark.parametrize("line", ["args", "oom", "watchdog"])
def test_a_line_glued_to_other_text_is_in_doubt_until_a_start_is_read(wrapper: str, line: str) -> None:
    [glued] = read(WRAPPERS[wrapper](PREFIX + LINES[line]))
    assert glued == dataclasses.replace(read(PREFIX + LINES[line])[0], suspect=True)


@given(st.lists(st.sampled_from(sorted(LINES)), max_size=12), st.lists(st.sampled_from(sorted(WRAPPERS)), min_size=1))
def test_a_log_of_wrapped_lines_gives_the_events_of_the_lines(lines: list[str], wrappers: list[str]) -> None:
    plain = [PREFIX + LINES[line] for line in lines]
    wrapped = [WRAPPERS[wrappers[i % len(wrappers)]](line) for i, line in enumerate(plain)]
    # Text before a line in the same physical line may come from a request: this can make events suspect.
    assert unmarked(read(*wrapped)) == unmarked(read(*plain))


PREFIXES: dict[str, tuple[float | None, Rank]] = {
    "[2025-11-20 11:40:13] ": (WHEN, NO_RANK),
    "[2025-11-20 11:40:13.250] ": (WHEN + 0.25, NO_RANK),
    "[2025-11-20 11:40:13.250 DP1 TP3] ": (WHEN + 0.25, Rank(dp=1, tp=3)),
    "[2025-11-20 11:40:13 DP1 TP3 EP0 PP2] ": (WHEN, Rank(dp=1, tp=3, pp=2)),
    "[2025-11-20 11:40:13 DP1 PP2 ATTN_CP4 MOE_DP5 TP3 EP6] ": (WHEN, Rank(dp=1, tp=3, pp=2)),
    "[2025-11-20 11:40:13 MOE_DP5 ATTN_CP4 TP3] ": (WHEN, Rank(tp=3)),
    "[2025-11-20 11:40:13 DP0 TP0] ": (WHEN, Rank(dp=0, tp=0)),
    "[11:40:13 TP0] ": (42_013.0, Rank(tp=0)),
    "[11:40:13] ": (42_013.0, NO_RANK),
    "2025-11-20 11:40:13 TP0] ": (WHEN, Rank(tp=0)),
    "[gpu_id=0] ": (None, Rank(tp=0)),
    "[gpu=3] ": (None, Rank(tp=3)),
    "[TP1] ": (None, Rank(tp=1)),
    "": (None, NO_RANK),
    "2025-11-20 11:40:13 INFO 151972 [scheduler_metrics_mixin.py:287] ": (WHEN, NO_RANK),
    "2025-11-20 11:40:13,250 - INFO - ": (WHEN + 0.25, NO_RANK),
    "2025-11-20 11:40:13,250 - sglang.srt.managers.scheduler - INFO - ": (WHEN + 0.25, NO_RANK),
    "2025-11-20 19:40:13+08:00 | INFO | scheduler:287 | ": (WHEN, NO_RANK),
    "[2025-11-20 11:40:13] INFO scheduler.py:287: ": (WHEN, NO_RANK),
    "[2025-11-20 11:40:13 TP2] WARNING scheduler.py:287: ": (WHEN, Rank(tp=2)),
    "INFO 2025-11-20 11:40:13 TP2 [scheduler.py:287] ": (WHEN, Rank(tp=2)),
    "INFO:sglang.srt.managers.scheduler:": (None, NO_RANK),
    "[2025-02-30 11:40:13] ": (None, NO_RANK),
    "[2025-11-20 11:40:13] \x1b[32m": (WHEN, NO_RANK),
}


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("line", ["decode", "prefill", "retraction", "old_retraction"])
def test_every_prefix_gives_the_time_and_the_ranks_it_prints(prefix: str, line: str) -> None:
    [event] = read(prefix + LINES[line])
    assert (event.time, event.rank) == PREFIXES[prefix]
    [plain] = read(PREFIX + LINES[line])
    event.time, event.rank = plain.time, plain.rank
    assert event == plain


def test_a_container_gives_its_time_to_a_line_without_one() -> None:
    for wrapped in (
        json.dumps({"log": DECODE + "\n", "stream": "stderr", "time": "2025-11-20T11:40:13.5Z"}),
        f"2025-11-20T11:40:13.5Z stderr F {DECODE}",
        f"2025-11-20T12:40:13.5+01:00 stderr F {DECODE}",
    ):
        assert [event.time for event in read(wrapped)] == [WHEN + 0.5]


def test_a_time_without_a_date_rolls_over_midnight() -> None:
    times = ["23:59:58", "23:59:59", "00:00:01", "23:59:59", "00:00:02", "12:00:00", "23:00:00", "01:00:00"]
    events = read(*(f"[{time} TP0] {DECODE}" for time in times))
    day = 86_400
    assert [event.time for event in events] == [
        *(86_398.0, 86_399.0, day + 1.0, 86_399.0, day + 2.0, day + 43_200.0, day + 82_800.0, 2 * day + 3600.0)
    ]


def test_parts_of_a_kubernetes_line_are_joined_by_stream() -> None:
    line = PREFIX + DECODE
    events = read(
        f"2025-11-20T11:40:13.1Z stderr P {line[:60]}",
        f"2025-11-20T11:40:13.1Z stdout F {PREFIX}The server is fired up and ready to roll!",
        f"2025-11-20T11:40:13.1Z stderr P {line[60:90]}",
        f"2025-11-20T11:40:13.1Z stderr F {line[90:]}",
    )
    assert events[1:] == read(line)
    assert len(events) == 2


def test_a_long_line_that_docker_cut_is_joined() -> None:
    line = PREFIX + "server_args={'model_path': '" + "m" * 20_000 + "', 'tp_size': 8}"
    parts = [line[:16_384], line[16_384:] + "\n"]
    [event] = read(*(json.dumps({"log": part, "stream": "stderr", "time": "x"}) for part in parts))
    assert isinstance(event, ServerArgs)
    assert event.args["tp_size"] == 8


def test_chinese_punctuation_is_read() -> None:
    [event] = read(f"{PREFIX}Decode batch, #running-req：237，#token：925941，token usage：0.89，#queue-req：4")  # noqa: RUF001
    assert event == DecodeBatch(WHEN, Rank(tp=0), running=237, queued=4, tokens=925_941, full_usage=0.89)


def test_releases_before_0_3_print_the_status_without_a_keyword() -> None:
    [event] = read(
        "[gpu_id=0] #running-req: 7, #token: 2048, token usage: 0.12, cache hit rate: 3.10%, "
        "gen throughput (token/s): 410.22, #queue-req: 3"
    )
    assert event == DecodeBatch(
        None, Rank(tp=0), running=7, queued=3, tokens=2048, full_usage=0.12, generation_throughput=410.22
    )


def test_the_oldest_retraction_is_in_lower_case() -> None:
    [event] = read(f"{PREFIX}decode out of memory happened, #retracted_reqs: 1, #new_token_ratio: 0.9998 -> 1.0000")
    assert event == Retraction(WHEN, Rank(tp=0), requests=1, ratio_before=0.9998, ratio_after=1.0)


def test_a_mixed_prefill_line_gives_the_running_requests_of_its_head() -> None:
    [event] = read(
        f"{PREFIX}Prefill batch(mixed #running-req: 12). #new-seq: 4, #new-token: 612, #cached-token: 35, "
        "cache hit rate: 31.51%, #queue-req: 4"
    )
    assert isinstance(event, PrefillBatch)
    assert (event.running, event.new_sequences, event.queued) == (12, 4, 4)


@pytest.mark.parametrize("head", ["Decode batch [42], ", "Decode batch[42], ", "Decode batch [42]. "])
def test_an_iteration_number_in_the_head_changes_nothing(head: str) -> None:
    assert read(PREFIX + DECODE.replace("Decode batch, ", head)) == read(PREFIX + DECODE)
    prefill = LINES["prefill"]
    assert read(PREFIX + prefill.replace("Prefill batch, ", head.replace("Decode", "Prefill"))) == read(
        PREFIX + prefill
    )


@pytest.mark.parametrize("device", ["cuda", "cpu", "npu", "musa"])
@pytest.mark.parametrize("value", ["True", "False"])
def test_every_spelling_of_the_graph_is_read(device: str, value: str) -> None:
    [event] = read(PREFIX + DECODE.replace("cuda graph: True", f"{device} graph: {value}"))
    assert isinstance(event, DecodeBatch)
    assert (event.graph, event.graph_device) == (value == "True", device)


def test_a_sparse_pool_gives_its_gpu_part() -> None:
    [event] = read(
        f"{PREFIX}Decode batch, #running-req: 3, #gpu token: 100, gpu token usage: 0.40, #cpu token: 900, "
        "cpu token usage: 0.90, fwd occupancy: nan%, accept len: nan, gen throughput (token/s): nan, #queue-req: 0"
    )
    assert event == DecodeBatch(WHEN, Rank(tp=0), running=3, queued=0, tokens=100, full_usage=0.4)


def test_all_optional_fields_together_are_known() -> None:
    reader = LogReader()
    [event] = reader.feed(
        (
            f"{PREFIX}Decode batch, #running-req: 3, #full token: 100, full token usage: 0.40, mamba num: 3, "
            "mamba usage: 0.50, accept len: 2.62, accept rate: 0.54, cap len: 3.1, block accept len: 2.0, "
            "pre-allocated usage: 0.01, #prealloc-req: 1, #transfer-req: 2, #retracted-req: 3, #host-receive-req: 4, "
            "waiting-image-req: 5, npu graph: False, gen throughput (token/s): 12.50, #queue-req: 6, "
            "est. decode TFLOPS/s (per GPU): 1.25, est. read BW (GB/s per GPU): 2.50, "
            "est. write BW (GB/s per GPU): 0.5, fwd occupancy: 93.10%, largest-len: 3120\n"
        ).encode()
    )
    assert isinstance(event, DecodeBatch)
    assert event.queues == {"prealloc": 1, "transfer": 2, "retracted": 3, "host_receive": 4, "waiting_image": 5}
    assert (event.unknown_keys, event.graph, event.mamba_usage) == ((), False, 0.5)
    assert not any(reader.unrecognised.values())


@pytest.mark.parametrize("key", ["message", "msg"])
@pytest.mark.parametrize(
    ("extra", "time"),
    [
        ('"levelname": "INFO", "asctime": "2025-11-20 11:40:14,000"', 1_763_638_814.0),
        ('"level": "info", "ts": 1763638814.0', 1_763_638_814.0),
        ('"@timestamp": "2025-11-20T19:40:14+08:00", "logger": "sglang"', 1_763_638_814.0),
        ('"time": 1763638814000', 1_763_638_814.0),
        ('"severity": "INFO"', None),
    ],
)
def test_a_structured_loggers_line_is_unwrapped(key: str, extra: str, time: float | None) -> None:
    line = f'{{{extra}, "{key}": "KV cache pool is full. Retract requests. #retracted_reqs: 3"}}\n'
    events = LogReader().feed(line.encode())
    assert [(event.time, getattr(event, "requests", None)) for event in events] == [(time, 3)]


def test_a_structured_message_with_sglangs_own_prefix_has_its_time_and_ranks() -> None:
    text = "[2025-11-20 11:40:13 TP3] KV cache pool is full. Retract requests. #retracted_reqs: 3"
    events = LogReader().feed(json.dumps({"level": "info", "message": text}).encode())
    assert [(event.time, event.rank.tp) for event in events] == [(1_763_638_813.0, 3)]


def test_only_a_traceback_is_read_behind_the_first_line_of_a_structured_message() -> None:
    text = (
        "Model attempted to call undefined function: x\n[2025-11-20 11:40:13] KV cache pool is full. #retracted_reqs: 3"
    )
    assert LogReader().feed(json.dumps({"level": "info", "message": text}).encode()) == []
    failure = (
        'Scheduler hit an exception: Traceback (most recent call last):\n  File "x.py", line 1, in forward_extend\n'
        "torch.OutOfMemoryError: CUDA out of memory."
    )
    events = LogReader().feed(json.dumps({"level": "error", "message": failure}).encode())
    assert [type(event).__name__ for event in events] == ["Liveness", "OutOfMemory"]


def test_a_json_request_log_is_no_structured_message() -> None:
    line = {"timestamp": "2025-11-20T11:40:13", "event": "request.finished", "message": "KV cache pool is full."}
    reader = LogReader()
    assert reader.feed(json.dumps(line).encode()) == []
    assert reader.counts["request"] == 1


WHOLE_DECODE = (
    "Decode batch, #running-req: 5, #token: 900, token usage: 0.90, cuda graph: True, "
    "gen throughput (token/s): 87.00, #queue-req: 7"
)
WHOLE_RETRACTION = (
    "KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_tokens_gained: 9, "
    "#new_token_ratio: 0.1000 -> 0.9000"
)


@pytest.mark.parametrize("first", [WHOLE_DECODE, WHOLE_RETRACTION])
@pytest.mark.parametrize("second", [WHOLE_DECODE, WHOLE_RETRACTION])
def test_two_processes_lines_written_without_an_end_between_them_are_two_events(first: str, second: str) -> None:
    reader = LogReader()
    line = f"[2025-11-20 11:40:13 TP0] {first}[2025-11-20 11:40:14 TP1] {second}\n"
    events = reader.feed(line.encode())
    assert [event.rank.tp for event in events] == [0, 1]
    assert sum(reader.counts.values()) == 1


def test_nothing_is_read_behind_a_line_that_had_not_ended() -> None:
    line = f"[2025-11-20 11:40:13 TP0] {WHOLE_DECODE[:60]}[2025-11-20 11:40:14 TP1] {WHOLE_RETRACTION}\n"
    reader = LogReader()
    assert len(reader.feed(line.encode())) == 1
    assert reader.unrecognised["batch_line"] == 1


@pytest.mark.parametrize(
    "line",
    [
        "max_running_requests was reduced from the requested 512 to 96 (per dp worker) due to the available KV cache.",
        "Post-capture KV sizing: max_running_requests 512 -> 96",
        "max_running_requests is capped to 96 by the mamba state cache",
    ],
)
def test_a_line_that_lowers_the_running_limit_changes_nothing_else(line: str) -> None:
    events = LogReader().feed(f"[2025-11-20 11:40:13 DP1 TP0] {line}\n".encode())
    assert events == [Limits(1_763_638_813.0, Rank(dp=1, tp=0), max_running_requests=96)]
