"""Prometheus families with our prefix."""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

PREFIX = "sglang_tuning_"
LONGEST_LABEL = 512


def gauge(name: str, words: str, *labels: str) -> GaugeMetricFamily:
    """Make a gauge without samples."""
    return GaugeMetricFamily(PREFIX + name, words, labels=labels)


def counter(name: str, words: str, *labels: str) -> CounterMetricFamily:
    """Make a counter without samples; `_total` is added to its name."""
    return CounterMetricFamily(PREFIX + name, words, labels=labels)


def info(name: str, words: str, values: dict[str, str]) -> InfoMetricFamily:
    """Make an info family with its one sample; `_info` is added to its name."""
    return InfoMetricFamily(PREFIX + name, words, value=values)


def sound(text: str | None) -> str:
    """Write words from outside as UTF-8 can: a lone surrogate in a name would cost the whole page."""
    return (text or "").encode("utf-8", "backslashreplace").decode()


def brief(text: str | None) -> str:
    """Write at most `LONGEST_LABEL` characters: a name of a megabyte costs the memory of everybody who keeps it."""
    words = text or ""
    return sound(words if len(words) <= LONGEST_LABEL else words[: LONGEST_LABEL - 1] + "…")
