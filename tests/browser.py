"""A real headless Chromium for the exporter's pages: window sizes, colour schemes, requests made, the accessibility
tree.
"""

from __future__ import annotations

import json
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from selenium import webdriver
from selenium.webdriver import Keys
from selenium.webdriver.chrome.service import Service

if TYPE_CHECKING:
    from collections.abc import Iterator

# Every piece of text that is drawn, with its colour and the one behind it, from the computed styles.
_TEXTS = """
const seen = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
const colour = text => text.match(/[\\d.]+/g).map(Number);
while (walk.nextNode()) {
  const text = walk.currentNode.data.trim(), element = walk.currentNode.parentElement;
  if (!text || element.closest("title, style")) continue;
  const range = document.createRange();
  range.selectNodeContents(walk.currentNode);
  const style = getComputedStyle(element), box = range.getBoundingClientRect();
  let behind = element;
  while (behind && colour(getComputedStyle(behind).backgroundColor)[3] === 0) behind = behind.parentElement;
  seen.push({text, ink: colour(style.color), paper: behind ? colour(getComputedStyle(behind).backgroundColor) : null,
             left: box.left, right: box.right, top: box.top, bottom: box.bottom, width: box.width,
             unseen: element.closest(".unseen") !== null});
}
return seen;
"""


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of text as drawn: its place in CSS pixels, and its contrast with the background."""

    words: str
    left: float
    right: float
    top: float
    bottom: float
    contrast: float  # as WCAG 2 has it, 1 to 21


class Browser:
    """One window; each page sets its size and colour scheme."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(
        self,
        url: str,
        *,
        width: int = 1280,
        height: int = 900,
        scheme: str = "light",
        zoom: float = 1,
    ) -> None:
        """Open a page.

        A `zoom` of 2 halves the page's pixels, as the browser's own does; `width` is that of the window.
        """
        size = {"width": round(width / zoom), "height": round(height / zoom)}
        self.command("Emulation.setDeviceMetricsOverride", **size, deviceScaleFactor=zoom, mobile=width < 500)
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._log("performance")  # what was before is another page's
        self._log("browser")
        self.driver.get(url)

    def command(self, name: str, **arguments: Any) -> Any:
        """Give Chromium a command of its developer tools."""
        return self.driver.execute_cdp_cmd(name, arguments)

    def evaluate(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def count(self, selector: str) -> int:
        return int(self.evaluate(f"return document.querySelectorAll({json.dumps(selector)}).length"))

    def text(self, selector: str) -> str:
        """The text of the first such element in the document; empty without one, as between two pages."""
        return str(self.evaluate(f"return document.querySelector({json.dumps(selector)})?.textContent ?? ''"))

    def texts(self) -> list[Text]:
        """All visible text."""
        drawn = [each for each in self.evaluate(_TEXTS) if not each["unseen"] and each["width"]]
        return [
            Text(
                each["text"],
                each["left"],
                each["right"],
                each["top"],
                each["bottom"],
                contrast(each["ink"], each["paper"] or [255, 255, 255]),
            )
            for each in drawn
        ]

    def width_needed(self) -> int:
        """How wide the page is, in CSS pixels, whatever the window is."""
        return int(self.evaluate("return document.scrollingElement.scrollWidth"))

    def asked_for(self) -> list[str]:
        """The addresses that Chromium has asked for since the page was opened."""
        events = [json.loads(entry["message"])["message"] for entry in self._log("performance")]
        sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
        return [str(request["request"]["url"]) for request in sent]

    def complaints(self) -> list[str]:
        """The messages in the console."""
        return [str(entry["message"]) for entry in self._log("browser")]

    def _log(self, kind: str) -> list[dict[str, Any]]:
        """What Chromium has logged since the last call."""
        entries: list[dict[str, Any]] = self.driver.get_log(kind)  # type: ignore[no-untyped-call]
        return entries

    def tabbed(self, most: int = 60) -> list[str]:
        """The elements that the Tab key reaches, in order, until it leaves the page: the words of links, the tag of
        others.
        """
        reached = []
        for _ in range(most):
            self.driver.switch_to.active_element.send_keys(Keys.TAB)
            at = self.evaluate(
                "const e = document.activeElement; if (e === document.body) return null;"
                "const s = getComputedStyle(e);"
                "return [e.tagName, e.textContent, parseFloat(s.outlineWidth) > 0 && s.outlineStyle !== 'none'];"
            )
            if at is None:
                break
            tag, words, outlined = at
            assert outlined, f"{tag} {words!r} does not show that it has the focus"
            reached.append(words if tag == "A" else tag.lower())
        return reached

    def accessible(self) -> list[dict[str, Any]]:
        """The accessibility tree in order: role, name and properties of each node that is not ignored."""
        nodes = self.command("Accessibility.getFullAXTree")["nodes"]
        by_id = {node["nodeId"]: node for node in nodes}
        exposed: list[dict[str, Any]] = []

        def visit(node: dict[str, Any]) -> None:
            if not node.get("ignored"):
                properties = {each["name"]: each["value"].get("value") for each in node.get("properties", ())}
                exposed.append(
                    {"role": node["role"]["value"], "name": node.get("name", {}).get("value", ""), **properties}
                )
            for child in node.get("childIds", ()):
                if child in by_id:
                    visit(by_id[child])

        visit(nodes[0])
        return exposed


def contrast(ink: list[float], paper: list[float]) -> float:
    """Give the contrast ratio of two sRGB colours (0-255 each), WCAG 2.2, "contrast ratio" and "relative luminance"."""

    def luminance(colour: list[float]) -> float:
        shares = [value / 255 for value in colour[:3]]
        red, green, blue = (s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    darker, lighter = sorted((luminance(ink), luminance(paper)))
    return (lighter + 0.05) / (darker + 0.05)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A Chromium and its driver; both are ended afterwards."""
    for program, package in (("chromium", "chromium"), ("chromedriver", "chromium-driver")):
        if shutil.which(program) is None:
            pytest.fail(f"{program} is missing: install it (Debian: apt install {package})", pytrace=False)
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
