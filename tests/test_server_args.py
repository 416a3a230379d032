"""The printed arguments of a server, read back, and compared with Python's own parser where that can read them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tuning_exporter.sglang.args.printed import parse_server_args

LOGS = Path(__file__).parent / "data" / "logs"
SECRETS = {"api_key", "admin_api_key", "ssl_keyfile", "ssl_keyfile_password", "hf_token"} | {
    "watermark_config",
    "watermark_key",
    "watermark_key_b",
}


def parsed(text: str) -> dict[str, object] | None:
    found = parse_server_args(text)
    return None if found is None else found.args


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


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    for head in ("", "server_args=ServerArgs(", "server_args={'a': ", "server_args={"):
        parsed(head + text)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text("abc '\"\\,=:(){}[]<>\n", max_size=12),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text("abcxyz_", min_size=1, max_size=6), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["tp_size", "port", "model", "extra", "bs"]), VALUES, min_size=1))
def test_any_printed_dict_is_read_as_python_reads_it(args: dict[str, object]) -> None:
    assert parsed(f"server_args={args!r}") == args
