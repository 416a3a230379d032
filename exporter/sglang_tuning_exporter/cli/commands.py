"""The functions behind the commands. Each imports what it needs when it runs, so that `--help` is fast."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

from sglang_tuning_exporter.config import LOG_OPTIONS, REPORT_FORMAT, Option, layered, resolve, unknown_variables
from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.sglang.clean import clean


def serve(**given: Any) -> int:
    """Watch a server until a signal ends it."""
    _log_to_stderr()
    for problem in unknown_variables(os.environ):
        logging.getLogger("sglang_tuning_exporter").warning(problem)
    config = resolve(given, os.environ)
    from sglang_tuning_exporter.serve.run import serve

    return serve(config)


def report(*, max_gb: float | None, **given: Any) -> int:
    """Print what limited a server, read from its logs."""
    given |= _layered(given, REPORT_FORMAT)
    from sglang_tuning_exporter.core import report

    return report.run(most=_byte_limit(max_gb), **given)


def explain(*, log: str) -> int:
    """Print what a log, or one line of it, was read as."""
    from sglang_tuning_exporter.core import inputs
    from sglang_tuning_exporter.core.explain import explain

    name, _, number = log.rpartition(":")
    is_line = bool(name) and number.isdecimal() and not Path(log).exists()
    lines = (line for source in inputs.find([name if is_line else log], sys.stdin.buffer) for line in source.lines())
    sys.stdout.write(explain(lines, int(number) if is_line else None))
    return 0


def backfill(*, max_gb: float | None, grafana_url: str | None, **given: Any) -> int:
    """Write the metrics that an old log would have produced."""
    from sglang_tuning_exporter.mixin.annotations import GRAFANA_URL, SERVER
    from sglang_tuning_exporter.serve import backfill

    board = f"{(grafana_url or GRAFANA_URL).rstrip('/')}/d/{SERVER}"
    given |= _layered(given)
    return backfill.run(given.pop("logs"), board=board, most=_byte_limit(max_gb), **given)


def plan(*, logs: list[str], format: str, seconds: float, max_gb: float | None, **given: Any) -> int:  # noqa: A002 - the flag's name
    """Print what a server would do with more or fewer concurrent requests."""
    if bool(logs) == bool(given["sglang_url"]):
        raise UsageError("plan: give logs or --sglang-url, one of both")
    if logs:
        from sglang_tuning_exporter.core.plan import run

        return run(logs, **_layered(given), format=format, most=_byte_limit(max_gb))
    from sglang_tuning_exporter.collect import plan

    return plan.live(resolve(given, os.environ), seconds=seconds, format=format)


def replay(**given: Any) -> int:
    """Serve a recorded server as if it were live."""
    from sglang_tuning_exporter.recordings.replay import run

    return run(**given)


def record(*, output: Path, seconds: float | None, keep_request_text: bool, **given: Any) -> int:
    """Record a live server into a new directory."""
    if seconds is not None and not 0 < seconds < float("inf"):
        raise UsageError(f"--seconds={seconds}: give a time above 0")
    config = resolve({**given, "log_file": [given["log_file"]]}, os.environ)
    from sglang_tuning_exporter.recordings.record import Recorder, run

    return run(Recorder(config, output, keep_request_text=keep_request_text), seconds)


def notify(*, listen_address: str) -> int:
    """Print Alertmanager's notifications."""
    from sglang_tuning_exporter.recordings.notifications import run

    return run(listen_address)


def generate(
    *,
    runbook_url: str | None,
    grafana_url: str | None,
    output: Path,
    check: bool,
    time_scale: float,
    config: Path | None,
    format: str,  # noqa: A002 - the flag's name
) -> int:
    """Write the rules and dashboards, or check them."""
    from sglang_tuning_exporter.mixin import run
    from sglang_tuning_exporter.mixin.annotations import Links
    from sglang_tuning_exporter.mixin.wishes import NONE, read

    wishes = NONE if config is None else read(config)
    links = Links(runbook_url or wishes.runbook_url, grafana_url or wishes.grafana_url)
    return run(output, check=check, time_scale=time_scale, links=links, wishes=wishes, kind=format)


def demo(*, recording: str, **given: Any) -> int:
    """Run the whole chain over a recording."""
    from sglang_tuning_exporter.recordings.demo import run

    _log_to_stderr()
    logging.getLogger().setLevel(logging.WARNING)
    return run(recording, **given)


def _layered(given: dict[str, Any], *more: Option) -> dict[str, Any]:
    """Return the settings by which logs are judged; `given` loses its thresholds."""
    options = [each for each in LOG_OPTIONS if each.name in given]
    found = layered((*options, *more), given, os.environ)
    for name in ("threshold", "accept", "wait"):
        given.pop(name, None)
    return {"own_thresholds": found.pop("threshold"), **found}


def _byte_limit(gigabytes: float | None) -> int | None:
    """Return the limit in bytes for piped or compressed input, if one was given."""
    if gigabytes is not None and not 0 < gigabytes <= 1_000_000:
        raise UsageError(f"--max-gb={gigabytes:g}: give a number above 0, up to 1000000")
    return None if gigabytes is None else int(gigabytes * (1 << 30)) or 1


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("urllib3").setLevel(logging.ERROR)


class _OneLine(logging.Formatter):
    """Escapes control characters in log lines: file names and errors in them must not control the terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base class's name
        return clean(super().formatMessage(record))
