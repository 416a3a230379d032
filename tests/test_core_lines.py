"""Each kind of line in SGLang's log, and the event that it gives."""

from __future__ import annotations

import re
import sys
import time

import pytest

from sglang_tuning_exporter.core import lines
from sglang_tuning_exporter.core.events import NO_RANK, Event, Rank
from sglang_tuning_exporter.core.lines import Reader

WHEN = 1_763_638_813.0
STAMP = "[2025-11-20 11:40:13 TP0] "
DECODE = "Decode batch, #running-req: 1, #token: 1, token usage: 0.99, gen throughput (token/s): 0.01, #queue-req: 9"
RETRACTION = (
    "KV cache pool is full. Retract requests. #retracted_reqs: 5, #new_tokens_gained: 8950, #new_token_ratio: 0.3002 ->"
    " 0.5783"
)
START = STAMP + "server_args=ServerArgs(tp_size=8)"
READY = STAMP + "The server is fired up and ready to roll!"
CUDA = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.75 GiB."
FAILED_TRANSFER = (
    "Decode transfer failed for request rank=0 decode_req.req.rid='0a' decode_req.req.bootstrap_room=11 with exception"
    " KVTransferError(bootstrap_room=11)"
)


def read(*text: str) -> list[Event]:
    reader = Reader()
    found = [event for line in text for event in reader.read(line.encode())] + list(reader.end())
    return [event for event in found if event.kind not in {"words", "advice"}]  # those are in tests of their own


def short(event: Event) -> tuple[str, str, dict[str, float]]:
    return event.kind, event.word, event.figures


