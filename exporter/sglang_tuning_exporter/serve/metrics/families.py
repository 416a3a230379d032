"""Prometheus families with our prefix, and their text.

`generate_latest` of prometheus_client writes the same text; it spells the labels of every sample anew, which for a server
of eight ranks takes longer than reading SGLang's own page. Labels stay the same from scrape to scrape, so theirs is kept.
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
    """The labels of a sample, shared by all that have them and never changed; `text` is how a page spells them."""

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
        created: float | None = None,  # noqa: ARG002 - the text format has no place for it
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


def info(name: str, words: str, values: dict[str, str]) -> InfoMetricFamily:
    """Make an info family with its one sample; `_info` is added to its name."""
    return InfoMetricFamily(PREFIX + name, words, value=values)


def sound(text: str | None) -> str:
    """Write words from outside as they may be shown; a lone surrogate in a name would cost the whole page."""
    return clean(text or "")


def brief(text: str | None) -> str:
    """Write at most `LONGEST_LABEL` characters: a name of a megabyte costs the memory of everybody who keeps it."""
    words = text or ""
    return sound(words if len(words) <= LONGEST_LABEL else words[: LONGEST_LABEL - 1] + "…")


def spelled(labels: Mapping[str, str]) -> str:
    """Write labels as the text format has them, in the order of their names; nothing where there is none."""
    pairs = ",".join(f'{name}="{clean(value).translate(_ESCAPES)}"' for name, value in sorted(labels.items()))
    return f"{{{pairs}}}" if pairs else ""


def text(families: Iterable[Metric]) -> str:
    """Write gauges, counters and infos in Prometheus's text format 0.0.4."""
    lines: list[str] = []
    for family in families:
        lines.append(_head(family.name, family.type, family.documentation))
        for name, labels, value, *_ in family.samples:
            own = labels.text if isinstance(labels, Labels) else spelled(labels)
            lines.append(f"{name}{own} {_number(value)}\n")
    return "".join(lines)


def _number(value: float) -> str:
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


# Labels come from our own tables and from the server's ranks, arguments and files: of the latter any number may come.
@lru_cache(maxsize=8192)
def _labels(names: tuple[str, ...], values: tuple[str, ...]) -> Labels:
    return Labels(dict(zip(names, values, strict=True)))


@lru_cache(maxsize=256)
def _head(name: str, kind: str, words: str) -> str:
    name, kind = {"counter": (name + "_total", kind), "info": (name + "_info", "gauge")}.get(kind, (name, kind))
    return f"# HELP {name} {words.translate(_WORDS)}\n# TYPE {name} {kind}\n"
