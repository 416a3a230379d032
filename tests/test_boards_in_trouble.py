"""What the boards show in difficult cases: foreign targets, missed and slow scrapes, odd names, two jobs, low
objectives.

`promtool` answers the boards' own queries over series written here. The sample `_` means no scrape; `stale` is the
marker that a failed scrape leaves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isnan
from pathlib import Path
from typing import Any

import pytest

from promtool import PRESENT, Samples, evaluated
from test_dashboards import BOARDS, chosen, panel_of

pytestmark = pytest.mark.skipif(not PRESENT, reason="no Prometheus is installed")


def panel(board: str, title: str) -> dict[str, Any]:
    return panel_of(BOARDS[board], title)


def query(board: str, title: str, ref: str = "A", **choices: str) -> str:
    [target] = [target for target in panel(board, title)["targets"] if target["refId"] == ref]
    return chosen(target["expr"], **choices)


def answers(directory: Path, series: Mapping[str, str], exprs: list[str], *, at: str) -> list[Samples]:
    [found] = evaluated(directory, [series], exprs, at=at)
    return found


def answer(directory: Path, series: Mapping[str, str], expr: str, *, at: str = "30m") -> Samples:
    [found] = answers(directory, series, [expr], at=at)
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
    found = answers(directory, series, [chosen(target["expr"]) for target in targets], at=at)
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


def test_states_are_counted_by_level_and_no_verdict_is_not_fine(tmp_path: Path) -> None:
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
        ("w-restarts", "restart_loop", "warning"),
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


def test_several_servers_of_one_exporter_are_rows_of_which_one_is_chosen(tmp_path: Path) -> None:
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


def test_a_changed_verdict_is_shown_at_once_even_if_the_old_series_has_no_end(tmp_path: Path) -> None:
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


def test_the_last_figures_of_an_absent_server_are_not_shown(tmp_path: Path) -> None:
    series = server("a:1", "server_down", "critical") | {
        'sglang_tuning_token_usage_ratio{job="sglang",instance="a:1",pool="full"}': "0.9x110 stale _x60"
    }
    [(_, value)] = answer(tmp_path, series, query("server", TILES, "F", instance="a:1"))
    assert isnan(value)
