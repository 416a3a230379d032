"""An address that answers and is not SGLang's: whose page it is, what is said, and what stays "down"."""

from __future__ import annotations

import pytest

from conftest import SERVING, Answer, FakeSGLang, reply, running_exporter, wait_for
from sglang_tuning_exporter.core.judge import STARTING
from sglang_tuning_exporter.sglang.exposition import owner_of
from test_core_watch import Beside

VLLM = b'# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{model_name="m"} 1.0\n'
NODE = b"go_gc_duration_seconds_count 1\nnode_cpu_seconds_total 3\n"
ROUTER = b'sgl_router_active_requests 3\nsgl_router_requests_total{route="/generate"} 9\n'
UNNAMED = b"python_gc_collections_total 1\nup 1\n"
PAGE = reply(b"<html>Welcome</html>", content_type="text/html")
OWN = b'sglang_tuning_build_info{version="1"} 1\n' + SERVING


@pytest.mark.parametrize(
    ("page", "owner"),
    [
        (VLLM, "vLLM's"),
        (NODE, "that of the node exporter"),
        (ROUTER, "that of SGLang's router (model gateway)"),
        (b"prometheus_build_info 1\n", "that of Prometheus"),
        (b"go_info 1\n  DCGM_FI_DEV_GPU_UTIL 3\n", "that of NVIDIA's DCGM exporter"),
        (OWN, "that of sglang-tuning-exporter itself"),
        (b"sglang_tuning_up 0\n", "that of sglang-tuning-exporter itself"),
        (SERVING, ""),
        (b"sglang_num_queue_reqs 1\n", ""),  # a gateway replaces the colon
        (b"ray_tasks 3\nnode_cpu 1\nsglang_num_queue_reqs 1\n", ""),  # served by Ray
        (b"sglang_tuning_notes 1\n" + SERVING, ""),
        (UNNAMED, None),
        (b"# TYPE vllm:x counter\nmy_node_cpu 1\n", None),
    ],
)
def test_a_page_has_its_owner(page: bytes, owner: str | None) -> None:
    assert owner_of(page.decode()) == owner


def lost(reason: str, *, after_pages: int = 0) -> Beside:
    """A server of which so many pages came, and then for minutes this failure."""
    beside = Beside(reads=False)
    for page in range(after_pages):
        beside.scrape(page * 15, running=4.0)
    for second in range(400, 731, 15):
        beside.watch.lose(reason, "its /metrics is vLLM's; check --sglang-url", 1_763_632_800.0 + second)
        beside.watch.judge(1_763_632_800.0 + second)
    return beside


def firing(beside: Beside) -> set[str]:
    return {name for name, clock in beside.watch.clocks.by_diagnosis.items() if clock.firing is not None}


@pytest.mark.parametrize(
    ("reason", "pages", "verdict"),
    [
        ("not_sglang", 0, "not_sglang"),
        ("not_sglang", 9, "not_sglang"),  # another engine was started at the same port
        ("no_series", 0, "not_sglang"),
        ("no_series", 9, "server_down"),  # a proxy's page in SGLang's place
        ("http_status", 0, "server_down"),
        ("unreachable", 0, STARTING),
    ],
)
def test_what_answers_in_sglangs_place_decides_the_verdict(reason: str, pages: int, verdict: str) -> None:
    judgement = lost(reason, after_pages=pages).judge(731)
    assert judgement.verdict == verdict
    assert {"server_down", "not_sglang"} & {each.diagnosis for each in judgement.findings} <= {verdict}


def test_a_wrong_address_is_a_warning_that_says_what_answers() -> None:
    (own,) = lost("not_sglang").judge(731).findings
    assert (own.severity, own.alert, own.sentence) == (
        "warning",
        "SGLangWrongAddress",
        "its /metrics is vLLM's; check --sglang-url",
    )
    assert "--sglang-url" in own.changes[0].words


def test_it_has_an_alert_of_its_own_and_nobody_is_called_for_a_server_that_is_down() -> None:
    assert firing(lost("not_sglang")) == {"not_sglang"}
    assert firing(lost("no_series", after_pages=9)) == {"server_down"}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (reply(VLLM), "its /metrics is vLLM's"),
        (PAGE, "it answers with a web page, not with metrics"),
        (reply(UNNAMED), "its page holds no series of SGLang's"),
    ],
)
def test_page_api_and_metrics_say_that_it_is_not_sglang(sglang: FakeSGLang, answer: Answer, words: str) -> None:
    sglang.answers["/metrics"] = answer
    with running_exporter("--sglang-url", sglang.url) as exporter:
        page = exporter.page()
        assert (page.value("sglang_tuning_up"), page.error) == (0, "not_sglang")
        findings = exporter.get("/api/v1/findings").json()
        assert findings["verdict"] == "not_sglang"
        (own,) = [each for each in findings["findings"] if each["diagnosis"] in {"not_sglang", "server_down"}]
        assert words in own["sentence"]
        assert words in exporter.get("/").text.replace("&#39;", "'")
        assert page.value("sglang_tuning_alert", diagnosis="server_down") in {0, None}
        sglang.answers["/metrics"] = reply(SERVING)
        wait_for(lambda: exporter.page().value("sglang_tuning_up") == 1, 30)
        assert exporter.page().error is None
