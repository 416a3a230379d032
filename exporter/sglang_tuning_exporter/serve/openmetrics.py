"""A long time as one OpenMetrics file, with bounded memory.

OpenMetrics wants the families one after the other and all samples of a series together, but a log gives them time by time. So each
series is collected in a file of its own, and these are joined at the end. `promtool` would also accept them time by time (it reads the
file once for each block and only needs rising times in each series); other readers of OpenMetrics do not.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.core import Metric

from sglang_tuning_exporter.serve.metrics.families import Family

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


@contextmanager
def openmetrics_file(path: Path, labels: Mapping[str, str]) -> Iterator[OpenMetricsFile]:
    """Give a file that is written whole when the `with` block ends without an error, else not at all. Raises `OSError`."""
    target = path.resolve()  # of a link
    with tempfile.TemporaryDirectory(prefix=_BESIDE, dir=target.parent, ignore_cleanup_errors=True) as directory:
        file = OpenMetricsFile(Path(directory), labels)
        yield file
        file.write_to(target)


class OpenMetricsFile:
    """Samples in files in a directory, one for each series. `labels` are added to every series, before its own."""

    def __init__(self, directory: Path, labels: Mapping[str, str]) -> None:
        self._directory = directory
        self._labels = "".join(f'{name}="{_escaped(value)}",' for name, value in labels.items())
        # By the family's name: its head, and its series by name and labels.
        self._families: dict[str, tuple[str, dict[tuple[str, ...], _OpenSeries]]] = {}
        self._held = self._count = 0

    def add(self, families: Iterable[Family | Metric], at: float) -> None:
        """Write every sample of `families` at this time, unix seconds, which must rise from call to call."""
        moment = f" {at:.3f}\n".replace(".000\n", "\n")
        for family in families:
            if family.name not in self._families:
                about = f"# HELP {family.name} {_escaped(family.documentation)}\n# TYPE {family.name} {family.type}\n"
                self._families[family.name] = (about, {})
            known = self._families[family.name][1]
            for sample in family.samples:
                key = (sample.name, *sample.labels.values())
                series = known.get(key)
                if series is None:
                    series = known[key] = self._new(sample.name, sample.labels)
                line = f"{series.head} {_figure(sample.value)}{moment}"
                series.held.append(line)
                self._held += len(line)
        if self._held > MOST_HELD:
            self._spill()

    def _new(self, name: str, labels: Mapping[str, str]) -> _OpenSeries:
        own = "".join(f'{label}="{_escaped(value)}",' for label, value in labels.items())
        self._count += 1
        return _OpenSeries(f"{name}{{{(self._labels + own)[:-1]}}}", self._directory / str(self._count))

    def _spill(self) -> None:
        for _, of_family in self._families.values():
            for series in of_family.values():
                if series.held:
                    with series.file.open("a", encoding="utf-8") as file:
                        file.writelines(series.held)
                    series.held.clear()
        self._held = 0

    def write_to(self, target: Path) -> None:
        """Write all into one file, in place of another."""
        whole = self._directory / "whole"
        with whole.open("wb") as sink:
            for about, of_family in self._families.values():
                sink.write(about.encode())
                for series in of_family.values():
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
        whole.replace(target)


def _figure(value: float) -> str:
    return str(int(value)) if value == value // 1 and abs(value) < 1e15 else repr(float(value))