# A line for each row of the table: its event's kind, word and figures.
EXAMPLES: list[tuple[str, str, str, dict[str, float]]] = [
    (DECODE, "decode", "", {"running": 1, "tokens": 1, "usage": 0.99, "throughput": 0.01, "queued": 9}),
    (
        (
            "Decode batch [42]. #running-req: 3, #full token: 100, full token usage: 0.40, mamba num: 3, mamba usage:"
            " 0.50, accept len: 2.62, pre-allocated usage: 0.01, #prealloc-req: 1, #transfer-req: 2, #retracted-req: 3,"
            " #host-receive-req: 4, waiting-image-req: 5, npu graph: False, gen throughput (token/s): 12.50,"
            " #queue-req: 6, est. read BW (GB/s per GPU): 2.50, fwd occupancy: 93.10%"
        ),
        "decode",
        "npu",
        {
            "running": 3,
            "tokens": 100,
            "usage": 0.4,
            "mamba_usage": 0.5,
            "accept_length": 2.62,
            "prealloc": 1,
            "transfer": 2,
            "retracted": 3,
            "host_receive": 4,
            "graph": 0,
            "throughput": 12.5,
            "queued": 6,
        },
    ),
    (
        (
            "Prefill batch, #new-seq: 4, #new-token: 6120, #cached-token: 3584, token usage: 0.89, #running-req: 237,"
            " #queue-req: 4, "
        ),
        "prefill",
        "",
        {"sequences": 4, "tokens": 6120, "cached": 3584, "usage": 0.89, "running": 237, "queued": 4},
    ),
    (
        (
            "Prefill batch(mixed #running-req: 12). #new-seq: 4, #new-token: 612, #cached-token: 35, cache hit rate:"
            " 31.51%, #queue-req: 4"
        ),
        "prefill",
        "",
        {"sequences": 4, "tokens": 612, "cached": 35, "running": 12, "queued": 4},
    ),
    (RETRACTION, "retraction", "", {"requests": 5, "gained": 8950, "ratio_before": 0.3002, "ratio_after": 0.5783}),
    (
        (
            "decode out of memory happened, #retracted_reqs: 1, #aborted_retracted_reqs: 2, #new_token_ratio: 0.9998 ->"
            " 1.0000"
        ),
        "retraction",
        "",
        {"requests": 1, "aborted": 2, "ratio_before": 0.9998, "ratio_after": 1.0},
    ),
    ("Testing retraction. #retracted_reqs: 1", "retraction", "", {"requests": 1, "testing": 1}),
    (
        "KV Cache is allocated. #tokens: 1040384, K size: 19.5 GB, V size: 20.25 GB",
        "pool",
        "",
        {"tokens": 1_040_384, "gigabytes": 39.75},
    ),
    (
        "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 9, KV size: 1.5 GB",
        "pool",
        "",
        {"tokens": 9, "gigabytes": 1.5},
    ),
    ("Post-capture KV sizing: KV cache allocated. #tokens: 50", "pool", "", {"tokens": 50, "resized": 1}),
    (
        (
            "max_total_num_tokens=9, chunked_prefill_size=-1, max_prefill_tokens=8, max_running_requests=7,"
            " context_len=6, available_gpu_mem=5.5 GB"
        ),
        "limits",
        "gpu",
        {
            "max_total_num_tokens": 9,
            "chunked_prefill_size": -1,
            "max_prefill_tokens": 8,
            "max_running_requests": 7,
            "context_len": 6,
            "available_gb": 5.5,
        },
    ),
    (
        "max_running_requests was reduced from the requested 512 to 96 (per dp worker)",
        "limits",
        "",
        {"max_running_requests": 96},
    ),
    ("Post-capture KV sizing: max_running_requests 512 -> 96", "limits", "", {"max_running_requests": 96}),
    ("max_running_requests is capped to 96 by the mamba state cache", "limits", "", {"max_running_requests": 96}),
    ("Load weight begin. avail mem=78.71 GB", "memory", "weights_begin", {"available": 78.71}),
    (
        "Load weight end. type=LlamaForCausalLM, avail mem=12.25 GB, mem usage=66.46 GB.",
        "memory",
        "weights",
        {"available": 12.25, "used": 66.46},
    ),
    (
        "Mamba Cache is allocated. max_mamba_cache_size: 300, conv_state size: 0.25GB, ssm_state size: 1.5GB",
        "memory",
        "state_cache",
        {"used": 1.75, "states": 300},
    ),
    ("Memory pool end. avail mem=11.93 GB", "memory", "pool", {"available": 11.93}),
    (
        "Capture cuda graph begin. This can take up to several minutes. avail mem=11.93 GB",
        "memory",
        "graph_begin",
        {"available": 11.93},
    ),
    (
        "Capture prefill CUDA graph end. mem usage=2.06 GB. avail mem=9.87 GB.",
        "memory",
        "graph",
        {"available": 9.87, "used": 2.06, "prefill": 1},
    ),
    (
        "Capture npu graph end. mem usage=8.79 GB. avail mem=9.11 GB.",
        "memory",
        "graph",
        {"available": 9.11, "used": 8.79},
    ),
    ("The server is fired up and ready to roll!", "ready", "", {}),
    ("Watchdog timeout (self.watchdog_timeout=300)", "hang", "scheduler", {"seconds": 300}),
    (
        "DetokenizerManager watchdog timeout (self.watchdog_timeout=60, self.soft=True)",
        "hang",
        "detokenizer",
        {"seconds": 60},
    ),
    (
        (
            "Health check failed. Server couldn't get a response from detokenizer for last 20 seconds. tic start time:"
            " 11:39:53. last_heartbeat time: 11:39:50"
        ),
        "health",
        "",
        {"silent": 23},
    ),
    ("Health check failed. Server couldn't get a response from detokenizer for last 20 seconds.", "health", "", {}),
    (
        "Subprocess scheduler_0 (pid=4711) crashed with exit code -9. Triggering SIGQUIT for cleanup...",
        "end",
        "process_died",
        {},
    ),
    ("Received sigquit from a child process. It usually means the child failed.", "end", "process_died", {}),
    ("SIGQUIT received. signum=None, frame=None. It usually means one child failed.", "end", "process_died", {}),
    ("Fatal Python error: Segmentation fault", "end", "aborted", {}),
    ("  what():  CUDA error: an illegal memory access was encountered", "end", "aborted", {}),
    ("Bus error (core dumped)", "end", "aborted", {}),
    (
        ":0:rocdevice.cpp :3586: 11 us: Callback: Queue 0x7f aborting with error : HSA_STATUS_ERROR",
        "end",
        "aborted",
        {},
    ),
    (
        "[rank1]:[E1209 02:28:15 ProcessGroupNCCL.cpp:2057] [Rank 1] watchdog thread terminated with exception",
        "end",
        "aborted",
        {},
    ),
    ("Child process unexpectedly failed with exitcode=9. pid=4711", "end", "process_died", {}),
    ("Rank 0 scheduler is dead. Please check if there are relevant logs.", "end", "launch_failed", {}),
    ("Initialization failed. Please see the error messages above.", "end", "launch_failed", {}),
    ("Scheduler hit an exception: Traceback (most recent call last):", "end", "scheduler_exception", {}),
    ("Exception in ModelTpServer:", "end", "scheduler_exception", {}),
    ("SIGTERM received. signum=None frame=None. Draining requests and shutting down...", "draining", "", {}),
    (
        "Gracefully exiting... Remaining number of requests 2. Remaining requests remaining_rids=['a', 'b'].",
        "draining",
        "",
        {"remaining": 2},
    ),
    ("Prefill out of memory. Try to lower your batch size.", "out_of_memory", "prefill", {}),
    ("Decode out of memory. Please try to lower your batch size.", "out_of_memory", "decode", {}),
    ("ValueError: Failed to retract any request. No space left for only one request.", "out_of_memory", "decode", {}),
    (
        "ValueError: Out of memory even after retracting all other requests in the decode batch.",
        "out_of_memory",
        "decode",
        {},
    ),
    (
        "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.88.",
        "out_of_memory",
        "startup",
        {},
    ),
    ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "out_of_memory", "startup", {}),
    ("Capture cuda graph failed: CUDA out of memory. Tried to allocate 2 GiB", "out_of_memory", "graph_capture", {}),
    (CUDA, "out_of_memory", "unknown", {}),
    ("RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB", "out_of_memory", "unknown", {}),
    (
        "Input length (900 tokens) exceeds the maximum allowed length (512 tokens). Use a shorter input.",
        "too_long",
        "",
        {"tokens": 900, "most": 512},
    ),
    (
        (
            "Request length is longer than the KV cache pool size or the max context length. Truncated."
            " len(req.origin_input_ids)=900, self.max_req_input_len=512."
        ),
        "too_long",
        "",
        {"tokens": 900, "most": 512},
    ),
    (
        "[http_server] Error: The input (900 tokens) is longer than the model's context length (512 tokens).",
        "too_long",
        "context",
        {"tokens": 900, "most": 512},
    ),
    (
        (
            "[http_server] Error: Requested token count exceeds the model's maximum context length of 512 tokens. You"
            " requested a total of 900 tokens: 800 tokens from the input messages and 100 tokens for the completion."
            " Please reduce the number of tokens to fit within the limit."
        ),
        "too_long",
        "context",
        {"tokens": 900, "most": 512},
    ),
    (
        (
            "Grammar-based generation (json_schema, regex, ebnf, structural_tag) is not supported when the server is"
            " launched with --grammar-backend none, self.rid='a'"
        ),
        "refused",
        "",
        {"grammar": 1},
    ),
    ("Multimodal prompt is too long after expanding the images, self.rid='a'", "refused", "", {}),
    (
        FAILED_TRANSFER + ": Request 11 timed out after 300.0s in KVPoll.WaitingForInput",
        "transfer",
        "decode",
        {"room": 11},
    ),
    (
        FAILED_TRANSFER.replace("Decode transfer", "Prefill bootstrap") + ": Duplicate decode bootstrap room",
        "transfer",
        "prefill",
        {"room": 11},
    ),
    (
        FAILED_TRANSFER.replace("Decode transfer", "Decode handshake").partition(" with")[0],
        "transfer",
        "decode",
        {"room": 11},
    ),
    (
        "Some requests fail to receive KV Cache transfer done signal after bootstrapping. If a greater mean TTFT",
        "transfer",
        "",
        {},
    ),
    (
        "Some requests timed out when bootstrapping, which means prefill instances fail to receive the KV indices",
        "transfer",
        "",
        {},
    ),
    ("Could not fetch prefill parallel info from 10.0.0.1:8998 after 60 attempts", "transfer", "", {}),
    ("Could not fetch prefill dp_size for bootstrap_addr: 10.0.0.1:8998", "transfer", "", {}),
    ("Prefill instance failed to register to bootstrap server after 5 retries", "transfer", "prefill", {}),
    (
        (
            "[Staging] a chunk exceeds the staging ring; failing affected requests. Increase"
            " SGLANG_DISAGG_STAGING_POOL_SIZE_MB"
        ),
        "transfer",
        "",
        {},
    ),
    (
        "Context corruption detected: Request a (bootstrap_room=1) received metadata from bootstrap_room=2.",
        "transfer",
        "",
        {},
    ),
    ("Failed to get prefill parallel info: 404, Not Found", "transfer", "", {"attempt": 1}),
    (
        "Lost connection with prefill instance (bootstrap_addr: 10.0.0.1:8998), 3 transfers affected",
        "transfer",
        "",
        {"attempt": 1},
    ),
    ("Session 10.0.0.2:15000 failed.", "transfer", "", {"attempt": 1}),
    ("Unsupported element_size = 656 for JIT HiCache kernel", "hicache", "kernel", {}),
    ("write_back: KV subtree dropped without backup due to host memory pressure, root node 7", "hicache", "host", {}),
    ("Not enough host memory for request 0a", "hicache", "host", {}),
    ("HiCache staged prefetch dropped after 3 device_capacity deferrals req=a pool=b tokens=1", "hicache", "host", {}),
    ("Write page to storage: 4 pages failed.", "hicache", "storage", {}),
    ("Prefetch operation 0a failed to retrieve page 1b.", "hicache", "storage", {}),
    ("HiCache prefetch transfer failed for request 0a", "hicache", "storage", {}),
    ("Failed to attach storage backend 'mooncake': timeout", "hicache", "storage", {}),
    ("Failed to register buffer to Mooncake Store: -1", "hicache", "storage", {}),
    ("[Rank 3] HiCacheHF3FS get 0a1b failed", "hicache", "storage", {}),
    ("TensorCast L3 unavailable: category=session_failed", "hicache", "storage", {}),
    (
        "max_total_tokens=131072 is larger than the profiled value -561981. Use the profiled value instead.",
        "no_pool",
        "",
        {"tokens": -561_981},
    ),
]
STORE = "E0616 07:25:02.248379 40411 store_py.cpp:372] Put operation failed with error: NO_AVAILABLE_HANDLE"
# Lines without an event.
SILENT = [
    ("KV Cache VA upper bound. #tokens: 9", "known"),
    ("INFO:     Application startup complete.", "known"),
    ("Endpoint '/get_server_info' is deprecated and will be removed", "known"),
    ("Receive: obj=GenerateReqInput(text='x')", "request"),
    ("in=GenerateReqInput(text='x'), out={}", "request"),
    ('{"timestamp": "2025-11-20T11:40:13", "event": "request.received", "obj": {"text": "x"}}', "request"),
    ("Received output for rid='x' but the state was deleted", "request"),
    ("Req Time Stats(rid=abc", "request"),
    ("Model attempted to call undefined function: x", "request"),
    ("Parsed value 'x", "request"),
]


