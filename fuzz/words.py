"""Words that have a meaning for a reader of an input, for the fuzzer to insert."""

from __future__ import annotations

from sglang_tuning_exporter.config import OPTIONS

PART = b"\n%%%% "  # begins a file inside an input that stands for several

LOG = (
    b"Decode batch, ", b"Prefill batch, ", b"Prefill batch. ", b"#running-req: ", b"#queue-req: ", b"token usage: ", b"cuda graph: True",
    b"KV cache pool is full. Retract requests. ", b"#retracted_reqs: ", b"#new_token_ratio: 0.3 -> 0.5", b"server_args=ServerArgs(", b"server_args={",
    b"torch.OutOfMemoryError: ", b"Traceback (most recent call last):\n", b"[2025-11-20 11:40:13] ", b"[2025-11-20 11:40:13 DP1 TP0] ", b"[11:40:13] ",
    b"The server is fired up and ready to roll!", b"max_total_num_tokens=", b"available_gpu_mem=", b'{"log":"', b"2025-11-20T11:40:11.5Z stderr F ",
    b"\x1b[31m", b"nan", b"1e999", b"\r\n", b"Capture cuda graph bs [1, 2]", b"gen throughput (token/s): ", b"\x00", b"(Engine pid=1) ",
)  # fmt: skip
PAGE = (
    b"# TYPE ", b"# HELP ", b"# EOF", b"sglang:", b"sglang_", b"sglang_tuning_", b"num_running_reqs", b"_total", b"_created", b"_bucket", b'{le="+Inf"}',
    b'dp_rank="1"', b'tp_rank="0"', b"\\n", b'\\"', b"\\\\", b" NaN", b" +Inf", b" counter", b" gauge", b" histogram", b" summary", b" info", b" 1e9",
    b" # {} 1 2", PART, b"time_to_first_token_seconds", b"token_usage", b'priority=""', b"1763638815000",
)  # fmt: skip
JSON = (
    b'"', b"{", b"}", b"[", b"]", b":", b",", b"null", b"true", b"-1", b"1e999", b"NaN", b"Infinity", b'"internal_states"', b'"loads"', b'"model_path"',
    b'"version"', b'"memory_usage"', b'"api_key"', b"\\ud800", b"9" * 30, b'"schedule_conservativeness"', b'"cuda_graph_bs"', b'"chunked_prefill_size"',
)  # fmt: skip
ARGUMENT = (
    b"server_args=ServerArgs(", b"server_args={", b"'model_path': ", b"model_path=", b"'", b'"', b"\\'", b"None", b"True", b"nan", b"inf", b"[", b"]", b"{",
    b"}", b"(", b")", b"<", b">", b", ", b"=", b"field(default_factory=", b"api_key=", b"--api-key", b"token", b"cuda_graph_bs=", b"0x1", b"1_0", b"1e999",
    b"b'", b"r'", b"schedule_conservativeness=", b"mem_fraction_static=", b"max_running_requests=", b"chunked_prefill_size=", b"dp_size=", b"tp_size=",
)  # fmt: skip
CONFIG = (
    b'!!int ""', b"!!bool x", b"!!timestamp x", b"!!float ", b"{=: ", b'"\\UFFFFFFFF"', b"0x" + b"f" * 40,
    *(option.name.encode() + b": " for option in OPTIONS), b"http://", b"https://[", b"]", b"!!", b"&a ", b"*a", b"<<: ", b"|\n ", b"? ", b"---\n", b"~",
    b"2025-13-01", b"0x1f", b"1:30", b".nan", b".inf", b'"\\ud800"', b"offline", b"queue_upper", b"=", b"-", b"%", b"@",
)  # fmt: skip
STATE = (
    *JSON, b'"schema": 1', b'"watch"', b'"ranks"', b'"counted"', b'"doubtful"', b'"ledger"', b'"waiting"', b'"clocks"', b'"words"', b'"starts"',
    b'"outages"', b'"positions"', b'"files"', b'"patterns"', b'"inode"', b'"position"', b'"lines"', b'"decode"', b'"kind": "retraction"',
)  # fmt: skip
RECORDING = (
    PART + b"server.log\n", PART + b"events.jsonl\n", PART + b"recording.json\n", PART + b"server_info.json\n", PART + b"metrics-3-1763638817000.prom\n",
    *LOG, b'{"t": 1763638813, "event": "ready"}\n', b'"SIGKILL"', b'"load_begin"', b'"load_end"', b'"burst"', b'"exit"', b'"log_utc_offset_seconds": ',
)  # fmt: skip
