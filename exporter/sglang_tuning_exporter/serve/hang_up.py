"""SIGHUP: the end where a terminal was closed; from a service manager it usually means reload."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable


def handle_hang_up(end: Callable[[], object] | None = None) -> None:
    """Handle SIGHUP from now on: `end` with a terminal, one warning without. For the main thread only.

    Nothing changes where SIGHUP is ignored already (nohup), and where there is a terminal but nothing to end in order.
    """
    handler = end if _has_terminal() else _warn
    if handler is not None and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: handler())


def _warn() -> None:
    logging.getLogger("sglang_tuning_exporter").warning(
        "SIGHUP: ignored; restart to change settings (rotated logs are followed without a signal)"
    )


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
