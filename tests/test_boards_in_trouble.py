"""What the boards show in difficult cases: foreign targets, missed and slow scrapes, odd names, two jobs, low objectives.

`promtool` answers the boards' own queries over series written here. The sample `_` means no scrape; `stale` is the marker
that a failed scrape leaves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from fuzz.promtool import PRESENT, promtool
from sglang_tuning_exporter.core.runbooks import ALERTS
from sglang_tuning_exporter.mixin import boards
from sglang_tuning_exporter.mixin.boards.words import STATE_WORDS

BOARDS = {json.loads(text)["uid"].removeprefix("sglang-tuning-"): json.loads(text) for text in boards.files().values()}
PANELS = [
    (name, each)
    for name, board in BOARDS.items()
    for panel in board["panels"]
    for each in (panel, *panel.get("panels", ()))
    if each["type"] != "row"
]
ALL = {
    "job": ".+", "instance": ".+", "model": ".*", "dp_rank": ".*", "__range": "1h",
}  # fmt: skip
BY_ID = {row.id: row for row in ALERTS}
pytestmark = pytest.mark.skipif(not PRESENT, reason="no Prometheus is installed")

Samples = list[tuple[dict[str, str], float]]


def chosen(target: Mapping[str, Any], **choices: str) -> str:
    """Fill a query's variables as Grafana does: a rate is over four times its smallest step, or that of the data source."""
    expr: str = target["expr"]
    choices["__rate_interval"] = {"15s": "1m", "1m": "4m"}[target.get("interval", "15s")]
    for name, value in sorted((ALL | choices).items(), key=lambda item: -len(item[0])):
        expr = expr.replace(f"${name}", value)
    return expr


def panel(board: str, title: str) -> dict[str, Any]:
    """Give a panel by its title; a tile comes before the graph of the same title."""
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


def above(instance: str, *diagnoses: str, value: str = "2x240", limit: str = "1x240") -> dict[str, str]:
    """Give the conditions of diagnoses, above their limit unless it is said otherwise."""
    return {
        f'sglang_tuning_condition{end}{{job="sglang",instance="{instance}",diagnosis="{diagnosis}"}}': values
        for diagnosis in diagnoses
        for end, values in (("", value), ("_limit", limit))
    }


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
    }


def firing(instance: str, diagnosis: str, severity: str) -> dict[str, str]:
    labels = f'alertname="{BY_ID[diagnosis].alert}",alertstate="firing",diagnosis="{diagnosis}",severity="{severity}"'
    return {f'ALERTS{{job="sglang",instance="{instance}",{labels}}}': "1x240"}


FLEET = ("Servers", "Servers, the worst first", "How each server was doing")
NODE = {'up{job="node",instance="gpu1:9100"}': "0x240"}


def levels(samples: Samples) -> dict[str, float]:
    return {labels["level"]: value for labels, value in samples if value}


# --- who is counted --------------------------------------------------------------------------------------------------


def test_a_target_that_is_not_an_exporter_is_not_in_the_fleet(tmp_path: Path) -> None:
    counted, rows, line = answers(tmp_path, server("a:1") | NODE, [query("fleet", title) for title in FLEET], at="30m")
    assert levels(counted) == {"0": 1}
    assert [labels["instance"] for labels, _ in rows] == ["a:1"]
    assert [labels["instance"] for labels, _ in line] == ["a:1"]


@pytest.mark.parametrize("minutes", [3, 30, 23 * 60])
def test_a_dead_exporter_counts_once_and_is_as_urgent_everywhere(tmp_path: Path, minutes: int) -> None:
    series = server("a:1") | server("b:1", how=f"1x40 0x{4 * 60 * 24}") | NODE
    [counted, rows, line] = answers(tmp_path, series, [query("fleet", title) for title in FLEET], at=f"{10 + minutes}m")
    assert levels(counted)["4"] == 1
    assert [(labels["verdict"], value) for labels, value in rows if labels["instance"] == "b:1"] == [
        ("exporter_down", 4)
    ]
    assert [value for labels, value in line if labels["instance"] == "b:1"] == [4]


def test_an_exporter_that_is_dead_for_days_is_still_shown_while_its_alert_fires(tmp_path: Path) -> None:
    series = {'up{job="sglang",instance="a:1"}': "0x240"} | firing("a:1", "exporter_down", "critical")
    assert [labels["verdict"] for labels, _ in answer(tmp_path, series, query("fleet", FLEET[1]))] == ["exporter_down"]


