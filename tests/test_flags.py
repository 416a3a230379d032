"""How arguments are spelled: a release and a name in, a flag out.

The expected spellings are what the releases' own parsers answered; the lines of arguments are those of `data/logs`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_tuning_exporter.sglang.args.flags import (
    flag_of,
    infer_version,
    release_of,
    releases,
)
from sglang_tuning_exporter.sglang.args.printed import parse_server_args

LOGS = Path(__file__).parent / "data" / "logs"
PRINTED = sorted(path.stem for path in LOGS.glob("*.log") if "server_args=" in path.read_text(encoding="utf-8"))


def parsed(text: str) -> dict[str, object] | None:
    found = parse_server_args(text)
    return None if found is None else found[0]


def printed(version: str) -> dict[str, object]:
    text = (LOGS / f"{version}.log").read_text(encoding="utf-8")
    args = parsed(text[text.index("server_args=") :].split("\n", 1)[0])
    assert args is not None
    return args


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


@pytest.mark.parametrize("version", PRINTED)
def test_the_names_of_the_arguments_identify_the_release_that_printed_them(version: str) -> None:
    assert infer_version(printed(version)) == (version, version)


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
    unknown = {(version, arg) for version in PRINTED for arg in printed(version) if flag_of(arg, version) is None}
    assert not unknown
