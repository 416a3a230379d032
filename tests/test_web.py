"""The exporter's HTML pages and HTTP behaviour: text from outside is escaped, and every endpoint is read-only."""

from __future__ import annotations

import html
import re
import time
from typing import TYPE_CHECKING

import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import escape

from conftest import SERVING_WITH_DP_RANKS, FakeSGLang, config, hang, watched_retractions, web
from scenes import SCENES, lived
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.diagnosis.conditions.share import STATE_WORDS
from sglang_tuning_exporter.diagnosis.evidence import Evidence
from sglang_tuning_exporter.diagnosis.table import BY_ID
from sglang_tuning_exporter.diagnosis.wording import bounds_of, pieces
from sglang_tuning_exporter.serve.pages.figures import span
from sglang_tuning_exporter.serve.pages.rendering import flags
from sglang_tuning_exporter.sglang.events import DecodeBatch, Rank
from sglang_tuning_exporter.sglang.metrics import page_figures as facts
from sglang_tuning_exporter.state.signals import STATES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sglang_tuning_exporter.state.signals import Signal

HEADLINE = BY_ID["server_down"].summary  # a recorded server is away when its recording ends
FOUND = BY_ID["retracting_too_often"].summary


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A sidecar at the end of the retract recording, log read, SGLang gone."""
    sidecar = watched_retractions(tmp_path_factory.mktemp("retract"))
    sidecar.start()
    sidecar.scrape(5)
    with web(sidecar) as url:
        yield url


def text_of(page: str) -> str:
    """The visible text, in one line."""
    body = re.sub(r"<(style|title)>.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


def page_of(sidecar: Sidecar) -> str:
    with web(sidecar) as url:
        answer = requests.get(url + "/", timeout=10)
    assert answer.status_code == 200
    return answer.text


def test_the_verdict_is_the_headline_and_appears_once(address: str) -> None:
    page = requests.get(address + "/", timeout=10).text
    assert f'<h1 class="bad">{html.escape(HEADLINE)}</h1>' in page
    assert text_of(page).count(HEADLINE) == 1


def test_the_advice_names_flag_and_values(address: str) -> None:
    page = requests.get(address + "/", timeout=10).text
    assert "<code>--schedule-conservativeness 1.3</code>" in page
    seen = text_of(page)
    assert "Try --schedule-conservativeness 1.3 now 0.1" in seen
    assert BY_ID["retracting_too_often"].remedy.why in seen
    assert "It will not help if the value is already above 1.43" in seen
    assert re.search(r"Seen: [\d.]+ retractions/min; healthy: up to about 1\.", seen)


def test_the_sources_are_named(address: str) -> None:
    seen = text_of(requests.get(address + "/", timeout=10).text)
    assert "http://127.0.0.1:9/metrics connection refused: nothing listens at that address" in seen
    assert "server.log following" in seen


def test_the_page_works_with_the_log_alone(tmp_path: Path) -> None:
    seen = text_of(page_of(watched_retractions(tmp_path, sglang_url=None)))
    assert seen.count(FOUND) == 1
    assert "metrics not configured (--sglang-url)" in seen


def test_the_page_says_which_log_level_has_the_batch_lines_until_one_comes(tmp_path: Path) -> None:
    hint = "no batch line yet (SGLang prints them at --log-level info)"
    log = tmp_path / "server.log"
    log.write_text("UserWarning: a server at --log-level warning prints this\n")
    quiet = Sidecar(config(log_file=(str(log),)))
    quiet.start()
    try:
        assert f"server.log following; {hint}" in text_of(page_of(quiet))
    finally:
        quiet.stop()
    assert hint not in text_of(page_of(watched_retractions(tmp_path, sglang_url=None)))


def test_the_page_of_a_start_says_that_nothing_is_known_yet(tmp_path: Path) -> None:
    seen = text_of(page_of(Sidecar(config(log_file=(str(tmp_path / "none.log"),)))))
    assert "Too little load was seen yet to say what limits this server." in seen
    assert "not reported" in seen


def test_the_page_does_not_wait_for_a_server_that_hangs(sglang: FakeSGLang) -> None:
    sglang.answers["/metrics"] = hang
    begin = time.monotonic()
    assert "not scraped yet" in text_of(page_of(Sidecar(config(sglang_url=sglang.url, scrape_timeout=60.0))))
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "{{ 7 * 7 }}"])
def test_a_hostile_model_name_is_text(name: str, tmp_path: Path) -> None:
    sidecar = watched_retractions(tmp_path)
    sidecar.state.facts.model_name = name
    page = page_of(sidecar)
    assert name in text_of(page).replace("  ", " ") or html.escape(name) in page
    assert "<script" not in page
    assert "<img" not in page


def test_a_server_that_is_down_shows_no_old_shares(address: str) -> None:
    seen = text_of(requests.get(address + "/", timeout=10).text)
    assert HEADLINE in seen
    assert "Serving time with" not in seen


@pytest.mark.parametrize("signal", ["queue", "admission", "cuda_graph"])
def test_every_state_that_takes_serving_time_has_words_for_its_line(signal: Signal) -> None:
    assert set(STATES[signal]) - {"idle", "unknown"} <= set(STATE_WORDS)


def test_the_page_loads_nothing_from_elsewhere(address: str) -> None:
    page = requests.get(address + "/", timeout=10).text
    assert re.findall(r'<link[^>]*href="([^"]{5})', page) == ["data:"]  # the icon
    assert not re.search(r"(src|action|srcset)\s*=|url\(|@import|<script", page)
    alerts = ("SGLangServerDown", "SGLangRetractingTooOften", "SGLangQueueTooLong")
    own = {"?still", "metrics", "api/v1/findings", "runbooks/", *(f"runbooks/{alert}" for alert in alerts)}
    assert set(re.findall(r'<a href="([^"]*)"', page)) == own


PATHS = [
    "/",
    "/?still",
    "/metrics",
    "/-/healthy",
    "/-/ready",
    "/api/v1/findings",
    "/runbooks/",
    "/runbooks/SGLangServerDown",
]


@pytest.mark.parametrize("path", PATHS)
def test_head_answers_as_get_without_a_body(path: str, address: str) -> None:
    answer = requests.head(address + path, timeout=10)
    assert answer.status_code == requests.get(address + path, timeout=10).status_code == 200
    assert answer.content == b""


@pytest.mark.parametrize(
    "path",
    [
        "/nothing",
        "/metrics/",
        "/docs",
        "/redoc",
        "/openapi.json",
        "/favicon.ico",
        "/..%2f..%2fetc/passwd",
        "/api",
        "/api/v1",
        "/api/v1/findings/",
        "/api/v2/findings",
        "/runbooks/Nothing",
        "/runbooks/SGLangServerDown/",
        "/runbooks/server_down.md",
        "/runbooks/..%2f..%2fpyproject.toml",
    ],
)
def test_an_unknown_path_is_404(path: str, address: str) -> None:
    assert requests.get(address + path, timeout=10, allow_redirects=False).status_code == 404


@pytest.mark.parametrize("path", [*PATHS, "/runbooks"])
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "MADE-UP"])
def test_nothing_can_be_written(method: str, path: str, address: str) -> None:
    answer = requests.request(method, address + path, data=b"x", timeout=10)
    assert (answer.status_code, set(answer.headers["Allow"].split(", "))) == (405, {"GET", "HEAD"})


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
@pytest.mark.parametrize("path", [*PATHS, "/runbooks", "/runbooks/Nothing", "/nothing"])
def test_every_answer_is_safe_in_a_browser(path: str, method: str, address: str) -> None:
    headers = requests.request(method, address + path, timeout=10, allow_redirects=False).headers
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["X-Frame-Options"] == "DENY"
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert headers["Cache-Control"] == "no-store"
    assert "Server" not in headers


def test_metrics_are_in_the_text_format(address: str) -> None:
    content_type = requests.get(address + "/metrics", timeout=10).headers["Content-Type"]
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"


def test_it_is_ready_only_while_it_watches(tmp_path: Path) -> None:
    sidecar = Sidecar(config(log_file=(str(tmp_path / "x"),)))
    with web(sidecar) as url:
        assert requests.get(url + "/-/ready", timeout=10).status_code == 503
        assert requests.get(url + "/-/healthy", timeout=10).status_code == 200
        sidecar.start()
        assert requests.get(url + "/-/ready", timeout=10).status_code == 200


@pytest.mark.parametrize(
    ("evidence", "words"),
    [
        (Evidence("queue", 0.7, 0.5, "share"), "up to 50 %"),
        (Evidence("reserve", 3.1, 5.0, "GB", below=True), "5.0 GB or more"),
        (Evidence("reserve", 12.0, 10.0, "GB"), "up to 10.0 GB"),
        (Evidence("oom", 2.0, 0.0, "count"), "none"),
    ],
)
def test_the_healthy_range_is_shown_on_the_right_side(evidence: Evidence, words: str) -> None:
    assert bounds_of(evidence) == f"healthy: {words}"


QUOTED = """python3 -m x --a 'b c --d' --e "$KEY" --f=1 tail --g \\'"""


