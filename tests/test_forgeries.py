"""Lines that a request or a model puts into the log move nothing: with the server's metrics beside it, and without. Times are seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fuzz.forgeries import CARRIERS, FORGED, Played, play
from sglang_tuning_exporter.claims import DECIDE_SECONDS
from sglang_tuning_exporter.recording import load
from sglang_tuning_exporter.replay import packaged

WHOLE = load(packaged("steady"))
READY = next(number for number, line in enumerate(WHOLE.lines) if b"fired up and ready" in line.text)
MIDDLE, END = READY + 120, READY + 260
STEADY = replace(
    WHOLE,
    lines=WHOLE.lines[:END],
    scrapes=tuple(scrape for scrape in WHOLE.scrapes if scrape.at <= WHOLE.lines[END - 1].at),
)
TRUTH = {metrics: play(STEADY, b"", 0, metrics=metrics) for metrics in (False, True)}


@pytest.mark.parametrize("metrics", [False, True], ids=["log only", "with metrics"])
@pytest.mark.parametrize("forged", FORGED)
def test_words_behind_any_message_move_nothing(forged: str, *, metrics: bool) -> None:
    for carrier in CARRIERS if not metrics else ("tool", "an exception", "no prefix"):
        told = play(STEADY, CARRIERS[carrier].replace(b"%s", FORGED[forged]), MIDDLE, metrics=metrics)
        assert told == TRUTH[metrics], carrier


def server(*, answers: bool) -> Played:
    """A server that has served, a moment after its last batch line; `answers`: it is scraped."""
    played = Played(STEADY, MIDDLE, metrics=answers)
    played.until_middle()
    return played


OUT_OF_MEMORY = b"[2026-11-20 19:30:00] Decode out of memory. Try to lower your batch size.\n"


def test_a_real_failure_is_told_at_once_where_only_the_log_tells() -> None:
    played = server(answers=False)
    played.say(b"")
    played.say(OUT_OF_MEMORY)
    assert played.told().out_of_memory == {"decode": 1}


def test_a_real_failure_is_told_when_the_server_is_gone() -> None:
    played = server(answers=True)
    played.say(OUT_OF_MEMORY)
    assert played.told().out_of_memory == {}
    played.state.lost_scrape(played.now + 1.0)
    assert played.told().out_of_memory == {"decode": 1}


def test_a_failure_of_which_no_scrape_says_anything_is_told_after_half_a_minute() -> None:
    played = server(answers=True)
    played.say(OUT_OF_MEMORY)
    played.state.lost_scrape(played.now + 1.0, gone=False)
    played.state.advance(played.now + DECIDE_SECONDS - 0.1)
    assert played.told().out_of_memory == {}
    played.state.advance(played.now + DECIDE_SECONDS + 0.1)
    assert played.told().out_of_memory == {"decode": 1}


def test_a_start_while_the_server_is_away_is_one() -> None:
    played = server(answers=True)
    start = next(line.text for line in STEADY.lines if b"server_args=" in line.text)
    played.say(b"some words\n" + start)
    assert played.told().starts == 1
    played.state.lost_scrape(played.now + 1.0)
    assert played.told().starts == 2
