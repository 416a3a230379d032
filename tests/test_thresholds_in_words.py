"""A threshold set by the operator appears in every sentence: on the page, in JSON, in the series of the advice, and in the report."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from conftest import config
from sglang_tuning_exporter.cli import main
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.diagnosis.table import DIAGNOSES
from sglang_tuning_exporter.diagnosis.variants import BY_CHANGE, BY_NAME
from sglang_tuning_exporter.serve import api as findings
from sglang_tuning_exporter.serve.metrics import collect
from sglang_tuning_exporter.serve.metrics.families import text_format
from sglang_tuning_exporter.serve.pages import page
from sglang_tuning_exporter.sglang.log.reader import LogReader
from sglang_tuning_exporter.state.profiles import DEFAULT, PROFILES
from sglang_tuning_exporter.state.server import ServerState
from test_condition_contract import Life

OWN = {"token_usage_target": 0.77, "reserve_lower_gb": 4.25, "reserve_upper_gb": 12.5, "reserve_least_gb": 0.85}
# What the default profile would say of them.
LITERALS = re.compile(
    r"(?:below|above|at|than) 0\.9\b(?!\d)|(?<![\d.])5 to 8 GB|less than 1 GB|(?:more|less) than (?:5|10) GB"
)
LIVES = (
    Life("held_back", queued=9, usage=0.4),
    Life("at_limit", queued=40, usage=0.4, running=64),
    Life("reserve_below", reserve=2.5),
    Life("reserve_above", reserve=16.0),
    Life("graph_memory", reserve=0.7),
)
SAYS = {"held_back": "below 0.77", "at_limit": "0.77 or more", "reserve_below": "4.2", "reserve_above": "4.25 to 8 GB", "graph_memory": "0.85 GB"}  # fmt: skip


def watched(life: Life) -> Sidecar:
    """An exporter that has just seen ten minutes of it."""
    sidecar = Sidecar(config(log_file=("server.log",), threshold=OWN))
    begin = time.monotonic() - 900.0
    state, reader = ServerState(sidecar.profile, begin), LogReader()
    for at, line in life.lines():
        if at <= 900.0:
            for event in reader.feed(line.encode()):
                state.observe(event, begin + at)
    assert sidecar.log is not None
    sidecar.state = sidecar.log._state = state
    return sidecar


def reported(life: Life, directory: Path, form: str) -> str:
    log, output = directory / "server.log", directory / f"report.{form}"
    log.write_text(life.text())
    own = [word for name, value in OWN.items() for word in ("--threshold", f"{name}={value}")]
    main(["report", str(log), "--format", form, "--output", str(output), *own])
    return output.read_text()


@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.name)
def test_no_sentence_has_the_default_instead_of_the_set_threshold(life: Life, tmp_path: Path) -> None:
    sidecar = watched(life)
    texts = {
        "page": page.render(sidecar),
        "json": findings.render(sidecar).decode(),
        "series": text_format(collect(sidecar)),
        **{form: reported(life, tmp_path, form) for form in ("text", "json", "html")},
    }
    for where, text in texts.items():
        plain = re.sub(r"<[^>]*>", "", text)
        assert LITERALS.findall(plain) == [], where
    assert SAYS[life.name] in re.sub(r"<[^>]*>", "", texts["page"])


def test_every_word_of_the_table_can_be_said_of_any_profile() -> None:
    for profile in PROFILES.values():
        for row in DIAGNOSES:
            assert "{" not in str(row.remedy.with_figures(profile.figures)) + row.sentence("1", profile.figures)
        for text in (*BY_CHANGE.values(), *BY_NAME.values()):
            assert "{" not in f"{text.why} {text.cost} {text.will_not_help_if}".format(**profile.figures)


def test_no_row_has_a_threshold_as_a_literal() -> None:
    said = [f"{row.seen} {row.guide} {row.remedy}" for row in DIAGNOSES]
    said += [str(text) for text in (*BY_CHANGE.values(), *BY_NAME.values())]
    assert [text for text in said if LITERALS.search(text.replace("{", "").replace("}", ""))] == []
    assert DEFAULT.figures["token_usage_target"] == "0.9"
