"""`/api/v1/findings`: what limits the server now, as JSON, with the keys of its schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import requests

from conftest import config, watched_retractions, web
from sglang_tuning_exporter.collect.sidecar import Sidecar

if TYPE_CHECKING:
    from collections.abc import Iterator

SCHEMA = json.loads((Path(__file__).parents[1] / "docs" / "report.schema.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The exporter after the retract recording, whose server has ended."""
    sidecar = watched_retractions(tmp_path_factory.mktemp("findings"))
    with web(sidecar) as url:
        yield url


def findings(address: str) -> dict[str, Any]:
    answer = requests.get(address + "/api/v1/findings", timeout=10)
    assert answer.headers["Content-Type"] == "application/json"
    found: dict[str, Any] = json.loads(answer.text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    return found


def test_it_has_the_keys_of_its_schema(address: str) -> None:
    assert set(findings(address)) == set(SCHEMA["required"]) == set(SCHEMA["properties"])


def test_the_whole_command_line_has_the_advice_applied_and_nothing_else_changed(address: str) -> None:
    command = findings(address)["command"]
    assert "--schedule-conservativeness 1.3" in command["text"]
    assert "--max-total-tokens 2048" in command["text"]
    assert [change["flag"] for change in command["changes"]] == ["--schedule-conservativeness"]


def test_every_row_that_was_looked_at_is_a_check_with_its_evidence_or_what_it_needs(address: str) -> None:
    checks = {check["diagnosis"]: check for check in findings(address)["checks"]}
    assert checks["retracting_too_often"]["evidence"]["holds"] is True
    assert checks["running_at_limit"]["evidence"]["holds"] is False
    assert checks["memory_reserve_too_small"] == {
        "diagnosis": "memory_reserve_too_small",
        "evidence": None,
        "needs": "the start",
    }


def test_an_exporter_that_has_seen_nothing_says_so(tmp_path: Path) -> None:
    (tmp_path / "empty.log").touch()
    sidecar = Sidecar(config(log_file=(str(tmp_path / "empty.log"),)))
    sidecar.start()
    try:
        with web(sidecar) as url:
            document = findings(url)
    finally:
        sidecar.stop()
    assert (document["verdict"], document["findings"], document["command"]) == ("not_enough_data", [], None)
    assert document["server"] == {"version": None, "args": {}}
