"""The exporter's HTML pages and HTTP behaviour: text from outside is escaped, and every endpoint is read-only."""

from __future__ import annotations

import html
import re
import time
from functools import cache
from typing import TYPE_CHECKING

import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import escape

from conftest import SERVING_WITH_DP_RANKS, FakeSGLang, config, hang, watched_retractions, web
from scenes import SCENES, lived
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.core.page import flags
from sglang_tuning_exporter.core.rows import BY_ID
from sglang_tuning_exporter.core.text import pieces
from sglang_tuning_exporter.sglang.metrics import page_figures as facts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

HEADLINE = BY_ID["server_down"].summary
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
    body = re.sub(r"</?(?:span|bdi|code|small)\b[^>]*>", "", body)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


def page_of(sidecar: Sidecar) -> str:
    with web(sidecar) as url:
        answer = requests.get(url + "/?still", timeout=10)
    assert answer.status_code == 200
    return answer.text


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Gives the page of a server in a situation of `scenes`; each is run once."""

    @cache
    def of(name: str) -> str:
        with lived(SCENES[name](), tmp_path_factory.mktemp(name)) as sidecar:
            return page_of(sidecar)

    return of


def tiles(page: str) -> dict[str, tuple[str, str]]:
    """The guide's figures: name, value, and good, bad or nothing."""
    found = re.findall(r'<div(?: class="(\w+)")?><dt>([^<]+)</dt><dd class="value[^"]*">([^<]*)', page)
    return {name: (value.strip(), tone) for tone, name, value in found}


# What a person sees


def test_the_verdict_is_the_only_headline_of_its_words(scene: Callable[[str], str]) -> None:
    page = scene("down")
    assert re.findall(r"<h1 class=\"(\w+)\">([^<]+)", page) == [("bad", HEADLINE)]
    headings = [re.sub(r"<[^>]+>", "", each) for each in re.findall(r"<h[1-6][^>]*>(.*?)</h[1-6]>", page)]
    assert len(headings) == len(set(headings))


def test_the_advice_names_flag_and_values_why_and_when_it_will_not_help(scene: Callable[[str], str]) -> None:
    seen = text_of(scene("recorded"))
    assert "Try --schedule-conservativeness 1.3 now 0.1" in seen
    assert f"Why {BY_ID['retracting_too_often'].remedy.why}" in seen
    assert "It will not help if the value is already above 1.43" in seen
    assert re.search(r"[\d.]+ retractions/min \(limit [\d.]+/min\)\.", seen)


def test_the_command_line_has_the_change_and_nothing_else_anew(scene: Callable[[str], str]) -> None:
    page = scene("recorded")
    assert re.findall(r'<span class="changed">([^<]+)', page) == ["--schedule-conservativeness 1.3"]
    assert "--max-total-tokens 2048" in text_of(page)


def test_what_follows_from_the_verdict_is_listed_without_the_same_advice_again(scene: Callable[[str], str]) -> None:
    page = text_of(scene("retracting"))
    follows = page[page.index("What follows from it") : page.index("The command line")]
    assert "More requests wait than SGLang can start in time." in follows
    assert page.count("Try --schedule-conservativeness 1.3") == 1


def test_an_alert_that_fires_has_its_time_and_its_runbook(scene: Callable[[str], str]) -> None:
    page = scene("stuck")
    assert re.search(
        r'critical</span> <a href="runbooks/SGLangSchedulerStuck">SGLangSchedulerStuck</a> fires since \d\d:\d\d:\d\d',
        page,
    )


def test_what_has_not_lasted_long_enough_for_an_alert_is_said(scene: Callable[[str], str]) -> None:
    assert "No alert is firing: what was found has not lasted long enough." in text_of(scene("down"))
    assert "No alert is firing. " in text_of(scene("healthy"))


def test_a_paused_page_can_be_resumed_and_the_other_one_paused(address: str) -> None:
    moving, still = (requests.get(address + path, timeout=10).text for path in ("/", "/?still"))
    assert ('content="10"' in moving, '<a href="?still">pause</a>' in moving) == (True, True)
    assert ('http-equiv="refresh"' in still, '<a href="./">resume</a>' in still) == (False, True)


