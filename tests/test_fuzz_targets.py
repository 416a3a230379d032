"""A short fuzzing run for every reader of outside input; `python -m fuzz` does the same for any length of time.

Each target's check in `fuzz/targets.py` states what must hold. An input that once failed lies in `data/fuzz/<target>/` and is tried again here.
"""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from fuzz import mutated
from fuzz.mutated import spoiled
from fuzz.targets import FOUND, TARGETS, Target, harmless

ROOT = Path(__file__).parents[1]
CASES = sorted(path for path in FOUND.rglob("*") if path.is_file() and path.name != "README.md")
BUDGET = {"report": 15, "exposition": 25}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """Silence the log, because each damaged state file writes a line."""
    logging.getLogger("sglang_tuning_exporter").setLevel(logging.CRITICAL)


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_every_real_input_is_read(name: str) -> None:
    for text in TARGETS[name].seeds():
        TARGETS[name].check(text)


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_no_mutated_input_breaks_a_check(name: str) -> None:
    target = TARGETS[name]
    seeds = [seed[: target.longest] for seed in target.seeds()]

    @settings(
        max_examples=BUDGET.get(name, 40),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(spoiled(seeds, target.words))
    def tried(text: bytes) -> None:
        target.check(text)

    tried()


def test_inputs_that_failed_once_pass_now() -> None:
    assert {case.parent.name for case in CASES} <= TARGETS.keys()
    for case in CASES:
        TARGETS[case.parent.name].check(case.read_bytes())


def test_the_check_finds_a_leaked_secret() -> None:
    with pytest.raises(AssertionError, match="hf_token"):
        harmless({"a": [{"hf_token": "x"}]})
    with pytest.raises(AssertionError):
        harmless({"a": ["--api-key", "x"]})


def test_without_atheris_every_target_is_run_by_hypothesis_and_the_first_line_shows_it() -> None:
    script = (
        "import runpy, sys; sys.modules['atheris'] = None; "
        f"sys.argv = ['fuzz', '--seconds', '0', '--lines', '2000', '--seed', '5', '--target', 'spoiled', {', '.join(map(repr, TARGETS))}]; "
        "runpy.run_module('fuzz', run_name='__main__')"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=False, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(
        "seed 5, targets by Hypothesis, not led by coverage: atheris is not installed for Python 3."
    )
    assert re.findall(
        r"^(\w+): [1-9]\d* inputs in \d+ s by Hypothesis, nothing found", ran.stdout, re.MULTILINE
    ) == list(TARGETS)


def test_what_hypothesis_finds_is_kept_and_ends_with_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(text: bytes) -> None:
        assert b"bad" not in text

    target = Target("spoilt", check, lambda: [b"good"], (b"bad",))
    assert mutated.run(target, 60, 3, tmp_path) == 1
    assert b"bad" in (tmp_path / "found").read_bytes()
    assert "spoilt: found something with seed 3" in capsys.readouterr().err


def test_a_short_run_repeats_its_seed_and_says_what_it_did() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "fuzz", "--target", "spoiled", "--lines", "4000", "--seed", "7"],
        capture_output=True, text=True, timeout=120, check=False, cwd=ROOT,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert re.match(r"seed 7, targets .*\n4,000 spoiled lines, ", ran.stdout)