def test_without_any_exporter_the_fleet_says_so(tmp_path: Path) -> None:
    assert answer(tmp_path, NODE, query("fleet", "Servers")) == []
    assert panel("fleet", "Servers")["fieldConfig"]["defaults"]["noValue"] == "No answer from the exporter"


def test_one_scrape_that_was_missed_is_no_dead_exporter(tmp_path: Path) -> None:
    series = server("a:1", "queue_too_long", "warning", how="1x119 0x0 1x60")
    rows = answer(tmp_path, series, query("fleet", FLEET[1]), at="30m")
    assert [(labels["verdict"], int(value)) for labels, value in rows] == [("queue_too_long", 3)]


def test_an_instance_that_two_jobs_scrape_counts_once(tmp_path: Path) -> None:
    series = (
        server("a:1", "queue_too_long", "warning")
        | server("a:1", "queue_too_long", "warning", job="again")
        | server("b:1")
    )
    for job in ("sglang", "again"):
        series[f'sglang_tuning_queued_requests{{job="{job}",instance="a:1"}}'] = "7x240"
        series[f'sglang:generation_tokens_total{{job="{job}",instance="a:1",model_name="m"}}'] = "0+150x240"
    counted, waiting, tokens = answers(
        tmp_path,
        series,
        [query("fleet", title) for title in ("Servers", "Requests waiting", "Generated tokens")],
        at="30m",
    )
    assert levels(counted) == {"3": 1, "0": 1}
    assert [value for _, value in waiting] == [7]
    assert [value for _, value in tokens] == [10]


def test_a_severity_that_no_server_has_is_shown_as_0(tmp_path: Path) -> None:
    series = server("a:1", "healthy") | server("b:1", "stuck", "critical") | server("c:1", job="again")
    counted = answer(tmp_path, series, query("fleet", "Servers"))
    assert {labels["level"]: value for labels, value in counted} == {"4": 1, "3": 0, "2": 0, "1": 0, "0": 2}


# --- what to change --------------------------------------------------------------------------------------------------


def test_what_limits_a_server_comes_first_and_advice_to_people_has_no_flag(tmp_path: Path) -> None:
    series = server("a:1", "cuda_graph_not_covering", "warning") | above(
        "a:1", "cuda_graph_not_covering", "queue_too_long"
    )
    series[advised("a:1", "cuda_graph_not_covering", "--cuda-graph-max-bs", "160 (default)", "256")] = "1.7e9x240"
    series[advised("a:1", "queue_too_long", "", "", "send fewer")] = "1.7e9x240"
    rows = answer(tmp_path, series, query("server", "What to change", instance="a:1"))
    assert sorted((-value, labels["diagnosis"], labels["advice"]) for labels, value in rows) == [
        (-2, "cuda_graph_not_covering", "--cuda-graph-max-bs: now 160 (default), try 256"),
        (-1, "queue_too_long", "send fewer"),
    ]
    [row] = answer(tmp_path, series, query("fleet", FLEET[1]))
    assert row[0]["advice"] == "--cuda-graph-max-bs: now 160 (default), try 256"


def test_what_is_not_above_its_limit_is_not_advised_about(tmp_path: Path) -> None:
    series = server("a:1", "retracting_too_often", "warning") | above("a:1", "retracting_too_often")
    series |= above("a:1", "queue_too_long", value="1x240")
    for diagnosis in ("retracting_too_often", "queue_too_long"):
        series[advised("a:1", diagnosis, "", "", f"end {diagnosis}")] = "1.7e9x240"
    rows = answer(tmp_path, series, query("server", "What to change", instance="a:1"))
    assert [labels["diagnosis"] for labels, _ in rows] == ["retracting_too_often"]


def test_a_change_that_several_diagnoses_advise_stands_once_beside_the_verdict(tmp_path: Path) -> None:
    diagnoses = ("latency_queue", "retracting_too_often", "requests_rejected")
    series = server("a:1", "retracting_too_often", "warning") | above("a:1", *diagnoses)
    for diagnosis in diagnoses:
        series[advised("a:1", diagnosis, "--schedule-conservativeness", "1 (default)", "1.3")] = "1.7e9x240"
    rows = answer(tmp_path, series, query("server", "What to change", instance="a:1"))
    assert [labels["diagnosis"] for labels, _ in rows] == ["retracting_too_often"]


