"""The /metrics page: no series twice, none without data from the server, packed or not, and not too many."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import requests
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from bench.server import page
from conftest import (
    RETRACTION,
    SERVING,
    SERVING_WITH_DP_RANKS,
    FakeSGLang,
    Page,
    config,
    reply,
    wait_for,
    watched_retractions,
    web,
)
from promtool import PRESENT, promtool
from sglang_tuning_exporter import __version__
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.core.diagnoses import BY_ID
from sglang_tuning_exporter.core.lines import Reader
from sglang_tuning_exporter.serve.metrics import collect
from sglang_tuning_exporter.serve.metrics.families import PREFIX, Family, gauge, info, text_format
from sglang_tuning_exporter.sglang import exposition, metrics

# What prometheus_client exposes of the exporter's own process.
OWN_PROCESS = {
    f"process_{name}"
    for name in (
        "cpu_seconds", "max_fds", "open_fds", "resident_memory_bytes", "start_time_seconds", "virtual_memory_bytes",
    )
}  # fmt: skip


def page_of(sidecar: Sidecar) -> Page:
    with web(sidecar) as url:
        return Page(requests.get(url + "/metrics", timeout=10).text)


def native(sglang: FakeSGLang, body: bytes = SERVING, **settings: object) -> Page:
    sglang.answers["/metrics"] = reply(body)
    return page_of(Sidecar(config(sglang_url=sglang.url, **settings)))


def test_the_verdict_is_one_sentence_without_figures(tmp_path: Path) -> None:
    retracting = Page(text_format(collect(watched_retractions(tmp_path, without=10.0))))  # before it is asked to end
    (verdict,) = retracting.labels("sglang_tuning_verdict_info")
    assert verdict["verdict"] == "retracting_too_often"
    assert verdict["level"] == "warning"
    assert not re.search(r"[0-9]", verdict["sentence"])
    assert retracting.value("sglang_tuning_scale_out_helps") == 0


def test_a_server_that_is_away_is_answered_with_status_200(tmp_path: Path) -> None:
    sidecar = watched_retractions(tmp_path)
    sidecar.start()
    away = page_of(sidecar)
    assert away.value("sglang_tuning_up") == 0
    assert away.error == "connection_refused"
    assert away.value("sglang_tuning_build_info", version=__version__) == 1
    assert away.value("sglang_tuning_scale_out_helps") is None


def test_sglangs_own_series_come_exactly_once_and_unchanged(sglang: FakeSGLang) -> None:
    page = native(sglang)
    lines = [line for line in SERVING.decode().splitlines() if re.match(r"sglang:(?!.*_created)", line)]
    served = [line for line in page.text.splitlines() if line.startswith("sglang:")]
    assert len(lines) > 20
    assert Counter(served) == Counter(lines)


def test_no_series_comes_twice_and_none_of_ours_has_a_native_name(sglang: FakeSGLang) -> None:
    page = native(sglang)
    series = Counter(line.rpartition(" ")[0] for line in page.text.splitlines() if not line.startswith("#"))
    assert series.most_common(1)[0][1] == 1
    declared = Counter(line.split()[2] for line in page.text.splitlines() if line.startswith("# TYPE"))
    assert declared.most_common(1)[0][1] == 1
    assert all(name.startswith(("sglang:", PREFIX)) for name in page.families if name not in OWN_PROCESS)


def test_ranks_are_a_label_only_where_the_server_has_dp_ranks(sglang: FakeSGLang) -> None:
    page = native(sglang, SERVING_WITH_DP_RANKS)
    for name in ("queued_requests", "running_requests", "token_usage_ratio", "state"):
        assert {labels["dp_rank"] for labels in page.labels(PREFIX + name)} == {"0", "1"}
    assert {"dp_rank"} & set(page.labels("sglang_tuning_condition")[0]) == set()
    single = native(sglang)
    assert not [s for s in single.samples if s.name.startswith(PREFIX) and "dp_rank" in s.labels]


@pytest.mark.parametrize("name", [r"\ud800", r"\x00", '"}\\n# TYPE up gauge\\nup 5\\n{x="', "ü" * 300])
def test_a_hostile_model_name_costs_neither_the_page_nor_a_series(name: str, sglang: FakeSGLang) -> None:
    sidecar = Sidecar(config(sglang_url=sglang.url, log_file=("/nonexistent/server.log",)))
    line = f"[2025-11-20 11:38:20] server_args={{'model_path': '{name}', 'tp_size': 8}}\n"
    for event in Reader().read(line.encode()):
        sidecar.watch.take_line(event)
    sglang.stop()
    page = page_of(sidecar)
    assert page.value("sglang_tuning_server_arg", arg="tp_size") == 8
    assert len(page.labels("sglang_tuning_server_info")) == 1
    assert all(family.startswith(PREFIX) for family in page.families if family not in OWN_PROCESS)


def test_a_log_whose_name_is_not_utf8_does_not_cost_the_page(tmp_path: Path) -> None:
    odd = str(tmp_path) + "/\udcff.log"
    Path(odd).touch()
    sidecar = Sidecar(config(log_file=(odd,)))
    sidecar.start()
    with Path(odd).open("ab") as log:
        log.write(RETRACTION)
    wait_for(lambda: sidecar.log is not None and sidecar.log.last_line_at is not None)
    with web(sidecar) as url:
        page = Page(requests.get(url + "/metrics", timeout=10).text)
        assert requests.get(url + "/", timeout=10).status_code == 200
    assert [labels["file"][-9:] for labels in page.labels("sglang_tuning_log_up")] == [r"\udcff.log"[-9:]]


@pytest.mark.skipif(not PRESENT, reason="promtool is not installed")
@pytest.mark.parametrize("passthrough", [True, False])
def test_promtool_accepts_the_page_and_the_exporters_series_pass_its_lint(
    passthrough: bool,  # noqa: FBT001 - a parameter of the test
    sglang: FakeSGLang,
) -> None:
    page = native(sglang, passthrough=passthrough)
    status, said = promtool("check", "metrics", given=page.text)
    assert "error" not in said, said
    assert PREFIX not in said, said
    if not passthrough:
        assert (status, said) == (0, "")


@pytest.mark.parametrize("serving", [SERVING, SERVING_WITH_DP_RANKS], ids=["one scheduler", "DP ranks"])
def test_the_exporters_page_is_what_prometheus_client_would_write(
    serving: bytes, sglang: FakeSGLang, tmp_path: Path
) -> None:
    sglang.answers["/metrics"] = reply(serving)
    sidecar = watched_retractions(tmp_path, sglang_url=sglang.url)
    sidecar.scrape(5)
    collected = collect(sidecar)
    assert text_format(collected) == generate_latest(_Given(collected)).decode()


@pytest.mark.parametrize("word", ['a"b', "a\\b", "ä", "", "x" * 300])
@pytest.mark.parametrize("value", [0.0, -1.5, 1e6, 123456789.125, 1e21, float("inf"), float("-inf"), float("nan"), 7])
def test_any_label_and_figure_is_written_as_the_library_would(word: str, value: float) -> None:
    family = gauge("x", word or "words", "b", "a")
    family.add_metric([word, "1"], value)
    family.add_metric(["other", word], value)
    families = [family, info("y", "words", {"z": word, "a": word})]
    assert text_format(families) == generate_latest(_Given(families)).decode()


class _Given(Collector):
    """These families, as a registry would give them."""

    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.documentation, family.type)
            for sample in family.samples:
                text, value = sample
                metric.add_sample(family.sample_name, dict(exposition.labels(text[1:-1])), value)
            yield metric


# How many series

MOST, MOST_OF_A_RANK = 270, 25


def series(sidecar: Sidecar) -> Counter[str]:
    return Counter({family.sample_name: len(family.samples) for family in collect(sidecar) if family.samples})


def under_load(ranks: int) -> Sidecar:
    """An exporter that has scraped a server of so many DP ranks for ten minutes; nothing of it is in a log."""
    sidecar = Sidecar(config(sglang_url="http://127.0.0.1:9"))
    begin = sidecar.now() - 600
    sidecar.watch.begin = begin
    for at in range(0, 601, 15):
        sidecar.watch.take_page(metrics.read(page(ranks)), begin + at)
        sidecar.watch.judge(begin + at)
    return sidecar


def test_a_server_of_one_rank_has_at_most_270_series_with_every_alert_known(tmp_path: Path) -> None:
    found = series(watched_retractions(tmp_path, profile="offline", threshold={"alert_wait": 0.001}))
    assert found["sglang_tuning_alert"] > 20
    assert found.total() <= MOST, found.most_common(12)


def test_a_further_rank_adds_few_series() -> None:
    two, four = (series(under_load(ranks)) for ranks in (2, 4))
    assert (four.total() - two.total()) / 2 <= MOST_OF_A_RANK, (four - two).most_common(12)


def test_only_measured_diagnoses_with_an_alert_have_a_condition_and_its_limit(
    tmp_path: Path,
) -> None:
    sidecar = watched_retractions(tmp_path)
    named = {
        name: {exposition.labels(text[1:-1])["diagnosis"] for family in collect(sidecar) for text,
            _ in family.samples if family.name == name}
        for name in ("sglang_tuning_condition", "sglang_tuning_condition_limit")
    }  # fmt: skip
    assert named["sglang_tuning_condition"] == named["sglang_tuning_condition_limit"]
    assert all(BY_ID[name].alert for name in named["sglang_tuning_condition"])
