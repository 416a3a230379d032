"""What the families need of a running sidecar; `report.backfill` gives the same of a log of the past."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from sglang_tuning_exporter.capacity.model import Measured
    from sglang_tuning_exporter.collect.loads import LoadsInquiry
    from sglang_tuning_exporter.collect.scrape_health import ScrapeHealth
    from sglang_tuning_exporter.collect.tail import FileStatus
    from sglang_tuning_exporter.collect.threads import Threads
    from sglang_tuning_exporter.config import Config
    from sglang_tuning_exporter.diagnosis.evidence import Past
    from sglang_tuning_exporter.diagnosis.findings import Judgement
    from sglang_tuning_exporter.diagnosis.recommendation import Given, Recommendation
    from sglang_tuning_exporter.state.profiles import Profile
    from sglang_tuning_exporter.state.server import ServerState


class LogView(Protocol):
    """The log half: its files, what was counted of its lines, and whether the state file can be written."""

    last_line_at: float | None

    @property
    def files(self) -> Sequence[FileStatus]: ...
    @property
    def reads_the_past(self) -> bool: ...
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
    """One server's state with where it comes from."""

    config: Config
    profile: Profile
    health: ScrapeHealth
    state: ServerState
    measured: Measured
    loads: LoadsInquiry
    threads: Threads
    recommended_since: dict[Recommendation, Given]

    @property
    def log(self) -> LogView | None:
        """The log half; None without a log."""

    @property
    def log_silent_seconds(self) -> float | None:
        """How long after the log's last batch line the metrics showed work; None where there are not both."""

    def view(self) -> AbstractContextManager[float]:
        """Hold the state still; the moment is given."""

    def past(self, now: float, seconds: float | None = None) -> Past:
        """Give what the conditions look at of the last `seconds`, the profile's window unless given."""

    def judge(self, now: float) -> Judgement:
        """Say what limits the server."""
