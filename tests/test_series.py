"""How many series of ours a server has: what a Prometheus with a thousand of them must keep."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from bench.server import page
from conftest import config, watched_retractions
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.core.rows import BY_ID
from sglang_tuning_exporter.serve.metrics import collect
from sglang_tuning_exporter.sglang.metrics import page_figures

if TYPE_CHECKING:
    from pathlib import Path

MOST, MOST_OF_A_RANK = 270, 25


def series(sidecar: Sidecar) -> Counter[str]:
    return Counter(sample.name for family in collect(sidecar) for sample in family.samples)


def under_load(ranks: int) -> Sidecar:
    """An exporter that has scraped a server of so many DP ranks for ten minutes; nothing of it is in a log."""
    sidecar = Sidecar(config(sglang_url="http://127.0.0.1:9"))
    begin = sidecar.now() - 600
    sidecar.watch.begin = begin
    for at in range(0, 601, 15):
        sidecar.watch.scrape(page_figures.read(page(ranks)), begin + at)
        sidecar.watch.judge(begin + at)
    return sidecar


def test_a_server_of_one_rank_has_at_most_270_series_with_every_alert_known(tmp_path: Path) -> None:
    found = series(watched_retractions(tmp_path, profile="offline", threshold={"alert_wait": 0.001}))
    assert found["sglang_tuning_alert"] > 20
    assert found.total() <= MOST, found.most_common(12)


def test_a_further_rank_adds_few_series() -> None:
    two, four = (series(under_load(ranks)) for ranks in (2, 4))
    assert (four.total() - two.total()) / 2 <= MOST_OF_A_RANK, (four - two).most_common(12)


def test_rows_without_an_alert_have_no_condition_and_a_limit_stands_only_beside_what_is_measured(
    tmp_path: Path,
) -> None:
    sidecar = watched_retractions(tmp_path)
    named = {
        name: {sample.labels["diagnosis"] for family in collect(sidecar) for sample in family.samples if sample.name == name}
        for name in ("sglang_tuning_condition", "sglang_tuning_condition_limit")
    }  # fmt: skip
    assert named["sglang_tuning_condition"] == named["sglang_tuning_condition_limit"]
    assert all(BY_ID[name].alert for name in named["sglang_tuning_condition"])
