"""How the last scrape of SGLang ended, as the rest of the exporter sees it. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ScrapeHealth:
    """How scraping SGLang does."""

    up: bool | None = None  # None before the first scrape and without --sglang-url
    reason: str = ""
    message: str = ""
    scrape_seconds: float | None = None
    starting: bool = False  # it is away because it is starting, as far as can be told
    serves: bool = False  # the last scrape failed, but it answers
    unrecognised: int = 0  # SGLang families on the last page that no known release has
