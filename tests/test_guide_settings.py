"""The guide's settings for a workload: named where a server falls short of them, silent where it is beyond them."""

from __future__ import annotations

import pytest

from sglang_tuning_exporter.core.diagnoses.start import differing
from sglang_tuning_exporter.core.judge import judge
from sglang_tuning_exporter.core.view import View
from views import Load, late, seen

BEYOND = Load(more={"cuda_graph/beyond_captured": 20.0})


def named(view: View) -> list[str]:
    return [f"{view.facts.flag(setting.arg)} {setting.value:g}" for setting in differing(view)]


def test_online_a_batch_beyond_the_largest_graph_may_need_larger_graphs() -> None:
    view = seen(BEYOND, cuda_graph_max_bs=24, cuda_graph_bs=[1, 2, 4, 8, 16, 24], max_running_requests=512)
    assert "--cuda-graph-max-bs 256" in named(view)


@pytest.mark.parametrize("limit", [48, 512])
def test_graphs_that_every_batch_replays_are_not_made_larger(limit: int) -> None:
    assert named(seen(Load(running=4.0), cuda_graph_max_bs=8, max_running_requests=limit)) == []


def test_graphs_are_not_made_larger_than_the_running_limit() -> None:
    view = seen(BEYOND, version="0.5.10", cuda_graph_max_bs=8, max_running_requests=48)
    found = next(each for each in judge(view).findings if each.diagnosis == "profile_settings")
    assert ("--cuda-graph-max-bs", 48.0) in [(each.flag, each.to) for each in found.changes]


def test_larger_graphs_than_the_guides_are_not_made_smaller() -> None:
    view = seen(Load(), cuda_graph_max_bs=1016, cuda_graph_bs=[1, 512, 1016], max_running_requests=4096)
    assert "--cuda-graph-max-bs 256" not in named(view)


@pytest.mark.parametrize(("conservativeness", "is_named"), [(1.0, True), (1.2, False), (1.5, False)])
def test_conservativeness_is_raised_to_the_guides_and_never_lowered(conservativeness: float, is_named: bool) -> None:  # noqa: FBT001 - a case
    view = seen(Load(), schedule_conservativeness=conservativeness)
    assert ("--schedule-conservativeness 1.2" in named(view)) is is_named


def test_a_prefill_server_which_never_retracts_keeps_its_conservativeness() -> None:
    assert named(seen(Load(), schedule_conservativeness=1.0, disaggregation_mode="prefill")) == []


def test_a_large_batch_whose_tokens_come_in_time_keeps_its_limit() -> None:
    assert "--max-running-requests 128" not in named(seen(Load(running=200.0), max_running_requests=512))


def test_a_large_batch_whose_tokens_come_late_is_told_the_guides_limit() -> None:
    load = Load(running=200.0, more=late("inter_token", 0.5))
    assert "--max-running-requests 128" in named(seen(load, max_running_requests=512))
