"""What two logs and a page of a real SGLang on a GPU, with CUDA graphs, are read as. How they were made: data/logs/recorded/README.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.events import Event
from sglang_tuning_exporter.core.lines import Reader
from sglang_tuning_exporter.core.server import COVERAGE_SECONDS, Server
from sglang_tuning_exporter.core.summary import last_figures
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


@pytest.mark.parametrize("log", [GRAPHS, OOM], ids=lambda log: log.stem)
def test_all_of_a_real_log_is_understood(log: Path) -> None:
    assert not +read(log)[1].unreadable


def test_the_start_shows_where_the_memory_went() -> None:
    facts = served(GRAPHS).facts
    assert (facts.capacity_gb, facts.gigabytes("weights")) == (78.5, 1.87)
    assert (facts.pool(), facts.gigabytes("pool")) == (2_073_331, 63.28)
    assert [facts.gigabytes("graph"), facts.gigabytes("decode_graph")] == pytest.approx([1.18 + 0.36, 0.36])
    assert facts.reserve_gb == 9.6
    assert (facts.release, facts.without_graph, facts.least_limit) == ("0.5.23", "", 4096)


def test_the_largest_captured_batch_is_that_of_decoding_not_of_prefill() -> None:
    facts = served(GRAPHS).facts
    assert (facts.largest_captured, len(facts.graph_sizes)) == (256, 36)


def test_a_line_behind_a_progress_bar_is_read() -> None:
    lines = GRAPHS.read_bytes().split(b"\n")
    [bar] = [place for place, line in enumerate(lines) if b"it/s][2026" in line]
    assert lines[bar].startswith(b"\r")
    glued = (
        lines[bar][: lines[bar].index(b"[2026")] + b"[2026-11-26 01:38:47] The server is fired up and ready to roll!"
    )
    assert [event.kind for event in Reader().read(glued)] == ["ready"]


def test_batches_beyond_the_largest_graph_lower_the_coverage() -> None:
    server = served(GRAPHS)
    lines = [event for event in read(GRAPHS)[0] if event.kind == "decode"]
    replayed = sum(event.figures["graph"] for event in lines)
    assert (len(lines), replayed) == (23, 17)
    assert server.now is not None
    assert server.schedulers[None].coverage(server.window(COVERAGE_SECONDS, server.now)) == pytest.approx(17 / 23)
    whole = server.window(600.0)
    assert whole["cuda_graph/beyond_captured"] > 0
    assert whole["cuda_graph/eager"] == 0


def test_a_server_that_was_asked_to_end_has_not_crashed() -> None:
    server = served(GRAPHS)
    assert (server.stopping, server.ended) == (True, "")
    assert last_figures(server)["running_requests"] == 0  # 320 ran in the last batch that was logged


def test_memory_that_ran_out_under_load_ran_out_in_prefill() -> None:
    [failure] = [event for event in read(OOM)[0] if event.kind == "out_of_memory"]
    assert failure.word == "prefill"
    assert "470.00 MiB" in failure.text
    server = served(OOM)
    assert server.counted["out_of_memory.prefill"] == 1
    assert server.end_explanation is not None
    assert server.end_explanation.text == failure.text


def test_a_page_counts_passes_with_and_without_a_graph() -> None:
    [rank] = page_figures.read(PAGE.read_text()).ranks
    assert (rank.graph_passes, rank.eager_passes, rank.prefill_passes) == (1806, 127, 192)


def test_a_page_shows_the_memory_of_the_graphs_of_both_phases_and_what_is_left() -> None:
    [rank] = page_figures.read(PAGE.read_text()).ranks
    assert rank.graph_memory_gb == pytest.approx(1.1796875 + 0.361328125)
    assert rank.available_gpu_memory_gb == pytest.approx(9.60, abs=0.005)
    assert rank.kv_pool_tokens == 2_073_331
