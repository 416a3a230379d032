"""`backfill`: a log as the metrics that the exporter would have exposed, for a Prometheus that was not there.

`serve.metrics` makes the families of a stand-in for the running sidecar, so there is no second list of names. Also written:
SGLang's own gauges where the log prints the same figure, `up`, and the alerts as the exporter's clocks have them.
"""

from __future__ import annotations

import datetime as dt
import re
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from math import inf, isfinite
from pathlib import Path
from typing import IO
from urllib.parse import urlencode

from sglang_tuning_exporter.collect.follower import FileStatus
from sglang_tuning_exporter.collect.threads import Threads
from sglang_tuning_exporter.config import Config, profiles
from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.core import capacity, findings, report
from sglang_tuning_exporter.core.diagnoses import adapted
from sglang_tuning_exporter.core.inputs import Logs
from sglang_tuning_exporter.core.server import Scheduler
from sglang_tuning_exporter.core.watch import Watch
from sglang_tuning_exporter.serve.metrics import collect
from sglang_tuning_exporter.serve.metrics.families import Family, gauge, label_text
from sglang_tuning_exporter.sglang.clean import clean

STEP_SECONDS = 15.0  # the scrape interval of alerts/prometheus.yml
GAP_SECONDS = 86400.0  # a log that is silent for longer has no samples meanwhile
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_BESIDE = ".sglang-tuning-backfill-"
_WORTH_BYTES = 1 << 20  # a smaller log is written before a progress line helps


class BackfillView:
    """A stand-in for the running sidecar and for its log while a log is read, at the log's time: all up to the last event taken."""

    # Of the log: at each time everything printed until then is read.
    state_file_problem: str | None = None
    is_catching_up = counts_steps = False
    left_out = dropped_lines = files_lost = unrecognised_families = 0
    scrape_seconds: float | None = None

    def __init__(self, logs: Logs, profile: profiles.Profile, shift: float = 0.0) -> None:
        """`shift`: seconds from the log's times to unix seconds."""
        self._logs, self._shift = logs, shift
        self.watch = Watch(profile, (logs.first or 0.0) + shift, reads=True, scrapes=False)
        self.measured = capacity.Measured(profile.window_seconds)
        self.loads_failures = Counter[str]()
        self.log = self
        self.files = [FileStatus(name, reason="", position=0, dropped=0) for name in logs.names]
        self.last_line_at: float | None = None
        self.lines = self.unrecognised = Counter[str]()
        self.threads = Threads(threading.Event())  # none is started
        self.config = Config(log_file=tuple(logs.names), profile=profile.name)
        self._now = -inf  # the last scrape
        self.counts_log = True

    @contextmanager
    def view(self) -> Iterator[float]:
        """Return the present time; only `moments` changes anything here."""
        yield self._now

    def judge(self, now: float) -> findings.Judgement:
        """Return what limits the server."""
        return self.watch.judge(now)

    @staticmethod
    def unix(moment: float) -> float:
        """Return the time itself: it is unix seconds."""
        return moment

    def moments(self) -> Iterator[tuple[float, list[Family]]]:
        """Give every scrape: its time in unix seconds, and the families.

        Raise `UsageError` for input that cannot be read or is no log of SGLang.
        """
        with closing(self._logs.events()) as events:
            for event in events:
                if event.time is not None:
                    event.time += self._shift
                    for at in self._due(event.time):
                        yield at, self._scraped(at)
                    self.last_line_at = event.time
                self.watch.take_line(event)
                self.lines, self.unrecognised = self._logs.tally
        self.lines, self.unrecognised = self._logs.tally
        end = self._logs.end
        for at in self._due((-inf if end is None else end + self._shift) + STEP_SECONDS):
            yield at, self._scraped(at)

    def _due(self, now: float) -> Iterator[float]:
        """Give the times of the scrapes before an event: every 15 s, from before the first event on."""
        if now - self._now > GAP_SECONDS:
            self._now = (now // STEP_SECONDS - 1) * STEP_SECONDS
        while self._now + STEP_SECONDS <= now:
            yield self._now + STEP_SECONDS

    def _scraped(self, at: float) -> list[Family]:
        self._now = at
        self.watch.advance(at)
        return [*collect(self), *self._native(), *self._prometheus()]

    def _native(self) -> Iterator[Family]:
        """Return SGLang's own gauges that a log line prints, with the labels of its schedulers (srt/metrics, 0.3.6 on)."""
        facts = self.watch.server.facts
        figures: dict[str, tuple[str, Callable[[Scheduler], float | None]]] = {
            "num_running_reqs": ("Requests that run (#running-req of the log).", lambda each: each.running),
            "num_queue_reqs": ("Requests that wait (#queue-req of the log).", lambda each: each.queued),
            "token_usage": (
                "Used share of the KV cache, of its fullest pool, 0-1 (token usage of the log).",
                lambda each: each.usage,
            ),
            "gen_throughput": ("Generated tokens per second, as last logged.", lambda each: each.throughput),
            "max_total_num_tokens": ("Tokens that fit into the KV cache.", lambda each: facts.pools.get(each.dp)),
        }
        model = facts.word("served_model_name") or facts.word("model_path")
        for name, (words, figure) in figures.items():
            family = gauge(name, words, "model_name", prefix="sglang:")
            for dp, scheduler in self.watch.server.schedulers.items():
                value = figure(scheduler)
                if value is not None and isfinite(value):
                    family.add_metric([model], value, dp)
            yield family

    def _prometheus(self) -> Iterator[Family]:
        """Return what Prometheus adds itself: `up`, and `ALERTS`, which the boards mark."""
        yield gauge("up", "Whether the exporter would have answered.", prefix="").with_samples([(1.0,)])
        doc, labels = (
            "Alerts as the committed rules would have had them.",
            ("alertname", "alertstate", "severity", "diagnosis"),
        )
        alerts = gauge("ALERTS", doc, *labels, prefix="")
        for clock in self.watch.clocks.by_row.values():
            state = "firing" if clock.firing is not None else "pending" if clock.since is not None else ""
            if state:
                alerts.add_metric([clock.row.alert, state, clock.row.severity, clock.row.id], 1.0)
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
    threshold: Mapping[str, float] | None = None,
    accept: Mapping[str, str] | None = None,
    wait: Mapping[str, float] | None = None,
    most: int | None = None,
) -> int:
    """Write the logs as OpenMetrics with times, for `promtool tsdb create-blocks-from openmetrics`; return 0. Raise `UsageError`.

    Print where `board`, the address of a server's board in Grafana, shows them.
    """
    judged = adapted(profile, threshold, accept, wait)
    for flag, value in (("--job", job), ("--instance", instance)):
        if not value or not value.isprintable():
            raise UsageError(f"{flag}={clean(value)}: give a name, as Prometheus would have it")
    read = Logs(logs, most=most)
    report.check_output(output, read.paths)
    if output.exists() and not output.is_file():
        raise UsageError(f"--output={clean(str(output))}: is no ordinary file; give one that can be written anew")
    view = BackfillView(read, judged, _shift(read, date))
    begin: float | None = None
    end = 0.0
    try:
        with report.progress(read, _WORTH_BYTES), _whole(output) as file:
            known: set[str] = set()
            for at, families in view.moments():
                begin = at if begin is None else begin
                end = at
                file.writelines(_lines(families, at, {"job": job, "instance": instance}, known))
            file.write("# EOF\n")
    except OSError as error:
        raise UsageError(
            f"--output={clean(str(output))}: {error.strerror or error}; give a file that can be written"
        ) from None
    sys.stderr.writelines(f"sglang-tuning-exporter: {note}\n" for note in read.notes)
    if begin is not None:
        range_ = {"from": int(1000 * begin), "to": int(1000 * end)}
        shows = urlencode({"var-job": job, "var-instance": instance, **range_})
        report.write(f"Once Prometheus has these metrics, Grafana shows them at {board}?{shows}\n")
    return 0


