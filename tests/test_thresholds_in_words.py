"""A threshold set by the operator appears in every sentence: on the page, in JSON, in the series, in the runbooks, and
in the report.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conftest import config
from scenes import Moment, Story, Timed
from sglang_tuning_exporter.cli import main
from sglang_tuning_exporter.core import runbooks
from sglang_tuning_exporter.core.diagnoses import ALL
from sglang_tuning_exporter.serve import pages as page
from sglang_tuning_exporter.serve.metrics import collect
from sglang_tuning_exporter.serve.metrics.families import text_format
from test_core_course import BEGIN, load, start

OWN = {"token_usage_target": 0.77, "reserve_lower_gb": 4.25, "reserve_upper_gb": 12.5, "reserve_least_gb": 0.85}
# What the default profile would say of them.
LITERALS = re.compile(
    r"(?:below|above|at|than) 0\.9\b(?!\d)|(?<![\d.])5 to 8 GB|less than 1 GB|(?:more|less) than (?:5|10) GB"
)
LIVES = {
    "held_back": [*start(), *load(20, 600, queue=9, usage=0.4)],
    "at_limit": [*start(limit=60), *load(20, 600, queue=40, usage=0.4, running=60)],
    "reserve_below": [*start(left=2.5), *load(20, 600)],
    "reserve_above": [*start(left=16.0), *load(20, 600)],
    "graph_memory": [*start(left=0.7), *load(20, 600)],
}
SAYS = {
    "held_back": "0.77 or more",
    "at_limit": "0.77 or more",
    "reserve_below": "4.25 to 8 GB",
    "reserve_above": "4.25 to 8 GB",
    "graph_memory": "0.85 GB",
}


def watched(lines: list[str], directory: Path) -> Timed:
    """An exporter that has just seen them."""
    log = directory / "server.log"
    log.touch()
    exporter = Timed(config(log_file=(str(log),), threshold=OWN), BEGIN)
    for place in range(0, len(lines), 10):
        text = "".join(f"{line}\n" for line in lines[place : place + 10])
        moment = Moment(BEGIN + place, text.encode(), None)
        exporter.pass_on(Story((), scraped=False), moment, log)
    return exporter


def reported(lines: list[str], directory: Path, form: str) -> str:
    log, output = directory / "past.log", directory / f"report.{form}"
    log.write_text("".join(f"{line}\n" for line in lines))
    own = [word for name, value in OWN.items() for word in ("--threshold", f"{name}={value}")]
    main(["report", str(log), "--format", form, "--output", str(output), *own])
    return output.read_text()


@pytest.mark.parametrize("life", LIVES)
def test_no_sentence_has_the_default_instead_of_the_set_threshold(life: str, tmp_path: Path) -> None:
    exporter = watched(LIVES[life], tmp_path)
    texts = {
        "page": page.render(exporter),
        "json": page.as_json(exporter).decode(),
        "series": text_format(collect(exporter)),
        **{alert: runbooks.page(alert, exporter.profile) for alert in runbooks.BY_ALERT},
        **{form: reported(LIVES[life], tmp_path, form) for form in ("text", "json", "html")},
    }
    exporter.stop()
    for where, text in texts.items():
        plain = re.sub(r"<[^>]*>", "", text)
        assert LITERALS.findall(plain) == [], where
    assert SAYS[life] in re.sub(r"<[^>]*>", "", texts["page"])


def test_no_row_has_a_threshold_as_a_literal() -> None:
    said = [f"{row.seen} {row.guide} {row.remedy} {row.when.name}" for row in ALL]
    assert [text for text in said if LITERALS.search(text.replace("{", "").replace("}", ""))] == []
