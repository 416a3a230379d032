"""Background threads that are restarted after an unexpected error."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable

from sglang_tuning_exporter.sglang.clean import clean

RESTART_SECONDS = 1.0  # pause before a thread is started again
STEADY_SECONDS = 60.0  # a thread that ran this long has recovered: its next error counts as the first
MOST_IN_A_ROW = 5

logger = logging.getLogger("sglang_tuning_exporter")


class Threads:
    """Runs functions in threads until `stopping` is set; after an error the function is called again."""

    def __init__(self, stopping: threading.Event) -> None:
        self.errors: Counter[str] = Counter()  # by name
        self.failed = ""  # the name of the thread that had too many errors in a row
        self.give_up: Callable[[], object] = lambda: None  # called then
        self._stopping = stopping
        self._threads: list[threading.Thread] = []

    def start(self, name: str, run: Callable[[], object]) -> None:
        """Call `run` in a new thread; it returns when `stopping` is set."""
        self.errors[name] += 0
        thread = threading.Thread(target=self._keep_running, args=(name, run), name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def attempt(self, name: str, run: Callable[[], object]) -> bool:
        """Call `run` in this thread; False after an error, which is logged in one line and counted."""
        try:
            run()
        except Exception as error:  # noqa: BLE001 - whatever it is, the other thread and the pages go on
            self.errors[name] += 1
            place = traceback.extract_tb(error.__traceback__)[-1]
            words = clean(f"{type(error).__name__}: {error}")[:200]
            logger.error(  # noqa: TRY400 - one line: a traceback does not help an operator
                "%s thread: unexpected error, please report it: %s (%s:%s)", name, words, place.name, place.lineno
            )
            return False
        return True

    def join(self, until: float) -> bool:
        """Wait for all threads until this monotonic time; return False if one still runs."""
        for thread in self._threads:
            thread.join(timeout=max(until - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def _keep_running(self, name: str, run: Callable[[], object]) -> None:
        in_a_row = 0
        while not self._stopping.is_set():
            begin = time.monotonic()
            if self.attempt(name, run):
                return
            in_a_row = 1 if time.monotonic() - begin >= STEADY_SECONDS else in_a_row + 1
            if in_a_row >= MOST_IN_A_ROW:
                logger.error("%s thread: %d errors in a row: the exporter ends", name, in_a_row)
                self.failed = name
                self.give_up()
                return
            self._stopping.wait(RESTART_SECONDS)
