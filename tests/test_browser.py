"""The exporter's page in a real Chromium: first screen, phone, dark scheme, keyboard, screen reader."""

from __future__ import annotations

import re
import time
from contextlib import ExitStack
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from browser import Browser, chromium
from conftest import running_exporter, wait_for, web
from nights import failing
from scenes import SCENES, lived
from sglang_tuning_exporter.cli import main
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.core.diagnoses import BY_ID
from sglang_tuning_exporter.recordings.recording import load
from sglang_tuning_exporter.recordings.replay import ReplayServer, packaged
from sglang_tuning_exporter.sglang.clean import clean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

WINDOW, PHONE = 1280, 390
RIGHT_TO_LEFT = "\u202e\u05e9\u05dc\u05d5\u05dd gpt\u2067"  # with marks that would turn the rest of the line around
HOSTILE = [
    "<img src=x onerror=\"document.title='owned'\">",
    "</title></bdi><script>document.title='owned'</script>",
    RIGHT_TO_LEFT,
    "🦙🦙 ラマ",
    "m" * 300,
]
Scene = tuple[Sidecar, str]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Scene]]:
    """Gives the sidecar of a situation of `scenes` and its address; each is run once."""
    with ExitStack() as open_scenes:
        known: dict[str, Scene] = {}

        def of(name: str) -> Scene:
            if name not in known:
                directory = tmp_path_factory.mktemp(name)
                sidecar = open_scenes.enter_context(lived(SCENES[name](), directory))
                known[name] = (sidecar, open_scenes.enter_context(web(sidecar)) + "/?still")
            return known[name]

        yield of


@pytest.fixture
def address(scene: Callable[[str], Scene]) -> str:
    """A server with a setting to change."""
    return scene("beyond_captured")[1]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [WINDOW, PHONE])
def test_the_limit_and_the_command_are_on_the_first_screen(
    width: int, scheme: str, browser: Browser, address: str
) -> None:
    browser.open(address, width=width, height=740, scheme=scheme)
    seen = [text for text in browser.texts() if text.bottom <= 740]
    words = [text.words for text in seen]
    assert "Warning" in words
    assert BY_ID["cuda_graph_not_covering"].summary in words
    assert "--cuda-graph-max-bs-decode 32" in words
    assert "now 8" in words


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["retracting", "down"])
def test_every_text_has_enough_contrast(
    name: str, scheme: str, browser: Browser, scene: Callable[[str], Scene]
) -> None:
    browser.open(scene(name)[1], scheme=scheme)
    texts = browser.texts()
    assert len(texts) > 50
    assert [text for text in texts if text.contrast < 4.5] == []


@pytest.mark.parametrize("name", SCENES)
def test_nothing_is_cut_or_has_to_be_scrolled_sideways(
    name: str, browser: Browser, scene: Callable[[str], Scene]
) -> None:
    for width, zoom in ((WINDOW, 1), (PHONE, 1), (320, 1), (WINDOW, 2)):
        browser.open(scene(name)[1], width=width, zoom=zoom)
        room = width / zoom
        assert browser.width_needed() <= room, f"{name} at {width} zoomed {zoom}"
        assert [text for text in browser.texts() if text.left < 0 or text.right > room] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_report_fits_a_phone_without_columns_of_letters_and_every_text_stands_out(
    scheme: str, browser: Browser, tmp_path: Path
) -> None:
    log, page = tmp_path / "server.log", tmp_path / "report.html"
    log.write_bytes(failing())
    assert main(["report", str(log), "--format", "html", "--output", str(page)]) == 1
    browser.open(page.as_uri(), width=PHONE, scheme=scheme)
    assert browser.width_needed() <= PHONE
    texts = [text for text in browser.texts() if text.bottom > text.top]
    assert len(texts) > 50
    assert [text for text in texts if text.right - text.left < 40 and text.bottom - text.top > 60] == []
    assert [text for text in texts if text.contrast < 4.5] == []
    assert [address for address in browser.asked_for() if address != page.as_uri()] == browser.complaints() == []


def test_the_page_loads_nothing_else_and_logs_no_error(browser: Browser, address: str) -> None:
    browser.open(address)
    time.sleep(0.3)  # an icon is asked for late
    assert {url for url in browser.asked_for() if not url.startswith("data:")} == {address}
    assert browser.complaints() == []


