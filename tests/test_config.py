"""A setting comes from a flag, a variable, the file or its default; a wrong one is a line that says what is right."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from sglang_tuning_exporter.config import OPTIONS, Config, add_arguments, resolve, unknown_variables
from sglang_tuning_exporter.config.values import UsageError

SOURCES = ("flag", "environment", "file", "default")


def resolved(*flags: str, file: Path | None = None, **environment: str) -> Config:
    parser = argparse.ArgumentParser()
    add_arguments(parser, OPTIONS)
    parser.add_argument("--config")
    named = [] if file is None else ["--config", str(file)]
    return resolve(vars(parser.parse_args([*flags, *named])), environment)


def written(directory: Path, text: str) -> Path:
    path = directory / "config.yml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(*flags: str, file: Path | None = None, **environment: str) -> str:
    with pytest.raises(UsageError) as caught:
        resolved(*flags, file=file, **environment)
    return str(caught.value)


# name: (as written in flag, variable and file, as it comes out), one pair for each source
VALUES: dict[str, tuple[tuple[str, Any], tuple[str, Any], tuple[str, Any]]] = {
    "sglang_url": (
        ("http://flag:1", "http://flag:1"),
        ("http://var:2/", "http://var:2"),
        ("https://file", "https://file"),
    ),
    "log_file": (("flag.log", ("flag.log",)), ("a.log,b.log", ("a.log", "b.log")), ("[x, y]", ("x", "y"))),
    "profile": (("offline", "offline"), ("long_context", "long_context"), ("multi_turn", "multi_turn")),
    "listen_address": (
        ("flag:1", "flag:1"),
        ("[::1]:2", "[::1]:2"),
        ("':3'", "0.0.0.0:3"),
    ),
    "scrape_timeout": (("1", 1.0), ("2.5", 2.5), ("3", 3.0)),
    "state_file": (("flag", Path("flag")), ("variable", Path("variable")), ("stored", Path("stored"))),
    "metrics_path": (("/flag", "/flag"), ("/var", "/var"), ("/file", "/file")),
    "passthrough": (("", False), ("true", True), ("false", False)),
    "lean_passthrough": (("", True), ("false", False), ("true", True)),
    "threshold": (
        ("queue_upper=500", {"queue_upper": 500.0}),
        ("queue_upper=1,frequent_share=0.4", {"queue_upper": 1.0, "frequent_share": 0.4}),
        ("{queue_upper: 3}", {"queue_upper": 3.0}),
    ),
    "from_start": (("", True), ("no", False), ("yes", True)),
    "accept": (
        ("queue_too_long=a, b", {"queue_too_long": "a, b"}),
        ("crashed=a; log_silent=b", {"crashed": "a", "log_silent": "b"}),
        ("{crashed: c}", {"crashed": "c"}),
    ),
    "wait": (
        ("crashed=90s", {"crashed": 90.0}),
        ("crashed=1m,log_silent=2m", {"crashed": 60.0, "log_silent": 120.0}),
        ("{crashed: 1h}", {"crashed": 3600.0}),
    ),
    "external_url": (("http://f:1", "http://f:1"), ("https://v/x/", "https://v/x"), ("http://s", "http://s")),
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("winner", SOURCES)
def test_flag_beats_environment_beats_file_beats_default(name: str, winner: str, tmp_path: Path) -> None:
    option = next(option for option in OPTIONS if option.name == name)
    (flag, from_flag), (variable, from_variable), (stored, from_file) = VALUES[name]
    rank = SOURCES.index(winner)
    flags = ([option.flag] if option.is_switch else [option.flag, flag]) if rank == 0 else []
    variables = {option.variable: variable} if rank <= 1 else {}
    watched = "log_file: other.log" if name == "sglang_url" else "sglang_url: http://other"
    file = written(tmp_path, watched + (f"\n{name}: {stored}\n" if rank <= 2 else "\n"))
    config = resolved(*flags, file=file, **variables)
    assert getattr(config, name) == (from_flag, from_variable, from_file, option.default)[rank]


def test_the_key_may_stand_in_the_environment_and_a_file_of_it_wins(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("from-file\n")
    assert resolved("--log-file", "x", SGLANG_TUNING_API_KEY="from-variable").api_key == "from-variable"
    given = resolved("--log-file", "x", "--api-key-file", str(tmp_path / "key"), SGLANG_TUNING_API_KEY="from-variable")
    assert given.api_key == "from-file"
    assert "from-file" not in repr(given)
    with pytest.raises(UsageError, match="SGLANG_TUNING_API_KEY=…: give") as error:
        resolved("--log-file", "x", SGLANG_TUNING_API_KEY="two\nlines")
    assert "two" not in str(error.value)


def test_every_option_is_among_the_tested_ones() -> None:
    assert set(VALUES) | {"api_key_file", "web_config"} == {option.name for option in OPTIONS}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sglang-url", "localhost:30000"], ["--sglang-url=localhost:30000", "http://127.0.0.1:30000"]),
        (["--sglang-url", "http://[::1"], ["--sglang-url=http://[::1", "http://127.0.0.1:30000"]),
        (["--sglang-url", "http://h:99999"], ["--sglang-url=http://h:99999", "http://127.0.0.1:30000"]),
        (["--log-file", ""], ["--log-file=", "give a path"]),
        (["--log-file", "-", "--log-file", "-"], ["--log-file=['-', '-']", "only once"]),
        (["--external-url", "gpu1"], ["--external-url=gpu1", "give an address"]),
        (["--profile", "fast"], ["--profile=fast", "online, offline, long_context, multi_turn"]),
        (["--listen-address", "9741"], ["--listen-address=9741", "0.0.0.0:9741"]),
        (["--listen-address", "host:70000"], ["--listen-address=host:70000", "65535"]),
        (["--scrape-timeout", "soon"], ["--scrape-timeout=soon", "seconds above 0"]),
        (["--metrics-path", "metrics"], ["--metrics-path=metrics", "starts with /"]),
        (["--api-key-file", "no/such"], ["--api-key-file=no/such", "give a file"]),
        (["--config", "no/such.yml"], ["--config=no/such.yml", "No such file"]),
    ],
)
def test_a_wrong_flag_is_answered_with_key_value_and_remedy(arguments: list[str], words: list[str]) -> None:
    said = refusal(*arguments)
    assert all(word in said for word in words), said


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sglang_url", "[http://a]"),
        ("log_file", "{a: b}"),
        ("log_file", "[a, '']"),
        ("profile", "[offline]"),
        ("profile", "2025-11-20"),
        ("listen_address", "9741"),
        ("listen_address", "{host: x}"),
        ("scrape_timeout", "true"),
        ("scrape_timeout", ".nan"),
        ("scrape_timeout", "[1]"),
        ("metrics_path", "[/m]"),
        ("passthrough", "[]"),
        ("from_start", "2"),
        ("api_key_file", "[x]"),
    ],
)
def test_a_value_of_the_wrong_shape_in_the_file_is_refused_by_key(key: str, value: str, tmp_path: Path) -> None:
    said = refusal(file=written(tmp_path, f"{key}: {value}\n"))
    assert f": {key}=" in said
    assert "give " in said


def test_a_file_of_aliases_that_unfold_without_end_is_refused_at_once(tmp_path: Path) -> None:
    lists = ["&a0 [x, x, x, x, x, x, x, x, x, x]"]
    lists += [f"&a{depth} [{', '.join([f'*a{depth - 1}'] * 10)}]" for depth in range(1, 12)]
    (tmp_path / "config.yml").write_text(f"profile: [{', '.join(lists)}]\n")
    assert refusal(file=tmp_path / "config.yml").endswith("*alias: not taken; write the value out")


def test_an_unknown_key_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    said = refusal(file=written(tmp_path, "log_files: x\n"))
    assert "unknown key log_files" in said
    assert "log_file" in said.split("known are")[1]


@pytest.mark.parametrize(
    "url",
    ["http://u:hunter2@h:1", "http://:hunter2@h", "http://u:hun/ter2@h", "http://u:hunter2@[::1", "ftp://u:hunter2@h"],
)
def test_a_password_in_an_address_is_refused_without_repeating_it(url: str) -> None:
    said = refusal("--sglang-url", url)
    assert "--api-key-file" in said
    assert "hun" not in said


@pytest.mark.parametrize("secret", [b"", b"\n \n", b"two\nlines", b"\xff\xfe", "schlüssel".encode()])
def test_a_key_that_no_header_can_carry_is_refused_without_repeating_it(secret: bytes, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(secret)
    said = refusal("--log-file", "x", "--api-key-file", str(tmp_path / "key"))
    assert said.startswith("--api-key-file=")
    assert "lines" not in said


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ("queue_top=5", "--threshold=queue_top=5: known thresholds are queue_lower, "),
        ("queue_upper=many", "--threshold=queue_upper=many: give a number"),
        ("queue_upper", "--threshold=queue_upper=: give a number"),
        ("frequent_share=1.5", "--threshold=frequent_share=1.5: give a share above 0 and below 1"),
        ("queue_upper=-1", "--threshold=queue_upper=-1: give a number from 0 up"),
        ("queue_upper=nan", "--threshold=queue_upper=nan: give a number from 0 up"),
        ("reserve_lower_gb=12", "--threshold=reserve_lower_gb=12: give a number below reserve_upper_gb=10"),
    ],
)
def test_a_wrong_threshold_is_refused_by_name(given: str, remedy: str) -> None:
    assert refusal("--sglang-url", "http://a", "--threshold", given).startswith(remedy)


def test_contradicting_thresholds_are_refused_by_the_key_of_their_source(tmp_path: Path) -> None:
    problem = "reserve_lower_gb=12: give a number below reserve_upper_gb=10"
    file = written(tmp_path, "log_file: x\nthreshold: {reserve_lower_gb: 12}\n")
    assert refusal(file=file).startswith(f"{file}: threshold={problem}")
    said = refusal("--log-file", "x", SGLANG_TUNING_THRESHOLD="reserve_lower_gb=12")
    assert said.startswith(f"SGLANG_TUNING_THRESHOLD={problem}")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (("--threshold", "queue_uper=1"), "queue_upper"),
        (("--profile", "ofline"), "offline"),
    ],
)
def test_a_mistyped_name_is_answered_with_the_nearest_one(given: tuple[str, str], meant: str) -> None:
    assert refusal("--log-file", "x", *given).endswith(f"; did you mean {meant}?")


def test_a_variable_with_our_prefix_that_nothing_reads_is_named_with_the_nearest_one() -> None:
    (said,) = unknown_variables({"SGLANG_TUNING_PROFLE": "offline", "SGLANG_TUNING_PROFILE": "x", "HOME": "/"})
    assert said == "SGLANG_TUNING_PROFLE: unknown variable, ignored; did you mean SGLANG_TUNING_PROFILE?"
