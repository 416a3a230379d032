"""Protocols of what the families need of a running sidecar; `report.backfill` implements them for a log of the past."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from sglang_tuning_exporter.capacity.model import Measured
from sglang_tuning_exporter.collect.schedules import LoadsSchedule, ScrapeHealth
from sglang_tuning_exporter.collect.tail import FileStatus
from sglang_tuning_exporter.collect.threads import Threads
from sglang_tuning_exporter.config import Config
from sglang_tuning_exporter.diagnosis.evidence import Past
from sglang_tuning_exporter.diagnosis.findings import Judgement
from sglang_tuning_exporter.diagnosis.recommendation import Recommendation, RecommendedSince
from sglang_tuning_exporter.state.profiles import Profile
from sglang_tuning_exporter.state.server import ServerState


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
    profile: Profile
    health: ScrapeHealth
    state: ServerState
    measured: Measured
    loads: LoadsSchedule
    threads: Threads
    recommended_since: dict[Recommendation, RecommendedSince]

    @property
    def log(self) -> LogView | None:
        """The log; None without one."""

    @property
    def log_silent_seconds(self) -> float | None:
        """Seconds from the log's last batch line to the last work in the metrics; None unless both are read."""

    def view(self) -> AbstractContextManager[float]:
        """Lock the state; the context is the present time."""

    def past(self, now: float, seconds: float | None = None) -> Past:
        """Return what the conditions need of the last `seconds`, by default the profile's window."""

    def judge(self, now: float) -> Judgement:
        """Return what limits the server."""
