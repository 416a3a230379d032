"""Prometheus families with our prefix, and their text.

`generate_latest` of prometheus_client writes the same text, but writes the labels of every sample again at each scrape. For a
server of eight ranks that takes longer than reading SGLang's own page. Here the text of labels is cached.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Sample
from prometheus_client.utils import floatToGoString

from sglang_tuning_exporter.sglang.clean import clean

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from prometheus_client.core import Exemplar, Metric, Timestamp

PREFIX = "sglang_tuning_"
LONGEST_LABEL = 512
_WORDS = str.maketrans({"\\": r"\\", "\n": r"\n"})
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class Labels(dict[str, str]):
    """The labels of a sample, shared by all samples that have them and never changed; `text` is their text on a page."""

    __slots__ = ("text",)

    def __init__(self, labels: Mapping[str, str]) -> None:
        super().__init__(labels)
        self.text = spelled(labels)


class _Gauge(GaugeMetricFamily):
    def __init__(self, name: str, words: str, names: tuple[str, ...]) -> None:
        super().__init__(name, words, labels=names)
        self.names = names

    def add_metric(self, labels: Sequence[str], value: float, timestamp: Timestamp | float | None = None) -> None:
        self.samples.append(Sample(self.name, _labels(self.names, tuple(labels)), value, timestamp))


class _Counter(CounterMetricFamily):
    def __init__(self, name: str, words: str, names: tuple[str, ...]) -> None:
        super().__init__(name, words, labels=names)
        self.names = names

    def add_metric(
        self,
        labels: Sequence[str],
        value: float,
        created: float | None = None,  # noqa: ARG002 - the text format has no field for it
        timestamp: Timestamp | float | None = None,
        exemplar: Exemplar | None = None,
    ) -> None:
        own = _labels(self.names, tuple(labels))
        self.samples.append(Sample(self.name + "_total", own, value, timestamp, exemplar))


def gauge(name: str, words: str, *labels: str) -> GaugeMetricFamily:
    """Make a gauge without samples."""
    return _Gauge(PREFIX + name, words, labels)


def counter(name: str, words: str, *labels: str) -> CounterMetricFamily:
    """Make a counter without samples; `_total` is added to its name."""
    return _Counter(PREFIX + name, words, labels)


def single(name: str, words: str, value: float | None) -> Metric:
    """Make a gauge with one sample; without samples where there is no value."""
    return by_label(gauge(name, words), [("", value)])


def by_label(family: Metric, samples: Iterable[tuple[str, float | None]]) -> Metric:
    """Give a family of one label (or of none) its samples; those without a value are left out."""
    for label, value in samples:
        if value is not None:
            family.add_metric([label] if family.names else [], value)  # type: ignore[attr-defined]  # one of ours
    return family


def info(name: str, words: str, values: dict[str, str]) -> InfoMetricFamily:
    """Make an info family with its one sample; `_info` is added to its name."""
    return InfoMetricFamily(PREFIX + name, words, value=values)


def sound(text: str | None) -> str:
    """Return words from outside without characters that would break the page, such as lone surrogates."""
    return clean(text or "")


def brief(text: str | None) -> str:
    """Return at most `LONGEST_LABEL` characters: a very long name would cost memory in every Prometheus."""
    words = text or ""
    return sound(words if len(words) <= LONGEST_LABEL else words[: LONGEST_LABEL - 1] + "…")


def spelled(labels: Mapping[str, str]) -> str:
    """Return labels in the text format, sorted by name; empty where there are none."""
    pairs = ",".join(f'{name}="{clean(value).translate(_ESCAPES)}"' for name, value in sorted(labels.items()))
    return f"{{{pairs}}}" if pairs else ""


def text(families: Iterable[Metric]) -> str:
    """Return gauges, counters and infos in Prometheus's text format 0.0.4."""
    lines: list[str] = []
    for family in families:
        lines.append(_head(family.name, family.type, family.documentation))
        for name, labels, value, *_ in family.samples:
            own = labels.text if isinstance(labels, Labels) else spelled(labels)
            lines.append(f"{name}{own} {_number(value)}\n")
    return "".join(lines)


def _number(value: float) -> str:
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


# Bounded: ranks, arguments and files come from outside, in any number.
@lru_cache(maxsize=8192)
def _labels(names: tuple[str, ...], values: tuple[str, ...]) -> Labels:
    return Labels(dict(zip(names, values, strict=True)))


@lru_cache(maxsize=256)
def _head(name: str, kind: str, words: str) -> str:
    name, kind = {"counter": (name + "_total", kind), "info": (name + "_info", "gauge")}.get(kind, (name, kind))
    return f"# HELP {name} {words.translate(_WORDS)}\n# TYPE {name} {kind}\n"
