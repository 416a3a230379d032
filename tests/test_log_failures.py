"""Tracebacks, failed allocations and the signs of life of a server's processes."""

from __future__ import annotations

import pytest

from sglang_tuning_exporter.diagnosis.evidence import past_of
from sglang_tuning_exporter.diagnosis.findings import judge
from sglang_tuning_exporter.sglang.events import Event, Liveness, OutOfMemory, Rank, ServerError
from sglang_tuning_exporter.sglang.log.reader import LogReader
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.server import ServerState

WHEN = 1_763_638_813.0
STAMP = "2025-11-20 11:40:13"
DECODE = f"[{STAMP} TP0] Decode batch, #running-req: 1, #token: 1, token usage: 0.99, #queue-req: 9\n"
START = f"[{STAMP}] server_args=ServerArgs(tp_size=8)\n"
READY = f"[{STAMP}] The server is fired up and ready to roll!\n"
CUDA = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.75 GiB. GPU 0 has a total capacity of 79.11 GiB.\n"
)


def read(text: str) -> list[Event]:
    return LogReader().feed(text.encode())


def failures(text: str) -> list[tuple[str, int | None]]:
    return [(event.phase, event.rank.tp) for event in read(text) if isinstance(event, OutOfMemory)]


def signs(text: str) -> list[str]:
    return [event.what for event in read(text) if isinstance(event, Liveness)]


def traceback(*functions: str, rank: int = 0) -> str:
    frames = "".join(f'  File "/srv/sglang/x.py", line 12, in {name}\n    {name}()\n    ^^^^\n' for name in functions)
    return f"[{STAMP} TP{rank}] Scheduler hit an exception: Traceback (most recent call last):\n{frames}"


SERVING = ("run_scheduler_process", "event_loop_overlap", "run_batch", "forward_batch_generation")
PHASES = [
    (DECODE, (*SERVING, "forward_extend", "forward"), "prefill"),
    (DECODE, (*SERVING, "forward_decode", "forward"), "decode"),
    (DECODE, (*SERVING, "replay"), "unknown"),
    (DECODE, SERVING, "unknown"),
    ("", SERVING, "unknown"),
    ("", (*SERVING, "forward_extend"), "prefill"),
    # The encoder of images takes them all at once: a smaller chunk of the prompt needs no less memory there.
    (DECODE, (*SERVING, "forward_extend", "embed_mm_inputs", "_get_chunked_prefill_embedding", "forward"), "unknown"),
    (DECODE, (*SERVING, "forward_extend", "get_video_feature", "forward"), "unknown"),
    (DECODE, (*SERVING, "forward_extend", "general_mm_embed_routine", "forward"), "prefill"),
    ("", ("run_scheduler_process", "__init__", "load_model"), "startup"),
    (START, ("run_scheduler_process", "__init__", "forward_extend"), "startup"),
    (START, ("run_scheduler_process", "__init__", "init_device_graphs", "capture", "forward_decode"), "graph_capture"),
    (START + READY, (*SERVING, "forward_decode"), "decode"),
    (START + READY + DECODE + START, (*SERVING, "forward_decode"), "startup"),
]


@pytest.mark.parametrize(("before", "functions", "phase"), PHASES)
def test_a_device_out_of_memory_is_where_its_frames_say(before: str, functions: tuple[str, ...], phase: str) -> None:
    assert failures(before + traceback(*functions) + CUDA) == [(phase, 0)]


@pytest.mark.parametrize(
    "message",
    [
        CUDA,
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n",
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB\n",
        "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB\n",
        "RuntimeError: CUDA error: out of memory\n",
        "torch.AcceleratorError: CUDA error: out of memory\n",
        "RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB\n",
    ],
)
def test_every_devices_out_of_memory_is_one(message: str) -> None:
    [event] = [
        event
        for event in read(DECODE + traceback(*SERVING, "forward_decode") + message)
        if isinstance(event, OutOfMemory)
    ]
    assert event == OutOfMemory(WHEN, Rank(tp=0), "decode", text=message.strip()[:200])


@pytest.mark.parametrize("graph", ["cuda graph", "CUDA graph"])
def test_a_failed_capture_is_a_capture_failure(graph: str) -> None:
    text = (
        traceback("run_scheduler_process")
        + f"Exception: Capture {graph} failed: CUDA out of memory. Tried to allocate\n"
    )
    assert failures(text + "Possible solutions:\n1. set --mem-fraction-static to a smaller value\n") == [
        ("graph_capture", 0)
    ]


def test_a_capture_that_failed_for_another_reason_is_no_out_of_memory() -> None:
    assert failures(traceback("capture") + "Exception: Capture cuda graph failed: invalid device function\n") == []


