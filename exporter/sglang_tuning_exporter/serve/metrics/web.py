"""The family with the address of this exporter's pages, for the links in notifications."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.registry import Collector

from sglang_tuning_exporter.serve.metrics.families import info, sound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sglang_tuning_exporter.serve.metrics.families import Family


def web(external_url: str | None, *, is_tls: bool) -> Family:
    """Return the family with its sample."""
    return info(
        "web",
        "Where people reach this exporter's pages: --external-url (empty: the scraped address), and the scheme it serves.",
        {"external_url": sound(external_url), "scheme": "https" if is_tls else "http"},
    )


class WebCollector(Collector):
    """Exposes the address. Whether TLS is on is looked up at each scrape, because the web configuration may change."""

    def __init__(self, external_url: str | None, is_tls: Callable[[], bool]) -> None:
        self._external_url, self._is_tls = external_url, is_tls

    def collect(self) -> Iterator[Family]:
        """Return the one family."""
        yield web(self._external_url, is_tls=self._is_tls())