def test_a_right_to_left_name_changes_the_direction_of_nothing_else(
    browser: Browser, scene: Callable[[str], Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecar, address = scene("beyond_captured")
    monkeypatch.setitem(sidecar.watch.server.facts.arguments, "served_model_name", RIGHT_TO_LEFT)
    browser.open(address)
    at = {text.words: text for text in browser.texts()}
    name, behind = at["\\u202e\u05e9\u05dc\u05d5\u05dd gpt\\u2067"], at["· SGLang 0.5.23 · profile online"]
    assert name.left < name.right <= behind.left


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_is_text_and_stays_in_its_place(
    name: str, browser: Browser, scene: Callable[[str], Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecar, address = scene("beyond_captured")
    facts = sidecar.watch.server.facts
    monkeypatch.setitem(facts.arguments, "served_model_name", name)
    monkeypatch.setitem(facts.arguments, "model_path", name)
    monkeypatch.delattr(facts, "typed_arguments", raising=False)  # it is kept for the arguments of before
    browser.open(address, width=PHONE)
    assert browser.text("header bdi") == clean(name)
    # A command to be pasted holds no control character: a variable stands in its place.
    assert (name if clean(name) == name else "$MODEL_PATH") in browser.text("pre").replace("'\"'\"'", "'")
    assert browser.count("img, script, iframe, object, body > style") == 0
    assert browser.evaluate("return document.title").startswith(BY_ID["cuda_graph_not_covering"].summary)
    assert browser.width_needed() <= PHONE
    assert "Warning" in [text.words for text in browser.texts()]
    assert browser.complaints() == []


def test_the_tab_key_reaches_every_link_and_the_command_line_visibly(browser: Browser, address: str) -> None:
    browser.open(address)
    step = "What to do, step by step"
    other = BY_ID["memory_reserve_too_large"].summary
    reached = browser.tabbed()
    assert reached[:3] == ["resume", step, "pre"]
    assert f"{step}: {other}" in reached
    assert reached[-3:] == ["metrics", "findings as JSON", "runbooks"]


@pytest.mark.parametrize("name", ["beyond_captured", "dp2", "unseen"])
def test_a_screen_reader_gets_landmarks_headings_figures_and_tables(
    name: str, browser: Browser, scene: Callable[[str], Scene]
) -> None:
    browser.open(scene(name)[1])
    nodes = browser.accessible()
    roles = [node["role"] for node in nodes]
    assert [role for role in roles if role in {"banner", "main", "contentinfo"}] == ["banner", "main", "contentinfo"]
    levels = [node["level"] for node in nodes if node["role"] == "heading"]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(later <= earlier + 1 for earlier, later in pairwise(levels))
    figures = browser.evaluate("return [...document.querySelectorAll('.figures dt')].map(e => e.textContent)")
    terms = [_words(nodes, place) for place, role in enumerate(roles) if role == "term"]
    assert [figure for figure in figures if figure not in terms] == []
    assert len(figures) == (7 if name == "unseen" else 8)  # given-up requests are known from the metrics alone
    tables = [place for place, role in enumerate(roles) if role == "table"]
    assert len(tables) == browser.count("table")
    headers = [node["name"] for node in nodes if node["role"] == "columnheader"]
    assert {"Source", "Health"} <= set(headers)
    assert ("DP0" in [node["name"] for node in nodes if node["role"] == "rowheader"]) is (name == "dp2")
    links = [node["name"] for node in nodes if node["role"] == "link"]
    assert len(links) == len(set(links))  # each name belongs to one link only


def test_a_screen_reader_gets_a_text_for_each_picture(browser: Browser, address: str) -> None:
    browser.open(address)
    pictures = [node["name"] for node in browser.accessible() if node["role"] in {"image", "img"}]
    assert len(pictures) == browser.count("svg") == 6
    assert [re.sub(r"\d[\d.,]*( to \d[\d.,]*)?", "#", picture) for picture in pictures] == [
        "Queued requests, last # s: #",
        "Token usage, last # s: #",
        "Running requests, last # s: #",
        "Generated tokens/s, last # s: #",
        "CUDA graph coverage, last # s: # %",
        "Retractions, last # s: # in all",
    ]


def test_the_runbooks_fit_a_phone_and_stand_out(browser: Browser, address: str) -> None:
    for scheme in ("light", "dark"):
        for page in ("runbooks/", "runbooks/SGLangRetractingTooOften"):
            browser.open(address.replace("?still", page), width=PHONE, scheme=scheme)
            assert browser.width_needed() <= PHONE
            assert [text for text in browser.texts() if text.contrast < 4.5] == []
            assert browser.complaints() == []


def test_the_page_of_a_replayed_server_refreshes_by_itself(browser: Browser, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.touch()
    replay = ReplayServer(load(packaged("retract")), log_path=log, speed=10.0)
    replay.start()
    try:
        with running_exporter("--sglang-url", replay.url, "--log-file", str(log)) as exporter:
            browser.open(exporter.url + "/", width=PHONE)
            first = browser.text("time")
            before = _retractions(browser)
            browser.evaluate("scrollTo(0, 300)")
            wait_for(lambda: browser.text("footer") != "" and browser.text("time") != first, 20)
            # The recording's retractions, each of which the server's counter is asked about.
            wait_for(lambda: _retractions(browser) > before, 20)
            assert browser.evaluate("return scrollY") > 200  # a reader further down keeps about the same place
            assert {url for url in browser.asked_for() if not url.startswith("data:")} == {exporter.url + "/"}
    finally:
        replay.stop()


def _retractions(browser: Browser) -> int:
    found = re.search(r"(\d+) in all", browser.text(".figures"))
    return int(found[1]) if found else 0


def _words(nodes: list[dict[str, Any]], place: int) -> str:
    """The words of a node without a name of its own: those of the text after it."""
    return str(nodes[place]["name"] or nodes[place + 1]["name"])
