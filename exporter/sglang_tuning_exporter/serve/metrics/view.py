"""Protocols of what the families need of a running sidecar; `core.backfill` implements them for a log of the past."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from sglang_tuning_exporter.capacity.readings import Measured
from sglang_tuning_exporter.collect.follower import FileStatus
from sglang_tuning_exporter.collect.scrape import LoadsSchedule, ScrapeHealth
from sglang_tuning_exporter.collect.threads import Threads
from sglang_tuning_exporter.config import Config
from sglang_tuning_exporter.core.findings import Judgement
from sglang_tuning_exporter.core.watch import Watch


class LogView(Protocol):
    """The log: its files, its counted lines, and whether the state file can be written."""

    last_line_at: float | None

    @property
    def files(self) -> Sequence[FileStatus]: ...
    @property
    def is_catching_up(self) -> bool: ...
    @property
    def left_out(self) -> int: ...
    @property
    def files_lost(self) -> int: ...
    @property
    def dropped_lines(self) -> int: ...
    @property
    def lines(self) -> Counter[str]: ...
    @property
    def unrecognised(self) -> Counter[str]: ...
    @property
    def state_file_problem(self) -> str | None: ...


class SidecarView(Protocol):
    """One server's state and its data sources."""

    config: Config
    health: ScrapeHealth
    watch: Watch
    measured: Measured
    loads: LoadsSchedule
    threads: Threads

    @property
    def log(self) -> LogView | None:
        """The log; None without one."""

    @property
    def counts_log(self) -> bool:
        """Whether what the log shows is counted."""

    def view(self) -> AbstractContextManager[float]:
        """Lock the state; the context is the present time."""

    def judge(self, now: float) -> Judgement:
        """Return what limits the server."""

    def unix(self, moment: float) -> float:
        """Return a time of the watch in present unix seconds."""