@pytest.mark.parametrize(
    ("found", "shown"),
    [("scheduler_stuck", ["scheduler_stuck"]), ("queue_too_long", ["memory_reserve_too_large", "queue_too_long"])],
)
def test_an_optional_improvement_is_not_shown_beside_a_failure(tmp_path: Path, found: str, shown: list[str]) -> None:
    series = server("a:1", found, BY_ID[found].severity) | above("a:1", found, "memory_reserve_too_large")
    rows = answer(tmp_path, series, query("server", "What to change", instance="a:1"))
    assert sorted(labels["diagnosis"] for labels, _ in rows) == shown


@pytest.mark.parametrize(
    ("found", "value", "figure"),
    [
        ("client_too_slow", "0.97x240", " (97 % of the time)"),
        ("requests_failed", "0.12x240", " (12 %)"),
        ("retracting_too_often", "12.43x240", " (12.4/min)"),
        ("memory_reserve_too_small", "3x240", None),  # a condition is what is missing, and people read what is left
    ],
)
def test_a_verdict_has_its_figure_with_its_unit(tmp_path: Path, found: str, value: str, figure: str | None) -> None:
    series = server("a:1", found, "warning") | above("a:1", found, value=value, limit="0.05x240")
    [(labels, _)] = answer(tmp_path, series, query("server", "What limits it now", instance="a:1"))
    assert labels["sentence"] == f"It is {found.replace('_', ' ')}"
    assert labels.get("figure") == figure


@pytest.mark.parametrize(("lower", "words"), [("100x240", "below the range"), ("_x240", "queue empty")])
def test_an_empty_queue_is_below_the_range_of_a_profile_that_has_one(tmp_path: Path, lower: str, words: str) -> None:
    place = 'job="sglang",instance="a:1"'
    series = server("a:1") | {
        f"sglang_tuning_queued_requests{{{place}}}": "0x240",
        f'sglang_tuning_state{{{place},signal="queue",state="empty"}}': "1x240",
        f'sglang_tuning_threshold{{{place},signal="queue",bound="lower"}}': lower,
    }
    exprs = [
        query("server", title, ref, instance="a:1")
        for title, ref in (("Queued requests", "A"), ("What it was doing", "B"))
    ]
    tile, lane = answers(tmp_path, series, exprs, at="30m")
    assert [labels["verdict"] for labels, _ in tile] == [words]
    assert [list(STATE_WORDS.values())[int(value)][0] for _, value in lane] == [words]


# --- as it should be -------------------------------------------------------------------------------------------------


def test_a_dead_server_is_shown_with_the_end_from_its_log_and_without_old_figures(tmp_path: Path) -> None:
    place = 'job="sglang",instance="a:1"'
    words = "its log says that scheduler_0 crashed with exit code -9"
    series = (
        server("a:1", "server_down", "critical")
        | above("a:1", "server_down")
        | above("a:1", "queue_too_long", value="2x80 stale _x160")
    )
    series |= {
        f'sglang_tuning_end_info{{{place},class="unknown",words="{words}"}}': "1x240",
        advised("a:1", "server_down", "", "", "look at the log"): "5x240",
        f"sglang_tuning_available_gpu_memory_bytes{{{place}}}": "9e9x240",
        f"sglang_tuning_cuda_graph_coverage_ratio{{{place}}}": "1x240",
        f"sglang_tuning_retraction_events_total{{{place}}}": "0x240",
        f'sglang_tuning_threshold{{{place},signal="token_usage",bound="target"}}': "0.9x240",
    }
    titles = (
        "What limits it now",
        "What to change",
        "GPU memory left",
        "Retractions",
        "CUDA graphs used",
        "Token usage by pool",
    )
    exprs = [query("server", title, instance="a:1") for title in titles] + [query("fleet", FLEET[1])]
    sentence, change, *before, row = answers(tmp_path, series, exprs, at="30m")
    assert [labels["figure"] for labels, _ in sentence] == [f": {words}"]
    assert [(labels["diagnosis"], labels["advice"]) for labels, _ in change] == [("server_down", "look at the log")]
    assert before == [[]] * 4
    assert [labels["advice"] for labels, _ in row] == [words]