def test_the_live_page_has_none_of_the_words_of_a_log(scene: Callable[[str], str]) -> None:
    for name in ("retracting", "healthy", "down"):
        seen = text_of(scene(name))
        for words in ("the log alone", "At the end", "would have been", "when the log ends", "as printed"):
            assert words not in seen


# Sources


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


def test_a_log_that_cannot_be_followed_is_said_with_the_remedy(tmp_path: Path) -> None:
    sidecar = Sidecar(config(log_file=(str(tmp_path / "none.log"),)))
    sidecar.start()
    try:
        assert re.search(
            r'none\.log</bdi></td><td><strong class="bad">missing; waiting for it</strong>', page_of(sidecar)
        )
    finally:
        sidecar.stop()


def test_the_page_does_not_wait_for_a_server_that_hangs(sglang: FakeSGLang) -> None:
    sglang.answers["/metrics"] = hang
    begin = time.monotonic()
    assert "not scraped yet" in text_of(page_of(Sidecar(config(sglang_url=sglang.url, scrape_timeout=60.0))))
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "{{ 7 * 7 }}"])
def test_a_hostile_model_name_is_text(name: str, tmp_path: Path) -> None:
    sidecar = watched_retractions(tmp_path)
    sidecar.watch.server.facts.arguments["served_model_name"] = name
    page = page_of(sidecar)
    assert f"<bdi>{html.escape(name).replace('&#x27;', '&#39;').replace('&quot;', '&#34;')}</bdi>" in page
    assert "<script" not in page
    assert "<img" not in page


def test_the_page_loads_nothing_from_elsewhere(address: str) -> None:
    page = requests.get(address + "/", timeout=10).text
    assert re.findall(r'<link[^>]*href="([^"]{5})', page) == ["data:"]  # the icon
    assert not re.search(r"(src|action|srcset)\s*=|url\(|@import|<script", page)
    links = set(re.findall(r'<a href="([^"]*)"', page))
    assert links >= {"?still", "metrics", "api/v1/findings", "runbooks/"}
    assert all(re.fullmatch(r"\?still|\?all=1|metrics|api/v1/findings|runbooks/\w*", link) for link in links)


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


def test_it_is_ready_only_while_it_watches(tmp_path: Path) -> None:
    sidecar = Sidecar(config(log_file=(str(tmp_path / "x"),)))
    with web(sidecar) as url:
        assert requests.get(url + "/-/ready", timeout=10).status_code == 503
        assert requests.get(url + "/-/healthy", timeout=10).status_code == 200
        sidecar.start()
        assert requests.get(url + "/-/ready", timeout=10).status_code == 200


QUOTED = """python3 -m x --a 'b c --d' --e "$KEY" --f=1 tail --g \\'"""


def test_a_command_line_is_cut_before_its_flags_and_not_inside_what_is_quoted() -> None:
    assert pieces(QUOTED) == ("python3 -m x", "--a 'b c --d'", '--e "$KEY"', "--f=1 tail", "--g \\'")


@given(st.text() | st.lists(st.sampled_from(["--a", "'", '"', "\\", "b", " ", "\n", "$X"])).map("".join))
def test_the_pieces_of_any_command_line_are_the_command_line(text: str) -> None:
    assert " ".join(pieces(text)) == text


def test_a_flag_in_prose_is_kept_together_and_prose_is_escaped() -> None:
    assert flags("lower --max-running-requests, <b> -- or more") == (
        'lower <span class="flag">--max-running-requests</span>, &lt;b&gt; -- or more'
    )


@given(st.text() | st.lists(st.sampled_from(["--a-b", "<", "&", " ", "--", "x"])).map("".join))
def test_prose_with_flags_reads_as_it_was_written(words: str) -> None:
    assert html.unescape(re.sub(r"</?span[^>]*>", "", flags(words))) == html.unescape(str(escape(words)))


# The guide's figures


