"""The one place that starts promtool, and reads its output: what it found where a test of rules expects nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

LESS_COLLECTING = {"GOGC": "400"}  # four times the memory between two garbage collections: a quarter less time
PRESENT = shutil.which("promtool") is not None
# Answers where nothing else does, so that each question has an answer.
_NOBODY = 'label_replace(vector(1), "instance", "nobody", "", "")'
_FIRING = f'count by (instance, diagnosis) (ALERTS{{alertstate="firing"}}) or {_NOBODY}'
_GOT = re.compile(r"^\s+got: (.*)$", re.MULTILINE)


class UnplayableError(Exception):
    """promtool is missing, or refused what it was given."""


class Said(NamedTuple):
    """What a run of promtool printed, and its exit status."""

    status: int
    words: str


def promtool(*arguments: str | Path, given: str | None = None, seconds: float = 300) -> Said:
    """Run promtool with `given` as its input. Raises `UnplayableError` where it is not installed."""
    program = shutil.which("promtool")
    if program is None:
        raise UnplayableError("promtool is missing: install Prometheus 2.42 or newer (Debian: apt install prometheus)")
    command = [program, *map(str, arguments)]
    ran = subprocess.run(
        command,
        env={**os.environ, **LESS_COLLECTING},
        input=given,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=seconds,
        check=False,
    )
    return Said(ran.returncode, ran.stdout + ran.stderr)


def got(words: str, count: int) -> list[str]:
    """Give its answers to `count` queries that expected nothing. Raises `UnplayableError` with its words where it gave others."""
    answers = _GOT.findall(words)
    if len(answers) != count:
        raise UnplayableError(words[-2000:])
    return answers


def alerts_firing(
    series: Sequence[Mapping[str, str]],
    moments: Iterable[float],
    rules: str,
    directory: Path,
    *,
    interval: str,
    evaluation: str,
) -> list[dict[str, set[str]]]:
    """Give the diagnoses whose alerts fire at each moment, by instance. A series is as promtool's `input_series` has it."""
    asked = [{"eval_time": f"{at:g}s", "expr": _FIRING} for at in moments]
    (directory / "rules.yml").write_text(rules)
    document = {
        "rule_files": ["rules.yml"],
        "evaluation_interval": evaluation,
        "group_eval_order": ["sglang-tuning.records", "sglang-tuning.alerts"],
        "tests": [{"interval": interval, "input_series": series, "promql_expr_test": asked}],
    }
    (directory / "test.yml").write_text(json.dumps(document))  # JSON is YAML, and quicker to write
    found: list[dict[str, set[str]]] = []
    for answer in got(promtool("test", "rules", directory / "test.yml", seconds=600).words, len(asked)):
        if 'instance="nobody"' not in answer:
            raise UnplayableError(answer[:2000])
        fires: dict[str, set[str]] = {}
        for diagnosis, instance in re.findall(r'\{diagnosis="(\w+)", instance="([^"]+)"\}', answer):
            fires.setdefault(instance, set()).add(diagnosis)
        found.append(fires)
    return found
