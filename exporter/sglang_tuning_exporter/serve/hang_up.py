"""SIGHUP: the end where a terminal was closed; from a service manager it usually means reload."""

from __future__ import annotations

import logging
import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def handle_hang_up(end: Callable[[], object] | None = None) -> Callable[[], object] | None:
    """Handle SIGHUP from now on and return the handler: `end` with a terminal, one warning without.

    None where nothing changes: SIGHUP is ignored already (nohup), or there is a terminal but nothing to end in order.
    For the main thread only.
    """
    handler = end if _has_terminal() else _warn
    if handler is None or signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        return None
    signal.signal(signal.SIGHUP, lambda *_: handler())
    return handler


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
