"""Whether a replica helps, and the autoscaler examples: what they ask for, by the query that Prometheus is asked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from promtool import evaluated
from sglang_tuning_exporter.core.alerts import scale_out_helps
from sglang_tuning_exporter.core.findings import Change, Finding, Judgement

DEPLOY = Path(__file__).parents[1] / "deploy"
AT_ONCE = 32  # requests that a server of the examples serves


def judgement(verdict: str, *changes: Change) -> Judgement:
    finding = Finding(verdict, "", "warning", True, "", "", "", "high", (), changes)  # noqa: FBT003 - as the class has it
    return Judgement(verdict, "", "warning", (finding,), {})


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


def test_where_a_flag_may_end_it_the_flag_comes_first() -> None:
    flag = Change(arg="max_running_requests", direction="raise", flag="--max-running-requests", now=4, to=8)
    assert scale_out_helps(judgement("running_at_limit", flag)) is False
    assert scale_out_helps(judgement("running_at_limit")) is True


def queries() -> dict[str, str]:
    """The query of each example by its job."""
    triggers = [
        each["spec"]["triggers"][0]["metadata"] for each in yaml.safe_load_all((DEPLOY / "keda.yml").read_text())
    ]
    found = {re.findall(r'job="([^"]+)"', each["query"])[0]: each["query"] for each in triggers}
    words = [line[1:] for line in (DEPLOY / "hpa.yml").read_text().splitlines() if line.startswith("#  ")]
    (rule,) = yaml.safe_load("\n".join(words))["rules"]["external"]
    return found | {"adapter": rule["metricsQuery"].replace("<<.LabelMatchers>>", 'job="sglang"')}


def test_the_examples_want_a_replica_for_so_many_requests_and_never_act_on_no_figure() -> None:
    for document in yaml.safe_load_all((DEPLOY / "keda.yml").read_text()):
        (trigger,) = document["spec"]["triggers"]
        assert float(trigger["metadata"]["threshold"]) == AT_ONCE
        assert trigger["metadata"]["ignoreNullValues"] == "false"
    (hpa,) = yaml.safe_load_all((DEPLOY / "hpa.yml").read_text())
    assert hpa["spec"]["metrics"][0]["external"]["target"]["averageValue"] == str(AT_ONCE)


# Servers as (running, waiting, whether a replica helps), None where it is away; and the requests that are counted.
CASES: dict[str, tuple[dict[str, tuple[float, float, float] | None], float]] = {
    "a queue that a replica takes load off": ({"a": (30, 50, 1), "b": (20, 0, 0)}, 100),
    "a queue that a flag would end": ({"a": (30, 50, 0), "b": (20, 0, 0)}, 50),
    "one that is away beside a bored one": ({"a": (3, 0, 0), "b": None}, 35),
    "one that is away beside one in need": ({"a": (30, 50, 1), "b": None}, 112),
    "no requests": ({"a": (0, 0, 0), "b": (0, 0, 0)}, 0),
    "no figures": ({"a": None, "b": None}, 64),
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_runs_and_waits_is_added_up_and_a_server_that_is_away_changes_nothing(case: str, tmp_path: Path) -> None:
    servers, wanted = CASES[case]
    series = {}
    for name, figures in servers.items():
        labels = f'job="sglang", instance="{name}"'
        series[f"sglang_tuning_build_info{{{labels}}}"] = "1x10"
        for metric, value in zip(("running_requests", "queued_requests"), figures or (), strict=False):
            for rank in (0, 1):
                series[f'sglang_tuning_{metric}{{{labels}, dp_rank="{rank}"}}'] = f"{value / 2}x10"
        if figures is not None:
            series[f"sglang_tuning_scale_out_helps{{{labels}}}"] = f"{figures[2]}x10"
    asked = [queries()[job] for job in ("sglang", "adapter")]
    assert evaluated(tmp_path, [series], asked, at="5m", every="1m") == [[[({}, wanted)]] * 2]