@pytest.mark.parametrize(("line", "kind", "word", "figures"), EXAMPLES)
def test_a_line_gives_its_event(line: str, kind: str, word: str, figures: dict[str, float]) -> None:
    [event] = read(STAMP + line)
    assert short(event) == (kind, word, figures)
    assert (event.time, event.rank, event.marked) == (WHEN, Rank(tp=0), False)


@pytest.mark.parametrize(("line", "kind"), SILENT)
def test_a_line_without_an_event_has_its_kind(line: str, kind: str) -> None:
    reader = Reader()
    assert reader.read((STAMP + line).encode()) == ()
    assert (reader.kind, dict(reader.lines)) == (kind, {kind: 1})


def test_a_storage_of_hicache_that_refuses_or_ends_is_heard_between_stamped_lines() -> None:
    thread = [
        "Exception in thread Thread-13 (backup_thread_func):",
        "Traceback (most recent call last):",
        '  File "/usr/lib/python3.12/threading.py", line 1010, in run',
        '  File "/srv/sglang/srt/managers/cache_controller.py", line 812, in backup_thread_func',
        "AttributeError: no batch_put_from",
    ]
    for said in ([STORE], thread):
        [event] = [
            each for each in read(STAMP + "Load weight begin. avail mem=1 GB", *said) if each.kind in ("hicache", "end")
        ]
        assert (event.kind, event.word, event.text) == ("hicache", "storage", said[-1])


