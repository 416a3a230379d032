"""The result of the last scrape of SGLang. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ScrapeHealth:
    """Whether SGLang could be scraped, and why not."""

    up: bool | None = None  # None before the first scrape and without --sglang-url
    reason: str = ""
    message: str = ""
    scrape_seconds: float | None = None
    starting: bool = False  # it does not answer, probably because it is starting
    serves: bool = False  # the last scrape failed, but it answers
    unrecognised: int = 0  # SGLang families on the last page that no known release has
