"""`/v1/loads` is asked for the limits of DP ranks, once, of releases that have them, and nothing waits for it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from conftest import SERVING, SERVING_WITH_DP_RANKS, FakeSGLang, config, hang, reply, wait_for
from sglang_tuning_exporter.collect.sidecar import Sidecar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def info_page(version: str) -> Callable[[Any], None]:
    info = {"model_path": "tiny", "version": version, "internal_states": [{}]}
    return reply(json.dumps(info).encode(), content_type="application/json")


LOADS = reply(
    json.dumps({"loads": [{"dp_rank": 1, "max_running_requests": 48}]}).encode(), content_type="application/json"
)


@pytest.fixture
def sidecar(sglang: FakeSGLang) -> Iterator[Sidecar]:
    made = Sidecar(config(sglang_url=sglang.url, api_key="sk-secret"), self_scrape_seconds=0.2)
    yield made
    made.stop()


def scraped_again(sglang: FakeSGLang, times: int) -> None:
    before = sglang.count("/metrics")
    wait_for(lambda: sglang.count("/metrics") > before + times, 20)


def test_a_server_with_dp_ranks_is_asked_once_with_the_key(sidecar: Sidecar, sglang: FakeSGLang) -> None:
    sglang.answers |= {
        "/metrics": reply(SERVING_WITH_DP_RANKS),
        "/server_info": info_page("0.5.23"),
        "/v1/loads": LOADS,
    }
    sidecar.start()
    wait_for(lambda: sidecar.watch.server.facts.limits.get(1) == 48)
    (head,) = (head for head in sglang.asked if head.startswith("GET /v1/loads"))
    assert "Authorization: Bearer sk-secret\r\n" in head
    scraped_again(sglang, 4)
    assert sglang.count("/v1/loads") == 1


@pytest.mark.parametrize(("page", "version"), [(SERVING, "0.5.23"), (SERVING_WITH_DP_RANKS, "0.5.7")])
def test_a_server_of_one_rank_or_of_a_release_without_limits_is_not_asked(
    sidecar: Sidecar, sglang: FakeSGLang, page: bytes, version: str
) -> None:
    sglang.answers |= {"/metrics": reply(page), "/server_info": info_page(version), "/v1/loads": LOADS}
    sidecar.start()
    wait_for(lambda: sglang.count("/server_info") == 1)
    scraped_again(sglang, 3)
    assert sglang.count("/v1/loads") == 0


@pytest.mark.parametrize("answer", [None, hang])
def test_scrapes_go_on_without_an_answer(
    sidecar: Sidecar, sglang: FakeSGLang, answer: Callable[[Any], None] | None
) -> None:
    sglang.answers |= {"/metrics": reply(SERVING_WITH_DP_RANKS), "/server_info": info_page("0.5.23")}
    sglang.answers |= {} if answer is None else {"/v1/loads": answer}
    sidecar.start()
    wait_for(lambda: sglang.count("/v1/loads") == 1)
    before = sglang.count("/metrics")
    assert sidecar.scrape(5.0) is not None
    assert sglang.count("/metrics") == before + 1
    assert sidecar.watch.is_up is True
