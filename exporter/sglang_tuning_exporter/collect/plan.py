"""`plan --sglang-url`: what a server would do with more or fewer requests at once, from the server itself."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.config import Config
from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.core.plan import check_format, show, table

LEAST_SECONDS, MOST_SECONDS = 30.0, 86400.0
ASK_SECONDS = 5.0


def live(config: Config, *, seconds: float, format: str) -> int:  # noqa: A002 - the flag's name
    """Watch a server for `seconds` and print its table; 0, or 1 where its step time is not known. Raise `UsageError`."""
    check_format(format)
    if not LEAST_SECONDS <= seconds <= MOST_SECONDS:
        raise UsageError(f"--seconds={seconds:g}: give {LEAST_SECONDS:g} to {MOST_SECONDS:g}")
    logging.getLogger("sglang_tuning_exporter").addHandler(logging.NullHandler())  # what fails is said once, at the end
    sidecar = Sidecar(replace(config, log_file=(), state_file=None), self_scrape_seconds=ASK_SECONDS)
    sidecar.start()
    end, was_up = time.monotonic() + seconds, False
    while (left := end - time.monotonic()) > 0 and (was_up or sidecar.watch.failure is None):
        time.sleep(min(left, 0.5))
        was_up = was_up or sidecar.watch.is_up is True
    sidecar.stop()
    if sidecar.watch.failure is not None:
        raise UsageError(f"--sglang-url={config.sglang_url}: {sidecar.watch.failure.message}")
    with sidecar.view() as now:
        return show(table(sidecar.watch.server, sidecar.measured, now), format)
