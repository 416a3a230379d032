"""`/v1/loads` is requested after scrapes, only of releases where the answer is cheap, and nothing waits for it."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from conftest import FakeSGLang, Page, config, hang, reply, wait_for
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.serve.metrics import collect
from sglang_tuning_exporter.serve.metrics.families import text_format

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def info_page(version: str) -> Callable[[Any], None]:
    info = {"model_path": "tiny", "version": version, "internal_states": [{}]}
    return reply(json.dumps(info).encode(), content_type="application/json")


def loads(prefill_seconds: float = 1.0) -> Callable[[Any], None]:
    """One scheduler's counters, at the moment of the answer as a snapshot has it."""

    def answer(connection: Any) -> None:
        load = {
            "timestamp": time.time(),
            "dp_rank": 0,
            "num_waiting_uncached_tokens": 0,
            "total_prefill_uncached_tokens": 3000,
            "total_prefill_busy_us": 1e6 * prefill_seconds,
            "decode_moments": [10.0, 80.0, 1e5, 640.0, 8e5, 80.0],
        }
        reply(json.dumps({"loads": [load]}).encode(), content_type="application/json")(connection)

    return answer


@pytest.fixture
def sidecar(sglang: FakeSGLang) -> Iterator[Sidecar]:
    made = Sidecar(config(sglang_url=sglang.url, api_key="sk-secret"), self_scrape_seconds=0.2)
    yield made
    made.stop()


def failures(sidecar: Sidecar, reason: str) -> float | None:
    return Page(text_format(collect(sidecar))).value("sglang_tuning_loads_failures_total", reason=reason)


def test_a_release_that_counts_its_steps_is_asked_with_the_key(sidecar: Sidecar, sglang: FakeSGLang) -> None:
    sglang.answers |= {"/server_info": info_page("0.5.23"), "/v1/loads": loads()}
    sidecar.start()
    wait_for(lambda: sglang.count("/v1/loads") == 1)
    (head,) = (head for head in sglang.asked if head.startswith("GET /v1/loads"))
    assert "Authorization: Bearer sk-secret\r\n" in head
    wait_for(lambda: sidecar.measured.scheduler(None, sidecar.now(), only=True) is not None)
    assert failures(sidecar, "timeout") == 0
    before = sglang.count("/metrics")
    wait_for(lambda: sglang.count("/metrics") > before + 8, 20)
    assert sglang.count("/v1/loads") == 1, "it is asked again after five seconds"


@pytest.mark.parametrize("version", ["0.5.7", "0.5.16", "0.5.17"])
def test_a_release_that_would_ask_its_schedulers_is_not_asked(
    sidecar: Sidecar, sglang: FakeSGLang, version: str
) -> None:
    sglang.answers |= {"/server_info": info_page(version), "/v1/loads": loads()}
    sidecar.start()
    wait_for(lambda: sglang.count("/metrics") > 3 and sglang.count("/server_info") == 1)
    assert sglang.count("/v1/loads") == 0
    assert failures(sidecar, "timeout") is None


def test_a_server_without_it_counts_a_failure_and_serves_all_else(sidecar: Sidecar, sglang: FakeSGLang) -> None:
    sglang.answers |= {"/server_info": info_page("0.5.23")}
    sidecar.start()
    wait_for(lambda: failures(sidecar, "http_404") == 1)
    assert sidecar.watch.is_up is True


def test_scrapes_go_on_while_it_hangs(sidecar: Sidecar, sglang: FakeSGLang) -> None:
    sglang.answers |= {"/server_info": info_page("0.5.23"), "/v1/loads": hang}
    sidecar.start()
    wait_for(lambda: sglang.count("/v1/loads") == 1)
    before = sglang.count("/metrics")
    assert sidecar.scrape(5.0) is not None
    assert sglang.count("/metrics") == before + 1
    assert sidecar.watch.is_up is True
    wait_for(lambda: failures(sidecar, "timeout") == 1)
