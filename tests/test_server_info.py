"""`/server_info` and `/v1/loads`: JSON in, plain figures out, no secret among them.

The answers are cut down by hand from recorded ones of 0.5.9 and 0.5.23 (the step counters are made up); the flat one is written after 0.4.3's source.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tuning_exporter.sglang.server_info import Load, parse_loads, parse_server_info

STATE_0_5_23 = {
    "schedule_conservativeness": 1.0,
    "effective_max_running_requests_per_dp": 2048,
    "last_gen_throughput": 30.6386982590881,
    "memory_usage": {
        "weight": 0.003,
        "kvcache": 0.004,
        "startup_available": 18.505,
        "token_capacity": 16384,
        "graph": {"prefill": 0.5, "decode": 1.25},
    },
    "decode_cuda_graph_bs": [1, 2, 4],
}
ANSWER_0_5_23 = {
    "model_path": "m",
    "schedule_conservativeness": 1.0,
    "max_running_requests": None,
    "dp_size": 2,
    "cuda_graph_config": {"decode": {"max_bs": 32}},
    "api_key": "sk-very-secret",
    "launch_command": "--model-path m --api-key sk-very-secret",
    "status": "ready",
    "max_total_num_tokens": 16384,
    "scheduler_pids": [12675, 12676],
    "internal_states": [STATE_0_5_23, {**STATE_0_5_23, "effective_max_running_requests_per_dp": 1024}],
    "version": "0.5.23",
}
STATE_0_5_9 = {
    "last_gen_throughput": 763.236060607523,
    "memory_usage": {"weight": -0.01, "kvcache": 0.0, "token_capacity": 2048, "graph": 0},
    "effective_max_running_requests_per_dp": 1024,
}


def test_no_secret_leaves_an_answer() -> None:
    secret = "sk-very-secret"
    args = {
        "api_key": secret,
        "admin_api_key": secret,
        "ssl_keyfile": secret,
        "ssl_keyfile_password": secret,
        "hf_token": secret,
        "client_secret": secret,
        "credentials": secret,
        "hicache_storage_backend_extra_config": json.dumps({"access_key": secret}),
        "otlp_traces_endpoint": f"http://user:{secret}@collector:4317",
        "nested": {"inner": [{"password": secret}, "--api-key", secret]},
        "launch_command": f"--api-key {secret}",
    }
    info = parse_server_info(json.dumps({**ANSWER_0_5_23, **args, "internal_states": [args]}))
    assert info is not None
    assert secret not in repr(info)
    assert info.args["dp_size"] == 2


LOAD = {
    "dp_rank": 1,
    "num_running_reqs": 231,
    "num_waiting_reqs": 2603,
    "num_used_tokens": 905134,
    "max_total_num_tokens": 1040384,
    "max_running_requests": 4096,
    "timestamp": 1774000000.5,
    "num_waiting_uncached_tokens": 9000,
    "total_prefill_uncached_tokens": 70000,
    "total_prefill_busy_us": 2500000,
    "decode_moments": [3, 30, 900, 310, 9100, 30],
}


@pytest.mark.parametrize("answer", [{"version": "0.5.23", "loads": [LOAD]}, [LOAD]])
def test_loads_are_read_for_every_dp_rank(answer: Any) -> None:
    assert parse_loads(json.dumps(answer)) == [
        Load(
            dp=1,
            max_running_requests=4096,
            timestamp=1774000000.5,
            waiting_uncached_tokens=9000,
            prefill_uncached_tokens=70000,
            prefill_busy_seconds=2.5,
            decode_moments=(3.0, 30.0, 900.0, 310.0, 9100.0, 30.0),
        )
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Internal Server Error",
        '{"detail":"Not Found"}',
        "null",
        "[]",
        "3",
        '"version"',
        "[" * 200_000,
        b"\xff\xfe\xfa",
        "1" * 9000,
    ],
    ids=lambda text: repr(text[:12]),
)
def test_text_that_is_not_an_answer_gives_neither_info_nor_loads(text: str | bytes) -> None:
    assert parse_server_info(text) is None
    assert parse_loads(text) == []


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from([*STATE_0_5_23, *LOAD, "x"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from([*ANSWER_0_5_23, *STATE_0_5_9, "loads"]), json_values))
def test_no_json_raises(answer: dict[str, Any]) -> None:
    text = json.dumps(answer)
    parse_server_info(text)
    parse_loads(text)
    parse_loads(json.dumps(list(answer.values())))