def test_a_server_that_was_asked_to_end_is_stopped_and_has_no_figure_of_now(address: str) -> None:
    page = requests.get(address + "/", timeout=10).text
    assert "Stopped The server was stopped: its log says that it was asked to end." in text_of(page)
    assert {value for value, _ in tiles(page).values()} == {"not reported"}


def test_an_unknown_figure_is_not_judged(tmp_path: Path) -> None:
    figures = tiles(page_of(Sidecar(config(log_file=(str(tmp_path / "none.log"),)))))
    assert len(figures) == 7
    assert set(figures.values()) == {("not reported", "")}


def test_a_figure_has_its_value_what_is_healthy_and_its_past(scene: Callable[[str], str]) -> None:
    page = scene("retracting")
    assert tiles(page)["Retractions a minute"][1] == "bad"
    assert "✗ not good; healthy: up to about 1" in text_of(page)
    assert re.search(r"last 15 min: \d+ in all", text_of(page))
    assert page.count("<svg") >= 6


def test_a_kv_cache_is_green_only_while_nobody_waits_and_red_where_it_has_room_for_those_who_wait(
    scene: Callable[[str], str],
) -> None:
    assert tiles(scene("healthy"))["Token usage"][1] == "good"
    assert tiles(scene("retracting"))["Token usage"][1] == ""  # full with a queue: requests wait


def test_each_data_parallel_rank_has_its_line_and_one_scheduler_has_none(tmp_path: Path) -> None:
    sidecar = Sidecar(config(sglang_url="http://127.0.0.1:9"))
    sidecar.watch.scrape(facts.read(SERVING_WITH_DP_RANKS.decode()), sidecar.now())
    rows = re.findall(r'<th scope="row">(DP\d)</th>', page_of(sidecar))
    assert rows == ["DP0", "DP1"]
    assert "data-parallel" not in page_of(watched_retractions(tmp_path))


def test_the_page_of_a_dead_server_has_nothing_green_and_no_old_figure(scene: Callable[[str], str]) -> None:
    page = scene("down")
    assert '<h1 class="bad">' in page
    assert not re.search(r'class="good"', page)
    assert {value for value, _ in tiles(page).values()} == {"not reported"}
    assert "of serving time" not in text_of(page)
    assert "Checks passed" not in page


def test_the_page_of_a_server_that_hangs_generates_no_token_and_offers_no_chance(scene: Callable[[str], str]) -> None:
    page = scene("stuck")
    assert tiles(page)["Generated tokens/s"][0] == "0"
    assert re.search(r"last 15 min: \d,\d+ to \d,\d+", text_of(page))
    assert "Worth a try" not in page


def test_an_idle_server_has_no_retractions_and_an_unseen_one_has_none_shown(scene: Callable[[str], str]) -> None:
    idle, unseen = (tiles(scene(name)) for name in ("idle", "unseen"))
    assert [idle[name][0] for name in ("Retractions a minute", "Queued requests", "Running requests")] == [
        "0.0",
        "0",
        "0",
    ]
    assert unseen["Retractions a minute"][0] == "not reported"


def test_a_passed_check_shows_its_figure_with_its_limit(scene: Callable[[str], str]) -> None:
    page = scene("healthy")
    checks = dict(re.findall(r'✓</span>([^<]+): <span class="soft">([^<]+)</span>', page))
    assert checks["Server down"] == "no"
    assert checks["Out of memory"] == "none"
    assert checks["Memory reserve too large"] == "9.9 GB (limit 10.0 GB)"
    assert checks["Memory reserve too small"] == "9.9 GB (at least 5.0 GB)"
    assert not [figure for figure in checks.values() if not re.fullmatch(r"no|none|.+ \((limit|at least) .+\)", figure)]


def test_what_is_not_judged_is_named_with_what_it_needs(tmp_path: Path) -> None:
    seen = text_of(page_of(watched_retractions(tmp_path, sglang_url=None)))
    assert re.search(r"Not judged here, and what is missing: .*Server down.* \(metrics\)", seen)
