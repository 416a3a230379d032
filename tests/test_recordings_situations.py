"""Recordings of situations on a real server: what the exporter says of each, from each of its sources, is the truth.

The truth is in `closed_loop/situations.py`. The watcher itself runs, with its clock moved by hand (`closed_loop/rejudge.py`).
`OPEN` names what does not hold yet; who mends it takes its line out.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from closed_loop.situations import BY_NAME
from closed_loop.verdicts import SOURCES, Seen, judged, seen
from sglang_tuning_exporter.recording import load

RECORDINGS = Path(__file__).parent / "recordings"
EXPORTER = Path(__file__).parent.parent / "exporter"
NAMES = sorted(path.name for path in RECORDINGS.iterdir() if path.name in BY_NAME)

# (situation, way of seeing) → what is still wrong: the headline, an advice, or a cure that is missing.
HEADLINE: dict[tuple[str, str], str] = {}
ADVICE: dict[tuple[str, str], str] = {}
CURE: dict[str, str] = {}


def cases(known: dict[tuple[str, str], str]) -> list[Any]:
    return [
        pytest.param(
            name,
            source,
            id=f"{name}-{source}",
            marks=[pytest.mark.xfail(strict=True, reason=known[name, source])] if (name, source) in known else [],
        )
        for name in NAMES
        for source in SOURCES
    ]


@cache
def said_of(name: str) -> dict[str, Seen]:
    situation = BY_NAME[name]
    return seen(situation, judged(RECORDINGS / name, EXPORTER, situation.profile))


@pytest.mark.parametrize("name", NAMES)
def test_a_recording_of_a_situation_can_be_replayed(name: str) -> None:
    recorded = load(RECORDINGS / name)
    assert recorded.length_seconds > 20
    assert recorded.sglang_version == BY_NAME[name].version


@pytest.mark.parametrize(("name", "source"), cases(HEADLINE))
def test_the_headline_is_true_at_the_end_of_the_load_and_never_false_before(name: str, source: str) -> None:
    assert said_of(name)[source].false_headlines == ()


@pytest.mark.parametrize(("name", "source"), cases(ADVICE))
def test_nothing_is_advised_that_would_do_harm(name: str, source: str) -> None:
    assert said_of(name)[source].harmful == ()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.xfail(strict=True, reason=CURE[name])] if name in CURE else [])
        for name in NAMES
        if BY_NAME[name].cures
    ],
)
def test_the_flag_that_cures_is_named(name: str) -> None:
    assert said_of(name)["both"].missed == ()


def test_what_is_known_to_be_open_is_about_recordings_that_are_here() -> None:
    assert {name for name, _ in (*HEADLINE, *ADVICE)} | set(CURE) <= set(NAMES)
