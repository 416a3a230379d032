"""What the boards show in difficult cases: foreign targets, missed and slow scrapes, odd names, two jobs, low objectives.

`promtool` answers the boards' own queries over series written here. The sample `_` means no scrape; `stale` is the marker
that a failed scrape leaves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from math import isfinite, isnan
from pathlib import Path
from typing import Any

import pytest
import yaml

from fuzz.promtool import PRESENT, promtool
from sglang_tuning_exporter.mixin import boards

BOARDS = {json.loads(text)["uid"].removeprefix("sglang-tuning-"): json.loads(text) for text in boards.files().values()}
PANELS = [
    (name, each)
    for name, board in BOARDS.items()
    for panel in board["panels"]
    for each in (panel, *panel.get("panels", ()))
    if each["type"] != "row"
]
ALL = {
    "cluster": ".*", "job": ".+", "instance": ".+", "server": "", "step": "30s", "__range": "1h",
}  # fmt: skip
pytestmark = pytest.mark.skipif(not PRESENT, reason="no Prometheus is installed")

Samples = list[tuple[dict[str, str], float]]


def chosen(target: Mapping[str, Any], **choices: str) -> str:
    """Fill a query's variables as Grafana does: a rate is over four times its smallest step."""
    expr: str = target["expr"]
    choices["__rate_interval"] = {"30s": "2m", "1m": "4m"}[choices.get("step", "30s")]
    for name, value in sorted((ALL | choices).items(), key=lambda item: -len(item[0])):
        expr = expr.replace(f"${name}", value)
    return expr


def panel(board: str, title: str) -> dict[str, Any]:
    """Give a panel by its title."""
    return next(each for name, each in PANELS if (name, each["title"]) == (board, title))


def query(board: str, title: str, ref: str = "A", **choices: str) -> str:
    [target] = [target for target in panel(board, title)["targets"] if target["refId"] == ref]
    return chosen(target, **choices)


def answers(
    directory: Path, series: Mapping[str, str], exprs: list[str], *, at: str, every: str = "15s"
) -> list[Samples]:
    """Give the answer of Prometheus to each query: every expectation is wrong, so that promtool prints the answer."""
    case = {
        "interval": every,
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": expr, "eval_time": at, "exp_samples": [{"labels": '{never="met"}', "value": number}]}
            for number, expr in enumerate(exprs)
        ],
    }
    path = directory / "case.yml"
    path.write_text(yaml.safe_dump({"rule_files": [], "evaluation_interval": every, "tests": [case]}))
    said = promtool("test", "rules", path).words
    got: list[Samples] = []
    for part in said.split("expr: ")[1:]:
        [words] = re.findall(r"\n +got:(.*)", part)
        samples = re.findall(r'\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\} ([^\s,]+)', words)
        got.append(
            [(dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels)), float(value)) for labels, value in samples]
        )
    assert len(got) == len(exprs), said
    return got


def answer(directory: Path, series: Mapping[str, str], expr: str, *, at: str = "30m", every: str = "15s") -> Samples:
    [found] = answers(directory, series, [expr], at=at, every=every)
    return found


def verdict(instance: str, name: str, level: str, job: str = "sglang") -> str:
    """Give the series of a verdict."""
    words = f'verdict="{name}",level="{level}",sentence="It is {name.replace("_", " ")}."'
    return f'sglang_tuning_verdict_info{{job="{job}",instance="{instance}",{words}}}'


def advised(instance: str, diagnosis: str, flag: str, current: str, suggested: str) -> str:
    """Give the series of an advice."""
    words = f'flag="{flag}",current="{current}",suggested="{suggested}",text="why"'
    place = f'job="sglang",instance="{instance}",diagnosis="{diagnosis}"'
    return f"sglang_tuning_advice_timestamp_seconds{{{place},{words}}}"


def server(
    instance: str, found: str = "healthy", level: str = "none", *, job: str = "sglang", how: str = "1x240"
) -> dict[str, str]:
    """Give what every exporter exposes, and `up`; `how` is whether it was scraped."""
    place = f'job="{job}",instance="{instance}"'
    there = re.sub(r"\b0x(\d+)", r"stale _x\1", how).replace(" _x0", "")
    return {
        f"up{{{place}}}": how,
        f'sglang_tuning_build_info{{{place},version="1"}}': there,
        verdict(instance, found, level, job): there,
        f"sglang_tuning_verdict_since_timestamp_seconds{{{place}}}": re.sub(r"\b1x", "0x", there),
    }