def test_a_verdict_is_shown_with_its_figure_and_since_when(tmp_path: Path) -> None:
    series = {key: values for key, values in server("a:1").items() if "verdict" not in key} | {
        verdict("a:1", "healthy", "none"): "1x40 stale _x200",
        verdict("a:1", "retracting_too_often", "warning"): "_x41 1x200",
        'sglang_tuning_verdict_since_timestamp_seconds{job="sglang",instance="a:1"}': "0x40 603x200",
    }
    series |= above("a:1", "retracting_too_often", value="_x41 12.43x200") | above("a:1", "queue_too_long")
    exprs = [query("server", title, instance="a:1") for title in ("What limits it now", "Since")]
    (sentence, since), (fine, begun) = (answers(tmp_path, series, exprs, at=at) for at in ("30m", "5m"))
    assert [(labels["verdict"], labels["figure"]) for labels, _ in sentence] == [
        ("retracting_too_often", " (12.4/min)")
    ]
    assert [(labels["verdict"], value) for labels, value in since] == [("retracting_too_often", 603_000)]
    assert ["figure" in labels for labels, _ in fine] == [False]
    assert [(labels["verdict"], value) for labels, value in begun] == [("healthy", 0)]


def test_a_dead_exporter_is_dead_since_its_last_answer_and_an_alert_stands_since_it_was_pending(tmp_path: Path) -> None:
    since = "sglang_tuning_verdict_since_timestamp_seconds"
    alerting = "time_to_first_token_burning_fast"
    pending = next(iter(firing("b:1", alerting, "critical"))).replace("ALERTS", "ALERTS_FOR_STATE")
    series = server("a:1", how="1x40 0x200") | server("b:1") | firing("b:1", alerting, "critical")
    series |= {
        f'{since}{{job="sglang",instance="a:1"}}': "5x40 stale _x200",
        f'{since}{{job="sglang",instance="b:1"}}': "5x240",
        pending.replace('alertstate="firing",', ""): "700x240",
    }
    dead, called = answers(
        tmp_path, series, [query("server", "Since", instance=name) for name in ("a:1", "b:1")], at="30m"
    )
    assert [(labels["verdict"], value) for labels, value in dead] == [("exporter_down", 600_000)]
    assert [(labels["verdict"], value) for labels, value in called] == [(alerting, 700_000)]


def test_a_time_that_ends_after_the_data_shows_the_last_verdict_and_when_the_data_ended(tmp_path: Path) -> None:
    place = 'job="sglang",instance="night"'
    advice = ("night", "retracting_too_often", "--schedule-conservativeness", "0.1")
    series = {
        f"up{{{place}}}": "1x80",
        f'sglang_tuning_build_info{{{place},version="1"}}': "1x80",
        verdict("night", "healthy", "none"): "1x40",
        verdict("night", "retracting_too_often", "warning"): "_x41 1x39",
        f"sglang_tuning_verdict_since_timestamp_seconds{{{place}}}": "0x40 610x39",
        **above("night", "retracting_too_often", value="0x40 2x39", limit="1x80"),
        advised(*advice, "0.5"): "_x41 5x10",
        advised(*advice, "1.3"): "_x60 5x20",
        f"sglang_tuning_queued_requests{{{place}}}": "7x80",
    }
    titles = ("What limits it now", "What to change", "Queued requests")
    exprs = [query("server", title, instance="night") for title in titles]
    exprs += [query("server", "Since", ref, instance="night") for ref in "AB"] + [query("fleet", FLEET[1])]
    sentence, change, queued, since, until, rows = answers(tmp_path, series, exprs, at="55m")
    assert [labels["verdict"] for labels, _ in sentence] == ["retracting_too_often"]
    assert [labels["advice"] for labels, _ in change] == ["--schedule-conservativeness: now 0.1, try 1.3"]
    assert [value for _, value in queued] == [7]
    assert [value for _, value in since] == [610_000]
    assert [value for _, value in until] == [1_200_000]
    assert [(labels["instance"], int(value)) for labels, value in rows] == [("night", 3)]
    assert answers(tmp_path, series, [query("server", "Since", "B", instance="night")], at="20m") == [[]]


def test_a_removed_exporter_is_not_shown_beside_the_present_ones(tmp_path: Path) -> None:
    gone = dict.fromkeys(server("old:1", "queue_too_long", "warning"), "1x80")
    rows = answer(tmp_path, server("a:1") | gone, query("fleet", FLEET[1]), at="40m")
    assert [labels["instance"] for labels, _ in rows] == ["a:1"]


