"""The report as an HTML page: everything in the text, charts over time, in one file that loads nothing else.

Real logs of 0.5.23 (tests/recordings), and lines as the released wheels format them, with hostile words in them.
"""

from __future__ import annotations

import gzip
import html
import http.server
import json
import re
import shutil
import subprocess
import threading
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from markupsafe import escape

from sglang_tuning_exporter.diagnosis.table import BY_ID
from sglang_tuning_exporter.recordings.replay import packaged
from sglang_tuning_exporter.report.inputs import Logs
from sglang_tuning_exporter.report.page import POLICY, ticks
from sglang_tuning_exporter.report.report import ReadLogs, run
from sglang_tuning_exporter.serve.pages.chart import Point, nice, scale
from sglang_tuning_exporter.state.profiles import PROFILES

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
RETRACT = packaged("retract") / "server.log.gz"
LOGS = sorted((HERE / "data" / "logs").glob("*.log"))
HOSTILE = "<script>document.title='owned'</script><img src=http://127.0.0.1:9/x onerror=alert(1)>"
VOID = {"meta", "br", "link", "img", "input", "hr"}


def page(tmp_path: Path, *logs: str | Path, profile: str = "online", against: tuple[str, ...] = ()) -> str:
    output = tmp_path / "report.html"
    run([str(log) for log in logs], format="html", output=output, profile=profile, against=against)
    return output.read_text()