def alert(instance: str, diagnosis: str, value: str = "1x240") -> dict[str, str]:
    """Give what the exporter says of an alert."""
    return {f'sglang_tuning_alert{{job="sglang",instance="{instance}",diagnosis="{diagnosis}"}}': value}


SERVERS = "Servers, the worst first"
AT_END, TILES = "What limits it at ${__to:date:HH:mm}", "Last two minutes"
NODE = {'up{job="node",instance="gpu1:9100"}': "0x240"}


def levels(directory: Path, series: Mapping[str, str], *, at: str = "30m") -> dict[str, float]:
    """Give how many servers the Fleet counts in each state."""
    targets = panel("fleet", "Servers by state")["targets"]
    found = answers(directory, series, [chosen(target) for target in targets], at=at)
    return {
        target["legendFormat"][2:]: samples[0][1]
        for target, samples in zip(targets, found, strict=True)
        if samples[0][1]
    }


def order(directory: Path, series: Mapping[str, str], *, at: str = "30m") -> list[str]:
    """Give the servers as the Fleet's table has them: by the sum of the columns that its transformation adds."""
    shown = panel("fleet", SERVERS)
    [summed] = [
        each["options"]["reduce"]["include"] for each in shown["transformations"] if each["id"] == "calculateField"
    ]
    assert {f"Value #{ref}" for ref in "BCD"} == set(summed)
    rows, *parts = answers(directory, series, [query("fleet", SERVERS, ref) for ref in "ABCD"], at=at)
    key = {labels["instance"]: 0.0 for labels, _ in rows}
    for labels, value in (sample for part in parts for sample in part):
        key[labels["instance"]] += value
    return sorted(key, key=lambda instance: -key[instance])


# --- who is counted --------------------------------------------------------------------------------------------------


def test_a_target_that_is_not_an_exporter_is_not_in_the_fleet(tmp_path: Path) -> None:
    assert levels(tmp_path, server("a:1") | NODE) == {"Fine": 1}
    rows = answer(tmp_path, server("a:1") | NODE, query("fleet", SERVERS))
    assert [labels["instance"] for labels, _ in rows] == ["a:1"]


@pytest.mark.parametrize("minutes", [3, 30, 23 * 60])
def test_a_dead_exporter_counts_once_and_stands_first_with_since_when(tmp_path: Path, minutes: int) -> None:
    series = server("a:1", "queue_too_long", "warning") | server("b:1", how=f"1x40 0x{4 * 60 * 24}") | NODE
    series |= {key: values.replace("x240", f"x{4 * 60 * 24}") for key, values in series.items() if "a:1" in key}
    at = f"{10 + minutes}m"
    assert levels(tmp_path, series, at=at) == {"No answer": 1, "Limited": 1}
    assert order(tmp_path, series, at=at) == ["b:1", "a:1"]
    rows = answer(tmp_path, series, query("fleet", SERVERS), at=at)
    [(labels, seconds)] = [row for row in rows if row[0]["instance"] == "b:1"]
    assert (labels["verdict"], labels["level"]) == ("exporter_down", "critical")
    assert seconds == pytest.approx(60 * minutes, abs=60)
    [(said, _)] = answer(tmp_path, series, query("server", AT_END, "B", instance="b:1"), at=at)
    assert said["sentence"] == "Prometheus cannot scrape the exporter."


def test_without_any_exporter_the_fleet_says_so(tmp_path: Path) -> None:
    assert answer(tmp_path, NODE, query("fleet", SERVERS)) == []
    assert panel("fleet", SERVERS)["fieldConfig"]["defaults"]["noValue"] == "No answer from any exporter"


def test_one_scrape_that_was_missed_is_no_dead_exporter(tmp_path: Path) -> None:
    series = server("a:1", "queue_too_long", "warning", how="1x119 0x0 1x60")
    rows = answer(tmp_path, series, query("fleet", SERVERS))
    assert [labels["verdict"] for labels, _ in rows] == ["queue_too_long"]
    assert answer(tmp_path, series, query("server", AT_END, "B", instance="a:1")) == []


