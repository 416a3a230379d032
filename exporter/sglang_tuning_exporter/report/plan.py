"""`plan --sglang-url`: what a server would do with more or fewer requests at once, from the server itself."""

from __future__ import annotations

import time

from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.config import Config
from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.core.plan import check_format, document, show
from sglang_tuning_exporter.diagnosis.demand import mean_prompt

LEAST_SECONDS, MOST_SECONDS = 30.0, 86400.0
ASK_SECONDS = 5.0


def live(config: Config, *, seconds: float, format: str) -> int:  # noqa: A002 - the flag's name
    """Watch a server for `seconds` and print its table; 0, or 1 where its step time is not known. Raises `UsageError`."""
    check_format(format)
    if not LEAST_SECONDS <= seconds <= MOST_SECONDS:
        raise UsageError(f"--seconds={seconds:g}: give {LEAST_SECONDS:g} to {MOST_SECONDS:g}")
    sidecar = Sidecar(config, self_scrape_seconds=ASK_SECONDS)
    sidecar.start()
    try:
        time.sleep(seconds)
        with sidecar.view() as now:
            if sidecar.health.up is False:
                raise UsageError(f"--sglang-url={config.sglang_url}: {sidecar.health.message}")
            past = sidecar.past(now)
            prompt, counts = mean_prompt(past), past.recent.counts
            tokens = counts["computed_tokens"] + counts["cached_tokens"]
            own = None if prompt is None or not tokens else prompt * counts["computed_tokens"] / tokens
            return show(document(past.capacities(), past.profile, prompt if own is None else own), format)
    finally:
        sidecar.stop()