def text_of(page: str) -> str:
    """The visible text, in one line."""
    body = re.sub(r"<(style|title)>.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"</?(?:span|bdi|code)[^>]*>", "", body).replace("<", " <")).split())


def seen(page: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", text_of(page)).split())


def hostile_log(tmp_path: Path) -> Path:
    """A recorded log of a model with a hostile name, in a file with one, with tool lines that would be markup."""
    lines = gzip.decompress(RETRACT.read_bytes()).replace(b"/srv/sglang/tiny-llama", HOSTILE.encode())
    tool = f"[2026-11-20 19:26:00] Model attempted to call undefined function: {HOSTILE}\n".encode()
    log = tmp_path / "<b>server.log"
    log.write_bytes(lines.replace(b"[2026-11-20 19:26:0", tool + b"[2026-11-20 19:26:0", 20))
    return log


def retracting_for_long() -> bytes:
    """The retract recording with its three minutes of load played eight times."""
    text = gzip.decompress(RETRACT.read_bytes())
    end = text.index(b"\n", text.index(b"fired up and ready")) + 1
    work = b"".join(line for line in text[end:].splitlines(keepends=True) if re.match(rb"\[2026-11-20 19:2[5-7]", line))

    def later(minutes: int) -> bytes:
        return re.sub(rb"(?m)^\[2026-11-20 19:(\d\d)", lambda m: b"[2026-11-20 19:%d" % (int(m[1]) + minutes), work)

    return text[:end] + b"".join(later(3 * remedy) for remedy in range(8))


class Tree(HTMLParser):
    """A parser that collects the tags and checks that all are closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes.update(name for name, _ in attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes.update(name for name, _ in attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("log", [RETRACT, *LOGS], ids=lambda log: log.name)
@pytest.mark.parametrize("profile", PROFILES)
def test_every_log_gives_a_page_whose_tags_are_closed(log: Path, profile: str, tmp_path: Path) -> None:
    assert Tree(page(tmp_path, log, profile=profile)).open == []


def test_the_page_has_everything_that_the_text_has(tmp_path: Path) -> None:
    said = seen(page(tmp_path, RETRACT))
    row = BY_ID["retracting_too_often"]
    for words in (
        row.summary,
        row.remedy.why,
        "Try --schedule-conservativeness 1.3 now 0.1",
        "retractions/min; healthy: up to about 1.",
        "--schedule-conservativeness 1.3 --device cpu",
        "starting",
        "idle",
        "requests waiting after a burst of retractions",
        "Confidence: high.",
    ):
        assert words in said, words


def test_figures_are_drawn_as_svg_with_words_for_who_cannot_see_them(tmp_path: Path) -> None:
    written = page(tmp_path, RETRACT)
    titles = re.findall(r'<svg [^>]*role="img"[^>]*><title>([^<]+)</title>', written)
    assert [title.split(" over the run")[0] for title in titles] == [
        "The phases of the run",
        "Queued requests",
        "Token usage",
        "Running requests",
        "Generated tokens a second",
        "Retractions",
    ]
    assert "nan" not in written.lower().replace("nanobind", "")
    assert (
        len(re.findall(r'<path class="mark" d="M[\d.]+ 0v8"/>', written)) == 6
    )  # retractions of one second are one tick


def test_the_reasons_of_advice_that_findings_share_stand_once(tmp_path: Path) -> None:
    written = page(tmp_path, HERE / "recordings" / "v0.5.9-retract" / "server.log.gz")
    reasons = re.findall(r"<dt>Why:</dt><dd>(.*?)</dd>", written)
    assert len(reasons) == len(set(reasons)) > 1
    assert "Why: see above, SGLang keeps retracting running requests: the KV cache is full." in written


def test_a_server_with_graphs_shows_how_many_batches_they_cover(tmp_path: Path) -> None:
    assert "CUDA graph coverage over the run: 1.00 throughout" in page(tmp_path, HERE / "data" / "logs" / "0.5.23.log")


def test_alerts_that_would_have_fired_have_a_lane_and_shade_the_figures(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_bytes(retracting_for_long())
    spans = ReadLogs(Logs([str(log)]), PROFILES["online"]).read().alarms.spans()
    assert "SGLangRetractingTooOften" in {span.alert for span in spans}
    written = page(tmp_path, log)
    assert '<rect class="shade warning"' in written
    assert '<div class="name">SGLangRetractingTooOften</div>' in written
    assert f"SGLangRetractingTooOften {BY_ID['retracting_too_often'].summary}" in seen(written)


def test_the_page_loads_nothing_and_runs_nothing(tmp_path: Path) -> None:
    written = page(tmp_path, hostile_log(tmp_path))
    tree = Tree(written)
    assert tree.tags.isdisjoint(
        {"script", "link", "img", "iframe", "object", "embed", "form", "a", "base", "image", "use"}
    )
    assert tree.attributes.isdisjoint({"src", "href", "xlink:href", "action", "srcset", "onerror", "onload"})
    assert not re.search(r"url\(|@import|http-equiv=\"refresh\"", written)
    assert f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">' in written
    assert "default-src 'none'" in POLICY


def test_hostile_words_of_the_log_are_text(tmp_path: Path) -> None:
    written = page(tmp_path, hostile_log(tmp_path))
    assert HOSTILE not in written
    assert escape(HOSTILE) in written
    assert "&lt;b&gt;server.log" in written


def test_a_night_that_was_good_on_the_whole_is_not_called_healthy_when_alerts_would_have_fired(tmp_path: Path) -> None:
    calm = HERE / "data" / "logs" / "0.5.23.log"
    assert 'class="word calm">No verdict<' in page(tmp_path, calm)
    line = (
        "[2025-11-20 {:02}:{:02}:{:02}] Decode batch, #running-req: {}, #token: 9, token usage: 0.40, cuda graph: True, "
        "gen throughput (token/s): 44.70, #queue-req: {}\n"
    )
    log = tmp_path / "server.log"
    log.write_text(
        "[2025-11-20 10:00:00] server_args=ServerArgs(model_path='m', tp_size=1, max_running_requests=4)\n"
        + "".join(
            line.format(10 + s // 3600, s // 60 % 60, s % 60, *((4, 60) if s < 1800 else (1, 0)))
            for s in range(5, 3 * 3600, 5)
        )
    )
    written = page(tmp_path, log)
    assert 'class="word warn">Healthy, in part<' in written
    assert "healthy: near 4 while requests wait" in seen(written)


def test_the_comparison_with_earlier_logs_comes_first(tmp_path: Path) -> None:
    big, limited = (str(HERE / "recordings" / name / "server.log.gz") for name in ("big_queue", "client_limited"))
    said = seen(page(tmp_path, limited, against=(big,)))
    assert said.index("Against") < said.index("Over time")
    assert "--max-running-requests 2 → not set" in said


def test_a_log_without_times_is_a_page_without_pictures(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(
        "Decode batch, #running-req: 4, #token: 925, token usage: 0.89, gen throughput (token/s): 1.00, #queue-req: 4\n"
    )
    written = page(tmp_path, log)
    assert "<svg" not in written
    assert "no line has a time" in seen(written)


@pytest.mark.parametrize("seconds", [1, 59, 600, 7200, 86400, 9 * 86400, 400 * 86400])
@pytest.mark.parametrize("begin", [0.0, 35000.0, 1763632800.0, 1763667601.0])
def test_an_axis_has_a_few_round_moments_in_order(begin: float, seconds: float) -> None:
    found = ticks(begin, seconds)
    assert 1 <= len(found) <= 9
    assert [left for left, _ in found] == sorted({left for left, _ in found})
    assert all(0 <= left <= 100 for left, _ in found)
    assert len({words for _, words in found}) == len(found)


@pytest.mark.parametrize(
    ("value", "rounded"), [(0, 1), (0.03, 0.05), (1, 1), (1.1, 2), (21, 25), (290, 500), (2001, 2500)]
)
def test_a_scale_ends_at_a_round_figure(value: float, rounded: float) -> None:
    assert nice(value) == pytest.approx(rounded)


def test_a_limit_far_above_the_figures_does_not_flatten_the_chart() -> None:
    points = [Point(0.5, 3, 3, 3)]
    assert scale(points, upper=2000).top == 3
    assert scale(points, upper=4).top == 4
    assert scale(points, limit=4096).limit is None


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves one page and remembers every request."""

    page = b""
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(200 if self.path == "/report.html" else 404)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(self.page if self.path == "/report.html" else b"")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """The page of a hostile log behind a real port, and what was asked for."""
    asked: list[str] = []
    handler = type("Page", (Handler,), {"page": page(tmp_path, hostile_log(tmp_path)).encode(), "asked": asked})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/report.html", asked
        server.shutdown()
        thread.join()


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_a_browser_shows_it_runs_nothing_and_asks_for_nothing_else(
    served: tuple[str, list[str]], tmp_path: Path
) -> None:
    address, asked = served
    ended = subprocess.run(
        [
            "chromium",
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--dump-dom",
            address,
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    dom = ended.stdout
    assert asked == ["/report.html"]
    assert "owned" not in re.findall(r"<title>(.*?)</title>", dom)[0]
    assert not re.search(r"<(script|img)\b", dom)
    assert HOSTILE in text_of(dom)
    assert dom.count("<svg") == 6
    assert "Content Security Policy" not in ended.stderr


def test_the_page_is_the_same_however_often_it_is_made(tmp_path: Path) -> None:
    assert page(tmp_path, RETRACT) == page(tmp_path, RETRACT)


def test_the_json_of_the_same_log_has_the_same_alerts_and_phases(tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    run([str(RETRACT)], format="json", output=output, profile="online")
    document = json.loads(output.read_text())
    said = seen(page(tmp_path, RETRACT))
    for phase in document["phases"]:
        assert phase["start"].replace("T", " ")[:19] in said
