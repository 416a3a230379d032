"""What a report says about a log: the document and its schema, the exit status, `--against`, and mistakes.

Real logs of 0.5.23 (tests/recordings) and lines as the released wheels format them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]  # it has no types

from sglang_tuning_exporter.cli import main
from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.core.answer import FIGURES, changed_words, compare
from sglang_tuning_exporter.core.findings import (
    Alert,
    Change,
    Figure,
    Finding,
    Judgement,
    Severity,
    Start,
    Stretch,
)
from sglang_tuning_exporter.core.inputs import Logs
from sglang_tuning_exporter.core.report import document, exit_status, judge_logs, run

HERE = Path(__file__).parent
RECORDINGS = sorted((HERE / "recordings").glob("*/server.log.gz"))
LOGS = sorted((HERE / "data" / "logs").glob("*.log"))
SCHEMA = json.loads((Path(__file__).parent.parent / "docs" / "report.schema.json").read_text())
BEGIN = 1_763_632_800.0  # 2025-11-20 10:00:00
RAISE = Change(
    arg="schedule_conservativeness", direction="raise", why="SGLang admits more requests than the KV cache can hold",
    not_if="it is above 1.43",
    cost="above 1.0 it admits fewer", flag="--schedule-conservativeness", now=0.3, to=1.3, gain="4 % more tokens",
)  # fmt: skip


def faults(value: Any) -> list[str]:
    """List where a document breaks the report's schema."""
    return [error.message for error in Draft202012Validator(SCHEMA).iter_errors(value)]


def recording(name: str) -> str:
    return str(HERE / "recordings" / name / "server.log.gz")


def finding(diagnosis: str = "retracting_too_often", severity: Severity = "warning", **more: Any) -> Finding:
    given: dict[str, Any] = {
        "alert": "SGLangRetractingTooOften", "is_limit": True, "headline": "SGLang kept retracting running requests.",
        "sentence": "12 retractions a minute", "guide": "the guide", "confidence": "high",
        "evidence": (Figure("retractions", 12.0, "per_minute", 1.0, "above"), Figure("mean running requests", 233.0,
            "count")),
        "changes": (RAISE,), "since": BEGIN + 600, "until": BEGIN + 2100, "seconds": 1200.0,
    }  # fmt: skip
    return Finding(diagnosis=diagnosis, severity=severity, **(given | more))


def judged(*findings: Finding, **more: Any) -> Judgement:
    """An hour of a server, judged."""
    verdict = findings[0].diagnosis if findings else "no_limit_in_log"
    severity = findings[0].severity if findings else "none"
    sentence = findings[0].headline if findings else "Nothing limits this server as far as its log shows."
    start = Start(
        BEGIN, "0.5.23", {"model_path": "m", "schedule_conservativeness": 0.3},
        {"schedule_conservativeness": (1.0, 0.3)},
        {"generated_tokens_per_second": 3106.7, "token_usage": 0.93, "share_cached": 0.51}, "",
        {"before_weights_gb": 78.71, "weights_gb": 16.46, "kv_pool_gb": 45.2, "left_gb": 7.0, "device": "gpu"},
    )  # fmt: skip
    times = [BEGIN + 10 * n for n in range(360)]
    series = {
        name: tuple((at, at % 50 if at % 900 else None) for at in times) for name in ("running", "queued", "usage")
    }
    series["retractions"] = tuple((at, float(at % 70 == 0)) for at in times)
    whole: dict[str, Any] = {
        "profile": "offline", "begin": BEGIN, "end": BEGIN + 3600, "serving_seconds": 3000.0, "idle_seconds": 500.0,
        "verdict": verdict, "sentence": sentence, "severity": severity, "findings": findings,
        "checks": {"latency_queue": None},
        "mostly": ("no_limit_in_log", 0.6),
        "alerts": (Alert("SGLangRetractingTooOften", "retracting_too_often", "warning", BEGIN + 700, None),
            ) * bool(findings),
        "course": (Stretch("starting", BEGIN, BEGIN + 60), Stretch("serving", BEGIN + 60, BEGIN + 3600, "an hour")),
        "series": series, "starts": (start,),
        "counts": {"retraction_events": 34.0, "retracted_requests": 102.0, "out_of_memory.prefill": 1.0, "lines": 900},
        "marked": {"retraction_events": 14.0},
        "shares": {"queue": {"above_range": 0.62}, "cuda_graph": {"replayed": 1.0}},
        "last": {"running_requests": 229.0, "token_usage": 1.0, "cuda_graph": 1.0}, "sources": ("server.log",),
        "command": ("python3 -m sglang.launch_server", "--model-path 'a model'", "--schedule-conservativeness 1.3",
            "--tp-size 2"),
        "command_changes": (("--schedule-conservativeness", "0.3", "1.3"),), "command_notes": ("Add --api-key again.",),
        "notes": ("34 retractions, 14 of them beside text that clients can write", "a note"),
    }  # fmt: skip
    return Judgement(**(whole | more))


@pytest.mark.parametrize("log", RECORDINGS + LOGS, ids=lambda log: log.parent.name + "-" + log.name)
@pytest.mark.parametrize("profile", ["online", "offline"])
def test_every_report_keeps_the_schema_and_is_strict_json(log: Path, profile: str) -> None:
    text = json.dumps(document(judge_logs(Logs([str(log)]), PROFILES[profile])[0]), allow_nan=False)
    assert faults(json.loads(text)) == []


