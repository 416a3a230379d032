"""What the commands over logs were given, checked once. Each check raises `UsageError`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.report.files import shown
from sglang_tuning_exporter.report.inputs import Logs
from sglang_tuning_exporter.state.profiles import PROFILES, Profile


def check(flag: str, value: str, options: Collection[str]) -> None:
    """Check that a flag has one of its values."""
    if value not in options:
        raise UsageError(f"{flag}={value}: give one of {', '.join(options)}")


def profile_of(name: str, own_thresholds: Mapping[str, float] | None) -> Profile:
    """Return a profile by its name, with the user's own thresholds."""
    return PROFILES[name].with_thresholds(own_thresholds or {})


def check_output(output: Path, *logs: Logs, replaced: bool = False) -> None:
    """Check that a file can be written beside these logs; `replaced`: by another file, so that it must be an ordinary one."""
    name = f"--output={shown(str(output))}"
    if output.is_dir():
        raise UsageError(f"{name}: is a directory; give a file")
    if replaced and output.exists() and not output.is_file():
        raise UsageError(f"{name}: is no ordinary file; give one that can be written anew")
    if not output.parent.is_dir():
        raise UsageError(f"{name}: there is no such directory; give a file in one that exists")
    if any(each.read_from(output) for each in logs):
        raise UsageError(f"{name}: is one of the logs; give another file")
