"""The runbooks as the exporter serves them: with its own addresses, the present finding, and nothing of a request."""

from __future__ import annotations

import html
import re
from typing import TYPE_CHECKING
from urllib.parse import urljoin

import pytest
import requests

from conftest import config, web
from scenes import SCENES, lived
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.core import runbooks
from sglang_tuning_exporter.core.runbooks import BY_ALERT
from test_web import text_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ALERTS = sorted(BY_ALERT)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The exporter beside a server that retracts."""
    with lived(SCENES["recorded"](), tmp_path_factory.mktemp("retract")) as sidecar, web(sidecar) as url:
        yield url


def get(url: str, **headers: str) -> requests.Response:
    return requests.get(url, timeout=10, allow_redirects=False, headers=headers)


@pytest.mark.parametrize("alert", ALERTS)
def test_the_exporter_serves_the_page_of_every_alert(alert: str, address: str) -> None:
    answer = get(f"{address}/runbooks/{alert}")
    assert answer.status_code == 200
    assert f">{alert}</h1>" in answer.text
    assert [f'<h2 id="{name.lower()}">' in answer.text for name in runbooks.SECTIONS] == [True] * 4
    assert runbooks.summary(BY_ALERT[alert]) in text_of(answer.text)


def test_commands_are_filled_in_for_this_server(address: str) -> None:
    page = text_of(get(f"{address}/runbooks/SGLangServerDown").text)
    host = address.removeprefix("http://")
    assert f"curl -s http://{host}/metrics | grep" in page
    assert "http://127.0.0.1:9/metrics" in page
    assert re.search(r"tail -n 40 /\S+/server\.log", page)
    assert not re.search(r"\b(EXPORTER|LOG|SGLANG)\b", page)


@pytest.mark.parametrize("host", ["<script>alert(1)</script>", "x; rm -rf ~", "$(id)", "a b", ""])
def test_a_hostile_host_is_not_filled_in(host: str, address: str) -> None:
    page = get(f"{address}/runbooks/SGLangServerDown", Host=host).text
    assert "http://EXPORTER/metrics" in page
    assert "<script" not in page
    assert "rm -rf" not in page


def test_a_log_with_a_hostile_name_is_one_word_and_no_markup(tmp_path: Path) -> None:
    path = tmp_path / "a;b <img src=x>`.log"
    path.touch()
    sidecar = Sidecar(config(log_file=(str(path),)))
    sidecar.start()
    with web(sidecar) as url:
        page = get(f"{url}/runbooks/SGLangServerDown").text
    assert f"tail -n 40 '{path}'" in html.unescape(page)
    assert "<img" not in page


def test_the_page_says_whether_it_holds_now_and_what_to_try(address: str) -> None:
    holds = text_of(get(f"{address}/runbooks/SGLangRetractingTooOften").text)
    assert "It holds now:" in holds
    assert "--schedule-conservativeness 1.3 now 0.1" in holds
    assert "It does not hold at the moment:" in text_of(get(f"{address}/runbooks/SGLangOutOfMemoryDecode").text)


def test_every_link_of_every_page_is_answered(address: str) -> None:
    pages = [f"{address}/runbooks/{page}" for page in ("", *ALERTS)]
    links = {urljoin(page, link) for page in pages for link in re.findall(r'href="([^"#]+)"', get(page).text)}
    assert len(links) > len(ALERTS)
    assert [link for link in links - {runbooks.GUIDE_URL} if get(link).status_code != 200] == []