def test_states_are_counted_by_the_exporters_level_and_a_server_without_a_verdict_is_not_fine(tmp_path: Path) -> None:
    series = server("a:1", "healthy") | server("b:1", "scheduler_stuck", "critical") | server("c:1", "no_limit_in_log")
    for instance, found in (("d:1", "not_enough_data"), ("e:1", "starting"), ("f:1", "idle"), ("g:1", "stopped")):
        series |= server(instance, found)
    assert levels(tmp_path, series) == {"Critical": 1, "No verdict": 4, "Fine": 2}


# --- the worst first -------------------------------------------------------------------------------------------------


def test_the_worst_stand_first_down_then_hung_memory_restarts_burn_and_lost_work(tmp_path: Path) -> None:
    series: dict[str, str] = {}
    for instance, found, level in (
        ("z-down", "server_down", "critical"),
        ("y-hung", "scheduler_stuck", "critical"),
        ("x-memory", "out_of_memory_decode", "critical"),
        ("w-restarts", "restart_loop", "critical"),
        ("v-burns", "healthy", "none"),
        ("u-limited", "queue_too_long", "warning"),
        ("s-fine", "healthy", "none"),
    ):
        series |= server(instance, found, level)
    series |= server("t-was-limited") | {
        verdict("t-was-limited", "healthy", "none"): "_x100 1x140",
        verdict("t-was-limited", "queue_too_long", "warning"): "1x99 stale _x140",
    }
    series |= alert("v-burns", "time_to_first_token_burning_fast") | alert("u-limited", "queue_too_long")
    assert order(tmp_path, series) == [
        "z-down", "y-hung", "x-memory", "w-restarts", "v-burns", "u-limited", "t-was-limited", "s-fine",
    ]  # fmt: skip


# --- several servers and clusters ------------------------------------------------------------------------------------


def test_several_servers_behind_one_exporter_are_several_rows_and_one_of_them_is_chosen(tmp_path: Path) -> None:
    series = {
        key.replace("{", f'{{server="{name}",', 1) if "sglang_tuning" in key else key: values
        for name, found in (("left", "healthy"), ("right", "queue_too_long"))
        for key, values in server("a:1", found, "warning" if found != "healthy" else "none").items()
    }
    rows = answer(tmp_path, series, query("fleet", SERVERS))
    assert {labels["server"]: labels["verdict"] for labels, _ in rows} == {"left": "healthy", "right": "queue_too_long"}
    [(labels, _)] = answer(tmp_path, series, query("server", AT_END, instance="a:1", server="right"))
    assert labels["verdict"] == "queue_too_long"


def test_one_address_in_two_clusters_is_two_rows(tmp_path: Path) -> None:
    series = {
        key.replace("{", f'{{cluster="{name}",', 1): values
        for name, found in (("east", "healthy"), ("west", "server_down"))
        for key, values in server("a:1", found, "critical" if found != "healthy" else "none").items()
    }
    rows = answer(tmp_path, series, query("fleet", SERVERS))
    assert {labels["cluster"]: labels["verdict"] for labels, _ in rows} == {"east": "healthy", "west": "server_down"}
    [(labels, _)] = answer(tmp_path, series, query("server", AT_END, instance="a:1", cluster="west"))
    assert labels["verdict"] == "server_down"


def test_a_server_that_ended_shows_the_line_of_its_log_that_says_why(tmp_path: Path) -> None:
    series = server("a:1", "server_down", "critical")
    series['sglang_tuning_end_info{job="sglang",instance="a:1",class="check",words="KeyError: x"}'] = "1x240"
    series['sglang_tuning_verdict_since_timestamp_seconds{job="sglang",instance="a:1"}'] = "603x240"
    [(labels, seconds)] = answer(tmp_path, series, query("server", AT_END, "C", instance="a:1"))
    assert (labels["sentence"], seconds) == ("In its log: KeyError: x", 1800 - 603)
    assert answer(tmp_path, server("a:1"), query("server", AT_END, "C", instance="a:1")) == []


