"""The scaling signal: demand over capacity, whether a replica helps, and a simulated fleet that follows it."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import fleet
from sglang_tuning_exporter.capacity.ranks import RankCapacity
from sglang_tuning_exporter.capacity.readings import Prefill
from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.events import Event
from sglang_tuning_exporter.core.findings import Change, Finding, Judgement
from sglang_tuning_exporter.core.rows import BY_ID
from sglang_tuning_exporter.core.scaling import (
    DEMAND_SECONDS,
    FLAG_FIRST,
    REPLICA,
    UNKNOWN,
    capacity_ratio,
    demands,
    scale_out_helps,
)
from sglang_tuning_exporter.core.scrapes import Stuck
from sglang_tuning_exporter.core.server import Server
from sglang_tuning_exporter.core.view import View, view_of
from test_prediction import around, measured

DEPLOY = Path(__file__).parents[1] / "deploy"
RULES = Path(__file__).parents[1] / "alerts" / "rules" / "sglang-tuning.rules.yml"


def load(
    running: int = 2, queued: int = 30, usage: float = 0.05, *, limit: int = 2, profile: str = "offline"
) -> Server:
    """Two minutes in which `running` requests ran and `queued` waited."""
    server = Server(PROFILES[profile])
    server.take(Event("arguments", 0.0, arguments={"model_path": "m", "max_running_requests": limit, "tp_size": 1}))
    server.take(Event("pool", 0.0, figures={"tokens": 16384.0}))
    server.take(Event("limits", 0.0, figures={"max_total_num_tokens": 16384.0, "max_running_requests": float(limit)}))
    figures = {"running": float(running), "queued": float(queued), "tokens": 800.0, "usage": usage, "throughput": 400.0}
    for second in range(1, 121):
        server.take(Event("decode", float(second), figures=dict(figures)))
    server.advance(120.0)
    return server


def view(server: Server, **more: object) -> View:
    return replace(view_of(server, DEMAND_SECONDS), **more)  # type: ignore[arg-type]


def of(server: Server, *ranks: RankCapacity) -> dict[str, float]:
    return {each.of: each.ratio for each in demands(view(server), ranks)}


def judgement(verdict: str, *changes: Change) -> Judgement:
    finding = Finding(verdict, "", "warning", True, "", "", "", "high", (), changes)  # noqa: FBT003 - as the class has it
    return Judgement(verdict, "", "warning", (finding,), ())


FLAG = Change("max_running_requests", "--max-running-requests", 2, 4, "")
PEOPLE = Change("", "", None, None, "add a replica")


def test_every_verdict_that_is_named_is_a_row_or_a_word() -> None:
    assert {*REPLICA, *FLAG_FIRST} <= BY_ID.keys()
    assert UNKNOWN - BY_ID.keys() == {"not_enough_data", "starting", "stopped"}
    assert not REPLICA & FLAG_FIRST


def test_a_running_limit_is_a_flags_first_and_a_replicas_where_no_flag_is_left() -> None:
    assert scale_out_helps(judgement("running_at_limit", FLAG)) is False
    assert scale_out_helps(judgement("running_at_limit", PEOPLE)) is True


@pytest.mark.parametrize(
    ("verdict", "helps"),
    [
        ("queue_too_long", True),
        ("latency_batch_too_large", True),
        ("client_too_slow", False),
        ("grammar_queue", False),
        ("dp_imbalanced", False),
        ("crashed", False),
        ("healthy", False),
        ("idle", False),
        ("not_enough_data", None),
        ("starting", None),
        ("stopped", None),
        ("server_down", None),
        ("scheduler_stuck", None),
    ],
)
def test_the_verdict_decides(verdict: str, *, helps: bool | None) -> None:
    assert scale_out_helps(judgement(verdict)) is helps


@pytest.mark.parametrize(
    "more",
    [{"starting": True}, {"stopped": True}, {"down": "refused"}, {"stuck": Stuck("scheduler", 100.0)}],
    ids=str,
)
def test_the_demand_of_a_server_that_is_away_is_not_known(more: dict[str, object]) -> None:
    assert capacity_ratio(view(load()), [measured()]) is not None
    assert capacity_ratio(view(load(), **more), [measured()]) is None


def test_an_idle_server_has_no_demand_and_one_that_was_not_seen_has_none_that_is_known() -> None:
    idle = load(running=0, queued=0)
    assert capacity_ratio(view(idle), []) == 0.0
    unseen = load()
    unseen.advance(1000.0)
    assert capacity_ratio(view(unseen), []) is None


def test_waiting_requests_need_as_much_of_the_cache_as_running_ones() -> None:
    assert of(load(8, 8, 0.5, limit=64))["kv_cache"] == pytest.approx(1.0)
    assert of(load(8, 0, 0.5, limit=64))["kv_cache"] == pytest.approx(0.5)


def test_prefill_is_its_backlog_over_the_objective() -> None:
    rank = replace(measured(), prefill=Prefill(around(1000.0), 0.5), waiting_tokens=4000.0)
    objective = PROFILES["online"].time_to_first_token_seconds
    assert objective is not None
    assert of(load(profile="online"), rank)["prefill"] == pytest.approx(4.0 / objective)
    assert "prefill" not in of(load(profile="offline"), rank)  # throughput has no objective


def test_inter_token_latency_is_the_models_without_a_histogram() -> None:
    objective = PROFILES["online"].inter_token_seconds
    assert objective is not None
    assert of(load(profile="online"), measured())["inter_token"] == pytest.approx(0.0044 / objective)


def test_generation_is_tokens_a_second_over_those_of_a_full_batch() -> None:
    rank = replace(measured(batch=8.0), most_requests=32)
    found = of(load(8, 0, 0.2, limit=64), rank)["generation"]
    assert found == pytest.approx((8 / 0.0056) / (32 / 0.0104))


def test_without_what_fits_generation_is_not_known() -> None:
    assert "generation" not in of(load(), measured())
    assert "generation" not in of(load(), RankCapacity(None, running=2.0))


def test_the_greatest_demand_counts() -> None:
    server = load(8, 80, 0.5, limit=64)
    assert capacity_ratio(view(server), [measured()]) == max(of(server, measured()).values())


@pytest.fixture(scope="module")
def courses() -> dict[str, fleet.Course]:
    return {scene.name: fleet.play(scene) for scene in fleet.SCENES}


def test_a_fleet_grows_with_a_burst_and_shrinks_after_it(courses: dict[str, fleet.Course]) -> None:
    burst = courses["burst"]
    assert burst.at(9) == 2
    assert burst.at(25) >= 4
    assert burst.at(59) == 2
    assert max(queued for at, queued in burst.queued if 25 * 60 < at < 30 * 60) < 100


def test_a_fleet_that_nobody_asks_shrinks_to_one_and_comes_back(courses: dict[str, fleet.Course]) -> None:
    idle = courses["idle"]
    assert (idle.at(14), idle.at(40)) == (2, 1)
    assert idle.at(59) >= 2


@pytest.mark.parametrize("scene", ["restart", "dead", "flag"])
def test_a_problem_that_replicas_do_not_solve_changes_no_fleet(courses: dict[str, fleet.Course], scene: str) -> None:
    assert {count for _, count in courses[scene].replicas} == {2}


def test_a_queue_that_a_flag_would_shorten_still_counts_as_long(courses: dict[str, fleet.Course]) -> None:
    assert courses["flag"].queued[-1][1] > 100


@pytest.mark.parametrize("scene", [scene.name for scene in fleet.SCENES])
def test_no_fleet_size_oscillates(courses: dict[str, fleet.Course], scene: str) -> None:
    assert courses[scene].changes <= 1  # up and down again with the load


def test_the_picture_in_the_docs_is_of_this_code() -> None:
    committed = Path(__file__).parents[1] / "docs" / "scaling.svg"
    assert committed.read_text(encoding="utf-8") == fleet.picture()


def queries() -> list[str]:
    """The queries of the examples."""
    text = "".join((DEPLOY / name).read_text() for name in ("keda.yml", "hpa.yml"))
    return re.findall(r"(job:sglang_tuning_demand:sum5m)", text)


def test_the_examples_ask_what_the_rules_record() -> None:
    recorded = {
        rule["record"]
        for group in yaml.safe_load(RULES.read_text())["groups"]
        for rule in group["rules"]
        if "record" in rule
    }
    assert set(queries()) <= recorded


def test_the_examples_scale_by_the_ratio_that_the_rules_aim_at_and_never_on_no_figure() -> None:
    for document in yaml.safe_load_all((DEPLOY / "keda.yml").read_text()):
        (trigger,) = document["spec"]["triggers"]
        assert float(trigger["metadata"]["threshold"]) == fleet.TARGET_RATIO
        assert trigger["metadata"]["ignoreNullValues"] == "false"
    (hpa,) = yaml.safe_load_all((DEPLOY / "hpa.yml").read_text())
    (metric,) = hpa["spec"]["metrics"]
    assert metric["external"]["target"]["averageValue"] == f"{1000 * fleet.TARGET_RATIO:.0f}m"


CASES: dict[str, tuple[dict[str, tuple[float | None, float | None]], float]] = {
    "two that a replica would help": ({"a": (1.2, 1), "b": (0.9, 1)}, 2.1),
    "a queue that a flag would end": ({"a": (9.0, 0), "b": (0.5, 0)}, 1.3),
    "a pile of requests": ({"a": (9.0, 1)}, 1.6),
    "one that starts beside one in need": ({"a": (1.2, 1), "b": (None, None)}, 1.6),
    "one that is dead beside a bored one": ({"a": (0.1, 0), "b": (None, None)}, 1.6),
    "one that starts beside one in great need": ({"a": (1.6, 1), "b": (1.6, 1), "c": (None, None)}, 3.2),
    "no requests": ({"a": (0.0, 0), "b": (0.0, 0)}, 0.0),
    "no figures": ({"a": (None, None), "b": (None, None)}, 1.6),
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_rules_add_up_servers(case: str, tmp_path: Path) -> None:
    servers, wanted = CASES[case]
    series = []
    for name, (ratio, helps) in servers.items():
        labels = f'job="sglang", instance="{name}"'
        series.append({"series": f"sglang_tuning_build_info{{{labels}}}", "values": "1+0x10"})
        for metric, value in (("capacity_ratio", ratio), ("scale_out_helps", helps)):
            if value is not None:
                series.append({"series": f"sglang_tuning_{metric}{{{labels}}}", "values": f"{value}+0x10"})
    samples = [{"labels": '{job="sglang"}', "value": wanted}]
    expected = [{"expr": "round(job:sglang_tuning_demand:sum5m, 0.001)", "eval_time": "5m", "exp_samples": samples}]
    test = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": series, "promql_expr_test": expected}],
    }
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump(test))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
