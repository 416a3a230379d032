"""The functions behind the commands. Each imports what it needs when it runs, so that `--help` is fast."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from sglang_tuning_exporter.config import (
    ENVIRONMENT_PREFIX,
    UsageError,
    add_arguments,
    agreeing,
    resolve,
    thresholds,
    unknown_variables,
)
from sglang_tuning_exporter.sglang.clean import clean


def serve(arguments: argparse.Namespace) -> int:
    """Watch a server until a signal ends it."""
    _log_to_stderr()
    for words_of_it in unknown_variables(os.environ):
        logging.getLogger("sglang_tuning_exporter").warning(words_of_it)
    config = resolve(arguments, os.environ)
    from sglang_tuning_exporter.serve.run import serve

    return serve(config)


def variable(name: str, default: str) -> str:
    """Return an environment variable of ours, or the default if it is empty."""
    return os.environ.get(ENVIRONMENT_PREFIX + name) or default


def _own_thresholds(arguments: argparse.Namespace) -> dict[str, float]:
    own = arguments.threshold or variable("THRESHOLD", "")
    return agreeing(thresholds("--threshold", own), arguments.profile) if own else {}


def _jobs(arguments: argparse.Namespace) -> int:
    from sglang_tuning_exporter.report.read_ahead import MOST_JOBS, available

    if arguments.jobs is None:
        return available()
    if not 1 <= arguments.jobs <= MOST_JOBS:
        raise UsageError(f"--jobs={arguments.jobs}: give a number from 1 to {MOST_JOBS}")
    jobs: int = arguments.jobs
    return jobs


def report(arguments: argparse.Namespace) -> int:
    """Print what limited a server, read from its logs."""
    from sglang_tuning_exporter.report import report

    return report.run(
        arguments.logs,
        format=arguments.format,
        output=arguments.output,
        profile=arguments.profile,
        own_thresholds=_own_thresholds(arguments),
        against=arguments.against,
        jobs=_jobs(arguments),
        most=_most(arguments),
    )


def backfill(arguments: argparse.Namespace) -> int:
    """Write the metrics that an old log would have produced."""
    from sglang_tuning_exporter.mixin.annotations import GRAFANA_URL
    from sglang_tuning_exporter.mixin.boards.common import SERVER
    from sglang_tuning_exporter.report import backfill

    return backfill.run(
        arguments.logs,
        output=arguments.output,
        profile=arguments.profile,
        job=arguments.job,
        instance=arguments.instance,
        board=f"{(arguments.grafana_url or GRAFANA_URL).rstrip('/')}/d/{SERVER}",
        date=arguments.date,
        own_thresholds=_own_thresholds(arguments),
        jobs=_jobs(arguments),
        most=_most(arguments),
    )


def plan(arguments: argparse.Namespace) -> int:
    """Print what a server would do with more or fewer concurrent requests."""
    if bool(arguments.logs) == bool(arguments.sglang_url):
        raise UsageError("plan: give logs or --sglang-url, one of both")
    from sglang_tuning_exporter.report import plan

    if arguments.logs:
        return plan.of_logs(
            arguments.logs,
            profile=arguments.profile,
            own_thresholds=_own_thresholds(arguments),
            format=arguments.format,
        )
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    flags = ["--sglang-url", arguments.sglang_url, "--profile", arguments.profile]
    flags += ["--api-key-file", arguments.api_key_file] if arguments.api_key_file else []
    flags += [word for own in arguments.threshold or () for word in ("--threshold", own)]
    return plan.live(resolve(parser.parse_args(flags), os.environ), seconds=arguments.seconds, format=arguments.format)


def _most(arguments: argparse.Namespace) -> int | None:
    """Return the limit in bytes for piped or compressed input, if one was given."""
    gigabytes = arguments.max_gb
    if gigabytes is not None and not 0 < gigabytes <= 1_000_000:
        raise UsageError(f"--max-gb={gigabytes:g}: give a number above 0, up to 1000000")
    return None if gigabytes is None else int(gigabytes * (1 << 30)) or 1


def replay(arguments: argparse.Namespace) -> int:
    """Serve a recorded server as if it were live."""
    from sglang_tuning_exporter.recordings import replay

    directory = replay.packaged(arguments.directory) if _is_name(arguments.directory) else Path(arguments.directory)
    return replay.run(
        directory,
        speed=arguments.speed,
        listen_address=arguments.listen_address,
        log_file=arguments.log_file,
        loop=arguments.loop,
    )


def record(arguments: argparse.Namespace) -> int:
    """Record a live server into a new directory."""
    seconds = arguments.seconds
    if seconds is not None and not 0 < seconds < float("inf"):
        raise UsageError(f"--seconds={seconds}: give a time above 0")
    watched = argparse.ArgumentParser()
    add_arguments(watched)
    given = ["--sglang-url", arguments.sglang_url, "--log-file", arguments.log_file]
    given += ["--api-key-file", arguments.api_key_file] if arguments.api_key_file is not None else []
    config = resolve(watched.parse_args(given), os.environ)
    from sglang_tuning_exporter.recordings import record as recorder

    assert config.sglang_url is not None
    assert config.metrics_url is not None
    recording = recorder.Recorder(
        config.sglang_url,
        config.metrics_url,
        arguments.log_file,
        arguments.output,
        api_key=config.api_key,
        keep_request_text=arguments.keep_request_text,
    )
    return recorder.run(recording, arguments.output, seconds)


def _is_name(directory: str) -> bool:
    return "/" not in directory and directory not in {".", ".."} and not Path(directory).is_dir()


def notify(arguments: argparse.Namespace) -> int:
    """Print Alertmanager's notifications."""
    from sglang_tuning_exporter.recordings.notifications import run

    return run(arguments.listen_address)


def generate(arguments: argparse.Namespace) -> int:
    """Write the rules and dashboards, or check them."""
    from sglang_tuning_exporter.mixin import run
    from sglang_tuning_exporter.mixin.annotations import GRAFANA_URL, Links

    links = Links(arguments.runbook_url or None, arguments.grafana_url or GRAFANA_URL)
    return run(arguments.output, check=arguments.check, time_scale=arguments.time_scale, links=links)


def demo(arguments: argparse.Namespace) -> int:
    """Run the whole chain over a recording."""
    from sglang_tuning_exporter.recordings.demo import run

    _log_to_stderr()
    logging.getLogger().setLevel(logging.WARNING)
    return run(arguments.recording, profile=arguments.profile, speed=arguments.speed, seconds=arguments.seconds)


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("urllib3").setLevel(logging.ERROR)


class _OneLine(logging.Formatter):
    """Escapes control characters in log lines: file names and errors in them must not control the terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base class's name
        return clean(super().formatMessage(record))