def test_a_command_line_is_cut_before_its_flags_and_not_inside_what_is_quoted() -> None:
    cut = pieces(QUOTED, frozenset({"--e"}))
    assert [text for text, _ in cut] == ["python3 -m x", "--a 'b c --d'", '--e "$KEY"', "--f=1 tail", "--g \\'"]
    assert [text for text, is_changed in cut if is_changed] == ['--e "$KEY"']


@given(st.text() | st.lists(st.sampled_from(["--a", "'", '"', "\\", "b", " ", "\n", "$X"])).map("".join))
def test_the_pieces_of_any_command_line_are_the_command_line(text: str) -> None:
    assert " ".join(piece for piece, _ in pieces(text, frozenset())) == text


def test_a_flag_in_prose_is_kept_together_and_prose_is_escaped() -> None:
    assert flags("lower --max-running-requests, <b> -- or more") == (
        'lower <span class="flag">--max-running-requests</span>, &lt;b&gt; -- or more'
    )


@given(st.text() | st.lists(st.sampled_from(["--a-b", "<", "&", " ", "--", "x"])).map("".join))
def test_prose_with_flags_reads_as_it_was_written(words: str) -> None:
    assert html.unescape(re.sub(r"</?span[^>]*>", "", flags(words))) == html.unescape(str(escape(words)))


