"""What two logs and a page of a real SGLang on a GPU, with CUDA graphs, are read as. How they were made: data/logs/recorded/README.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.events import Event
from sglang_tuning_exporter.core.lines import Reader
from sglang_tuning_exporter.core.server import Server
from sglang_tuning_exporter.sglang.metrics import page_figures

DATA = Path(__file__).parent / "data"
GRAPHS, OOM = (DATA / "logs" / "recorded" / f"0.5.23-h100-{name}.log" for name in ("graphs", "oom"))
PAGE = DATA / "metrics" / "recorded-0.5.23-h100-graphs.prom"


def read(log: Path) -> tuple[list[Event], Reader]:
    reader = Reader()
    events = [event for line in log.read_bytes().split(b"\n") for event in reader.read(line)]
    return [*events, *reader.end()], reader


def served(log: Path) -> Server:
    server = Server(PROFILES["online"])
    for event in read(log)[0]:
        server.take(event)
    return server


def test_the_start_shows_where_the_memory_went() -> None:
    facts = served(GRAPHS).facts
    assert (facts.capacity_gb, facts.gigabytes("weights")) == (78.5, 1.87)
    assert (facts.pool(), facts.gigabytes("pool")) == (2_073_331, 63.28)
    assert [facts.gigabytes("graph"), facts.gigabytes("decode_graph")] == pytest.approx([1.18 + 0.36, 0.36])
    assert facts.reserve_gb == 9.6
    assert (facts.release, facts.without_graph, facts.least_limit) == ("0.5.23", "", 4096)


def test_a_page_shows_the_memory_of_the_graphs_of_both_phases_and_what_is_left() -> None:
    [rank] = page_figures.read(PAGE.read_text()).ranks
    assert rank.graph_memory_gb == pytest.approx(1.1796875 + 0.361328125)
    assert rank.available_gpu_memory_gb == pytest.approx(9.60, abs=0.005)
    assert rank.kv_pool_tokens == 2_073_331
