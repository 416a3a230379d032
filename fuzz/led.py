"""One target under atheris, a process of its own: `python -m fuzz.led TARGET [libFuzzer's flags and directories]`.

libFuzzer never returns, and its instrumentation must be there before the package is imported.
"""

from __future__ import annotations

import logging
import sys

import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]  # not for every Python

atheris.enabled_hooks.add("str")  # not "RegEx": it cannot read patterns of bytes
with atheris.instrument_imports(include=["sglang_tuning_exporter"], enable_loader_override=False):
    from fuzz.targets import TARGETS

logging.disable(logging.CRITICAL)
target = TARGETS[sys.argv.pop(1)]
atheris.Setup(sys.argv, target.check)
atheris.Fuzz()