def test_a_chain_of_exceptions_is_one_failure() -> None:
    text = (
        START
        + traceback("run_scheduler_process", "__init__", "init_device_graphs", "capture")
        + CUDA
        + "\nDuring handling of the above exception, another exception occurred:\n\n"
        + "Traceback (most recent call last):\n"
        + '  File "/srv/sglang/x.py", line 12, in run_scheduler_process\n    scheduler = Scheduler()\n'
        + "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 512.00 MiB\n"
    )
    assert failures(text) == [("graph_capture", 0)]


def test_two_tracebacks_without_a_chain_are_two_failures() -> None:
    text = (
        DECODE
        + traceback(*SERVING, "forward_decode")
        + CUDA
        + "\n"
        + traceback(*SERVING, "forward_decode", rank=1)
        + CUDA
    )
    assert failures(text) == [("decode", 0), ("decode", 1)]


@pytest.mark.parametrize("before", ["", START + READY + DECODE], ids=["no batch yet", "text of requests possible"])
@pytest.mark.parametrize(("word", "phase"), [("Prefill", "prefill"), ("Decode", "decode")])
def test_an_error_line_and_the_exception_raised_from_it_are_one_failure(word: str, phase: str, before: str) -> None:
    message = f"{word} out of memory. Try to lower your batch size.\n"
    more = "Try to allocate 8192 tokens.\nAvailable tokens: 1519 (available_size=1211 + evictable_size=308)\n\n"
    lines = "".join(f"[{STAMP} TP{rank}] {message}{more}" for rank in range(2))
    raised = "".join(traceback(*SERVING, rank=rank) + f"RuntimeError: {message}{more}" for rank in range(2))
    assert failures(before + lines + raised) == [(phase, 0), (phase, 1)]
    assert failures(before + lines) == [(phase, 0), (phase, 1)]
    assert failures(before + raised) == [(phase, 0), (phase, 1)]


@pytest.mark.parametrize(
    ("message", "phase"),
    [
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "startup"),
        (
            "RuntimeError: alloc_req_slots runs out of memory. Please set a smaller number",
            "decode",
        ),
        ("ValueError: Failed to retract any request. No space left for only one request.", "decode"),
        ("ValueError: Out of memory even after retracting all other requests in the decode batch.", "decode"),
        ("RuntimeError: Prefill out of memory. Try to lower your batch size.", "prefill"),
    ],
)
def test_a_failure_that_names_itself_needs_no_frames(message: str, phase: str) -> None:
    assert failures(traceback("run_scheduler_process") + message + "\n") == [(phase, 0)]


@pytest.mark.parametrize("head", ["Exception in ModelTpServer:", "Exception in run_tp_server:"])
def test_the_oldest_release_prints_the_traceback_after_its_head(head: str) -> None:
    text = f"[11:38:21 TP3] {head}\nTraceback (most recent call last):\n"
    text += f'  File "x.py", line 1, in forward_extend\n    x()\n{CUDA}'
    [sign, failure] = read(text)
    assert sign == Liveness(41_901.0, Rank(tp=3), "scheduler_exception")
    assert failure == OutOfMemory(41_901.0, Rank(tp=3), "prefill", text=CUDA.strip())


def test_other_ranks_lines_inside_a_traceback_do_not_end_it() -> None:
    lines = (traceback(*SERVING, "forward_decode") + CUDA).splitlines(keepends=True)
    text = DECODE + "".join(line + f"[{STAMP} TP5] some other line\n" for line in lines)
    assert failures(text) == [("decode", 0)]


def test_a_traceback_whose_head_was_rotated_away_still_counts() -> None:
    text = DECODE + '  File "/srv/sglang/x.py", line 12, in forward_decode\n    x()\n' + CUDA
    assert failures(text) == [("decode", None)]


def test_a_traceback_of_the_http_server_is_no_failure_of_the_scheduler() -> None:
    text = f"[{STAMP}] ERROR:    Exception in ASGI application\nTraceback (most recent call last):\n"
    text += '  File "x.py", line 1, in app\n'
    reader = LogReader()
    [event] = reader.feed((text + "AttributeError: no attribute 'path'\n").encode())
    assert isinstance(event, ServerError)
    assert reader.counts["traceback"] == 3


def test_a_recoverable_retraction_is_no_out_of_memory() -> None:
    assert (
        failures(f"[{STAMP} TP0] Decode out of memory happened. #retracted_reqs: 1, #new_token_ratio: 0.3 -> 0.5\n")
        == []
    )
    assert failures(f"[{STAMP} TP0] KV cache pool is full. Retract requests. #retracted_reqs: 1\n") == []


