"""What is on the page now is what is: a rank, a pool or a series that has left the page is gone at the next scrape."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from conftest import Page, config
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.lines import Reader
from sglang_tuning_exporter.core.server import MOST_SCHEDULERS
from sglang_tuning_exporter.core.watch import Watch
from sglang_tuning_exporter.serve.metrics import collect
from sglang_tuning_exporter.serve.metrics.families import text_format
from sglang_tuning_exporter.sglang import metrics

if TYPE_CHECKING:
    from collections.abc import Iterable

BEGIN = 1_763_640_000.0
GAUGES = {
    "num_running_reqs": 3,
    "num_queue_reqs": 2,
    "token_usage": 0.5,
    "swa_token_usage": 0.4,
    "num_grammar_queue_reqs": 1,
    "num_prefill_inflight_queue_reqs": 4,
    "gen_throughput": 50,
    "new_token_ratio": 0.7,
    "max_total_num_tokens": 1000,
    "num_retracted_requests_total": 0,
}


def series(dp: int | None = None, **figures: Any) -> str:
    """The series of one scheduler; a figure of None is not there."""
    labels = 'engine_type="unified",model_name="m"' + ("" if dp is None else f',dp_rank="{dp}"')
    shown = {**GAUGES, **figures}
    return "".join(f"sglang:{name}{{{labels}}} {value}\n" for name, value in shown.items() if value is not None)


def shown(*pages: str) -> Page:
    """Our own series after these pages of SGLang."""
    sidecar = Sidecar(config(sglang_url="http://127.0.0.1:9"))
    for text in pages:
        sidecar._receive(text, 0.01)
    page = Page(text_format(collect(sidecar)))
    sidecar.stop()
    return page


def ranks_of(page: Page) -> set[str]:
    """The ranks of any series, gauges and counters."""
    return {sample.labels["dp_rank"] for sample in page.samples if "dp_rank" in sample.labels}


def phantoms(number: int = MOST_SCHEDULERS) -> str:
    return "".join(series(dp, num_queue_reqs=5000) for dp in range(number))


@pytest.mark.parametrize("beside", ["", series()], ids=["labelled alone", "labelled beside unlabelled"])
def test_ranks_of_one_bad_page_are_gone_with_the_next(beside: str) -> None:
    page = shown(series(), beside + phantoms(), series())
    assert ranks_of(page) == set()
    assert page.value("sglang_tuning_queued_requests") == 2


def test_real_ranks_have_their_place_after_a_flood_of_others() -> None:
    page = shown("".join(series(dp) for dp in range(500, 500 + MOST_SCHEDULERS)), series(0), series(0))
    assert ranks_of(page) == {"0"}
    assert page.value("sglang_tuning_retracted_requests_total", dp_rank="0") == 0


@pytest.mark.parametrize(
    ("gone", "ours", "labels"),
    [
        ("token_usage", "token_usage_ratio", {"pool": "full"}),
        ("swa_token_usage", "token_usage_ratio", {"pool": "swa"}),
        ("num_grammar_queue_reqs", "waiting_requests", {"queue": "grammar"}),
        ("num_prefill_inflight_queue_reqs", "waiting_requests", {"queue": "inflight"}),
        ("gen_throughput", "generation_tokens_per_second", {}),
        ("max_total_num_tokens", "kv_pool_tokens", {}),
        ("num_queue_reqs", "queued_requests", {}),
        ("num_running_reqs", "running_requests", {}),
        ("new_token_ratio", "new_token_ratio", {}),
    ],
)
@pytest.mark.parametrize("dp", [None, 0], ids=["unlabelled", "labelled"])
def test_a_series_that_left_the_page_is_gone_and_the_others_stay(
    gone: str, ours: str, labels: dict[str, str], dp: int | None
) -> None:
    rank = {} if dp is None else {"dp_rank": str(dp)}
    name = f"sglang_tuning_{ours}"
    whole, less = shown(series(dp)), shown(series(dp), series(dp, **{gone: None}))
    assert whole.value(name, **labels, **rank) is not None
    assert less.value(name, **labels, **rank) is None
    left = {sample.name for sample in whole.samples} - {sample.name for sample in less.samples}
    assert left <= {name, "sglang_tuning_queue_wait_seconds"}


def batch(dp: int, queue: int) -> bytes:
    return (
        f"[2025-11-20 12:00:10 DP{dp} TP0] Decode batch, #running-req: 3, #token: 90, token usage: 0.50, cuda graph:"
        f" True, gen throughput (token/s): 44.70, #queue-req: {queue}"
    ).encode()


def watched(steps: Iterable[tuple[float, str | bytes]]) -> Watch:
    watch, reader = Watch(PROFILES["online"], BEGIN, reads=True, scrapes=True), Reader()
    for at, what in steps:
        if isinstance(what, str):
            watch.take_page(metrics.read(what), BEGIN + at)
            continue
        for event in reader.read(what):
            event.time = BEGIN + at
            watch.take_line(event)
    return watch


def test_a_rank_that_only_the_log_names_is_gone_after_a_minute() -> None:
    both = series(0) + series(1)
    steps: list[tuple[float, str | bytes]] = [(0, both), (1, batch(5, 7)), (30, both)]
    assert 5 in watched(steps).server.schedulers, "its page may be made before"
    assert set(watched([*steps, (90, both)]).server.schedulers) == {0, 1}


def test_a_scheduler_that_one_page_lacks_goes_on_counting_where_it_was() -> None:
    found = "sglang_tuning_retracted_requests_total"
    steps: list[tuple[float, str | bytes]] = [
        (0, series(num_retracted_requests_total=316.0)),
        (15, series(num_retracted_requests_total=316.0) + phantoms(4)),
        (30, series(num_retracted_requests_total=317.0)),
    ]
    assert watched(steps).server.counted["retracted_requests"] == 0, f"{found}: it may still wait for its line"
    assert watched([*steps, (90, series(num_retracted_requests_total=317.0))]).server.counted["retracted_requests"] == 1


def retracted(number: float) -> str:
    """A page of a server that works."""
    works = f'sglang:generation_tokens_total{{model_name="m"}} {1000 + number}\n'
    return series(num_retracted_requests_total=number) + works


@pytest.mark.parametrize("first", [phantoms(4), retracted(316)], ids=["a bad first page", "a good one"])
def test_a_bad_page_right_after_a_restart_counts_nothing_again(first: str) -> None:
    before = watched([(0, retracted(10)), (15, retracted(316))])
    before.advance(BEGIN + 90)
    assert before.server.counted["retracted_requests"] == 306
    watch = Watch(PROFILES["online"], BEGIN + 100, reads=True, scrapes=True)
    watch.restore(json.loads(json.dumps(before.saved(BEGIN + 90))), BEGIN + 100, 10.0)
    for at, page in ((101, first), (116, retracted(317)), (180, retracted(317))):
        watch.take_page(metrics.read(page), BEGIN + at)
        watch.advance(BEGIN + at)
    assert watch.server.counted["retracted_requests"] == 307
