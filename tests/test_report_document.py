"""What a report says about a log: the document, its schema, the text and the exit status.

Real logs of 0.5.23 (tests/recordings) and lines as the released wheels format them, with figures of our own.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.diagnosis.json_findings import plain
from sglang_tuning_exporter.report.inputs import Logs
from sglang_tuning_exporter.report.report import report, run
from sglang_tuning_exporter.state.profiles import PROFILES

HERE = Path(__file__).parent
RECORDINGS = sorted((HERE / "recordings").glob("*/server.log.gz"))
LOGS = sorted((HERE / "data" / "logs").glob("*.log"))
SCHEMA = json.loads((HERE.parent / "docs" / "report.schema.json").read_text())
TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}


def faults(value: Any, schema: dict[str, Any], where: str = "$") -> list[str]:
    """List where `value` breaks `schema`; handles only the keywords that the report's schema uses."""
    used = {
        "type",
        "const",
        "enum",
        "pattern",
        "minimum",
        "maximum",
        "items",
        "minItems",
        "maxItems",
        "required",
        "properties",
    }
    unknown = set(schema) - used - {"additionalProperties", "description", "title", "$schema"}
    assert not unknown, f"this check does not handle {unknown}"
    names = schema.get("type", [])
    names = [names] if isinstance(names, str) else names
    kinds = tuple(kind for name in names for kind in TYPES[name])
    if names and (not isinstance(value, kinds) or (isinstance(value, bool) and "boolean" not in names)):
        return [f"{where}: {value!r} is not {names}"]
    found = []
    if value != schema.get("const", value) or value not in schema.get("enum", [value]):
        found.append(f"{where}: {value!r} is not what the schema names")
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        found.append(f"{where}: {value!r} is not {schema['pattern']}")
    least, most = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
    if isinstance(value, (int, float)) and not least <= value <= most:
        found.append(f"{where}: {value!r} is out of range")
    return found + faults_inside(value, schema, where)


def faults_inside(value: Any, schema: dict[str, Any], where: str) -> list[str]:
    found = []
    if isinstance(value, list):
        found += [f"{where}: too few"] * (len(value) < schema.get("minItems", 0))
        found += [f"{where}: too many"] * (len(value) > schema.get("maxItems", len(value)))
        for number, item in enumerate(value):
            found += faults(item, schema.get("items", {}), f"{where}[{number}]")
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        found += [f"{where}: {key} is missing" for key in schema.get("required", []) if key not in value]
        if schema.get("additionalProperties") is False:
            found += [f"{where}: {key} is unknown" for key in value if key not in properties]
        for key in properties.keys() & value.keys():
            found += faults(value[key], properties[key], f"{where}.{key}")
    return found


def recording(name: str) -> str:
    return str(HERE / "recordings" / name / "server.log.gz")


def document(*logs: str | Path, profile: str = "online") -> dict[str, Any]:
    return report(Logs([str(log) for log in logs]), PROFILES[profile])


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def batch(second: int, figures: str, *, ranks: str = "", kind: str = "Decode") -> str:
    minute = f"[2025-11-20 10:{second // 60:02}:{second % 60:02}{ranks}]"
    if kind == "Prefill":
        return f"{minute} Prefill batch, #new-seq: 1, #new-token: 900, #cached-token: 0, token usage: 0.10, {figures}"
    return f"{minute} Decode batch, {figures}"


def busy(running: int, queued: int, usage: float = 0.5, *, graph: bool = True) -> str:
    return (
        f"#running-req: {running}, #token: 925, token usage: {usage:.2f}, cuda graph: {graph}, "
        f"gen throughput (token/s): 4471.70, #queue-req: {queued}"
    )


def retracted(second: int, ranks: str = "") -> str:
    return (
        f"[2025-11-20 10:{second // 60:02}:{second % 60:02}{ranks}] KV cache pool is full. Retract requests. "
        "#retracted_reqs: 5, #new_tokens_gained: 8950, #new_token_ratio: 0.3002 -> 0.5783"
    )


