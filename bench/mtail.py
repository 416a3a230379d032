"""mtail with a program that keeps the same counters and gauges, as far as its language can."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAM = Path(__file__).parent / "sglang.mtail"
MISSING = "mtail is not installed (`apt-get install mtail`), so its row is missing."


def command(log: Path) -> Sequence[str] | None:
    """Return the command that reads `log` once; `None` where mtail is not installed."""
    found = shutil.which("mtail")
    if found is None:
        return None
    return [found, "--one_shot", "--port", "0", "--logs", str(log), "--progs", str(PROGRAM)]
