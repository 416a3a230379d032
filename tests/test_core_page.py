"""The report as a page: complete, closed, safe against words of the log, readable at every width in light and dark."""

from __future__ import annotations

import gzip
from html.parser import HTMLParser
from pathlib import Path

from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.answer import compare
from sglang_tuning_exporter.core.findings import Change, Judgement
from sglang_tuning_exporter.core.page import POLICY, page
from sglang_tuning_exporter.core.report import run
from sglang_tuning_exporter.recordings.replay import packaged
from test_core_report import finding, judged
from test_web import text_of

RETRACT = packaged("retract") / "server.log.gz"
HOSTILE = "<script>document.title='owned'</script><img src=http://127.0.0.1:9/x onerror=alert(1)>"
NAME = "<script>alert(1)</script><img onerror alert(1)>"  # without an address or a pair, which no argument shows
VOID = {"meta", "br", "link", "img", "input", "hr"}
OFFLINE = PROFILES["offline"]


def hostile_log(tmp_path: Path) -> Path:
    """A recorded log of a model with a hostile name, in a file with one, with tool lines that would be markup."""
    lines = gzip.decompress(RETRACT.read_bytes()).replace(b"/srv/sglang/tiny-llama", NAME.encode())
    tool = f"[2026-11-20 19:26:00] Model attempted to call undefined function: {HOSTILE}\n".encode()
    log = tmp_path / "<b>server.log"
    log.write_bytes(lines.replace(b"[2026-11-20 19:26:0", tool + b"[2026-11-20 19:26:0", 20))
    return log


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


def whole() -> Judgement:
    people = Change(words="send fewer requests at once")
    chance = finding(
        "memory_reserve_too_large", "info", is_limit=False, headline="Memory is unused.", changes=(people,)
    )
    return judged(finding(), finding("queue_too_long", headline="Too many wait."), chance)


def test_the_page_has_everything_that_the_text_has() -> None:
    written = page(whole(), OFFLINE, compare(whole(), whole()))
    assert Tree(written).open == []
    shown = text_of(written)
    for words in (
        "SGLang kept retracting running requests. Confidence: high; from 10:10:00 to 10:35:00.",
        "Most of the serving time (60 %): nothing limited the server.",
        "34 retractions, 14 of them beside text that clients can write",
        "Against server.log: no clear difference",
        "Retractions 12/min limit 1/min",
        "Try --schedule-conservativeness 1.3 now 0.3",
        "· as for “SGLang kept retracting running requests”",
        "It will not help if it is above 1.43.",
        "--schedule-conservativeness 1.3 --tp-size 2",
        "Add --api-key again.",
        "warning SGLangRetractingTooOften would have been notified at 10:11:40 (still firing when the log ends)",
        "Worth a try, one at a time Memory is unused.",
        "Send fewer requests at once.",
        "Memory: 78.71 GB free before weights",
        "serving: an hour",
        "The queue longer than healthy, 100 to 2,000 62 %",
        "Out of memory prefill 1",
        "At the end: running requests 229",
    ):
        assert words in shown, words


def test_hostile_words_of_the_log_are_text_and_the_page_has_no_script(tmp_path: Path) -> None:
    run([str(hostile_log(tmp_path))], format="html", output=tmp_path / "page.html", profile="online")
    tree = Tree((tmp_path / "page.html").read_text())
    assert not tree.tags & {"script", "img", "iframe", "link", "object"}
    assert not {name for name in tree.attributes if name.startswith("on") or name in {"src", "href"}}
    assert NAME in text_of((tmp_path / "page.html").read_text())
    assert POLICY.startswith("default-src 'none'")
