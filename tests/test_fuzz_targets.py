"""A short fuzzing run for every reader of outside input; `python -m fuzz` does the same for any length of time.

Each target's check in `fuzz/targets.py` states what must hold. An input that once failed lies in `data/fuzz/<target>/`
and is tried again here.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from fuzz.targets import FOUND, TARGETS, harmless
from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.serve.web_config import load

CASES = sorted(path for path in FOUND.rglob("*") if path.is_file() and path.name != "README.md")
BUDGET = {"report": 15, "exposition": 25, "state_file": 15}


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Silence the log, because each damaged state file writes a line."""
    caplog.set_level(logging.CRITICAL, logger="sglang_tuning_exporter")  # other tests of this process read the log


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_no_real_and_no_mutated_input_breaks_a_check(name: str) -> None:
    target = TARGETS[name]
    for text in target.seeds()[:: 1 + len(target.seeds()) // 100]:
        target.check(text)

    @settings(
        max_examples=BUDGET.get(name, 40),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(target.inputs())
    def one(text: bytes) -> None:
        target.check(text)

    one()


def test_inputs_that_failed_once_pass_now() -> None:
    assert {case.parent.name for case in CASES} <= TARGETS.keys() | {"web_config"}
    for case in CASES:
        if case.parent.name in TARGETS:
            TARGETS[case.parent.name].check(case.read_bytes())


@pytest.mark.parametrize("case", sorted((FOUND / "web_config").iterdir()), ids=lambda case: case.name)
def test_a_refused_web_configuration_prints_one_line_without_secrets(case: Path) -> None:
    with pytest.raises(UsageError) as refused:
        load(case, {})
    assert str(refused.value).isprintable()
    assert not re.search(r"-----BEGIN|\$2[aby]\$", str(refused.value))


def test_the_check_finds_a_leaked_secret() -> None:
    with pytest.raises(AssertionError, match="hf_token"):
        harmless({"a": [{"hf_token": "x"}]})
    with pytest.raises(AssertionError):
        harmless({"a": ["--api-key", "x"]})