# --- what to change --------------------------------------------------------------------------------------------------


def test_what_limits_a_server_comes_first_and_advice_to_people_has_no_flag(tmp_path: Path) -> None:
    series = server("a:1", "cuda_graph_not_covering", "warning")
    series[advised("a:1", "cuda_graph_not_covering", "--cuda-graph-max-bs", "160 (default)", "256")] = "1.7e9x240"
    series[advised("a:1", "queue_too_long", "", "", "send fewer")] = "1.7e9x240"
    series[advised("a:1", "dp_imbalanced", "--dp-size", "", "1")] = "1.7e9x240"
    rows = answer(tmp_path, series, query("server", "What to change", instance="a:1"))
    assert sorted((-value, labels["diagnosis"], labels["change"], labels["text"]) for labels, value in rows) == [
        (-2, "cuda_graph_not_covering", "--cuda-graph-max-bs 160 (default) → 256", "why"),
        (-1, "dp_imbalanced", "--dp-size  → 1", "why"),
        (-1, "queue_too_long", "send fewer", "why"),
    ]
    [row] = answer(tmp_path, series, query("fleet", SERVERS, "E"))
    assert row[0]["change"] == "--cuda-graph-max-bs 160 (default) → 256"


# --- as it should be -------------------------------------------------------------------------------------------------


def test_a_verdict_that_changes_is_the_new_one_at_once_also_where_a_series_has_no_end(tmp_path: Path) -> None:
    series = server("a:1") | {
        verdict("a:1", "healthy", "none"): "1x40",  # as of a back-filled log: no mark where it ends
        verdict("a:1", "retracting_too_often", "warning"): "_x41 1x200",
    }
    for at in ("10m30s", "13m"):
        rows = answer(tmp_path, series, query("server", AT_END, instance="a:1"), at=at)
        assert [labels["verdict"] for labels, _ in rows] == ["retracting_too_often"]
        strip = answer(tmp_path, series, query("server", "What limited it", instance="a:1"), at=at)
        assert {labels["verdict"]: value for labels, value in strip} == {"healthy": 0, "retracting_too_often": 1}


def test_a_time_shown_is_judged_as_a_whole_and_not_by_its_last_minute(tmp_path: Path) -> None:
    series = server("a:1") | {
        verdict("a:1", "healthy", "none"): "1x19 stale _x79 1x140",
        verdict("a:1", "retracting_too_often", "warning"): "_x20 1x79 stale _x139",
        advised("a:1", "retracting_too_often", "--schedule-conservativeness", "1", "1.3"): "_x20 1.7e9x79 stale _x139",
    }
    found = answers(
        tmp_path, series, [query("server", "In the time shown", ref, instance="a:1") for ref in "ABCD"], at="30m"
    )
    shares, first, last, changes = (
        {labels["verdict"]: (labels, value) for labels, value in samples} for samples in found
    )
    assert {name: round(value, 2) for name, (_, value) in shares.items()} == {
        "healthy": 0.34,
        "retracting_too_often": 0.66,
    }
    assert {name: labels["level"] for name, (labels, _) in shares.items()} == {
        "healthy": "good",
        "retracting_too_often": "warning",
    }
    assert (first["retracting_too_often"][1], last["retracting_too_often"][1]) == (300_000, 1_440_000)
    assert {name: labels["change"] for name, (labels, _) in changes.items()} == {
        "retracting_too_often": "--schedule-conservativeness 1 → 1.3"
    }


# --- scrapes ---------------------------------------------------------------------------------------------------------


