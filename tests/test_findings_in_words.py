"""A finding in words, as the exporter's page lays it out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from conftest import config, watched_retractions
from scenes import SCENES, lived
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.diagnosis.evidence import past_of
from sglang_tuning_exporter.diagnosis.findings import Judgement
from sglang_tuning_exporter.diagnosis.wording import state_shares, verdict_text
from sglang_tuning_exporter.serve.pages.page import text_of
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.server import ServerState

if TYPE_CHECKING:
    from sglang_tuning_exporter.diagnosis.wording import VerdictText


def now(sidecar: Sidecar) -> VerdictText:
    with sidecar.view() as at:
        return text_of(sidecar, sidecar.judge(at), at)


def test_the_value_that_sglang_chose_stands_beside_the_flag_and_in_the_command_line(tmp_path: Path) -> None:
    with lived(SCENES["beyond_captured"](), tmp_path) as sidecar:
        text = now(sidecar)
    assert text.faults[0].changes[0].now == "now 256 (default)"
    assert text.command is not None
    assert text.command.changes[0]["before"] == "256 (default)"


def test_a_retraction_rate_is_healthy_up_to_the_same_figure_everywhere(tmp_path: Path) -> None:
    sidecar = watched_retractions(tmp_path)
    finding = next(each for each in now(sidecar).findings if each.row.id == "retracting_too_often")
    healthy = f"healthy: {sidecar.profile.healthy['retractions']}"
    assert f"retractions/min; {healthy}." in finding.seen


def test_an_empty_queue_is_mentioned_once() -> None:
    shares = {"queue": {"empty": 1.0}, "admission": {"no_queue": 1.0}, "activity": {"serving": 1.0}}
    assert state_shares(shares) == [("an empty queue", 1.0)]


def test_a_value_that_is_a_word_is_shown_as_it_is(tmp_path: Path) -> None:
    sidecar = watched_retractions(tmp_path)
    with sidecar.view() as at:
        judgement = sidecar.judge(at)
        advice = replace(judgement.findings[0].advice[0], current="fcfs", suggested="lpm", flag="--schedule-policy")
        finding = replace(judgement.findings[0], advice=(replace(advice, arg="schedule_policy"),))
        text = text_of(sidecar, replace(judgement, findings=(finding,)), at)
    (change,) = text.findings[0].changes
    assert (change.verb, change.typed) == ("Try", "--schedule-policy lpm")
    assert change.now.startswith("now fcfs")


def test_text_from_the_server_is_printable(tmp_path: Path) -> None:
    sidecar = watched_retractions(tmp_path)
    sidecar.state.facts.args["model_path"] = "a\x1b[2J\u202e"
    command = now(sidecar).command
    assert command is not None
    assert all(words.isprintable() for words, _ in command.pieces)


def test_a_verdict_without_a_finding_says_what_it_rests_on(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("[2025-11-20 10:00:00] The server is fired up and ready to roll!\n" * 2)
    text = now(Sidecar(config(log_file=(str(log),))))
    assert (text.verdict, "in the last 10 minutes" in text.remark) == ("not_enough_data", True)


@pytest.mark.parametrize(
    ("shares", "sentence", "remark"),
    [
        ({"running_limit": 29.0, "held_back": 20.0, "no_queue": 51.0}, "for different reasons at different times", "29 % --max-running"),
        ({"running_limit": 29.0, "held_back": 4.0, "no_queue": 67.0}, "for part of the time", "29 % --max-running"),
        ({"pool_full": 80.0, "no_queue": 20.0}, "most of the time a full KV cache and requests waiting", ""),
        ({"no_queue": 100.0}, "nothing in the tuning guide explains these figures", "no diagnosis explains it"),
    ],
)  # fmt: skip
def test_without_a_clear_bottleneck_the_reasons_to_wait_are_named(
    shares: dict[str, float], sentence: str, remark: str
) -> None:
    past = past_of(ServerState(PROFILES["online"], 0.0), 600.0)
    for state, seconds in shares.items():
        past.recent.seconds["admission", state] = seconds
    text = verdict_text(Judgement("no_clear_bottleneck", (), (), past), None, lambda _: None)
    assert text.sentence.startswith("No clear bottleneck: ")
    assert sentence in text.sentence
    assert remark in text.remark