def test_every_row_of_the_table_has_a_line_here() -> None:
    texts = (
        [line for line, *_ in EXAMPLES]
        + [line for line, _ in SILENT]
        + ["server_args={", "Capture cuda graph bs [1, 2]", "max_total_tokens=9 is larger than the profiled value 4."]
        + ["[rank1]:[E1209 a.cpp:1] Rank 1 waits", "- ImportError: libnvrtc.so.12: no such file"]
        + [
            "h:1:1 [0] net.cc:579 NCCL WARN Error: network x not found",
            "/s/nvshmem/a.cpp:4: non-zero status: 7 connect EPS failed",
        ]
        + ["nvshmem initialization failed, exiting", STORE]
        + ["ERROR:    [Errno 98] Address already in use", "Application startup failed. Exiting.", "Uvicorn running on"]
    )
    found = [next((row for row in lines.MESSAGES if re.match(row.pattern, text.encode())), None) for text in texts]
    assert [row for row in lines.MESSAGES if row not in found] == []


@pytest.mark.parametrize(
    ("stamp", "time", "rank"),
    [
        ("[2025-11-20 11:40:13] ", WHEN, NO_RANK),
        ("[2025-11-20 11:40:13.250 DP1 PP2 ATTN_CP4 MOE_DP5 TP3 EP6] ", WHEN + 0.25, Rank(dp=1, tp=3, pp=2)),
        ("2025-11-20 11:40:13 TP0] ", WHEN, Rank(tp=0)),
        ("[11:40:13 TP0] ", 42_013.0, Rank(tp=0)),
        ("[TP1] ", None, Rank(tp=1)),
        ("", None, NO_RANK),
        ("[2025-02-30 11:40:13] ", None, NO_RANK),
        ("[2025-11-20 11:40:13 TP9999] ", WHEN, NO_RANK),
    ],
)
@pytest.mark.parametrize("line", [DECODE, RETRACTION])
def test_a_stamp_gives_time_and_ranks(stamp: str, time: float | None, rank: Rank, line: str) -> None:
    [event] = read(stamp + line)
    assert (event.time, event.rank) == (time, rank)