@contextmanager
def _whole(path: Path) -> Iterator[IO[str]]:
    """Give a file that takes the place of another when the `with` block ends without an error, else not at all. Raise `OSError`."""
    target = path.resolve()  # of a link
    with tempfile.TemporaryDirectory(prefix=_BESIDE, dir=target.parent, ignore_cleanup_errors=True) as directory:
        part = Path(directory) / "part"
        with part.open("w", encoding="utf-8") as file:  # with the permissions of a shell's redirection
            yield file
        part.replace(target)


def _lines(families: Iterable[Family], at: float, labels: Mapping[str, str], known: set[str]) -> Iterator[str]:
    """Give the samples of a moment as OpenMetrics, with these labels, before them what families that are not `known` yet are.

    A moment's samples stand together, not a series': `promtool` reads the times of each series in order, which suffices.
    """
    own, moment = label_text(labels)[:-1], f" {at:.3f}\n".replace(".000\n", "\n")
    for family in families:
        if family.name not in known:
            known.add(family.name)
            text = family.documentation.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
            yield f"# HELP {family.name} {text}\n# TYPE {family.name} {family.type}\n"
        for more, value in family.samples:
            figure = int(value) if value == value // 1 and abs(value) < 1e15 else float(value)
            yield f"{family.sample_name}{own}{f',{more[1:]}' if more else '}'} {figure!r}{moment}"


def _shift(logs: Logs, date: str | None) -> float:
    """Return the seconds to add to the log's times to get unix seconds: those of the day, where none is printed."""
    if logs.first is None:
        raise UsageError(f"{', '.join(logs.names[:3])}: prints no times; there is nothing to place in time")
    if logs.first >= findings.FIRST_DATED_SECOND:
        if date is not None:
            raise UsageError(f"--date={clean(date)}: the log prints its own days; leave --date out")
        return 0.0
    if date is None:
        raise UsageError(
            "--date: the log prints times without a day; give that of its first line, such as --date 2025-01-31"
        )
    try:
        day = dt.datetime.strptime(date if _DATE.fullmatch(date) else "", "%Y-%m-%d").replace(tzinfo=dt.timezone.utc)
    except ValueError:
        raise UsageError(f"--date={clean(date)}: give the day of the log's first line as YYYY-MM-DD") from None
    return day.timestamp()