def test_of_two_servers_as_severe_the_one_that_lost_more_time_is_worse(tmp_path: Path) -> None:
    series = server("a:1") | server("b:1")
    for instance, minutes in (("a:1", 5), ("b:1", 20)):
        steps = 120 - 4 * minutes
        series[verdict(instance, "healthy", "none")] = f"1x{steps} stale _x120"
        series[verdict(instance, "queue_too_long", "warning")] = f"_x{steps + 1} 1x{120 - steps}"
    rows = answer(tmp_path, series, query("fleet", FLEET[1]))
    assert [(labels["instance"], int(value)) for labels, value in sorted(rows, key=lambda row: -row[1])] == [
        ("b:1", 3),
        ("a:1", 3),
    ]


def test_the_alerts_that_fire_stand_beside_the_verdict_the_most_severe_with_the_largest_value(tmp_path: Path) -> None:
    series = server("a:1") | firing("a:1", "time_to_first_token_burning_fast", "critical")
    series |= firing("a:1", "queue_too_long", "warning")
    found = answer(tmp_path, series, query("server", "Firing alerts", instance="a:1"))
    assert {labels["alertname"]: value for labels, value in found} == {
        "SGLangTimeToFirstTokenBurningFast": 4,
        "SGLangQueueTooLong": 3,
    }


@pytest.mark.parametrize("found", ["not_enough_data", "starting", "idle", "stopped"])
def test_a_server_without_a_verdict_is_not_shown_as_healthy(tmp_path: Path, found: str) -> None:
    series = server("a:1", found) | server("b:1", "no_limit_in_log") | server("c:1", "healthy")
    assert levels(answer(tmp_path, series, query("fleet", "Servers"))) == {"1": 1, "0": 2}


def test_a_burn_rate_that_notifies_outranks_a_healthy_verdict(tmp_path: Path) -> None:
    series = server("a:1") | firing("a:1", "time_to_first_token_burning_fast", "critical")
    exprs = [*(query("fleet", title) for title in FLEET), query("server", "What limits it now", instance="a:1")]
    counted, rows, line, tile = answers(tmp_path, series, exprs, at="30m")
    assert levels(counted) == {"4": 1}
    assert [value for _, value in line] == [4]
    for samples in (rows, tile):
        assert [labels["verdict"] for labels, _ in samples] == ["time_to_first_token_burning_fast"]


def test_a_burn_rate_that_notifies_makes_the_diagnosis_found_as_urgent_and_does_not_hide_its_flag(
    tmp_path: Path,
) -> None:
    series = server("a:1", "retracting_too_often", "warning")
    series |= firing("a:1", "time_to_first_token_burning_fast", "critical")
    rows = answer(tmp_path, series, query("fleet", FLEET[1]))
    assert [(labels["verdict"], int(value)) for labels, value in rows] == [("retracting_too_often", 4)]


def test_of_two_equally_urgent_verdicts_the_exporters_own_is_shown(tmp_path: Path) -> None:
    series = server("a:1", "queue_too_long", "warning") | firing("a:1", "inter_token_latency_burning_slow", "warning")
    assert [labels["verdict"] for labels, _ in answer(tmp_path, series, query("fleet", FLEET[1]))] == ["queue_too_long"]


@pytest.mark.parametrize(("spent", "words"), [("idle", "replayed"), ("eager", "not covered")])
def test_cuda_graphs_are_judged_by_batches_under_load_and_not_by_health_checks_of_an_idle_server(
    spent: str, words: str, tmp_path: Path
) -> None:
    place = 'job="sglang",instance="a:1"'
    series = server("a:1") | {
        f"sglang_tuning_cuda_graph_coverage_ratio{{{place}}}": "0x240",
        f'sglang_tuning_threshold{{{place},signal="cuda_graph",bound="lower"}}': "0.5x240",
        f'sglang_tuning_state_seconds_total{{{place},signal="cuda_graph",state="{spent}"}}': "0+15x240",
    }
    [(labels, _)] = answer(tmp_path, series, query("server", "CUDA graphs used", instance="a:1"))
    assert labels["verdict"] == words


# --- tokens ----------------------------------------------------------------------------------------------------------


def gauge(instance: str, tokens: str, state: str = "1x240", rank: str = "") -> dict[str, str]:
    place = f'job="sglang",instance="{instance}"{rank}'
    return {
        f"sglang_tuning_generation_tokens_per_second{{{place}}}": tokens,
        f'sglang_tuning_state{{{place},signal="activity",state="serving"}}': state,
    }


