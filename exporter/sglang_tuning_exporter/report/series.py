"""Figures over time in constant memory: a fixed number of buckets that double their width when all are used. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from sglang_tuning_exporter.serve.pages.chart import Point

BUCKETS = 240
FIRST_WIDTH = 1.0  # seconds; printed times are whole seconds

Figure: TypeAlias = Literal["queued", "usage", "running", "throughput"]


@dataclass(slots=True)
class Range:
    """One figure in one bucket: its time-weighted sum, lowest and highest value."""

    seconds: float = 0.0
    sum: float = 0.0
    low: float = float("inf")
    high: float = float("-inf")

    def add(self, value: float, seconds: float) -> None:
        """Add a value that held for so many seconds."""
        self.seconds += seconds
        self.sum += value * seconds
        self.low = value if value < self.low else self.low  # noqa: FURB136 - min() costs three times as much
        self.high = value if value > self.high else self.high  # noqa: FURB136 - likewise

    def merge(self, other: Range) -> None:
        """Add another range."""
        self.seconds += other.seconds
        self.sum += other.sum
        self.low = min(self.low, other.low)
        self.high = max(self.high, other.high)

    @property
    def mean(self) -> float:
        """Its time-weighted mean. Raises `ZeroDivisionError` where nothing was added."""
        return self.sum / self.seconds


@dataclass(slots=True)
class Bucket:
    """The figures of one bucket; a figure that was never known is absent."""

    figures: dict[Figure, Range] = field(default_factory=dict)
    replayed: float = 0.0  # decode batches with a captured graph
    eager: float = 0.0  # and those without
    retractions: float = 0.0

    def range(self, figure: Figure) -> Range:
        """Return the range of a figure, to which its values are added."""
        return self.figures.setdefault(figure, Range())

    def add(self, figure: Figure, value: float, seconds: float) -> None:
        """Add a figure's value that held for so many seconds."""
        self.range(figure).add(value, seconds)

    def merge(self, other: Bucket) -> None:
        """Add the next bucket."""
        for figure, values in other.figures.items():
            self.figures.setdefault(figure, Range()).merge(values)
        self.replayed += other.replayed
        self.eager += other.eager
        self.retractions += other.retractions


class Series:
    """Figures in time order in at most `limit` buckets, for a log of any length."""

    def __init__(self, begin: float, limit: int = BUCKETS) -> None:
        self.begin = begin
        self.width = FIRST_WIDTH
        self._limit = limit
        self._buckets: list[Bucket | None] = []

    def at(self, moment: float) -> Bucket:
        """Return the bucket that `moment` falls into, made if it does not exist."""
        index = int((moment - self.begin) / self.width)
        while index >= self._limit:
            self._double()
            index = int((moment - self.begin) / self.width)
        if index >= len(self._buckets):
            self._buckets.extend([None] * (index + 1 - len(self._buckets)))
        bucket = self._buckets[index]
        if bucket is None:
            bucket = self._buckets[index] = Bucket()
        return bucket

    def end_of(self, moment: float) -> float:
        """Return where the bucket that `moment` falls into ends."""
        return self.begin + (int((moment - self.begin) / self.width) + 1) * self.width

    def _double(self) -> None:
        self.width *= 2
        halved: list[Bucket | None] = []
        for first in range(0, len(self._buckets), 2):
            left = self._buckets[first]
            right = self._buckets[first + 1] if first + 1 < len(self._buckets) else None
            if left is not None and right is not None:
                left.merge(right)
            halved.append(left if left is not None else right)
        self._buckets = halved

    def __len__(self) -> int:
        return len(self._buckets)

    def line(self, figure: Figure) -> list[Point]:
        """Return the points of one figure, in the middle of their buckets; seconds since the series began."""
        return [
            Point(self._middle(index), values.mean, values.low, values.high)
            for index, bucket in enumerate(self._buckets)
            if bucket is not None and (values := bucket.figures.get(figure)) is not None and values.seconds > 0
        ]

    def coverage(self) -> list[Point]:
        """Return the share of decode batches that replayed a captured graph, 0-1."""
        return [
            Point(self._middle(index), share, share, share)
            for index, bucket in enumerate(self._buckets)
            if bucket is not None and bucket.replayed + bucket.eager > 0
            for share in (bucket.replayed / (bucket.replayed + bucket.eager),)
        ]

    def retractions(self) -> list[Point]:
        """Return the retractions of each bucket that has some."""
        return [
            Point(self._middle(index), bucket.retractions, bucket.retractions, bucket.retractions)
            for index, bucket in enumerate(self._buckets)
            if bucket is not None and bucket.retractions > 0
        ]

    def _middle(self, index: int) -> float:
        return (index + 0.5) * self.width
