"""How arguments are spelled; the suggested command line: printed arguments and advice in, one line for a shell out;
what a release refuses.

Arguments come from `data/logs` and, as real servers printed them, from `data/server_args`. The parsers of installed
releases (0.4.9.post6, 0.5.9, 0.5.23) gave the same arguments back for such command lines; that is not repeated here.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from unittest.mock import ANY

import pytest

from sglang_tuning_exporter.core.facts import Facts
from sglang_tuning_exporter.sglang.flags import (
    checks,
    command_line,
    flag_of,
    have_effect,
    infer_version,
    parse_server_args,
    release_of,
    releases,
)
from sglang_tuning_exporter.sglang.server_info import parse_server_info

HERE = Path(__file__).parent
PRINTED = sorted(
    path
    for pattern in ("data/logs/*.log", "data/server_args/*.log")
    for path in HERE.glob(pattern)
    if "server_args=" in path.read_text(encoding="utf-8")
)


RELEASES = [path for path in PRINTED if path.parent.name == "logs"]


def printed(path: Path) -> dict[str, object]:
    text = path.read_text(encoding="utf-8")
    found = parse_server_args(text[text.index("server_args=") :].split("\n", 1)[0])
    assert found is not None
    return found[0]


def server(version: str, **args: object) -> Facts:
    return Facts(version=version, arguments={"model_path": "/models/x", **args})


def line(facts: Facts, **changes: object) -> str:
    command = command_line(facts.release, facts.arguments, changes)
    assert command is not None
    return " ".join(command[0])


def flags(command: str) -> str:
    """The command line after the model, which is always the same."""
    return command.removeprefix("python3 -m sglang.launch_server --model-path /models/x").strip()


@pytest.mark.parametrize("path", PRINTED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_recorded_server_gets_a_command_line_that_its_release_takes(path: Path) -> None:
    facts = Facts(printed(path))
    command = line(facts, schedule_conservativeness=1.7)
    assert facts.release is not None
    assert command.startswith("python3 -m sglang.launch_server --model-path ")
    assert "--schedule-conservativeness 1.7" in command
    known = {
        flag.flag for arg in (*printed(path), "schedule_conservativeness") if (flag := flag_of(arg, facts.release))
    }
    assert {word for word in shlex.split(command) if word.startswith("--")} <= known


@pytest.mark.parametrize(
    ("name", "typed"),
    [
        (
            "0.5.23-retract",
            (
                "--mem-fraction-static 0.1 --max-total-tokens 2048 --chunked-prefill-size 4096 "
                "--schedule-conservativeness 0.1 --device cpu --port 31000 --enable-metrics "
                "--attention-backend torch_native --sampling-backend pytorch --grammar-backend none"
            ),
        ),
        (
            "0.4.9.post6-big_queue",
            (
                "--port 31001 --mem-fraction-static 0.1 --max-running-requests 2 --max-total-tokens 16384 "
                "--chunked-prefill-size 4096 --device cpu --enable-metrics --attention-backend torch_native "
                "--sampling-backend pytorch --grammar-backend none --disable-cuda-graph"
            ),
        ),
    ],
)
def test_the_arguments_of_a_real_server_come_back(name: str, typed: str) -> None:
    facts = Facts(printed(HERE / "data" / "server_args" / f"{name}.log"))
    assert line(facts).partition(" --load-format dummy ")[2] == typed
    assert command_line(facts.release, facts.arguments, {}) == (ANY, (), ANY)


@pytest.mark.parametrize(
    ("version", "name", "spelled"),
    [
        ("0.5.13", "cuda_graph_max_bs_decode", "--cuda-graph-max-bs 512"),
        ("0.5.14", "cuda_graph_max_bs", "--cuda-graph-max-bs-decode 512"),
        ("0.5.23", "cuda_graph_max_bs", "--cuda-graph-max-bs-decode 512"),
    ],
)
def test_a_renamed_argument_has_the_name_of_the_running_release(version: str, name: str, spelled: str) -> None:
    assert flags(line(server(version), **{name: 512.0})) == spelled


def test_advice_that_the_release_has_no_flag_for_is_not_written() -> None:
    command = line(server("0.3.0"), cuda_graph_max_bs=256, schedule_conservativeness=1.3)
    assert flags(command) == "--schedule-conservativeness 1.3"


def test_dp_attention_is_one_flag_where_the_pair_is_deprecated() -> None:
    resolved = server("0.5.23", tp_size=8, dp_size=1, attn_dp_size=8, enable_dp_attention=True)
    assert flags(line(resolved)) == "--tp-size 8 --attn-dp-size 8"
    assert flags(line(server("0.5.23", tp_size=8), enable_dp_attention=True, dp_size=8)) == (
        "--tp-size 8 --attn-dp-size 8"
    )
    assert flags(line(server("0.5.9", tp_size=8), enable_dp_attention=True, dp_size=8)) == (
        "--tp-size 8 --enable-dp-attention --dp-size 8"
    )


def test_words_are_quoted_for_a_shell() -> None:
    command = line(
        server(
            "0.5.9",
            json_model_override_args='{"rope_theta": 1e4}',
            chat_template="/x/my template.jinja",
            log_level_http="-loud",
            bucket_time_to_first_token=[0.1, 0.5, 1.0],
            extra_metric_labels={"team": "a b"},
            lora_paths=[{"lora_name": "a", "lora_path": "/x/a", "pinned": False}],
        )
    )
    assert flags(command) == (
        "--json-model-override-args '{\"rope_theta\": 1e4}' --chat-template '/x/my template.jinja' "
        "--log-level-http=-loud --bucket-time-to-first-token 0.1 0.5 1 "
        '--extra-metric-labels \'{"team": "a b"}\' --lora-paths a=/x/a'
    )
    assert "/x/my template.jinja" in shlex.split(command)


EVIL_NAMES = (
    "x; reboot",
    "$(reboot)",
    "`reboot`",
    'x"; reboot; "',
    "x'y",
    "x y",
    "x\n",
    "x\x1b[31m",
    "-x",
    "é",
    "x" * 200,
)


@pytest.mark.parametrize("name", EVIL_NAMES)
@pytest.mark.parametrize("value", [1, True, "\n", ["a", "-b"]])
def test_a_name_that_no_argument_can_have_is_no_flag(name: str, value: object) -> None:
    arguments = {"model_path": "/models/x", "stream_interval": 7, name: value}
    info = parse_server_info(json.dumps({**arguments, "version": "0.5.23"}))
    start = parse_server_args(f"server_args={arguments!r}")
    assert info is not None
    assert start is not None
    for args in (info.args, start[0]):
        assert name not in args
        assert flags(line(Facts(version="0.5.23", arguments=args))) == "--stream-interval 7"


@pytest.mark.parametrize(
    "value", ["a'b", "$(reboot)", "`reboot`", "a;b", "a\\", '"', "~x", "*", "{a,b}", "#x", "!x", "-x"]
)
def test_a_shell_runs_the_one_program_with_the_words_as_they_are(value: str) -> None:
    args = {"chat_template": value, "json_model_override_args": f'{{"{value}": 1}}', "file_storage_path": value}
    command = line(server("0.5.23", **args, cuda_graph_bs_decode=[value, "x"]))
    echo = 'python3() { printf "%s\\0" "$@"; }; '
    ran = subprocess.run(["bash", "-c", echo + command], capture_output=True, text=True, check=True)
    words = ran.stdout.split("\0")
    assert ran.stderr == ""
    assert words[:-1] == [word.replace("$CUDA_GRAPH_BS_DECODE", "") for word in shlex.split(command)[1:]]
    assert {value, f"--chat-template={value}"} & set(words)
    assert value != "-x" or value not in words


def test_a_secret_becomes_a_placeholder() -> None:
    facts = server("0.5.23", api_key="<redacted>", ssl_certfile="/x/c.pem")
    command = line(facts)
    assert '--api-key "$API_KEY"' in command
    assert '--ssl-certfile /x/c.pem --ssl-keyfile "$SSL_KEYFILE"' in command
    assert command_line(facts.release, facts.arguments, {}) == (ANY, (), ("--admin-api-key",))


# What a release refuses


@pytest.mark.parametrize(
    ("release", "change", "is_taken"),
    [
        ("0.3.0", {"kv_cache_dtype": "fp8_e4m3"}, False),
        ("0.4.1.post7", {"kv_cache_dtype": "fp8_e4m3"}, True),
        ("0.5.7", {"load_balance_method": "total_requests"}, False),
        ("0.5.8", {"load_balance_method": "total_requests"}, True),
    ],
)
def test_a_value_that_the_releases_parser_does_not_know_has_no_effect(
    release: str, change: dict[str, object], *, is_taken: bool
) -> None:
    assert have_effect(release, change, {"dp_size": 2}) is is_taken


def test_attention_data_parallelism_needs_ranks_that_divide_the_gpus() -> None:
    tried = [("0.4.9.post6", 1), ("0.5.9", 1), ("0.4.9.post6", 8), ("0.5.9", 3)]
    changes = [(release, {"enable_dp_attention": True, "dp_size": dp}) for release, dp in tried]
    assert [have_effect(*change, {"tp_size": 8}) for change in changes] == [False, False, True, False]


def test_a_check_that_the_running_server_fails_already_is_ignored() -> None:
    odd: dict[str, object] = {"page_size": 64, "chunked_prefill_size": 100}
    assert have_effect("0.5.9", {"chunked_prefill_size": 200}, odd)


def test_every_check_is_about_arguments_that_its_releases_have() -> None:
    known = releases()
    for span, check in checks():
        assert flag_of(check["arg"], known[span[-1]]) or flag_of(check["arg"], known[span[0]]), check


# How arguments are spelled: what the releases' own parsers answered


@pytest.mark.parametrize(
    ("release", "arg", "flag"),
    [
        ("0.5.13", "cuda_graph_max_bs", "--cuda-graph-max-bs"),
        ("0.5.14", "cuda_graph_max_bs_decode", "--cuda-graph-max-bs-decode"),
        ("0.5.23", "fp8_gemm_runner_backend", "--fp8-gemm-backend"),
        ("0.5.23", "ep_join_mode", "--elastic-ep-join-mode"),
        ("0.3.0", "tp_size", "--tp-size"),
        ("0.5.23", "tp_size", "--tp-size"),
        ("0.5.23", "disable_cuda_graph", "--disable-cuda-graph"),
        ("0.5.23", "stat_loggers", ""),
    ],
)
def test_an_argument_is_spelled_as_its_release_spells_it(release: str, arg: str, flag: str) -> None:
    found = flag_of(arg, release)
    assert found is not None
    assert found.flag == flag


@pytest.mark.parametrize(
    ("release", "arg"),
    [
        ("0.5.20", "cuda_graph_max_bs"),
        ("0.5.14", "cuda_graph_max_bs"),
        ("0.5.13", "cuda_graph_max_bs_decode"),
        ("0.5.21", "attn_dp_size"),
        ("0.5.13", "enable_piecewise_cuda_graph"),
        ("0.5.23", "no_such_argument"),
    ],
)
def test_a_release_has_no_flag_for_an_argument_that_it_does_not_have_yet_or_any_more(release: str, arg: str) -> None:
    assert flag_of(arg, release) is None


@pytest.mark.parametrize("path", RELEASES, ids=lambda path: path.stem)
def test_the_names_of_the_arguments_identify_the_release_that_printed_them(path: Path) -> None:
    assert infer_version(printed(path)) == (path.stem, path.stem)


def test_a_handful_of_names_identifies_no_release() -> None:
    assert infer_version({"tp_size": 1, "dp_size": 1, "model_path": "m"}) is None
    assert infer_version({f"word_{n}": n for n in range(20)}) is None


def test_the_version_chooses_among_releases_that_fit_alike() -> None:
    args = dict.fromkeys(
        ("model_path", "tokenizer_path", "load_format", "trust_remote_code", "context_length", "dtype"), None
    )
    assert release_of("0.5.9", args) == "0.5.9"
    assert release_of("0.5.6.post2", args) == "0.5.5.post3"
    assert release_of(None, args) == releases()[-1]


def test_the_table_covers_every_argument_that_the_known_lines_print() -> None:
    unknown = {(path.stem, arg) for path in RELEASES for arg in printed(path) if flag_of(arg, path.stem) is None}
    assert not unknown