@pytest.mark.parametrize("log", RECORDINGS + LOGS, ids=lambda log: log.parent.name + "-" + log.name)
@pytest.mark.parametrize("profile", ["online", "offline"])
def test_every_report_keeps_the_schema_and_is_strict_json(log: Path, profile: str) -> None:
    text = json.dumps(document(log, profile=profile), allow_nan=False)
    assert faults(json.loads(text), SCHEMA) == []


def test_the_schema_refuses_what_is_not_in_it() -> None:
    right = document(recording("big_queue"))
    for wrong in (
        {**right, "schema_version": "2"},
        {**right, "more": 1},
        {key: value for key, value in right.items() if key != "last"},
        {**right, "counts": {**right["counts"], "lines": "819"}},
        {**right, "span": {**right["span"], "start": "yesterday"}},
        {**right, "findings": [{**right["findings"][0], "severity": "loud"}]},
        {**right, "shares": {"queue": {"empty": 1.5}}},
        {**right, "counts": {**right["counts"], "server_starts": True}},
    ):
        assert faults(wrong, SCHEMA)


def test_requests_held_back_by_the_limit_are_reported_with_the_flag_and_both_values() -> None:
    found = document(recording("big_queue"))
    assert found["verdict"] == "running_at_limit"
    assert found["counts"] == {
        "lines": 819,
        "decode_batches": 236,
        "prefill_batches": 153,
        "retraction_events": 0,
        "retracted_requests": 0,
        "out_of_memory": {"prefill": 0, "decode": 0, "graph_capture": 0, "startup": 0, "unknown": 0},
        "server_starts": 1,
        "unrecognised": 0,
    }
    advice = found["findings"][0]["advice"][0]
    assert (advice["flag"], advice["current"], advice["suggested"]) == ("--max-running-requests", 2, 16)
    assert found["findings"][0]["first_seen"] == "2026-11-20T19:33:06Z"
    assert found["findings"][0]["last_seen"] == "2026-11-20T19:33:45Z"


def test_a_slow_client_is_a_finding_only_where_throughput_is_wanted() -> None:
    assert document(recording("client_limited"), profile="offline")["verdict"] == "client_too_slow"
    assert document(recording("client_limited"), profile="online")["verdict"] == "healthy"


def test_advice_to_people_names_no_flag_and_says_it_in_words() -> None:
    advice = document(recording("client_limited"), profile="offline")["findings"][0]["advice"][0]
    assert (advice["flag"], advice["current"], advice["gain"]) == (None, None, None)
    assert advice["suggested"].startswith("send about 320 requests at once (now 1): about 220 can run")


def test_a_restart_in_the_log_is_counted_and_gives_the_second_starts_arguments() -> None:
    found = document(recording("restart_append"))
    assert found["counts"]["server_starts"] == 2
    assert found["server"]["version"] is None
    assert found["server"]["args"]["device"] == "cpu"


def test_a_secret_of_the_arguments_is_not_in_the_report(tmp_path: Path) -> None:
    log = write(
        tmp_path / "a.log", "[2025-11-20 10:00:00] server_args={'tp_size': 8, 'api_key': 'sk-very-secret', 'inf': inf}"
    )
    text = json.dumps(document(log), allow_nan=False)
    assert "tp_size" in text
    assert "very-secret" not in text


def test_arguments_that_json_cannot_hold_become_text() -> None:
    assert plain({"a": [float("inf"), (1, {2})], 3: float("nan"), "b": None}) == {
        "a": ["inf", [1, [2]]],
        "3": "nan",
        "b": None,
    }


def test_lines_that_every_tp_rank_repeats_count_once_whichever_rank_comes_first(tmp_path: Path) -> None:
    lines = [batch(second, busy(4, 0), ranks=f" TP{rank}") for second in range(5) for rank in (3, 1, 0, 2)]
    lines += [retracted(6, f" TP{rank}") for rank in range(4)]
    counts = document(write(tmp_path / "a.log", *lines))["counts"]
    assert (counts["decode_batches"], counts["retraction_events"], counts["retracted_requests"]) == (5, 1, 5)


def test_a_batch_that_every_stage_of_a_pipeline_prints_is_one(tmp_path: Path) -> None:
    lines = [batch(second, busy(4, 0), ranks=f" PP{rank}") for second in range(5) for rank in (1, 0)]
    assert document(write(tmp_path / "a.log", *lines))["counts"]["decode_batches"] == 5


