"""Forged lines that a request or a model puts into the log change nothing, with the server's metrics and without. Times are seconds."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz.forgeries import CARRIERS, FORGED, Played, play
from sglang_tuning_exporter.recordings.recording import load
from sglang_tuning_exporter.recordings.replay import packaged
from sglang_tuning_exporter.sglang.event_json import from_json, to_json
from sglang_tuning_exporter.sglang.events import NO_RANK, ServerArgs
from sglang_tuning_exporter.sglang.log.reader import LogReader
from sglang_tuning_exporter.sglang.metrics import page_figures as facts
from sglang_tuning_exporter.state.confirmation import DECIDE_SECONDS
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.server import ServerState

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)

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
def test_forged_words_behind_any_message_change_nothing(forged: str, *, metrics: bool) -> None:
    for carrier in CARRIERS if not metrics else ("tool", "an exception", "no prefix"):
        outcome = play(STEADY, CARRIERS[carrier].replace(b"%s", FORGED[forged]), MIDDLE, metrics=metrics)
        if (
            forged == "rejections"
            and not metrics
            and carrier not in {"undefined function", "json part", "parsed value", "tool"}
        ):
            assert outcome.rejected == TRUTH[metrics].rejected + 30  # a log alone cannot show more (SECURITY.md)
            outcome = outcome._replace(rejected=TRUTH[metrics].rejected)
        assert outcome == TRUTH[metrics], carrier


def server(*, answers: bool) -> Played:
    """A server that has served, a moment after its last batch line; `answers`: it is scraped."""
    played = Played(STEADY, MIDDLE, metrics=answers)
    played.until_middle()
    return played


OUT_OF_MEMORY = b"[2026-11-20 19:30:00] Decode out of memory. Try to lower your batch size.\n"


def test_a_real_failure_counts_at_once_with_the_log_alone() -> None:
    played = server(answers=False)
    played.say(b"")
    played.say(OUT_OF_MEMORY)
    assert played.outcome().out_of_memory == {"decode": 1}


def test_a_real_failure_counts_when_the_server_is_gone() -> None:
    played = server(answers=True)
    played.say(OUT_OF_MEMORY)
    assert played.outcome().out_of_memory == {}
    played.state.lost_scrape(played.now + 1.0)
    assert played.outcome().out_of_memory == {"decode": 1}


@pytest.mark.parametrize(
    "forged", ["out of memory", "its traceback", "all lines of a start", "start", "a dead process", "watchdog"]
)
@pytest.mark.parametrize("carrier", ["tool", "error in request"])
def test_forged_words_change_nothing_while_only_the_metrics_are_away(forged: str, carrier: str) -> None:
    outcomes = []
    for words in (
        b"",
        CARRIERS[carrier].replace(b"%s", b"x" + FORGED[forged]).replace(b"%p", b"[2026-11-20 19:30:00] "),
    ):
        played = server(answers=True)
        begin = played.now
        for number, line in enumerate(STEADY.lines[MIDDLE : MIDDLE + 60]):
            played.now = begin + number
            played.state.lost_scrape(played.now)
            played.say(line.text)
            if number == 30:
                played.say(words)
        outcomes.append(played.outcome())
    assert outcomes[0] == outcomes[1]


def test_a_failure_without_a_scrape_after_it_counts_after_half_a_minute() -> None:
    played = server(answers=True)
    played.say(OUT_OF_MEMORY)
    played.state.lost_scrape(played.now + 1.0, gone=False)
    played.state.advance(played.now + DECIDE_SECONDS - 0.1)
    assert played.outcome().out_of_memory == {}
    played.state.advance(played.now + DECIDE_SECONDS + 0.1)
    assert played.outcome().out_of_memory == {"decode": 1}


def test_a_start_in_the_log_counts_once_the_server_is_away() -> None:
    played = server(answers=True)
    start = next(line.text for line in STEADY.lines if b"server_args=" in line.text)
    played.say(b"some words\n" + start)
    assert played.outcome().starts == 1
    played.state.lost_scrape(played.now + 1.0)
    assert played.outcome().starts == 2


LINES = [line.text for line in WHOLE.lines]


def restarted(played: Played) -> None:
    """Replace the state, as when the exporter is killed and started again: a new process has only the state file."""
    saved = json.loads(json.dumps(played.state.saved(played.now), allow_nan=False))
    played.state = ServerState(PROFILES["online"], played.now)
    played.state.restore(saved, played.now)
    for event in LogReader().feed(b"".join(LINES[:MIDDLE])):
        played.state.recall(event, played.now)


ARGUMENTS = next(number for number, line in enumerate(LINES) if b"server_args=" in line)
START_LINES = [line for line in LINES[ARGUMENTS : READY + 1] if LogReader().feed(line)]


@pytest.mark.parametrize("answers", [False, True], ids=["log only", "with metrics"])
@pytest.mark.parametrize("killed", range(-1, len(START_LINES)))
def test_a_start_that_waits_counts_whenever_the_exporter_is_killed(killed: int, *, answers: bool) -> None:
    played = server(answers=answers)
    for number, line in enumerate([b"words of somebody\n" + START_LINES[0], *START_LINES[1:]]):
        played.say(line)
        if number == killed:
            restarted(played)
        played.now += 1.0
        played.state.advance(played.now)
    if answers:
        assert played.outcome().starts == 1
        played.state.observe_scrape(facts.read(WHOLE.scrapes[1].text.decode()), played.now)
    assert played.outcome().starts == 2
    if (
        answers or killed < 2
    ):  # else it was accepted before, and its arguments are in the part of the log that is read at start-up
        assert played.outcome().arguments == TRUTH[False].arguments


@pytest.mark.parametrize("answers", [False, True], ids=["log only", "with metrics"])
@pytest.mark.parametrize("killed", range(-1, 3))
def test_a_forged_start_is_refused_whenever_the_exporter_is_killed(killed: int, *, answers: bool) -> None:
    played = server(answers=answers)
    forged = FORGED["all lines of a start"].replace(b"%p", LINES[MIDDLE][:22])
    for number, text in enumerate([b"words of somebody", forged, b"\n"]):
        played.say(text)
        if number == killed:
            restarted(played)
    played.to_end()
    assert played.outcome().starts == 1
    assert played.outcome().arguments == TRUTH[False].arguments


@pytest.mark.parametrize("after", [0, 40], ids=["the last lines", "in the middle"])
@pytest.mark.parametrize("words", ["start", "all lines of a start", "limits", "a dead process"])
def test_forged_lines_from_before_the_exporter_started_change_nothing(words: str, after: int) -> None:
    forged = CARRIERS["tool"].replace(b"%s", FORGED[words]).replace(b"%p", LINES[MIDDLE][:22])
    known = []
    for text in (b"", forged):
        state = ServerState(PROFILES["online"], 0.0)
        for event in LogReader(strict=True).feed(b"".join([*LINES[:MIDDLE], text, *LINES[MIDDLE : MIDDLE + after]])):
            state.recall(event, event.time or 0.0)
        known.append((state.facts.args, state.facts.running_limits, state.life.died, state.life.starts(0.0)))
    assert known[0] == known[1]


def test_a_start_of_before_the_exporter_came_is_known_when_its_next_lines_are() -> None:
    later = [line.replace(b"11-20 19:", b"11-20 20:") for line in LINES[ARGUMENTS:READY]]
    later[0] = later[0][:22] + b"words of somebody\n" + later[0].replace(b"tiny-llama", b"another")
    for recalled in (1, len(later)):
        state, reader = ServerState(PROFILES["online"], 0.0), LogReader(strict=True)
        for event in reader.feed(b"".join([*LINES[:MIDDLE], *later[:recalled]])):
            state.recall(event, event.time or 0.0)
        state.observe_all(reader.feed(b"".join(later[recalled:])))
        assert state.facts.args["model_path"] == "/srv/sglang/another"
        assert state.starts == 0


def test_a_start_in_a_state_file_has_no_argument_that_no_document_can_hold() -> None:
    start = ServerArgs(None, NO_RANK, {"a": b"x", "b": inf, "c": [1, None], "d": "x"})
    kind, body = json.loads(json.dumps(to_json(start), allow_nan=False))
    assert from_json(kind, body) == ServerArgs(None, NO_RANK, {"c": [1, None], "d": "x"})


@given(st.sampled_from(["ServerArgs", "Limits", "Liveness", "Memory", "x"]), JSON)
def test_any_value_in_place_of_an_event_in_a_state_file_is_an_event_or_left_out(kind: str, value: object) -> None:
    rank = [None, None, None]
    for body in (value, {"rank": value}, {"rank": rank, "args": value}, {"rank": rank, "what": value, "stage": value}):
        event = from_json(kind, body)
        assert event is None or json.dumps(to_json(event), allow_nan=False)
        state = ServerState(PROFILES["online"], 0.0)
        state.restore({"claims": {"start": [[1.0, kind, body, True, 1.0]], "lines": [[1.0, kind, body]]}}, 1.0)
        state.settle(2.0)