@pytest.mark.parametrize("line", [RETRACTION, DECODE, "server_args={'tp_size': 1}", "[TP0] " + RETRACTION])
def test_among_lines_with_a_stamp_a_line_without_one_is_not_sglangs(line: str) -> None:
    assert len(read(STAMP + DECODE, line)) == 1
    assert len(read(line)) == 1


def test_behind_a_line_that_had_not_ended_nothing_counts() -> None:
    reader = Reader()
    assert len(reader.read(f"{STAMP}{DECODE[:60]}[2025-11-20 11:40:14 TP1] {RETRACTION}".encode())) == 1
    assert reader.unreadable == {"batch_line": 1}


def test_a_line_of_a_full_pool_without_its_ratio_is_no_retraction() -> None:
    reader = Reader()
    assert not reader.read((STAMP + RETRACTION.partition(", #new_token_ratio")[0]).encode())
    assert reader.unreadable == {"retraction_line": 1}
    assert len(reader.read(f"{STAMP}{RETRACTION[:60]}[2025-11-20 11:40:14 TP1] {DECODE}".encode())) == 1


@pytest.mark.parametrize("figure", ["1e999", "9" * 6000, "-4", "nan"])
def test_a_figure_that_no_server_prints_is_left_out(figure: str) -> None:
    [event] = read(STAMP + DECODE.replace("#queue-req: 9", f"#queue-req: {figure}"))
    assert "queued" not in event.figures


POST = '127.0.0.1:40000 - "POST /v1/chat/completions HTTP/1.1" '


@pytest.mark.parametrize("before", [STAMP + "INFO:     ", "INFO:     ", STAMP])
@pytest.mark.parametrize(
    ("line", "kinds"),
    [
        (POST + "503 Service Unavailable", ["rejected"]),
        (POST + "500 Internal Server Error", ["server_error"]),
        (POST + "200 OK", []),
        ('1.2.3.4:5 - "GET /health HTTP/1.1" 503 Service Unavailable', []),
        ('1.2.3.4:5 - "POST /503 HTTP/1.1" 404 Not Found', []),
        ('1.2.3.4:5 - "POST /pause_generation HTTP/1.1" 200 OK', ["pause"]),
        ('1.2.3.4:5 - "POST /continue_generation HTTP/1.1" 200 OK', ["resume"]),
    ],
)
def test_an_access_line_gives_failed_requests_and_pauses(before: str, line: str, kinds: list[str]) -> None:
    reader = Reader()
    assert [event.kind for event in reader.read((before + line).encode())] == kinds
    assert reader.kind == "access"


def test_an_exception_of_a_request_counts_once() -> None:
    exception = STAMP + "ERROR:    Exception in ASGI application"
    failed = STAMP + "INFO:     " + POST + "500 Internal Server Error"
    assert [event.kind for event in read(failed, exception, exception)] == ["server_error"] * 2


def test_arguments_in_several_lines_are_one_start() -> None:
    text = STAMP + "server_args={'dtype': 'auto', 'model_path': '" + "m" * 20_000 + "', 'tp_size': 8}"
    [event] = read(text[:9000], text[9000:16_000], text[16_000:])
    assert (event.arguments["tp_size"], event.figures) == (8, {})
    [cut, after] = read(text[:9000], STAMP + DECODE)
    assert (cut.kind, cut.figures, after.kind) == ("arguments", {"cut": 1}, "decode")