@pytest.mark.parametrize(
    ("first", "words"),
    [(0.0, "just now"), (-5.0, "last 5 s"), (-89.0, "last 89 s"), (-90.0, "last 2 min"), (-900.0, "last 15 min")],
)
def test_a_chart_shows_how_far_back_it_goes(first: float, words: str) -> None:
    assert span([(-2000.0, 1.0), (first, 1.0), (0.0, 2.0)]) == words


def test_a_verdict_without_a_finding_shows_its_evidence(tmp_path: Path) -> None:
    page = text_of(page_of(Sidecar(config(log_file=(str(tmp_path / "none.log"),)))))
    assert "A verdict needs 20 s under load and 10 observations" in page
    assert "there are 0 s and 0 in the last 10 minutes." in page


def test_an_unknown_figure_is_not_judged(tmp_path: Path) -> None:
    page = page_of(Sidecar(config(log_file=(str(tmp_path / "none.log"),))))
    figures = re.findall(r'<div( class="\w+")?><dt>([^<]+)</dt><dd class="value">([^<]*)</dd>', page)
    assert len(figures) == 7
    assert {(judged, value) for judged, _, value in figures} == {("", "not reported")}


def test_a_kv_cache_is_green_only_while_nobody_waits_and_red_where_it_has_room_for_those_who_wait(
    tmp_path: Path,
) -> None:
    sidecar = watched_retractions(tmp_path)
    shown = []
    for queued, usage in ((0, 0.2), (5, 0.95), (5, 0.2)):
        line = DecodeBatch(None, Rank(), 2, queued, 1000, usage, graph_device="cpu")
        sidecar.state.observe(line, time.monotonic())
        shown += re.findall(r'<div(?: class="(\w+)")?><dt>Token usage</dt><dd class="value">([^<]*)<', page_of(sidecar))
    assert shown[:2] == [("good", "0.20"), ("", "0.95")]  # full with a queue: as the guide advises, and requests wait
    assert shown[2] in {("", "0.20"), ("bad", "0.20")}  # the server recovers, or holds back


