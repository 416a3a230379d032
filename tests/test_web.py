"""The exporter's HTML pages, its findings as JSON and its HTTP behaviour.

Text from outside is escaped, and every endpoint is read-only.
"""

from __future__ import annotations

import html
import json
import re
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import requests

from conftest import FakeSGLang, config, hang, watched_retractions, web
from scenes import SCENES, lived
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.core.diagnoses import BY_ID
from sglang_tuning_exporter.core.page import flags
from sglang_tuning_exporter.serve import pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


def test_an_alert_that_fires_has_its_time_and_its_runbook(scene: Callable[[str], str]) -> None:
    page = scene("stuck")
    assert re.search(
        r'critical</span> <a href="runbooks/SGLangSchedulerStuck">SGLangSchedulerStuck</a> fires since \d\d:\d\d:\d\d',
        page,
    )


# Sources


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


@pytest.mark.parametrize(
    "path",
    [
        "/nothing",
        "/metrics/",
        "/docs",
        "/redoc",
        "/favicon.ico",
        "/api",
        "/api/v1",
        "/api/v1/findings/",
        "/api/v2/findings",
        "/runbooks/SGLangNothing",
        "/runbooks/sglangserverdown",
        "/runbooks/server_gone",
        "/runbooks/SGLangServerDown/",
        "/runbooks/SGLangServerDown%0a",
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


def test_a_flag_in_prose_is_kept_together_and_prose_is_escaped() -> None:
    assert flags("lower --max-running-requests, <b> -- or more") == (
        'lower <span class="flag">--max-running-requests</span>, &lt;b&gt; -- or more'
    )


# The guide's figures


def test_a_server_that_was_asked_to_end_is_stopped_and_has_no_figure_of_now(address: str) -> None:
    page = requests.get(address + "/", timeout=10).text
    assert "Stopped The server was stopped: its log says that it was asked to end." in text_of(page)
    assert {value for value, _ in tiles(page).values()} == {"not reported"}


def test_a_figure_has_its_value_what_is_healthy_and_its_past(scene: Callable[[str], str]) -> None:
    page = scene("retracting")
    assert tiles(page)["Retractions a minute"][1] == "bad"
    assert "✗ not good; healthy: up to about 1" in text_of(page)
    assert re.search(r"last \d+ (?:s|min): \d+ in all", text_of(page))
    assert page.count("<svg") >= 5


def test_a_figure_is_good_or_bad_as_the_page_judges_it_above(scene: Callable[[str], str]) -> None:
    retracting, healthy = tiles(scene("retracting")), tiles(scene("healthy"))
    bad = {name for name, (_, tone) in retracting.items() if tone == "bad"}
    assert bad == {"Queued requests", "Retractions a minute"}
    assert {healthy[name][1] for name in bad | {"Token usage"}} == {"good"}
    assert re.search(r"✗ not good; \d+ % of the time; healthy: a wait up to 5 s", text_of(scene("retracting")))


def test_a_figure_that_no_row_judges_is_neither_good_nor_bad(scene: Callable[[str], str]) -> None:
    assert {tone for _, tone in tiles(scene("idle")).values()} == {""}
    assert {tiles(scene("healthy"))[name][1] for name in ("Running requests", "Generated tokens/s")} == {""}


@pytest.mark.parametrize("about", [pages._QUEUE, pages._ADMISSION, pages._GRAPHS, pages._RETRACTIONS, pages._RESERVE])
def test_each_figure_that_can_be_good_or_bad_has_rows_that_judge_it(about: frozenset[str]) -> None:
    counts = {name for row in BY_ID.values() for name in (*row.when.counts, row.when.limit) if isinstance(name, str)}
    assert about & counts


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
    assert re.search(r"last \d+ min: [\d,]+ to [\d,]+", text_of(page))
    assert "Worth a try" not in page


# /api/v1/findings: what limits the server now, as JSON


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The same without a scrape that failed."""
    with web(watched_retractions(tmp_path_factory.mktemp("findings"))) as url:
        yield url


def findings(address: str) -> dict[str, Any]:
    answer = requests.get(address + "/api/v1/findings", timeout=10)
    assert answer.headers["Content-Type"] == "application/json"
    found: dict[str, Any] = json.loads(answer.text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    return found


def test_the_whole_command_line_has_the_advice_applied_and_nothing_else_changed(ended: str) -> None:
    command = findings(ended)["command"]
    assert "--schedule-conservativeness 1.3" in command["text"]
    assert "--max-total-tokens 2048" in command["text"]
    assert [change["flag"] for change in command["changes"]] == ["--schedule-conservativeness"]


def test_every_row_that_was_looked_at_is_a_check_with_its_evidence_or_what_it_needs(ended: str) -> None:
    checks = {check["diagnosis"]: check for check in findings(ended)["checks"]}
    assert checks["retracting_too_often"]["evidence"]["holds"] is True
    assert checks["running_at_limit"]["evidence"]["holds"] is False
    assert checks["memory_reserve_too_small"] == {
        "diagnosis": "memory_reserve_too_small",
        "evidence": None,
        "needs": "the start",
    }


def test_an_exporter_that_has_seen_nothing_says_so(tmp_path: Path) -> None:
    (tmp_path / "empty.log").touch()
    sidecar = Sidecar(config(log_file=(str(tmp_path / "empty.log"),)))
    sidecar.start()
    try:
        with web(sidecar) as url:
            document = findings(url)
    finally:
        sidecar.stop()
    assert (document["verdict"], document["findings"], document["command"]) == ("not_enough_data", [], None)
    assert document["server"] == {"version": None, "args": {}}
