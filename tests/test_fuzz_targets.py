"""Hostile input for everything that comes from the world, a little of it at every run; `python -m fuzz` does the same for as long as it is let.

What must hold is said by each target's check in `fuzz/targets.py`. An input that once broke one lies in `data/fuzz/<target>/` and is tried again here.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.targets import FOUND, TARGETS, harmless

ROOT = Path(__file__).parents[1]
CASES = sorted(path for path in FOUND.rglob("*") if path.is_file() and path.name != "README.md")
BUDGET = {"report": 15, "exposition": 25}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """A damaged state file is said aloud: not ten thousand times."""
    logging.getLogger("sglang_tuning_exporter").setLevel(logging.CRITICAL)


@st.composite
def spoiled(draw: st.DrawFn, seeds: list[bytes], words: tuple[bytes, ...]) -> bytes:
    """A real input that was cut, mended with pieces of another, with words that mean something and with words that mean nothing."""
    text = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(text)))
        upto = at + draw(st.integers(0, 30))
        piece = draw(st.sampled_from(words) | st.binary(max_size=6) | st.just(draw(st.sampled_from(seeds))[-200:]))
        text = text[:at] + piece + text[upto:]
    return text[draw(st.sampled_from([0, 0, 0, 1, len(text) // 2])) :]


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_every_real_input_is_read(name: str) -> None:
    for text in TARGETS[name].seeds():
        TARGETS[name].check(text)


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_no_spoiled_input_does_what_must_not_happen(name: str) -> None:
    target = TARGETS[name]
    seeds = [seed[: target.longest] for seed in target.seeds()]

    @settings(
        max_examples=BUDGET.get(name, 40),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(spoiled(seeds, target.words))
    def tried(text: bytes) -> None:
        target.check(text)

    tried()


def test_what_was_found_once_stays_mended() -> None:
    assert {case.parent.name for case in CASES} <= TARGETS.keys()
    for case in CASES:
        TARGETS[case.parent.name].check(case.read_bytes())


def test_a_check_sees_a_secret() -> None:
    with pytest.raises(AssertionError, match="hf_token"):
        harmless({"a": [{"hf_token": "x"}]})
    with pytest.raises(AssertionError):
        harmless({"a": ["--api-key", "x"]})


def test_without_atheris_what_it_leads_is_left_out_and_named() -> None:
    script = (
        "import runpy, sys; sys.modules['atheris'] = None; sys.argv = ['fuzz', '--target', 'config', 'lines']; "
        "runpy.run_module('fuzz', run_name='__main__')"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stderr
    assert "atheris is not installed for Python 3." in ran.stderr
    assert ran.stderr.rstrip().endswith("left out config, lines")


def test_a_short_run_repeats_its_seed_and_says_what_it_did() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "fuzz", "--target", "spoiled", "--lines", "4000", "--seed", "7"],
        capture_output=True, text=True, timeout=120, check=False, cwd=ROOT,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("seed 7\n4,000 spoiled lines, ")