def test_each_data_parallel_rank_has_its_line_and_one_scheduler_has_none(tmp_path: Path) -> None:
    sidecar = Sidecar(config(sglang_url="http://127.0.0.1:9"))
    sidecar.state.observe_scrape(facts.read(SERVING_WITH_DP_RANKS.decode()), time.monotonic())
    rows = re.findall(r'<th scope="row">(DP\d)</th>', page_of(sidecar))
    assert rows == ["DP0", "DP1"]
    assert "data-parallel" not in page_of(watched_retractions(tmp_path))


def test_the_page_says_how_the_server_fails_to_answer(address: str) -> None:
    seen = text_of(requests.get(address + "/", timeout=10).text)
    assert "Seen: its /metrics could not be scraped (connection refused: nothing listens at that address)." in seen


def test_the_page_of_a_dead_server_has_nothing_green_and_no_old_figure(tmp_path: Path) -> None:
    with lived(SCENES["down"](), tmp_path) as sidecar, web(sidecar) as address:
        page = requests.get(address + "/?still", timeout=10).text
    assert '<h1 class="bad">' in page
    assert not re.search(r'class="good"', page)
    values = re.findall(r'<dd class="value">([^<]+)', page)
    assert values
    assert set(values) == {"not reported"}
    assert "Confidence" not in page


def test_the_page_of_a_server_that_hangs_generates_no_token_and_offers_no_chance(tmp_path: Path) -> None:
    with lived(SCENES["stuck"](), tmp_path) as sidecar, web(sidecar) as address:
        page = requests.get(address + "/?still", timeout=10).text
    assert re.search(r'Generated tokens/s</dt><dd class="value">0<', page)
    assert "last 15 min: 0 to 8900" in page
    assert "Worth a try" not in page
    assert "Confidence" not in page
    assert "healthy: none" not in page


def test_an_idle_server_has_no_retractions_and_an_unseen_one_has_none_shown(tmp_path: Path) -> None:
    for name, figure in (("idle", "0.0"), ("unseen", "not reported")):
        with lived(SCENES[name](), tmp_path / name) as sidecar, web(sidecar) as address:
            page = requests.get(address + "/?still", timeout=10).text
        assert f'Retractions a minute</dt><dd class="value">{figure}<' in page


def test_a_passed_check_shows_its_figure_with_its_limit_and_not_the_words_for_a_failure(
    tmp_path: Path,
) -> None:
    with lived(SCENES["healthy"](), tmp_path) as sidecar, web(sidecar) as address:
        page = requests.get(address + "/?still", timeout=10).text
    checks = dict(re.findall(r'✓</span>([^<]+): <span class="soft">([^<]+)</span>', page))
    assert checks["Server down"] == "no"
    assert checks["Out of memory"] == "none"
    assert checks["Memory reserve too large"] == "9.9 GB (limit 10.0 GB)"
    assert checks["Memory reserve too small"] == "9.9 GB (at least 5.0 GB)"
    assert not [figure for figure in checks.values() if not re.fullmatch(r"no|none|.+ \((limit|at least) .+\)", figure)]


def test_each_change_has_its_own_reasons_below_it(tmp_path: Path) -> None:
    with lived(SCENES["recorded"](), tmp_path) as sidecar, web(sidecar) as address:
        page = text_of(requests.get(address + "/?still", timeout=10).text)
    order = (
        "--schedule-conservativeness 1.3",
        "SGLang admits more requests",
        "above 1.43",
        "raise --max-total-tokens",
        "--max-total-tokens keeps the KV cache smaller",
        "no more fits into GPU memory",
        "The command line",
    )
    places = [page.index(words) for words in order]
    assert places == sorted(places)
