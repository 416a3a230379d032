"""`backfill`: a log as the metrics that the exporter would have exposed, for a Prometheus that was not there.

The live collector makes the families from a stand-in for the running sidecar, so there is no second list of names. Also written:
SGLang's own gauges where the log prints the same figure, `up`, and the alerts that would have fired.
"""

from __future__ import annotations

import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from math import isfinite
from pathlib import Path
from urllib.parse import urlencode

from prometheus_client.core import GaugeMetricFamily, Metric

from sglang_tuning_exporter.capacity.model import Measured
from sglang_tuning_exporter.collect.schedules import LoadsSchedule, ScrapeHealth
from sglang_tuning_exporter.collect.tail import FileStatus
from sglang_tuning_exporter.collect.threads import Threads
from sglang_tuning_exporter.config import Config
from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.core.report import Progress, check_output
from sglang_tuning_exporter.diagnosis.evidence import Past, past_of
from sglang_tuning_exporter.diagnosis.findings import Judgement, judge
from sglang_tuning_exporter.diagnosis.recommendation import Recommendation, RecommendedSince, recommendations, since
from sglang_tuning_exporter.report.alarms import AlarmClock
from sglang_tuning_exporter.report.analysis import Analysis
from sglang_tuning_exporter.report.files import shown
from sglang_tuning_exporter.report.inputs import Logs
from sglang_tuning_exporter.report.openmetrics import openmetrics_file
from sglang_tuning_exporter.report.samples import EVALUATION_SECONDS
from sglang_tuning_exporter.serve.metrics import collect
from sglang_tuning_exporter.sglang.clean import clean
from sglang_tuning_exporter.sglang.log.prefix import FIRST_DATED_SECOND, day_seconds
from sglang_tuning_exporter.state.profiles import PROFILES, Profile
from sglang_tuning_exporter.state.rank import RankState

_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_WORTH_BYTES = 1 << 20  # a smaller log is written before a progress line helps


class _BackfillLog:
    """What `metrics` reads of the log: everything up to the last event taken."""

    state_file_problem: str | None = None
    is_catching_up = False  # at each time everything printed until then is read
    left_out = dropped_lines = files_lost = 0

    def __init__(self, names: Sequence[str]) -> None:
        self.files = [FileStatus(name, reason="", position=0, dropped=0) for name in names]
        self.last_line_at: float | None = None
        self.lines = self.unrecognised = Counter[str]()


class BackfillView:
    """A stand-in for the running sidecar while a log is read: the same state, at the log's time."""

    log_silent_seconds: float | None = None  # only metrics could show that the server worked without a line

    def __init__(self, logs: Logs, profile: Profile, shift: float = 0.0) -> None:
        self.alarms, self.logs = AlarmClock(profile), logs
        self._analysis = Analysis(profile)
        self.profile, self.state, self._shift = profile, self._analysis.state, shift
        self.health, self.loads = ScrapeHealth(), LoadsSchedule()
        self.log = _BackfillLog(logs.names)
        self.threads = Threads(threading.Event())  # none is started
        self.config = Config(log_file=tuple(logs.names), profile=profile.name)
        self.measured = Measured(profile.window_seconds)  # a log has no `/v1/loads`
        self.recommended_since: dict[Recommendation, RecommendedSince] = {}
        self._now = 0.0

    @contextmanager
    def view(self) -> Iterator[float]:
        """Return the present time; only `moments` changes anything here."""
        yield self._now

    def past(self, now: float, seconds: float | None = None) -> Past:
        """Return the evidence of the last `seconds`."""
        return past_of(self.state, now, seconds=seconds, starting=self.state.life.starts(now))

    def judge(self, now: float) -> Judgement:
        """Return the judgement that the exporter would have made."""
        judgement = judge(self.past(now))
        self.recommended_since = since(self.recommended_since, recommendations(judgement), now + self._shift)
        return judgement

    def moments(self) -> Iterator[tuple[float, list[Metric]]]:
        """Return every scrape: its time in unix seconds, and the families.

        Raises `UsageError` for input that cannot be read or is no log of SGLang.
        """
        analysis, alarms = self._analysis, self.alarms
        with closing(self.logs.events()) as events:
            for moment, event in events:
                if moment >= alarms.next_due:
                    for at in alarms.due(moment):
                        analysis.wait(at)
                        yield self._scraped(at)
                analysis.take(moment, event)
                if event is not None:
                    self.log.last_line_at = moment + self._shift
        for at in alarms.rest():
            self.state.settle(at)
            yield self._scraped(at)

    def _scraped(self, at: float) -> tuple[float, list[Metric]]:
        self.alarms.take(self.state, at, unrecognised=self.logs.unrecognised_taken.total())
        self._now, self.log.lines, self.log.unrecognised = at, self.logs.lines_taken, self.logs.unrecognised_taken
        return at + self._shift, [*collect(self), *self._native(), *self._prometheus()]

    def _native(self) -> Iterator[Metric]:
        """Return SGLang's own gauges that a log line prints, with the labels of its schedulers (srt/metrics, 0.3.6 on)."""
        facts = self.state.facts
        figures: dict[str, tuple[str, Callable[[RankState], float | None]]] = {
            "num_running_reqs": ("Requests that run (#running-req of the log).", lambda r: r.running),
            "num_queue_reqs": ("Requests that wait (#queue-req of the log).", lambda r: r.queued),
            "token_usage": (
                "Used share of the KV cache, of its fullest pool, 0-1 (token usage of the log).",
                lambda r: r.usage,
            ),
            "gen_throughput": ("Generated tokens per second, as last logged.", lambda r: r.generation_throughput),
            "max_total_num_tokens": ("Tokens that fit into the KV cache.", lambda r: facts.kv_pool_tokens.get(r.dp)),
        }
        for name, (words, figure) in figures.items():
            family = GaugeMetricFamily(f"sglang:{name}", words)
            for rank in self.state.schedulers:
                value = figure(rank)
                if value is not None and isfinite(value):
                    labels = {"model_name": facts.model_name or ""}
                    family.add_sample(
                        family.name, labels if rank.dp is None else labels | {"dp_rank": str(rank.dp)}, value
                    )
            yield family

    def _prometheus(self) -> Iterator[Metric]:
        """Return what Prometheus adds itself: `up`, and `ALERTS`, which the boards mark."""
        up = GaugeMetricFamily("up", "Whether the exporter would have answered.")
        up.add_metric([], 1.0)
        yield up
        alerts = GaugeMetricFamily(
            "ALERTS",
            "Alerts as the committed rules would have had them.",
            labels=["alertname", "alertstate", "severity", "diagnosis"],
        )
        for row, state in self.alarms.states():
            alerts.add_metric([row.alert, state, row.severity, row.id], 1.0)
        yield alerts