def busy(every: int) -> dict[str, str]:  # noqa: C901 - one line for each family, no decision
    """Give a server under load whose exporter is scraped every so many seconds."""
    place, count = 'job="sglang",instance="a:1"', 3600 // every
    grows = f"0+{every}x{count}"
    series = server("a:1", how=f"1x{count}")
    model = f'{place},model_name="m"'
    names = (
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "queue_time_seconds",
        "per_stage_req_latency_seconds",
        "prompt_tokens_histogram",
        "generation_tokens_histogram",
    )
    for name in names:
        for bound in ("0.1", "2.0", "+Inf"):
            series[f'sglang:{name}_bucket{{{model},le="{bound}"}}'] = grows
        for end in ("count", "sum"):
            series[f"sglang:{name}_{end}{{{model}}}"] = grows
    series[f'sglang:http_responses_total{{{place},endpoint="/generate",status_code="200"}}'] = grows
    for mode in ("decode", "prefill_compute", "prefill_cache"):
        series[f'sglang:realtime_tokens_total{{{model},mode="{mode}"}}'] = grows
    for name in ("generation_tokens", "num_requests"):
        series[f"sglang:{name}_total{{{model}}}"] = grows
    for name in (
        "retraction_events", "retracted_requests", "aborted_requests", "rejected_requests", "log_unrecognised", "server_starts",
    ):  # fmt: skip
        series[f"sglang_tuning_{name}_total{{{place}}}"] = grows
    for latency in ("time_to_first_token", "inter_token"):
        for name in ("observations", "breaches"):
            series[f'sglang_tuning_latency_{name}_total{{{place},latency="{latency}"}}'] = grows
    for signal, state in (
        ("admission", "pool_full"),
        ("queue", "in_range"),
        ("cuda_graph", "disabled"),
        ("cuda_graph", "replayed"),
        ("activity", "serving"),
    ):
        series[f'sglang_tuning_state_seconds_total{{{place},signal="{signal}",state="{state}"}}'] = grows
    series[f"sglang_tuning_cuda_graph_coverage_ratio{{{place}}}"] = f"0.97x{count}"
    series[f'sglang_tuning_log_lines_total{{{place},kind="decode"}}'] = grows
    series[f'sglang_tuning_out_of_memory_total{{{place},phase="decode"}}'] = grows
    series[f'sglang_tuning_decode_batches_total{{{place},graph="replayed"}}'] = grows
    for source in ("computed", "cached"):
        series[f'sglang_tuning_prompt_tokens_total{{{place},source="{source}"}}'] = grows
    series[f'sglang_tuning_threshold{{{place},signal="latency",bound="objective"}}'] = f"0.9x{count}"
    series[f'sglang_tuning_threshold{{{place},signal="cuda_graph",bound="lower"}}'] = f"0.5x{count}"
    series[f'sglang_tuning_state{{{place},signal="activity",state="serving"}}'] = f"1x{count}"
    series[f"sglang_tuning_finished_requests_total{{{place}}}"] = grows
    for signal in ("time_to_first_token_seconds", "inter_token_latency_seconds"):
        series[f'sglang_tuning_threshold{{{place},signal="{signal}",bound="upper"}}'] = f"2x{count}"
    return series


WINDOWED = [
    (f"{name}: {each['title']} {target['refId']}", target)
    for name, each in PANELS
    for target in each["targets"]
    if re.search(r"(?:rate|increase)\(", target["expr"])
]


@pytest.mark.parametrize(("every", "step"), [(15, "30s"), (60, "30s"), (120, "1m")])
def test_scrapes_a_minute_apart_or_two_with_a_longer_step_leave_no_panel_without_a_rate(
    tmp_path: Path, every: int, step: str
) -> None:
    # Prometheus 3 leaves the first moment of a window out
    exprs = [
        re.sub(
            r"\[(\d+)m\]", lambda found: f"[{int(found[1]) * 60_000 - 1}ms]", chosen(target, instance="a:1", step=step)
        )
        for _, target in WINDOWED
    ]
    for second in (0, 59):
        found = answers(tmp_path, busy(every), exprs, at=f"{1800 + second}s", every=f"{every}s")
        empty = [
            title
            for (title, _), samples in zip(WINDOWED, found, strict=True)
            if not any(isfinite(value) for _, value in samples)
        ]
        assert empty == []


def test_the_last_figures_of_a_server_that_is_away_are_not_shown_while_the_exporter_answers(tmp_path: Path) -> None:
    series = server("a:1", "server_down", "critical") | {
        'sglang_tuning_token_usage_ratio{job="sglang",instance="a:1",pool="full"}': "0.9x110 stale _x60"
    }
    [(_, value)] = answer(tmp_path, series, query("server", TILES, "F", instance="a:1"))
    assert isnan(value)
