"""`explain FILE[:LINE]` says what a line was read as, and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_tuning_exporter.cli import main
from sglang_tuning_exporter.core.explain import explain

AT = b"[2025-11-20 11:40:13 TP0] "
RETRACTION = AT + b"KV cache pool is full. Retract requests. #retracted_reqs: 3, #new_token_ratio: 0.3002 -> 0.5783"
LOG = [
    AT + b"Load weight begin. avail mem=78.71 GB",
    AT + b"Decode batch, #running-req: 5, #token: 900, token usage: 0.90, #queue-req: 7",
    RETRACTION,
    AT + b"Model attempted to call undefined function: foo",
    (
        b'{"log": "[2025-11-20 11:40:13 TP0] KV cache pool is full. #retracted_reqs: 4, #new_token_ratio: 0.3002 ->'
        b' 0.5783\\n", "stream": "stderr"}'
    ),
    b"user said: " + RETRACTION,
    b"",
    AT + b"Verify batch, #running-req: 4, #token: 5",
    AT + b"Init torch distributed begin.",
    b"a print",
]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            1,
            [
                "read as: memory",
                "event: memory weights_begin, 2025-11-20 11:40:13 UTC, TP0, available 78.71",
                "counted, not marked",
            ],
        ),
        (3, ["event: retraction, 2025-11-20 11:40:13 UTC, TP0, requests 3", "counted, not marked"]),
        (4, ["read as: request", "not counted: a line of SGLang's about one request"]),
        (
            5,
            [
                "around it: container's JSON",
                "requests 4",
                "counted, and marked: line 4, within 64 lines or 2 s before it",
                "undefined function: foo",
            ],
        ),
        (6, ["read as: other", "not counted: SGLang's words stand in it, but behind text that is no known wrapper's"]),
        (7, ["not counted: an empty line"]),
        (8, ["not counted: it begins as a line of SGLang's and goes on otherwise"]),
        (10, ["not counted: no known line of SGLang's"]),
        (99, ["there is no line 99: the log has 10"]),
    ],
)
def test_a_line_is_explained(line: int, words: list[str]) -> None:
    text = explain(LOG, line)
    assert [each for each in words if each not in text] == []


def test_a_whole_log_is_counted_by_kind() -> None:
    text = explain(LOG)
    rows = {
        row[0]: row[1:]
        for line in text.splitlines()
        if (row := line.split()) and row[0] in ("retraction", "decode", "request")
    }
    assert rows == {"retraction": ["2", "2", "1"], "decode": ["1", "1"], "request": ["1"]}
    assert "10 lines" in text
    assert "1 x batch_line not understood" in text
    assert "1 lines can carry text of others, first line 4: SGLang prints a request's text in it" in text


def test_the_command_line_takes_a_file_and_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "server.log"
    log.write_bytes(b"\n".join(LOG) + b"\n")
    assert main(["explain", f"{log}:3"]) == 0
    assert "read as: retraction" in capsys.readouterr().out
    assert main(["explain", str(log)]) == 0
    assert "10 lines" in capsys.readouterr().out
    assert main(["explain", f"{tmp_path}/none.log:3"]) == 2
    assert "none.log" in capsys.readouterr().err
