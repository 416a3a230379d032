"""A long time as one OpenMetrics file, with bounded memory.

OpenMetrics wants the families one after the other and all samples of a series together, but a log gives them time by time. So each
series is collected in a file of its own, and these are joined at the end. `promtool` would also accept them time by time (it reads the
file once for each block and only needs rising times in each series); other readers of OpenMetrics do not.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from prometheus_client.core import Metric

MOST_HELD = 8 << 20  # characters of samples kept in memory
_BESIDE = ".sglang-tuning-backfill-"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


@dataclass(slots=True)
class _OpenSeries:
    """One series: its name with labels, where its samples are on disk, and those still in memory."""

    head: str
    file: Path
    held: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _OpenMetric:
    about: str
    series: dict[tuple[str, ...], _OpenSeries] = field(default_factory=dict)


class OpenMetricsFile:
    """A file that is written whole when the `with` block ends without an error, else not at all. Raises `OSError`.

    `labels` are added to every series, before its own.
    """

    def __init__(self, path: Path, labels: Mapping[str, str]) -> None:
        self._path = path.resolve()  # the target of a link
        self._labels = "".join(f'{name}="{_escaped(value)}",' for name, value in labels.items())
        self._families: dict[str, _OpenMetric] = {}
        self._held = 0
        self._directory: Path | None = None
        self.samples = 0

    def __enter__(self) -> OpenMetricsFile:  # noqa: PYI034 - Python 3.10 has no Self
        self._directory = Path(tempfile.mkdtemp(prefix=_BESIDE, dir=self._path.parent))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._directory is not None
        try:
            if kind is None:
                self._concatenate(self._directory / "whole")
        finally:
            shutil.rmtree(self._directory, ignore_errors=True)

    def add(self, families: Iterable[Metric], at: float) -> None:
        """Write every sample of `families` at this time, unix seconds, which must rise from call to call."""
        moment = f" {at:.3f}\n".replace(".000\n", "\n")
        for family in families:
            known = self._families.get(family.name)
            if known is None:
                about = f"# HELP {family.name} {_escaped(family.documentation)}\n# TYPE {family.name} {family.type}\n"
                known = self._families[family.name] = _OpenMetric(about)
            for sample in family.samples:
                key = (sample.name, *sample.labels.values())
                series = known.series.get(key) or self._new(known, key, sample.labels)
                line = f"{series.head} {_figure(sample.value)}{moment}"
                series.held.append(line)
                self._held += len(line)
                self.samples += 1
        if self._held > MOST_HELD:
            self._spill()

    def _new(self, family: _OpenMetric, key: tuple[str, ...], labels: Mapping[str, str]) -> _OpenSeries:
        assert self._directory is not None
        own = "".join(f'{name}="{_escaped(value)}",' for name, value in labels.items())
        number = sum(len(other.series) for other in self._families.values())
        series = _OpenSeries(f"{key[0]}{{{(self._labels + own)[:-1]}}}", self._directory / str(number))
        family.series[key] = series
        return series

    def _spill(self) -> None:
        for family in self._families.values():
            for series in family.series.values():
                if series.held:
                    with series.file.open("a", encoding="utf-8") as file:
                        file.writelines(series.held)
                    series.held.clear()
        self._held = 0

    def _concatenate(self, whole: Path) -> None:
        with whole.open("wb") as sink:
            for family in self._families.values():
                sink.write(family.about.encode())
                for series in family.series.values():
                    if series.file.exists():
                        with series.file.open("rb") as source:
                            shutil.copyfileobj(source, sink, 1 << 20)
                        series.file.unlink()  # so that the space is never needed twice
                    sink.write("".join(series.held).encode())
            sink.write(b"# EOF\n")
        # With the permissions of a shell's redirection, not those of a temporary file.
        mask = os.umask(0)
        os.umask(mask)
        whole.chmod(0o666 & ~mask)
        whole.replace(self._path)


def _figure(value: float) -> str:
    return str(int(value)) if value == value // 1 and abs(value) < 1e15 else repr(float(value))
