"""A run's figures over time in constant memory: a fixed number of buckets that double their width when they are full. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

BUCKETS = 240
FIRST_WIDTH = 1.0  # seconds; printed times are whole seconds

Figure: TypeAlias = Literal["queued", "usage", "running", "throughput"]
FIGURES: tuple[Figure, ...] = ("queued", "usage", "running", "throughput")


@dataclass(slots=True)
class Range:
    """One figure in one bucket: weighted by the seconds for which it held, with its lowest and highest."""

    seconds: float = 0.0
    sum: float = 0.0
    low: float = float("inf")
    high: float = float("-inf")

    def add(self, value: float, seconds: float) -> None:
        """Take a value that held for so many seconds."""
        self.seconds += seconds
        self.sum += value * seconds
        self.low = value if value < self.low else self.low  # noqa: FURB136 - min() costs three times as much
        self.high = value if value > self.high else self.high  # noqa: FURB136 - likewise

    def merge(self, other: Range) -> None:
        """Take what another has."""
        self.seconds += other.seconds
        self.sum += other.sum
        self.low = min(self.low, other.low)
        self.high = max(self.high, other.high)

    @property
    def mean(self) -> float:
        """Its mean over time. Raises `ZeroDivisionError` where nothing was taken."""
        return self.sum / self.seconds


@dataclass(slots=True)
class Bucket:
    """What was seen between two moments; a figure that was not told is not there."""

    figures: dict[Figure, Range] = field(default_factory=dict)
    replayed: float = 0.0  # decode batches with a captured graph
    eager: float = 0.0  # and those without
    retractions: float = 0.0

    def add(self, figure: Figure, value: float, seconds: float) -> None:
        """Take a figure's value that held for so many seconds."""
        known = self.figures.get(figure)
        if known is None:
            known = self.figures[figure] = Range()
        known.add(value, seconds)

    def merge(self, other: Bucket) -> None:
        """Take what the next bucket has."""
        for figure, values in other.figures.items():
            self.figures.setdefault(figure, Range()).merge(values)
        self.replayed += other.replayed
        self.eager += other.eager
        self.retractions += other.retractions


@dataclass(frozen=True, slots=True)
class Point:
    """A bucket of one figure: seconds since the series began, of its middle, and what the figure was in it."""

    at: float
    mean: float
    low: float
    high: float


class Series:
    """Takes figures in time order and remembers at most `limit` buckets, whatever the length of the log."""

    def __init__(self, begin: float, limit: int = BUCKETS) -> None:
        self.begin = begin
        self.width = FIRST_WIDTH
        self._limit = limit
        self._buckets: list[Bucket | None] = []

    def at(self, moment: float) -> Bucket:
        """Give the bucket that `moment` falls into; it is made where there is none."""
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
        """Give one figure where it was told."""
        return [
            Point(self._middle(index), values.mean, values.low, values.high)
            for index, bucket in enumerate(self._buckets)
            if bucket is not None and (values := bucket.figures.get(figure)) is not None and values.seconds > 0
        ]

    def coverage(self) -> list[Point]:
        """Give the share of decode batches that replayed a captured graph, 0-1."""
        return [
            Point(self._middle(index), share, share, share)
            for index, bucket in enumerate(self._buckets)
            if bucket is not None and bucket.replayed + bucket.eager > 0
            for share in (bucket.replayed / (bucket.replayed + bucket.eager),)
        ]

    def retractions(self) -> list[Point]:
        """Give the retractions of each bucket that has some."""
        return [
            Point(self._middle(index), bucket.retractions, bucket.retractions, bucket.retractions)
            for index, bucket in enumerate(self._buckets)
            if bucket is not None and bucket.retractions > 0
        ]

    def _middle(self, index: int) -> float:
        return (index + 0.5) * self.width
