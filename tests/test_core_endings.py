"""Why a server ended: the line that explains it, its class, and what is not quoted.

Texts are those of public logs, cut down.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.events import (
    ENDINGS,
    LONGEST_TEXT,
    LONGEST_WORDS,
    Event,
    Rank,
    class_of,
    from_json,
    quoted,
    to_json,
)
from sglang_tuning_exporter.core.findings import Finding, Judgement
from sglang_tuning_exporter.core.inputs import Logs
from sglang_tuning_exporter.core.report import judge_logs
from sglang_tuning_exporter.core.watch import Watch
from sglang_tuning_exporter.sglang.clean import without_requests, without_secrets

AT = "[2026-06-01 10:00:{:02d} TP{}] "
DECODE = (
    "Decode batch, #running-req: 11, #token: 9747, token usage: 0.07, cuda graph: True, gen throughput (token/s):"
    " 919.88, #queue-req: 0,"
)
EXCEPTION = "Scheduler hit an exception: Traceback (most recent call last):"
SIGQUIT = "[2026-06-01 10:00:50] SIGQUIT received. signum=None, frame=None. It usually means one child failed."


def frame(file: str, function: str = "f") -> str:
    return f'  File "/srv/venv/site-packages/sglang/{file}", line 7, in {function}'


def scheduler(error: str, file: str = "srt/managers/scheduler.py", *, second: int = 10, rank: int = 0) -> list[str]:
    """Return the lines of a scheduler that ends by an exception."""
    return [
        AT.format(second, rank) + EXCEPTION,
        frame("srt/managers/scheduler.py", "run_scheduler_process"),
        "    f()",
        frame(file),
        *error.split("\n"),
    ]


def judged(tmp_path: Path, *lines: str) -> Judgement:
    log = tmp_path / "server.log"
    log.write_text("\n".join(lines) + "\n")
    return judge_logs(Logs([str(log)]), PROFILES["online"])[0]


def crash(tmp_path: Path, *lines: str) -> Finding:
    found = judged(tmp_path, *lines).findings
    return next(each for each in found if each.diagnosis == "crashed")


def explained(tmp_path: Path, *lines: str) -> Event:
    said = crash(tmp_path, *lines).explained_by
    assert said is not None
    return said


SERVED = AT.format(1, 0) + DECODE
ENDS = {
    "a check in SGLang": (["ValueError: Failed to allocate token prealloc indices"], "srt/mem_cache/radix_cache.py",
        "check"),
    "a workspace": (["RuntimeError: Failed to allocate memory for batch_prefill_tmp_v with size 435814400"],
        "srt/layers/attention.py", "memory"),
    "host memory": (["ValueError: Not enough host memory available. Requesting 7.05 GB, 2.04 GB free."],
        "srt/mem_cache/pool_host.py", "host_memory"),
    "a disk": (["OSError: [Errno 28] No space left on device"], "srt/utils/hf_transformers_utils.py", "disk"),
    "places for requests": (["RuntimeError: alloc_req_slots runs out of memory. num_reqs=2"],
        "srt/managers/schedule_batch.py", "check"),
    "an object of its own": (["TypeError: Unsupported BCG output type: <class 'LogitsProcessorOutput'>"],
        "srt/model_executor/runner.py", "check"),
    "what is not supported": (["ValueError: Unsupported quantization: fp4"], "srt/model_executor/runner.py",
        "unsupported"),
    "an unbalanced check": (["ValueError: The memory capacity is unbalanced. Some GPUs may be occupied by other"],
        "srt/model_executor/model_runner.py", "occupied"),
    "a GPU that is too old": (["RuntimeError: SGLang only supports sm75 and above."],
        "srt/model_executor/model_runner.py", "gpu"),
    "a data type that a GPU lacks": (["ValueError: FP8 KV cache with fa3 is only supported on Hopper GPUs"],
        "srt/layers/attention/flashattention_backend.py", "gpu"),
    "a variable that must be set": (["AssertionError: X_BIND is not set, please set the cores of each rank via X_BIND"],
        "srt/utils/numa_utils.py", "unsupported"),
    "what a model requires": (["ValueError: score_mod is only supported by the FA4 backend."],
        "srt/layers/attention/flashattention_backend.py", "unsupported"),
    "an error that Python raises": (["AttributeError: 'NoneType' object has no attribute 'must'"],
        "srt/layers/moe.py", "check"),
    "tensors that do not fit each other": (["RuntimeError: The size of tensor a (7) must match the size of tensor b"],
        "srt/models/llama.py", "check"),
    "a check without words": (["AssertionError"], "srt/models/llama.py", "check"),
    "words of no known class": (["ValueError: pack header 7 does not match manifest"],
        "srt/model_loader/validate.py", "unclassified"),
    "an argument": (["AssertionError: page size must be 64"], "srt/server_args.py", "argument"),
    "an argument that the text names": (["ValueError: Please use --attention-backend triton here"],
        "srt/models/llama.py", "argument"),
    "a library": (["ImportError: libnvrtc.so.12: cannot open shared object file"], "srt/layers/moe.py", "library"),
    "a compiler": (["RuntimeError: Internal Triton PTX codegen error:", "ptxas fatal: Value 'sm_120' is not defined"],
        "srt/layers/moe.py", "library"),
    "a network": (["RuntimeError: Gloo connectFullMesh failed with [pair.cc:144] no error"],
        "srt/distributed/parallel_state.py", "network"),
    "a transfer": (["KeyError: 'room'"], "srt/disaggregation/mooncake/conn.py", "transfer"),
    "a peer": (["ValueError: TP rank 1 is loaded, but there are other ranks that didn't finish loading."],
        "srt/model_executor/model_runner.py", "peer"),
    "a hub out of reach": (["OSError: We couldn't connect to 'https://huggingface.co' to load this file"],
        "srt/utils/hf_utils.py", "model"),
    "a download cut off": (["urllib3.exceptions.ProtocolError: ('Connection aborted.', ConnectionResetError(104))"],
        "srt/loader.py", "model"),
    "a damaged file": (["safetensors_rust.SafetensorError: Error while deserializing header"],
        "srt/model_loader/loader.py", "model"),
    "no right to a model": (["OSError: 401 Client Error. Cannot access gated repo for url https://huggingface.co/x"],
        "srt/loader.py", "argument"),
    "a pair's other server": (["requests.exceptions.ConnectionError: HTTPConnectionPool(host='h'): Connection refused"],
        "srt/a.py", "network"),
    "a port in use": (["torch.distributed.DistNetworkError: The server socket has failed to listen. name: EADDRINUSE"],
        "srt/a.py", "address"),
    "no GPU": (["RuntimeError: No CUDA GPUs are available"], "srt/model_executor/model_runner.py", "device"),
    "a pair that does not fit": (["RuntimeError: PD does NOT support different TP sizes yet"],
        "srt/disaggregation/nixl/conn.py", "argument"),
    "open files": (["OSError: [Errno 24] Too many open files"], "srt/managers/scheduler.py", "limit"),
    "memory of the host": (["OSError: [Errno 12] Cannot allocate memory"], "srt/mem_cache/pool_host.py", "host_memory"),
    "a right to a file": (["PermissionError: [Errno 13] Permission denied: '/cache/hub'"], "srt/model_loader/loader.py",
        "argument"),
    "a longer context": ([("ValueError: context_length (9) is greater than the derived context_length (8), or CUDA"
        " errors")], "srt/a.py", "argument"),
    "an address of another machine": (["zmq.error.ZMQError: Cannot assign requested address (addr='tcp://10.0.0.5:1')"],
        "srt/a.py", "argument"),
    "a compiler of C": (["subprocess.CalledProcessError: Command '['/usr/bin/gcc', 'm.c']' returned 1."],
        "srt/layers/moe.py", "library"),
    "a name without an address": (["socket.gaierror: [Errno -2] Name or service not known"],
        "srt/distributed/parallel_state.py", "network"),
    "a size that a flag sets": (["AssertionError: Not enough space for x, try to increase --mamba-full-memory-ratio."],
        "srt/a.py", "size"),
    "the storage of HiCache": (["AssertionError"], "srt/mem_cache/storage/mooncake_store/mooncake_store.py", "storage"),
    "a branch that nobody wrote": (["NotImplementedError"], "srt/lora/utils.py", "check"),
    "an operator of an NPU": (["RuntimeError: NPU function error: call aclnnInplaceCopy failed, error code is 161002"],
        "srt/a.py", "kernel"),
    "a kernel": (["torch.AcceleratorError: CUDA error: an illegal memory access was encountered"], "srt/layers/moe.py",
        "kernel"),
}  # fmt: skip


@pytest.mark.parametrize(("error", "file", "ending"), ENDS.values(), ids=ENDS.keys())
def test_the_exception_that_ended_a_scheduler_explains_its_end(
    error: list[str], file: str, ending: str, tmp_path: Path
) -> None:
    said = explained(tmp_path, SERVED, *scheduler("\n".join(error), file), "", SIGQUIT)
    assert (said.text, said.word) == (" ".join(error), ending)
    assert (said.rank.words, said.place, said.figures["line"]) == ("TP0", f"{file}:7 in f", 6)


def test_what_fails_in_sglangs_own_tests_ends_no_server(tmp_path: Path) -> None:
    head, frame = "Traceback (most recent call last):", '  File "/sgl/python/sglang/{}", line 391, in run'
    checks = [head, frame.format("test/test_utils.py"), "    a", "AssertionError: 1 not greater than 2", ""]
    again = ["During handling of the above exception, another exception occurred:", "", head]
    retry = [frame.format("srt/utils/common.py"), "    b", "Exception: retry() exceed maximum number of retries."]
    start = AT.format(1, 0) + "server_args=ServerArgs(model_path='x')"
    assert "crashed" not in {each.diagnosis for each in judged(tmp_path, start, *checks, *again, *retry).findings}
    assert crash(tmp_path, start, head, *retry)


@pytest.mark.parametrize(
    ("line", "ending"),
    [
        ("Fatal Python error: Segmentation fault", "kernel"),
        (
            (
                "  what():  [PG ID 2 PG GUID 3 Rank 1] Process group watchdog thread terminated with exception: CUDA"
                " error: an illegal memory access"
            ),
            "kernel",
        ),
        (
            (
                "[rank1]:[E1209 02:28:15.28 ProcessGroupNCCL.cpp:2057] [Rank 1] Process group watchdog thread"
                " terminated with exception: NCCL error"
            ),
            "network",
        ),
        ("Memory access fault by GPU node-7 (Agent handle: 0x20916760) on address (nil). Reason: Unknown.", "kernel"),
        (
            ":0:rocdevice.cpp :3586: 113 us: Callback: Queue 0x7f aborting with error : HSA_STATUS_ERROR_EXCEPTION",
            "kernel",
        ),
        ("Bus error (core dumped)", "kernel"),
        (
            (
                "EZ9999: [PID: 696742] 2025-10-31-21:35:03.992.057 The error from device(chipId:7), there is an"
                " exception of aivec error"
            ),
            "kernel",
        ),
        (
            (
                "[PID: 428723] 2026-06-09-03:35:23.635.715 AclNN_Parameter_Error(EZ1001): The tensor cannot be larger"
                " than 8 dimensions."
            ),
            "kernel",
        ),
        ("bash: line 1: 4711 Killed                  python -m sglang.launch_server", "killed"),
        (
            "/src/nvshmem/src/host/team/team.cu:f:63: NVSHMEM API called before NVSHMEM initialization has completed",
            "unknown",
        ),
    ],
)
def test_an_abort_without_a_traceback_is_an_end(line: str, ending: str, tmp_path: Path) -> None:
    found = crash(tmp_path, SERVED, line)
    assert found.explained_by is not None
    assert found.explained_by.word == ending
    assert found.headline.startswith("SGLang has crashed")


@pytest.mark.parametrize(
    "line",
    [
        (
            "node5:240:240 [6] misc/socket.cc:533 NCCL WARN socketPollConnect: Connect to 10.0.0.4<56849> returned"
            " 113(No route to host)"
        ),
        "/src/nvshmem/src/modules/transport/ibrc/ibrc.cpp:418: non-zero status: 22 ibv_modify_qp failed",
    ],
)
def test_a_library_that_could_not_connect_explains_the_end_after_it(line: str, tmp_path: Path) -> None:
    for error in ("", "RuntimeError: NCCL error: unhandled system error"):
        said = explained(tmp_path, line, *scheduler(error, "srt/distributed/parallel_state.py"))
        assert (said.word, said.text) == ("network", line)


def test_a_warning_of_nccl_about_a_setting_explains_no_end(tmp_path: Path) -> None:
    line = "node5:240:240 [6] NCCL WARN NUMA auto balancing enabled which can lead to variability"
    assert explained(tmp_path, line, *scheduler("KeyError: 'x'", "srt/models/llama.py")).word == "check"


@pytest.mark.parametrize("blanks", ["", "    "])
def test_advice_below_an_exception_is_no_part_of_it_also_in_a_log_pasted_with_blanks(
    tmp_path: Path, blanks: str
) -> None:
    error = (
        "Exception: Capture cuda graph failed: out of workspace\nfor a batch\nPossible solutions:\n1. disable cuda"
        " graph"
    )
    lines = scheduler(error, "srt/model_executor/cuda_graph_runner.py")
    found = explained(tmp_path, *(blanks + line for line in lines))
    assert found.text == "Exception: Capture cuda graph failed: out of workspace for a batch"


def test_a_traceback_that_lost_its_blanks_names_its_frame(tmp_path: Path) -> None:
    lines = [each.lstrip() for each in scheduler("NotImplementedError", "srt/lora/utils.py")]
    pasted = [each for line in lines for each in (line, "")]
    assert explained(tmp_path, *pasted).place == "srt/lora/utils.py:7 in f"


@pytest.mark.parametrize(
    ("function", "ended"),
    [("_cascade_evict", "an exception ended its scheduler"), ("init_lora_manager", "its start failed")],
)
def test_a_traceback_without_its_head_is_of_a_start_where_a_frame_shows_it(
    function: str, ended: str, tmp_path: Path
) -> None:
    log = judged(
        tmp_path, AT.format(1, 0) + "Init torch distributed begin.", frame("srt/a.py", function), "AssertionError"
    )
    assert any(ended in each.words for each in log.course)


@pytest.mark.parametrize(
    "line",
    [
        "Killed by a wolf, said the story",
        "An Aborted plan",
        "what(): a word of C++",
        "Bus errors are rare",
        "Killed",
        "Aborted",
    ],
)
def test_words_of_a_model_like_an_abort_are_marked_or_none(line: str, tmp_path: Path) -> None:
    work = [AT.format(second, 0) + DECODE for second in range(3, 50)]
    lines = (SERVED, "[2026-06-01 10:00:02] Receive: obj=GenerateReqInput(text='x", line, *work)
    found = [each for each in judged(tmp_path, *lines).findings if each.diagnosis == "crashed"]
    assert all(each.explained_by is None or each.explained_by.marked for each in found)


def test_a_start_that_failed_is_said_as_one(tmp_path: Path) -> None:
    found = crash(
        tmp_path, "launch_server.py: error: unrecognized arguments: --reasoning_parser --no-such-flag --api-key=sk-1"
    )
    assert (
        found.headline
        == "SGLang did not start: launch_server.py: error: unrecognized arguments: --reasoning_parser --no-such-flag"
        " --api-key."
    )
    assert [change.words for change in found.changes][:2] == [
        "spell it --reasoning-parser: SGLang's flags have hyphens",
        "drop --no-such-flag: no release up to 0.5.23 has this flag",
    ]


def test_every_line_of_an_error_names_where_it_begins_in_its_file(tmp_path: Path) -> None:
    for name, lines in (("a.log", [SERVED, SERVED]), ("b.log", scheduler("ValueError: x\nmore\nand more"))):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    found = [each for each in Logs([str(tmp_path / "*.log")]).events() if each.text.startswith("ValueError")]
    texts = ["ValueError: x", "ValueError: x more", "ValueError: x more and more"]
    assert [(each.text, each.figures["line"]) for each in found] == [(text, 5) for text in texts]


def test_a_traceback_without_its_last_line_is_cut_and_an_earlier_one_explains(tmp_path: Path) -> None:
    cut = scheduler("", "srt/speculative/eagle_worker.py")[:-1]
    said = explained(tmp_path, SERVED, *cut)
    assert (said.word, said.where.partition(", raised ")[2]) == (
        "cut",
        "below srt/speculative/eagle_worker.py:7 in f",
    )
    chained = [
        "",
        "During handling of the above exception, another exception occurred:",
        "",
        "Traceback (most recent call last):",
    ]
    whole = scheduler("torch.AcceleratorError: CUDA error: an illegal memory access was encountered")
    assert explained(tmp_path, SERVED, *whole, *chained, frame("srt/a.py")).word == "kernel"


@pytest.mark.parametrize(
    ("function", "headline"), [("initialize", "SGLang did not start."), ("forward", "SGLang has crashed.")]
)
def test_the_last_frame_shows_whether_it_was_a_start(function: str, headline: str, tmp_path: Path) -> None:
    lines = [*scheduler("")[:-2], frame("srt/model_executor/model_runner.py", function)]
    assert crash(tmp_path, *lines).headline == headline


WARM_UP = [
    "[2026-06-01 10:00:05] Initialization failed. warmup error: Traceback (most recent call last):",
    frame("srt/server.py", "_wait_and_warmup"),
    "AssertionError: res=<Response [502]>, res.text=''",
]


@pytest.mark.parametrize(("before", "ending"), [(WARM_UP, "proxy"), ([], "killed")])
def test_a_kill_after_a_warm_up_that_failed_is_sglangs_own(before: list[str], ending: str, tmp_path: Path) -> None:
    loaded = "[2026-06-01 10:00:04] Load weight end. type=X, dtype=torch.bfloat16, avail mem=9.69 GB"
    found = crash(tmp_path, loaded, *before, "", "Killed")
    assert found.explained_by is not None
    assert (found.headline[:21], found.explained_by.word) == ("SGLang did not start:", ending)


def test_a_warm_up_request_without_an_answer_is_a_hang(tmp_path: Path) -> None:
    lines = [
        WARM_UP[0],
        frame("srt/entrypoints/http_server.py", "_execute_server_warmup"),
        "ReadTimeout: Read timed out.",
    ]
    assert explained(tmp_path, *lines, "", "Killed").word == "hang"


@pytest.mark.parametrize("words", ["child proces. It usually", "child process. It usually"])
def test_a_kill_after_sglang_ended_itself_is_its_own(words: str, tmp_path: Path) -> None:
    hung = AT.format(9, 0) + "Watchdog timeout (self.watchdog_timeout=300)"
    ends = f"[2026-06-01 10:00:14] Received sigquit from a {words} means the child failed."
    found = crash(tmp_path, SERVED, hung, ends, "Killed")
    assert (found.headline, found.explained_by) == ("SGLang has crashed.", None)


def test_the_last_words_survive_the_exporter() -> None:
    said = Event(
        "words",
        900.0,
        Rank(tp=0),
        {"chain": 3.0},
        "check",
        "ValueError: Cannot use the fast tokenizer in slow tokenizer mode.",
    )
    said.place, said.file = "srt/a.py:7 in f", "server.log"
    assert from_json(json.loads(json.dumps(to_json(said)))) == said
    assert from_json({**to_json(said), "word": "no class"}) is None
    watch = Watch(PROFILES["online"], 0.0, reads=True, scrapes=True)
    watch.server.end_explanation = said
    later = Watch(PROFILES["online"], 1500.0, reads=True, scrapes=True)
    later.restore(json.loads(json.dumps(watch.saved(1000.0))), 1600.0, 500.0)
    assert later.server.end_explanation is not None
    assert (later.server.end_explanation.text, later.server.end_explanation.time) == (said.text, 1000.0)


def test_a_long_quotation_keeps_the_sentence_that_says_what_to_do() -> None:
    words = "AssertionError: X_BIND is not set, in this case " + "the number of ranks is too large for the nodes " * 5
    said = Event("words", word="unsupported", text=words + "please set the cores for each rank via X_BIND")
    assert said.short.startswith("AssertionError: X_BIND is not set")
    assert said.short.endswith("please set the cores for each rank via X_BIND")
    assert len(said.short) <= LONGEST_WORDS


def test_the_reason_of_a_start_that_fails_speaks_of_no_requests(tmp_path: Path) -> None:
    words = scheduler("KeyError: 'x'", "srt/model_loader/loader.py")
    started = AT.format(1, 0) + "server_args=ServerArgs(model_path='x', tp_size=1)"
    (change,) = crash(tmp_path, started, *words, "", SIGQUIT).changes
    assert "each start" in change.why
    (change,) = crash(tmp_path, SERVED, *words, "", SIGQUIT).changes
    assert "kind of request" in change.why


def test_the_schema_of_a_report_has_every_class() -> None:
    schema = (Path(__file__).parent.parent / "docs" / "report.schema.json").read_text()
    assert all(f'"{each}"' in schema for each in ENDINGS)


SECRETS = {
    "by its name": ("ValueError: api_key='abcdef' is wrong", "abcdef"),
    "an API key": ("401 for sk-proj-abcdefghijklmnop1234", "abcdefghijklmnop1234"),
    "a model hub's token": ("hf_abcdefghijklmnopqrstuv is no token", "abcdefghijklmnopqrstuv"),
    "a JWT": ("bad eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.c2lnbmF0dXJl", "eyJzdWIi"),
    "a URL": ("cannot reach https://user:hunter2@host/path", "hunter2"),
    "a signed URL": ("GET https://b.s3/x?X-Amz-Signature=0123456789abcdef&y=1", "0123456789abcdef"),
    "a cloud key": ("credential AKIAIOSFODNN7EXAMPLE", "AKIAIOSFODNN7EXAMPLE"),
    "a private key": ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----", "MIIE"),
    "a bearer": ("header Authorization: Bearer abcdefghij", "abcdefghij"),
    "a flag": ("argv: --api-key topsecret --port 1", "topsecret"),
}


@pytest.mark.parametrize(("text", "secret"), SECRETS.values(), ids=SECRETS.keys())
def test_a_secret_is_not_quoted(text: str, secret: str) -> None:
    assert secret not in without_secrets(text)
    assert "<redacted>" in quoted(text)


def test_words_of_a_request_are_not_quoted() -> None:
    text = f"ValueError: text='my diagnosis', input_ids=[1, 2, 3], '{'x' * 200}' and {list(range(40))}"
    shown = without_requests(text)
    assert "diagnosis" not in shown
    assert "1, 2, 3" not in shown
    assert "xxx" not in shown
    assert "38" not in shown


@given(st.text(max_size=5000), st.text(max_size=200))
def test_any_text_has_a_class_and_a_short_quotation(text: str, place: str) -> None:
    assert class_of([text], place) in ENDINGS
    assert len(quoted(text)) <= LONGEST_TEXT
    assert "\n" not in quoted(text)
