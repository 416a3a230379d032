"""Background threads: one that fails says so and is started again, three times; then the exporter ends."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable

from sglang_tuning_exporter.config.files import NoThreadError
from sglang_tuning_exporter.sglang.clean import clean

PAUSES = (1.0, 2.0, 4.0)  # seconds until a thread is started again, each longer: what fails at once may need time
STEADY_SECONDS = 60.0  # a thread that ran this long has recovered: its next error counts as the first

logger = logging.getLogger("sglang_tuning_exporter")


class Threads:
    """Runs functions in threads until `stopping` is set. A function that fails or returns before is called again."""

    def __init__(self, stopping: threading.Event) -> None:
        self.errors: Counter[str] = Counter()  # by name
        self.up: dict[str, bool] = {}  # by name: whether it runs, or is on its way back after an error
        self.failed = ""  # the name of the thread that could not be kept running
        self.give_up: Callable[[], object] = lambda: None  # called then
        self.stopping = stopping
        self._threads: list[threading.Thread] = []

    def start(self, name: str, run: Callable[[], object]) -> None:
        """Call `run` in a new thread; it returns when `stopping` is set.

        Raise `NoThreadError` where this process may start none.
        """
        thread = threading.Thread(target=self._keep_running, args=(name, run), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # then it is not noted as one that runs
            raise NoThreadError from None
        self.errors[name] += 0
        self.up[name] = True
        self._threads.append(thread)

    def attempt(self, name: str, run: Callable[[], object]) -> None:
        """Call `run` in this thread; an error is logged in one line with its place, and counted."""
        try:
            run()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the other threads and the pages go on
            self.errors[name] += 1
            logger.error("%s thread: unexpected error, please report it: %s", name, described(error))  # noqa: TRY400 - one line: a traceback does not help an operator

    def join(self, until: float) -> bool:
        """Wait for all threads until this monotonic time; return False if one still runs."""
        for thread in self._threads:
            thread.join(timeout=max(until - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def _keep_running(self, name: str, run: Callable[[], object]) -> None:
        in_a_row = 0
        while not self.stopping.is_set():
            begin = time.monotonic()
            self.up[name] = True
            self.attempt(name, run)
            if self.stopping.is_set():
                return
            self.up[name] = False
            in_a_row = 1 if time.monotonic() - begin >= STEADY_SECONDS else in_a_row + 1
            if in_a_row > len(PAUSES):
                logger.error("%s thread: %d errors in a row: the exporter ends", name, in_a_row)
                self.failed = name
                self.give_up()
                return
            self.stopping.wait(PAUSES[in_a_row - 1])


def described(error: BaseException) -> str:
    """Return an unexpected error and its place as one line."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    file = "/".join(place.filename.split("/")[-2:])
    return f"{clean(f'{type(error).__name__}: {error}')[:200]} ({file}:{place.lineno}, {place.name})"
