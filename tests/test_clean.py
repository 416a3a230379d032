"""No control character of a log, an answer, a file's name or a flag reaches a terminal, a page, a notification, a
metric or a command line.
"""

from __future__ import annotations

import json
import logging
import shlex
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from conftest import config
from sglang_tuning_exporter.cli import main
from sglang_tuning_exporter.cli.commands import on_one_line
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.serve.metrics import collect
from sglang_tuning_exporter.serve.metrics.families import text_format
from sglang_tuning_exporter.serve.pages import as_json
from sglang_tuning_exporter.serve.pages import render as as_page
from sglang_tuning_exporter.sglang.server_info import ServerInfo

STRANGE = "\x1b\x07\x08\r\x00\x7f\x85\x9b\u202e\u2066\u200b\u2028\u2029\ufeff\udc9b"
EVIL = f"model{STRANGE}[2Jx"
ARGS = (
    f"[2025-11-20 11:38:20] server_args=ServerArgs(model_path={EVIL!r}, tokenizer_path={EVIL!r},"
    f" served_model_name={EVIL!r}, schedule_conservativeness=0.1, max_running_requests=400)\n"
)
RETRACTIONS = "".join(
    f"[2025-11-20 11:4{at // 60}:{at % 60:02}] {words}\n"
    for at in range(0, 300, 3)
    for words in (
        (
            "Decode batch, #running-req: 237, #token: 925941, token usage: 0.99, cuda graph: True, gen throughput"
            " (token/s): 4471.70, #queue-req: 4"
        ),
        (
            "KV cache pool is full. Retract requests. #retracted_reqs: 2, #new_tokens_gained: 124, #new_token_ratio:"
            " 0.0317 -> 0.5260"
        ),
    )
)


def strange_in(text: str) -> set[str]:
    return {c for c in text if not c.isprintable() and c not in "\n\t"}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / f"server{STRANGE.replace(chr(0), '')}.log"
    path.write_text(ARGS + RETRACTIONS, encoding="utf-8", errors="surrogateescape")
    return path


@pytest.mark.parametrize("form", ["text", "html", "json"])
def test_a_report_shows_none(log: Path, form: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(log), "--format", form, "--profile", "offline"]) == 1
    said = capfd.readouterr()
    assert strange_in(said.out) == strange_in(said.err) == set()
    assert "--schedule-conservativeness" in said.out
    if form == "json":
        document = json.loads(said.out)
        assert strange_in(json.dumps(document, ensure_ascii=False)) == set()
        assert "$MODEL_PATH" in document["command"]["text"]


def test_pages_findings_and_metrics_show_none(log: Path) -> None:
    sidecar = Sidecar(config(log_file=(str(log),), sglang_url="http://127.0.0.1:9"))
    assert sidecar.log is not None
    sidecar.log.poll()
    sidecar.watch.take_facts(ServerInfo(EVIL, {"model_path": EVIL, f"max{STRANGE}": 3}))
    said = as_page(sidecar, still=True)
    assert "model\\x1b" in said
    assert strange_in(said) == set()
    assert strange_in(json.dumps(json.loads(as_json(sidecar)), ensure_ascii=False)) == set()
    families = text_format(collect(sidecar))
    assert strange_in(families) == set()
    assert list(text_string_to_metric_families(families))


@pytest.mark.parametrize(
    "command",
    ["report", "plan", "replay", "serve --sglang-url http://127.0.0.1:9 --web-config"],
)
def test_no_error_shows_one(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*shlex.split(command), "/nowhere/" + EVIL.replace("\0", "")]) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert strange_in(said) == set()


def test_no_log_line_of_the_exporter_shows_one_or_is_split_by_one() -> None:
    record = logging.LogRecord("x", logging.INFO, "x", 1, "log %s: %s", (EVIL, "a\nb"), None)
    assert on_one_line(record)
    said = record.getMessage()
    assert strange_in(said) == set()
    assert "\n" not in said