@pytest.mark.parametrize(
    ("message", "what"),
    [
        ("The server is fired up and ready to roll!", "ready"),
        ("Watchdog timeout (self.watchdog_timeout=300)", "watchdog_timeout"),
        ("Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)", "watchdog_timeout"),
        ("Detokenizer watchdog timeout (self.watchdog_timeout=300, self.soft=True)", "watchdog_timeout"),
        (
            "Health check failed. Server couldn't get a response from detokenizer for last 20 seconds.",
            "health_check_failed",
        ),
        (
            "Subprocess scheduler_0 (pid=4711) crashed with exit code -9. Triggering SIGQUIT for cleanup...",
            "process_died",
        ),
        ("Received sigquit from a child process. It usually means the child failed.", "process_died"),
        ("Child process unexpectedly failed with exitcode=9. pid=4711", "process_died"),
        ("Child process unexpectedly failed with an exit code 9. pid=4711", "process_died"),
        ("SIGTERM received. signum=None frame=None. Draining requests and shutting down...", "draining"),
        ("Rank 0 scheduler is dead. Please check if there are relevant logs.", "launch_failed"),
        ("Scheduler hit an exception: Traceback (most recent call last):", "scheduler_exception"),
        ("TpModelWorkerClient hit an exception: Traceback (most recent call last):", "scheduler_exception"),
    ],
)
def test_a_sign_of_life_is_read(message: str, what: str) -> None:
    assert signs(f"[{STAMP} TP0] {message}\n") == [what]


def test_a_launch_that_failed_is_recognised_by_the_last_exception() -> None:
    text = (
        f"[{STAMP}] server_args=ServerArgs(tp_size=1)\n[{STAMP}] kill_process_tree called: parent_pid=1\nTraceback (most recent call last):\n"
        '  File "e.py", line 1, in recv\n'
        "EOFError\n\nDuring handling of the above exception, another exception occurred:\n\n"
        'Traceback (most recent call last):\n  File "e.py", line 2, in wait_for_ready\n    raise x\n'
        "RuntimeError: Rank 0 scheduler died during initialization (exit code: -3). If exit code is -9 (SIGKILL), …\n"
    )
    assert read(text)[1:] == [Liveness(WHEN, Rank(), "launch_failed")]


# Of a real 0.5.23, cut down; its checks of the flags come before `server_args=`.
MAIN = """\
Traceback (most recent call last):
  File "/srv/venv/lib/python3.11/site-packages/sglang/launch_server.py", line 84, in <module>
    run_server(server_args)
  File "/srv/venv/lib/python3.11/site-packages/sglang/srt/arg_groups/validation_hook.py", line 282, in check_server_args
    assert cfg.schedule_policy in [
"""
USAGE = """\
usage: sglang serve [-h] --model-path MODEL_PATH
                    [--tokenizer-path TOKENIZER_PATH]
"""


def details(text: str) -> list[str]:
    return [event.detail for event in read(text) if isinstance(event, Liveness)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            USAGE + "sglang serve: error: unrecognized arguments: --no-such-flag 3 --api-kay=s3cret -x\n",
            "sglang serve: error: unrecognized arguments: --no-such-flag --api-kay -x",
        ),
        (
            "launch_server.py: error: argument --tp-size: invalid int value: 'two'\n",
            "launch_server.py: error: argument --tp-size: invalid int value: 'two'",
        ),
        (
            MAIN + "AssertionError: To use priority scheduling, schedule_policy must be 'fcfs' or 'lof'.\n",
            "AssertionError: To use priority scheduling, schedule_policy must be 'fcfs' or 'lof'",
        ),
        (MAIN + "EOFError\n", ""),
    ],
)
def test_a_main_process_that_ends_before_it_logs_its_arguments_is_a_launch_that_failed(text: str, words: str) -> None:
    assert signs(text) == ["launch_failed"]
    assert details(text) == [words]


@pytest.mark.parametrize(
    "text",
    [
        MAIN + "KeyboardInterrupt\n",
        MAIN.replace("launch_server", "srt/entrypoints/http_server") + "ValueError: one request\n",
        START + DECODE + "sglang serve: error: unrecognized arguments: --words-of-a-prompt\n",
        START + DECODE + MAIN + "ValueError: words of a prompt\n",
    ],
    ids=["ended by somebody", "of a request", "usage while it serves", "traceback while it serves"],
)
def test_other_tracebacks_and_words_of_requests_are_no_failed_launch(text: str) -> None:
    assert signs(text) == []


def test_a_sidecar_and_a_report_say_why_the_launch_failed() -> None:
    state = ServerState(PROFILES["online"], 0.0)
    failed = MAIN + "AssertionError: To use priority scheduling, schedule_policy must be 'fcfs' or 'lof'.\n"
    state.observe_all(read(failed + MAIN + "RuntimeError: the words after it\n"), 5.0)
    assert judge(past_of(state, 6.0)).verdict == "server_down"
    assert state.life.crash.startswith("AssertionError: To use priority scheduling")