def serves(instance: str, model: str) -> dict[str, str]:
    return {f'sglang_tuning_server_info{{job="sglang",instance="{instance}",model_name="{model}"}}': "1x240"}


def test_generated_tokens_are_those_of_the_chosen_model(tmp_path: Path) -> None:
    series = (
        server("a:1")
        | server("b:1")
        | server("c:1")
        | serves("a:1", "qwen")
        | serves("b:1", "llama")
        | serves("c:1", "llama")
    )
    for instance, model in (("a:1", "qwen"), ("b:1", "llama")):
        series[f'sglang:generation_tokens_total{{job="sglang",instance="{instance}",model_name="{model}"}}'] = (
            "0+150x240"
        )
        series |= gauge(instance, "900x240")
    series |= gauge("c:1", "500x240")
    exprs = [query("fleet", "Generated tokens", model=model) for model in ("qwen", "llama", ".*")]
    found = answers(tmp_path, series, exprs, at="30m")
    assert [[value for _, value in samples] for samples in found] == [[10], [510], [520]]


def test_a_throughput_that_stands_still_on_an_idle_server_is_not_shown(tmp_path: Path) -> None:
    series = server("a:1") | gauge("a:1", "37x240", "1x60 0x180")
    for board, title, ref in (("fleet", "Generated tokens", "A"), ("server", "Tokens per second", "C")):
        expr = query(board, title, ref, instance="a:1")
        assert [value for _, value in answer(tmp_path, series, expr, at="10m")] == [37]
        assert answer(tmp_path, series, expr, at="30m") == []


# --- DP ranks --------------------------------------------------------------------------------------------------------


def ranks() -> dict[str, str]:
    place = 'job="sglang",instance="a:1"'
    model = f'{place},model_name="m"'
    series = server("a:1") | {
        f'sglang_tuning_latency_observations_total{{{place},latency="time_to_first_token"}}': "0+10x240",
        f'sglang_tuning_latency_breaches_total{{{place},latency="time_to_first_token"}}': "0+1x240",
        f'sglang_tuning_threshold{{{place},signal="latency",bound="objective"}}': "0.9x240",
        f'sglang_tuning_threshold{{{place},signal="time_to_first_token_seconds",bound="upper"}}': "2x240",
        f"sglang:generation_tokens_total{{{model}}}": "0+450x240",
    }
    for rank, tokens in (("0", 150), ("1", 300)):
        for mode in ("decode", "prefill_compute", "prefill_cache"):
            labels = f'{model},dp_rank="{rank}",tp_rank="0",pp_rank="0",mode="{mode}"'
            series[f"sglang:realtime_tokens_total{{{labels}}}"] = f"0+{tokens}x240"
    return series


def test_latencies_stay_when_a_rank_is_chosen(tmp_path: Path) -> None:
    panels = [
        ("fleet", "Slower than the objective", "A"), ("latency", "Burn rate", "A"), ("latency", "Burn rate: TTFT", "D"),
    ]  # fmt: skip
    exprs = [query(*each, instance="a:1", dp_rank="1") for each in panels]
    found = answers(tmp_path, ranks(), exprs, at="30m")
    assert [[round(value, 6) for _, value in samples] for samples in found] == [[0.1], [1], [1]]


def test_tokens_per_second_are_the_sum_of_one_rank_or_of_all_ranks(tmp_path: Path) -> None:
    exprs = [
        query("server", "Tokens per second", ref, instance="a:1", dp_rank=rank)
        for rank in ("0", "1", ".*")
        for ref in "ABC"
    ]
    found = answers(tmp_path, ranks(), exprs, at="30m")
    assert [value for samples in found for _, value in samples] == [10] * 3 + [20] * 3 + [30] * 3


# --- retractions -----------------------------------------------------------------------------------------------------