def test_a_full_report_keeps_the_schema_which_refuses_anything_else() -> None:
    switch = Change(arg="disable_radix_cache", direction="drop", flag="--disable-radix-cache", now=True, removes=True)
    people = Change(words="send fewer requests at once")
    whole = judged(finding(changes=(RAISE, switch, people), because=("queue_too_long",)))
    right = document(whole, compare(whole, whole))
    assert faults(json.loads(json.dumps(right, allow_nan=False))) == []
    for wrong in (
        {**right, "schema_version": "1"},
        {**right, "more": 1},
        {key: value for key, value in right.items() if key != "last"},
        {**right, "counts": {**right["counts"], "lines": "819"}},
        {**right, "span": {**right["span"], "start": "yesterday"}},
        {**right, "findings": [{**right["findings"][0], "severity": "loud"}]},
    ):
        assert faults(wrong)
    advice = [
        (each["flag"], each["current"], each["suggested"], each["typed"]) for each in right["findings"][0]["advice"]
    ]
    assert advice == [
        ("--schedule-conservativeness", 0.3, 1.3, "--schedule-conservativeness 1.3"),
        ("--disable-radix-cache", "on", "off", "--disable-radix-cache"),
        (None, None, "send fewer requests at once", None),
    ]
    assert right["counts"]["out_of_memory"] == {
        "prefill": 1,
        "decode": 0,
        "graph_capture": 0,
        "startup": 0,
        "unknown": 0,
    }
    assert right["marked"] == {"retraction_events": 14}
    assert right["alerts"][0]["ongoing"]
    assert (right["last"]["queued_requests"], right["last"]["cuda_graph"]) == (None, True)
    assert right["notes"] == ["34 retractions, 14 of them beside text that clients can write", "a note"]


@pytest.mark.parametrize(
    ("severities", "fail_on", "status"),
    [
        ((), "info", 0),
        (("info",), "warning", 0),
        (("info",), "info", 1),
        (("warning",), "warning", 1),
        (("warning",), "critical", 0),
        (("info", "critical"), "critical", 1),
        (("critical",), "never", 0),
    ],
)
def test_the_exit_status_is_1_from_the_given_severity_on(
    severities: tuple[Severity, ...], fail_on: str, status: int
) -> None:
    found = judged(*(finding(f"d{n}", severity) for n, severity in enumerate(severities)))
    assert exit_status(found, fail_on) == status


def test_chances_are_no_failure() -> None:
    assert exit_status(judged(finding(severity="warning", is_limit=False)), "warning") == 0


def test_a_comparison_is_a_table_of_figures_and_changed_arguments_without_a_guess() -> None:
    before = judged(finding())
    slow = replace(
        before.starts[0],
        figures={"generated_tokens_per_second": 1000.0, "token_usage": 0.5, "share_cached": 0.5},
    )
    old = replace(before, sources=("old.log",), starts=(replace(slow, arguments={"schedule_conservativeness": 1.0}),))
    found = compare(old, before)
    assert found["words"] == "better: generated tokens/s"
    assert changed_words(found["changed_args"]) == ["--schedule-conservativeness 1.0 → 0.3"]
    changes = {row["name"]: row["change"] for row in found["figures"]}
    assert changes == {
        "generated tokens/s": "better",
        "mean token usage": "different",
        "prompt tokens found in the cache": "same",
    }
    assert compare(before, before)["words"] == "no clear difference"
    assert compare(before, judged(starts=()))["overall"] == "not_comparable"
    assert all(better in {"", "higher", "lower"} for _, _, better in FIGURES.values())


# The command


def test_text_json_and_page_are_written_to_a_file_or_to_standard_output(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = recording("big_queue")
    assert main(["report", log]) == 1
    said = capfd.readouterr()
    assert "--max-running-requests 16, now 2" in said.out
    assert "\x1b" not in said.out + said.err
    assert main(["report", "--format", "json", log, "--fail-on", "critical"]) == 0
    assert json.loads(capfd.readouterr().out)["verdict"] == "running_at_limit"
    assert main(["report", "--format", "html", "--output", str(tmp_path / "page.html"), log]) == 1
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


MISTAKES = {
    "no log": (["absent.log"], "absent.log: No such file or directory; give a log that can be read"),
    "--against": (["LOG", "--against", "absent.log"], "absent.log: No such file"),
    "--fail-on": (["LOG", "--fail-on", "loud"], "--fail-on=loud: give info, warning, critical or never"),
    "a directory": (["LOG", "--output", "."], "--output=.: is a directory; give a file"),
    "no directory": (["LOG", "--output", "absent/x"], "--output=absent/x: there is no such directory"),
    "the log itself": (["LOG", "--output", "LOG"], "is one of the logs; give another file"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_status_2(mistake: str, capfd: pytest.CaptureFixture[str]) -> None:
    argv, reason = MISTAKES[mistake]
    assert main(["report", *(recording("big_queue") if word == "LOG" else word for word in argv)]) == 2
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert reason in said.err


def test_damage_is_said_on_standard_error_and_in_the_notes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "server.log.gz"
    path.write_bytes(Path(recording("big_queue")).read_bytes()[:-3000])
    main(["report", "--format", "json", str(path)])
    said = capfd.readouterr()
    assert "ends in the middle of a gzip member; only what comes before it was read" in said.err
    assert "ends in the middle of a gzip member" in json.loads(said.out)["notes"][0]


def test_a_file_that_cannot_be_written_is_named() -> None:
    with pytest.raises(
        UsageError, match="--output=/dev/full: No space left on device; give a file that can be written"
    ):
        run([recording("big_queue")], output=Path("/dev/full"), format="json")