SERVING = ("run_scheduler_process", "event_loop_overlap", "run_batch", "forward_batch_generation")


def traceback(*functions: str, rank: int = 0) -> list[str]:
    frames = [f'  File "/srv/sglang/x.py", line 12, in {name}\n    {name}()' for name in functions]
    head = STAMP.replace("TP0", f"TP{rank}") + "Scheduler hit an exception: Traceback (most recent call last):"
    return [head, *"\n".join(frames).split("\n")]


def failures(*text: str) -> list[tuple[str, int | None]]:
    return [(event.word, event.rank.tp) for event in read(*text) if event.kind == "out_of_memory"]


@pytest.mark.parametrize(
    ("before", "functions", "phase"),
    [
        ([STAMP + DECODE], (*SERVING, "forward_extend", "forward"), "prefill"),
        ([STAMP + DECODE], (*SERVING, "forward_decode", "forward"), "decode"),
        ([STAMP + DECODE], SERVING, "unknown"),
        ([STAMP + DECODE], (*SERVING, "forward_extend", "embed_mm_inputs", "forward_extend"), "unknown"),
        ([], ("run_scheduler_process", "__init__", "load_model"), "startup"),
        ([START], ("run_scheduler_process", "__init__", "forward_extend"), "startup"),
        ([START], ("run_scheduler_process", "init_device_graphs", "capture", "forward_decode"), "graph_capture"),
        ([START, READY], (*SERVING, "forward_decode"), "decode"),
        ([START, READY, STAMP + DECODE, START], (*SERVING, "forward_decode"), "startup"),
    ],
)
def test_memory_ran_out_where_the_frames_say(before: list[str], functions: tuple[str, ...], phase: str) -> None:
    assert failures(*before, *traceback(*functions), CUDA) == [(phase, 0)]


HUGE = 200_000
HOSTILE = {
    "deep JSON": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "lists": b"[" * HUGE,
    "quotes": b'"' * HUGE,
    "CSV": b'"a",' * 50_000 + b'"' + STAMP.encode() + RETRACTION.encode() + b'"',
    "stamps": (STAMP + RETRACTION).encode() * 1500,
    "brackets": STAMP.encode() + b"[a] " * 50_000 + b"Decode batch, #running-req: 1",
    "fields": (STAMP + DECODE).encode() + b", a: 1" * 30_000,
    "arguments": STAMP.encode() + b"server_args=ServerArgs(" + b"a='" * 60_000,
    "colours": b"\x1b[" * 100_000,
    "NULs": b"\0" * HUGE + (STAMP + DECODE).encode(),
    "spaces": STAMP.encode() + b"Capture " + b"a " * 90_000,
    "not UTF-8": b"\xff\xc3\x28" * 60_000,
    "bars": b"10%|##|\r" * 20_000 + (STAMP + RETRACTION).encode(),
    "runtimes": b"2025-11-20T11:40:13.1Z stderr F " * 6000 + (STAMP + RETRACTION).encode(),
    "bytes": b'{"MESSAGE":[' + b"1," * 60_000 + b"1]}",
    "ranks": b"[2025-11-20 11:40:13" + b" TP0" * 40_000 + b"] " + RETRACTION.encode(),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize(
    "before", [b"", (STAMP + DECODE).encode(), b'{"time": "2025-11-20T11:40:13Z", "msg": "' + START.encode() + b'"}']
)
def test_a_hostile_line_is_read_in_bounded_time_and_memory(name: str, before: bytes) -> None:
    reader = Reader()
    reader.read(before)
    begin = time.process_time()
    for _ in range(3):
        reader.read(HOSTILE[name])
    assert time.process_time() - begin < 10  # a loop or an expression that backtracks takes minutes
    assert sum(map(sys.getsizeof, reader.wrapping.__dict__.values())) < 1 << 20
    assert reader.read((STAMP + DECODE).encode())[-1].kind == "decode"


def test_a_time_without_a_date_grows_over_midnight() -> None:
    times = ["23:59:58", "23:59:59", "00:00:01", "23:59:59", "00:00:02", "12:00:00", "23:00:00", "01:00:00"]
    day = 86_400.0
    found = [event.time for event in read(*(f"[{time} TP0] {DECODE}" for time in times))]
    assert found == [86_398.0, 86_399.0, day + 1, 86_399.0, day + 2, day + 43_200, day + 82_800, 2 * day + 3600]