def run(
    logs: Sequence[str],
    *,
    output: Path,
    profile: str,
    job: str,
    instance: str,
    board: str,
    date: str | None = None,
    own_thresholds: Mapping[str, float] | None = None,
    jobs: int = 1,
    most: int | None = None,
) -> int:
    """Write the logs as OpenMetrics with times, for `promtool tsdb create-blocks-from openmetrics`; return 0. Raises `UsageError`.

    Prints where `board`, the address of a server's board in Grafana, shows them.
    """
    judged = PROFILES[profile].with_thresholds(own_thresholds or {})
    for flag, value in (("--job", job), ("--instance", instance)):
        if not value or not value.isprintable():
            raise UsageError(f"{flag}={shown(value)}: give a name, as Prometheus would have it")
    read = Logs(logs, pace=EVALUATION_SECONDS, jobs=jobs, most=most)
    check_output(output, read.paths)
    if output.exists() and not output.is_file():
        raise UsageError(f"--output={shown(str(output))}: is no ordinary file; give one that can be written anew")
    progress = Progress(read.size, worth=_WORTH_BYTES)
    read.watch(progress.add)
    night = BackfillView(read, judged, _shift(read, date))
    begin: float | None = None
    end = 0.0
    try:
        with openmetrics_file(output, {"job": job, "instance": instance}) as file:
            for at, families in night.moments():
                begin = at if begin is None else begin
                end = at
                file.add(families, at)
    except OSError as error:
        raise UsageError(
            f"--output={shown(str(output))}: {error.strerror or error}; give a file that can be written"
        ) from None
    finally:
        progress.clear()
    sys.stderr.writelines(f"sglang-tuning-exporter: {clean(note)}\n" for note in read.notes)
    if begin is not None:
        range_ = {"from": int(1000 * begin), "to": int(1000 * end)}
        shows = urlencode({"var-job": job, "var-instance": instance, **range_})
        sys.stdout.write(f"Once Prometheus has these metrics, Grafana shows them at {board}?{shows}\n")
    return 0


def _shift(logs: Logs, date: str | None) -> float:
    """Return the seconds to add to the log's times to get unix seconds: those of the day, where none is printed."""
    dated = logs.first is not None and logs.first >= FIRST_DATED_SECOND
    if logs.first is None:
        raise UsageError(f"{', '.join(logs.names[:3])}: prints no times; there is nothing to place in time")
    if date is None:
        if not dated:
            raise UsageError(
                "--date: the log prints times without a day; give that of its first line, such as --date 2025-01-31"
            )
        return 0.0
    if dated:
        raise UsageError(f"--date={shown(date)}: the log prints its own days; leave --date out")
    day = day_seconds(date.encode()) if _DATE.fullmatch(date) else None
    if day is None:
        raise UsageError(f"--date={shown(date)}: give the day of the log's first line as YYYY-MM-DD")
    return float(day)