def test_the_end_of_dp_ranks_is_their_sum_and_the_fullest_pool(tmp_path: Path) -> None:
    lines = [
        batch(0, busy(9, 9, 0.99), ranks=" DP0"),
        batch(1, busy(4, 2, 0.30), ranks=" DP0"),
        batch(2, busy(3, 1, 0.70), ranks=" DP1"),
    ]
    last = document(write(tmp_path / "a.log", *lines))["last"]
    assert last == {"running_requests": 7, "queued_requests": 3, "token_usage": 0.7, "cuda_graph": True}


def test_ranks_of_the_start_before_are_not_part_of_the_end(tmp_path: Path) -> None:
    lines = [
        batch(0, busy(9, 9), ranks=" DP1"),
        "[2025-11-20 10:01:00] server_args={'tp_size': 1}",
        batch(90, busy(4, 2), ranks=" DP0"),
    ]
    assert document(write(tmp_path / "a.log", *lines))["last"]["running_requests"] == 4


def test_serving_ranks_do_not_add_up_to_more_than_the_span(tmp_path: Path) -> None:
    lines = [batch(second, busy(4, 0), ranks=f" DP{rank}") for second in range(0, 60, 5) for rank in range(4)]
    span = document(write(tmp_path / "a.log", *lines))["span"]
    assert (span["seconds"], span["serving_seconds"]) == (55, 55)


def test_the_graph_is_that_of_the_last_decode_line_and_unknown_without_one(tmp_path: Path) -> None:
    prefill = batch(9, "#running-req: 4, #queue-req: 0, ", kind="Prefill")
    eager = write(tmp_path / "eager.log", batch(0, busy(4, 0)), batch(1, busy(4, 0, graph=False)), prefill)
    assert document(eager)["last"]["cuda_graph"] is False
    assert document(write(tmp_path / "prefill.log", prefill))["last"]["cuda_graph"] is None


def test_memory_left_at_start_up_is_exposed_once_a_scheduler_and_not_of_a_cpu(tmp_path: Path) -> None:
    limits = "[2025-11-20 10:00:0{}{}] max_total_num_tokens=1040384, max_running_requests=4096, available_{}_mem={} GB"
    lines = [limits.format(0, " TP1", "gpu", "4.64"), limits.format(0, " TP0", "gpu", "4.63")]
    lines += ["[2025-11-20 10:00:05] server_args={'tp_size': 2}", limits.format(6, " TP0", "gpu", "12.50")]
    lines += [limits.format(7, "", "cpu", "99.00")]
    assert document(write(tmp_path / "a.log", *lines))["available_gpu_memory_gb"] == [4.63, 12.5]


def test_shares_of_each_signal_add_up_to_one_and_leave_idle_time_out(tmp_path: Path) -> None:
    idle_later = [batch(second, busy(4, 0)) for second in range(0, 50, 5)]
    found = document(write(tmp_path / "a.log", *idle_later, "[2025-11-20 10:10:00] Some other line"))
    assert found["span"]["seconds"] == 600
    assert found["span"]["serving_seconds"] == 57.5  # the next line was due five seconds after the last
    assert found["shares"]["queue"] == {"empty": 1, "below_range": 0, "in_range": 0, "above_range": 0}
    for states in found["shares"].values():
        assert sum(states.values()) == pytest.approx(1)


def test_without_served_requests_there_are_no_shares(tmp_path: Path) -> None:
    log = write(tmp_path / "a.log", "[2025-11-20 10:00:00] server_args={'tp_size': 2}", "[2025-11-20 10:05:00] x")
    found = document(log)
    assert found["shares"] == {}
    assert found["verdict"] == "starting"
    assert found["last"] == {
        "running_requests": None,
        "queued_requests": None,
        "token_usage": None,
        "cuda_graph": None,
    }


