"""What a server says of itself: printed arguments, compared with Python's own parser where that can read them, and
`/server_info`.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tuning_exporter.sglang.clean import redacted
from sglang_tuning_exporter.sglang.flags import is_word, parse_server_args
from sglang_tuning_exporter.sglang.metrics import RankFigures
from sglang_tuning_exporter.sglang.server_info import parse_loads, parse_server_info

LOGS = Path(__file__).parent / "data" / "logs"
SECRETS = {"api_key", "admin_api_key", "ssl_keyfile", "ssl_keyfile_password", "hf_token"} | {
    "watermark_config",
    "watermark_key",
    "watermark_key_b",
}


def parsed(text: str) -> dict[str, object] | None:
    found = parse_server_args(text)
    return None if found is None else found[0]


def printed(version: str) -> str:
    [line] = [text for text in (LOGS / f"{version}.log").read_text().splitlines() if "] server_args=" in text]
    return line.split("] ", 1)[1]


def judged(text: str) -> dict[str, object]:
    """The printed arguments as Python's parser reads them."""
    tree = ast.parse(text.split("=", 1)[1], mode="eval").body
    if isinstance(tree, ast.Call):
        pairs = {keyword.arg or "": keyword.value for keyword in tree.keywords}
        return {name: ast.literal_eval(value) for name, value in pairs.items() if not isinstance(value, ast.Call)}
    value = ast.literal_eval(tree)
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize("version", sorted(path.stem for path in LOGS.glob("0.*.log")))
def test_every_argument_of_every_release_has_the_value_python_reads(version: str) -> None:
    args = parsed(printed(version))
    assert args is not None
    expected = {name: value for name, value in judged(printed(version)).items() if name not in SECRETS}
    assert {name: args[name] for name in expected} == expected
    assert not SECRETS & args.keys()


@pytest.mark.parametrize(
    "name",
    [
        "api_key",
        "admin_api_key",
        "hf_token",
        "auth_token",
        "token",
        "ssl_keyfile",
        "ssl_keyfile_password",
        "client_secret",
        "aws_credentials",
        "PASSWORD",
        "access_token",
    ],
)
def test_a_secret_is_dropped_in_either_form(name: str) -> None:
    for text in (
        f"server_args=ServerArgs({name}='sk-live, (1)', port=1)",
        f"server_args={{'{name}': 'sk-live, (1)', 'port': 1}}",
        f"server_args={{'port': 1, 'nested': {{'{name}': 'sk-live'}}}}",
        f"server_args={{'port': 1, 'deep': [{{'{name}': 'sk-live'}}]}}",
        f"server_args={{'{name}': 'sk-live cut off",
    ):
        assert "sk-live" not in repr(parsed(text))


@pytest.mark.parametrize(
    "value",
    [
        "['--api-key', 'sk-live']",
        '\'{"secret_access_key": "sk-live"}\'',
        "'redis://user:sk-live@cache:6379'",
        "<object with password=sk-live>",
        "'Bearer sk-live'",
    ],
)
def test_a_secret_inside_another_value_is_redacted(value: str) -> None:
    args = parsed(f"server_args={{'extra': {value}, 'port': 1}}")
    assert args == {"extra": "<redacted>", "port": 1}


@pytest.mark.parametrize(
    "value",
    [
        "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=abc123+/==;EndpointSuffix=core.windows.net",
        "https://hooks.slack.com/services/T00/B00/XXXX",
        "x-honeycomb-team=abcdef123456",
        "x-honeycomb-team: abcdef123456",
        "session=abcdef; path=/",
        '{"connection": "abcdef123456"}',
        '{"headers": {"x-acme-team": "abcdef123456"}}',
    ],
)
def test_what_stands_inside_a_value_is_shown_only_if_it_is_known(value: str) -> None:
    assert parsed(f"server_args={{'extra': {value!r}, 'port': 1}}") == {"extra": "<redacted>", "port": 1}
    assert parsed(f"server_args={{'extra': [{value!r}]}}") == {"extra": ["<redacted>"]}
    inside = parse_server_info(
        json.dumps({"version": "1", "kv_events_config": {"a": {"b": value}}, "internal_states": []})
    )
    assert inside is not None
    assert inside.args == {"kv_events_config": {"a": {"b": "<redacted>"}}}


@pytest.mark.parametrize(
    "value",
    [
        "meta-llama/Llama-3.1-8B",
        "/models/Llama-3.1-8B",
        "s3://bucket/models/llama",
        "tcp://*:5557",
        "http://collector:4317",
        "10.0.0.1:5000",
        "adapter=/loras/a",
        '{"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}',
        '{"publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv-events"}',
        {"decode": {"backend": "full", "max_bs": 32, "bs": [1, 2]}},
        [1, 2, 4],
        ["a", "b"],
    ],
)
def test_figures_paths_addresses_and_values_of_flags_are_shown(value: object) -> None:
    assert parsed(f"server_args={{'extra': {value!r}}}") == {"extra": value}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text("abc '\"\\,=:(){}[]<>\n", max_size=12),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text("abcxyz_", min_size=1, max_size=6), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["tp_size", "port", "model", "extra", "bs"]), VALUES, min_size=1))
def test_any_printed_dict_is_read_as_python_reads_it(args: dict[str, object]) -> None:
    assert parsed(f"server_args={args!r}") == redacted(args, is_word)


# Server info


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
    info = parse_server_info(json.dumps({"dp_size": 2, **args, "internal_states": [args]}))
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
    "decode_moments": [3, 30, 900, 310, 9100, 30],
}


@pytest.mark.parametrize("answer", [{"version": "0.5.23", "loads": [LOAD]}, [LOAD]])
def test_loads_are_read_for_every_dp_rank(answer: Any) -> None:
    assert parse_loads(json.dumps(answer)) == [RankFigures(dp=1, running_limit=4096)]


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