def retracting(each: int) -> dict[str, str]:
    """Give a server that retracts once every so many scrapes of 15 s, and the rule's own figure."""
    place = 'job="sglang",instance="a:1"'
    values = " ".join(str(step // each) for step in range(160))
    return server("a:1") | {
        f"sglang_tuning_retraction_events_total{{{place}}}": values,
        f'sglang_tuning_threshold{{{place},signal="retractions_per_minute",bound="upper"}}': "1x240",
    }


def test_one_retraction_a_minute_is_tolerated_where_the_limit_is_one(tmp_path: Path) -> None:
    expr = query("server", "Retractions", instance="a:1")
    for at in ("30m", "30m7s", "30m20s", "30m38s"):  # between scrapes ten events are stretched to more
        [(labels, value)] = answer(tmp_path, retracting(4), expr, at=at)
        assert labels["verdict"] == "tolerated", value


def test_a_verdict_about_retractions_and_their_tiles_have_the_same_figure(tmp_path: Path) -> None:
    series = retracting(4) | server("a:1", "retracting_too_often", "warning")
    series |= above("a:1", "retracting_too_often", value="5x240")
    panels = [("server", "What limits it now", "A"), ("server", "Retractions", "A"), ("fleet", FLEET[1], "F")]
    exprs = [query(*each, instance="a:1") for each in panels]
    [(words, _)], [(tile, value)], [(_, column)] = answers(tmp_path, series, exprs, at="30m")
    assert words["figure"] == " (5/min)"
    assert (tile["verdict"], value, column) == ("too often", 5, 5)


def test_retractions_are_the_figure_of_the_rule_where_it_is_loaded(tmp_path: Path) -> None:
    series = retracting(4) | {'instance:sglang_tuning_retractions:rate10m{job="sglang",instance="a:1"}': "3.4x240"}
    panels = [
        ("server", "Retractions", "A"),
        ("server", "Retractions per minute", "C"),
        ("fleet", FLEET[1], "F"),
        ("fleet", "Retractions per minute", "A"),
    ]
    exprs = [query(*each, instance="a:1") for each in panels]
    assert [[value for _, value in samples] for samples in answers(tmp_path, series, exprs, at="30m")] == [[3.4]] * 4


def test_an_unreadable_log_hides_no_retraction(tmp_path: Path) -> None:
    place = 'job="sglang",instance="a:1"'
    series = retracting(4) | {f"sglang_tuning_retraction_events_total{{{place}}}": "0x240"}
    series[f"sglang_tuning_retracted_requests_total{{{place}}}"] = "0+1x240"
    assert [value for _, value in answer(tmp_path, series, query("server", "Retractions", instance="a:1"))] == [4]


# --- names -----------------------------------------------------------------------------------------------------------


def test_a_server_with_an_ipv6_address_fills_its_boards(tmp_path: Path) -> None:
    instance = "[2001:db8::1]:9741"
    place = f'job="sglang",instance="{instance}"'
    series = server(instance) | {
        f"sglang_tuning_{name}{{{place}}}": "7x240" for name in ("queued_requests", "running_requests")
    }
    exprs = [
        query("server", "What limits it now", instance=instance), query("server", "Queued requests", instance=instance),
        query("server", "Running requests and their limit", "B", instance=instance),
    ]  # fmt: skip
    assert all(answers(tmp_path, series, exprs, at="30m"))


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
    series[f'sglang_tuning_prompt_tokens_total{{{place},source="computed"}}'] = grows
    series[f'sglang_tuning_threshold{{{place},signal="latency",bound="objective"}}'] = f"0.9x{count}"
    series[f'sglang_tuning_threshold{{{place},signal="cuda_graph",bound="lower"}}'] = f"0.5x{count}"
    series[f'sglang_tuning_state{{{place},signal="activity",state="serving"}}'] = f"1x{count}"
    for signal in ("time_to_first_token_seconds", "inter_token_latency_seconds"):
        series[f'sglang_tuning_threshold{{{place},signal="{signal}",bound="upper"}}'] = f"2x{count}"
    return series


# There is one server, and so no second largest.
WINDOWED = [
    (f"{name}: {each['title']} {target['refId']}", chosen(target, instance="a:1"))
    for name, each in PANELS
    for target in each["targets"]
    if re.search(r"(?:rate|increase)\(", target["expr"]) and " unless topk(" not in target["expr"]
]


@pytest.mark.parametrize("every", [60, 120])
def test_scrapes_a_minute_or_two_apart_leave_no_panel_without_a_rate(tmp_path: Path, every: int) -> None:
    # Prometheus 3 leaves the first moment of a window out
    exprs = [re.sub(r"\[(\d+)m\]", lambda found: f"[{int(found[1]) * 60_000 - 1}ms]", expr) for _, expr in WINDOWED]
    for second in (0, 31, 59, 89):
        found = answers(tmp_path, busy(every), exprs, at=f"{1800 + second}s", every=f"{every}s")
        assert [title for (title, _), samples in zip(WINDOWED, found, strict=True) if not samples] == []


def test_a_tile_shows_what_was_known_last_while_one_scrape_is_missing(tmp_path: Path) -> None:
    place = 'job="sglang",instance="a:1"'
    how, value = "1x119 0x0 1x60", "{}x119 stale {}x60"
    series = server("a:1", "queue_too_long", "warning", how=how)
    for name in (
        "queued_requests", "token_usage_ratio", "cuda_graph_coverage_ratio", "available_gpu_memory_bytes", "up", "log_up", "running_requests",
        "server_info", "sources_info", "log_last_line_timestamp_seconds", "weights_bytes", "kv_pool_bytes", "cuda_graph_memory_bytes",
    ):  # fmt: skip
        series[f"sglang_tuning_{name}{{{place}}}"] = value.format(1, 1)
    series[f'sglang_tuning_state{{{place},signal="queue",state="above_range"}}'] = value.format(1, 1)
    series[advised("a:1", "queue_too_long", "--dp-size", "", "2")] = value.format(2, 2)
    tiles = [
        ("fleet", "Requests waiting", "A"), ("fleet", FLEET[1], "B"), ("fleet", FLEET[1], "C"), ("fleet", FLEET[1], "D"),
        ("server", "What limits it now", "A"), ("server", "Queued requests", "A"), ("server", "Token usage", "A"),
        ("server", "CUDA graphs used", "A"), ("server", "GPU memory left", "A"), ("server", "Data sources", "A"),
        ("server", "Data sources", "B"), ("server", "Server", "A"), ("server", "Last log line", "A"),
        *(("scheduling", "Where the GPU memory went", ref) for ref in "ABCD"),
    ]  # fmt: skip
    exprs = [query(*tile, instance="a:1") for tile in tiles]
    found = answers(tmp_path, series, [*exprs, query("fleet", FLEET[1])], at="30m")
    assert [tile for tile, samples in zip(tiles, found, strict=False) if not samples] == []
    assert found[5][0][0]["verdict"] == "queue too long"
    assert [labels["advice"] for labels, _ in found[-1]] == ["--dp-size: try 2"]


def test_the_last_figures_of_a_server_that_is_away_are_not_shown_while_the_exporter_answers(tmp_path: Path) -> None:
    series = server("a:1", "server_down", "critical") | {
        'sglang_tuning_queued_requests{job="sglang",instance="a:1"}': "7x110 stale _x60"
    }
    assert answer(tmp_path, series, query("fleet", "Requests waiting"), at="30m") == []


# --- burn rates ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objective", "fast", "slow"), [("0.99", 14.4, 6), ("0.95", 10, 6), ("0.9", 5, 5), ("0.8", 2.5, 2.5)]
)
def test_the_lines_of_a_burn_rate_lie_where_the_exporter_calls(
    tmp_path: Path, objective: str, fast: float, slow: float
) -> None:
    place = 'job="sglang",instance="a:1"'
    series = {
        f'sglang_tuning_threshold{{{place},signal="latency",bound="objective"}}': f"{objective}x240",
        f'sglang_tuning_threshold{{{place},signal="share",bound="upper"}}': "0.5x240",
    }
    exprs = [query("latency", "Burn rate: TTFT", ref, instance="a:1") for ref in "AB"]
    found = answers(tmp_path, series, exprs, at="30m")
    assert [round(value, 6) for samples in found for _, value in samples] == [fast, slow]


def test_a_server_that_misses_every_request_of_a_low_objective_burns_its_budget_fast(tmp_path: Path) -> None:
    place = 'job="sglang",instance="a:1"'
    series = {
        f'sglang_tuning_threshold{{{place},signal="latency",bound="objective"}}': "0.8x240",
        f'sglang_tuning_threshold{{{place},signal="share",bound="upper"}}': "0.5x240",
    }
    for name in ("observations", "breaches"):
        series[f'sglang_tuning_latency_{name}_total{{{place},latency="time_to_first_token"}}'] = "0+10x240"
    [(labels, value)] = answer(tmp_path, series, query("latency", "Burn rate", instance="a:1"))
    assert (labels["verdict"], round(value, 6)) == ("far too fast", 5)