def test_retractions_are_judged_over_the_whole_span_not_its_last_minutes(tmp_path: Path) -> None:
    early = [line for second in range(0, 300, 10) for line in (batch(second, busy(9, 4, 0.95)), retracted(second + 1))]
    late = [batch(second, busy(4, 0)) for second in range(300, 1200, 10)]
    found = document(write(tmp_path / "a.log", *early, *late))
    assert found["counts"]["retraction_events"] == 30
    assert found["verdict"] == "retracting_too_often"
    finding = found["findings"][0]
    assert (finding["first_seen"], finding["last_seen"]) == ("2025-11-20T10:00:01Z", "2025-11-20T10:04:51Z")
    assert finding["evidence"][0]["value"] == pytest.approx(30 / 1190 * 60, rel=0.01)


def test_a_request_that_quotes_the_log_changes_nothing(tmp_path: Path) -> None:
    quoted = batch(5, busy(400, 4000)).replace("[", "text='[", 1)
    lines = [
        batch(0, busy(4, 0)),
        f"[2025-11-20 10:00:05] Receive: obj=GenerateReqInput({quoted}')",
        f"[2025-11-20 10:00:05] Receive: obj=GenerateReqInput(text='{retracted(5)}')",
        "Prefill out of memory. Try to lower your batch size.",
    ]
    found = document(write(tmp_path / "a.log", *lines))
    assert found["counts"]["decode_batches"] == 1
    assert found["counts"]["retraction_events"] == 0
    assert found["last"]["queued_requests"] == 0


def run_on(*logs: str | Path, output: Path | None = None, kind: str = "json", profile: str = "online") -> int:
    return run([str(log) for log in logs], format=kind, output=output, profile=profile)


def test_the_exit_status_is_1_if_something_should_change(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_on(recording("big_queue")) == 1
    assert run_on(recording("dp2")) == 0
    assert capfd.readouterr().err == ""


def test_the_text_has_the_verdict_the_flag_and_the_counts(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_on(recording("big_queue"), kind="text") == 1
    text = capfd.readouterr().out
    assert text.startswith(
        "Requests wait because SGLang runs as many as --max-running-requests allows. (confidence: low; at 20"
    )
    assert ", the end of the log)\n" in text
    assert "Try --max-running-requests 16, now 2" in text
    assert "decode lines 236 (one for 40 batches), prefill batches 153, starts 1" in text


@pytest.mark.parametrize("log", RECORDINGS + LOGS, ids=lambda log: log.parent.name + "-" + log.name)
def test_every_log_gives_a_text(log: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_on(log, kind="text", profile="offline") in {0, 1}
    assert capfd.readouterr().out.count("\n") > 3


def test_a_text_without_dates_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line = batch(0, busy(4, 0)).replace("2025-11-20 ", "")
    run_on(write(tmp_path / "a.log", line, line.replace("10:00:00", "10:00:09")), kind="text")
    assert "no date in the log, 9 s" in capfd.readouterr().out


def test_the_report_goes_to_a_file_when_one_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "report.json"
    assert run_on(recording("dp2"), output=output) == 0
    assert json.loads(output.read_text())["counts"]["decode_batches"] == 103
    assert capfd.readouterr().out == ""


def test_a_note_about_a_cut_file_goes_to_stderr(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    packed = Path(recording("big_queue")).read_bytes()
    log = tmp_path / "server.log.gz"
    log.write_bytes(packed[:-4000])
    run_on(log)
    streams = capfd.readouterr()
    assert json.loads(streams.out)["counts"]["decode_batches"] > 0
    assert streams.err == (
        f"sglang-tuning-exporter: {log}: ends in the middle of a gzip member; only what comes before it was read\n"
    )


def test_an_output_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    for output, reason in (
        (tmp_path, "is a directory"),
        (tmp_path / "none" / "report.json", "no such directory"),
        (Path("/dev/full"), "No space left"),
    ):
        with pytest.raises(UsageError, match=reason) as raised:
            run_on(recording("dp2"), output=output)
        assert str(raised.value).startswith(f"--output={output}: ")


def test_a_log_is_never_overwritten_by_its_report(tmp_path: Path) -> None:
    log = write(tmp_path / "a.log", batch(0, busy(4, 0)))
    before = log.read_bytes()
    with pytest.raises(UsageError, match="is one of the logs"):
        run_on(tmp_path / "*.log", output=log)
    assert log.read_bytes() == before
