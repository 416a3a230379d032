"""Generated files: alert rules, configuration, templates, runbooks, boards, reference.

All are committed and checked.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sglang_tuning_exporter.config import values
from sglang_tuning_exporter.core import runbooks
from sglang_tuning_exporter.mixin import alerts, boards, reference
from sglang_tuning_exporter.mixin.wishes import NONE, Wishes, read

__all__ = ["files", "run"]
LEAST_SCALE, MOST_SCALE = 0.001, 1000.0  # beyond, durations would be 0, or longer than Prometheus allows


def files(time_scale: float = 1.0, wishes: Wishes = NONE, kind: str = "prometheus") -> dict[str, str]:
    """Return every generated file: path under the output directory → text."""
    return {
        **alerts.files(time_scale, wishes, kind),
        **runbooks.files(),
        **boards.files(wishes.loki),
        **_static(),
        **reference.files(),
    }


def _static() -> dict[str, str]:
    """Return the configuration files that need no computing: an installed exporter writes them without a checkout."""
    root = Path(__file__).parent / "static"
    return {str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in root.rglob("*") if path.is_file()}


def run(
    output: Path,
    *,
    check: bool,
    time_scale: float = 1.0,
    config: Path | None = None,
    format: str = "prometheus",  # noqa: A002 - the flag's name
    runbook_url: str | None = None,
    grafana_url: str | None = None,
) -> int:
    """Write the files, or compare them with `check`.

    Returns 0, or 1 where `check` found a stale file. Raise `UsageError`.
    """
    wishes = read(config, runbook_url=runbook_url, grafana_url=grafana_url)
    if not LEAST_SCALE <= time_scale <= MOST_SCALE:
        raise values.UsageError(f"--time-scale={time_scale:g}: give a number from {LEAST_SCALE:g} to {MOST_SCALE:g}")
    values.check(values.one_of(alerts.FORMATS), "--format", format)
    texts, readme = files(time_scale, wishes, format), output / "README.md"
    if readme.is_file():
        texts["README.md"] = reference.with_tables(readme.read_text(encoding="utf-8"))
    if not (output / "exporter").is_dir():  # a checkout's folders hold what README loads
        texts |= alerts.at_former_paths(texts)
    stale = [name for name, text in texts.items() if _is_stale(output, name, text, check=check)]
    for name in stale:
        print(f"{'stale' if check else 'written'}: {name}", file=sys.stderr if check else sys.stdout)
    if check and stale:
        print("run: sglang-tuning-exporter generate", file=sys.stderr)
    return 1 if check and stale else 0


def _is_stale(output: Path, name: str, text: str, *, check: bool) -> bool:
    """Return whether a file had another text; write its text unless `check`."""
    path = output / name
    try:
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            return False
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise values.UsageError(
            f"--output={output}: {path}: {error.strerror or error}; give a directory that can be written"
        ) from None
    return True
