"""Write what comes on stdin to two files: `python writer.py WITNESS LOG`. SIGHUP opens LOG anew, as a log rotation asks.

SGLang cannot reopen its log, so rotation needs a program such as this. WITNESS is never rotated and has every line once.
"""

from __future__ import annotations

import os
import signal
import sys

_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND
_MOST = 1 << 16


def main(witness: str, log: str) -> None:
    """Copy until stdin ends. Both files are appended to."""
    kept, current = os.open(witness, _APPEND, 0o644), os.open(log, _APPEND, 0o644)

    def reopen(*_: object) -> None:
        # Onto the same number, so that the copying below never holds a closed one.
        fresh = os.open(log, _APPEND, 0o644)
        os.dup2(fresh, current)
        os.close(fresh)

    signal.signal(signal.SIGHUP, reopen)
    while piece := os.read(0, _MOST):
        os.write(kept, piece)
        os.write(current, piece)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
