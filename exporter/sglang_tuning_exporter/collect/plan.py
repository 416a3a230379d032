"""`plan --sglang-url`: what a server would do with more or fewer requests at once, from the server itself."""

from __future__ import annotations

import time

from sglang_tuning_exporter.capacity.model import Measured
from sglang_tuning_exporter.collect.scrape import SNAPSHOT_SINCE, Client, ScrapeError
from sglang_tuning_exporter.config import Config
from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.core.plan import check_format, show, table
from sglang_tuning_exporter.core.watch import Watch
from sglang_tuning_exporter.sglang.args.flags import version_tuple
from sglang_tuning_exporter.sglang.metrics.page_figures import PageReader

LEAST_SECONDS, MOST_SECONDS = 30.0, 86400.0
ASK_SECONDS = 5.0


def live(config: Config, *, seconds: float, format: str) -> int:  # noqa: A002 - the flag's name
    """Watch a server for `seconds` and print its table; 0, or 1 where its step time is not known. Raise `UsageError`."""
    check_format(format)
    if not LEAST_SECONDS <= seconds <= MOST_SECONDS:
        raise UsageError(f"--seconds={seconds:g}: give {LEAST_SECONDS:g} to {MOST_SECONDS:g}")
    asked = Asked(config)
    end = time.monotonic() + seconds
    while True:
        begin = time.monotonic()
        asked.ask()
        left = end - time.monotonic()
        if left <= 0 or (asked.watch.failure is not None and not asked.was_up):
            break
        time.sleep(min(max(begin + ASK_SECONDS - time.monotonic(), 0.0), left))
    if asked.watch.failure is not None:
        raise UsageError(f"--sglang-url={config.sglang_url}: {asked.watch.failure.message}")
    now = time.time()
    asked.watch.advance(now)
    return show(table(asked.watch.server, asked.measured, now), format)


class Asked:
    """A server whose metrics and load counters are asked for, one after the other."""

    def __init__(self, config: Config) -> None:
        profile = PROFILES[config.profile].with_thresholds(config.threshold)
        self.watch = Watch(profile, time.time(), reads=False, scrapes=True)
        self.measured = Measured(profile.window_seconds)
        self.was_up = False
        self._timeout = config.scrape_timeout
        self._client = Client(config.sglang_url or "", config.metrics_url or "", config.api_key, config.api_key_file)
        self._pages = PageReader(passthrough=False)
        self._release: tuple[int, int, int] | None = None

    def ask(self) -> None:
        """Ask for its metrics, and where it answers for its arguments, once, and its counters."""
        begun = time.time()
        try:
            text = self._client.metrics(self._timeout)
        except ScrapeError as error:
            self.watch.lose(error.reason, str(error), time.time(), serves=error.serves)
            return
        self.watch.scrape(self._pages.read(text).scrape, time.time(), begun)
        self.was_up = True
        if self._release is None:
            info = self._client.server_info(self._timeout)
            if info is not None:
                self.watch.inform(info)
                self._release = version_tuple(info.version)
        if self._release is not None and self._release >= SNAPSHOT_SINCE:
            self._ask_loads()

    def _ask_loads(self) -> None:
        try:
            loads = self._client.loads(self._timeout)
        except ScrapeError:
            return  # the table says what is missing
        self.measured.observe(loads, time.time())
        for load in loads:
            self.watch.load(load)
