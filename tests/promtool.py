"""promtool: what it accepts, what queries answer over series written here, and which alerts these make fire."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

LESS_COLLECTING = {"GOGC": "400"}  # four times the memory between two garbage collections: a quarter less time
PRESENT = shutil.which("promtool") is not None
Samples: TypeAlias = "list[tuple[dict[str, str], float]]"
_SAMPLE = re.compile(r'\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\} ([^\s,]+)')
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Said(NamedTuple):
    """What a run of promtool printed, and its exit status."""

    status: int
    words: str


class Alert(NamedTuple):
    """A firing alert as it is sent to Alertmanager."""

    labels: dict[str, str]
    annotations: dict[str, str]


def promtool(*arguments: str | Path, given: str | None = None) -> Said:
    """Run promtool with `given` as its input."""
    program = shutil.which("promtool")
    assert program, "promtool is missing: install Prometheus 2.42 or newer (Debian: apt install prometheus)"
    ran = subprocess.run(
        [program, *map(str, arguments)], env={**os.environ, **LESS_COLLECTING}, input=given, capture_output=True,
        encoding="utf-8",
        errors="replace", timeout=600, check=False,
    )  # fmt: skip
    return Said(ran.returncode, ran.stdout + ran.stderr)


def _tested(directory: Path, rules: Path | None, every: str, tests: list[dict[str, Any]]) -> str:
    """Run tests of rules, each of which must fail: promtool then prints what there is."""
    document = {"rule_files": [str(rules)] if rules else [], "evaluation_interval": every}
    path = directory / "tests.yml"  # JSON is YAML, and quicker to write
    path.write_text(json.dumps({**document, "tests": [{**each, "interval": every} for each in tests]}))
    return promtool("test", "rules", path).words


def _series(values: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"series": name, "values": each} for name, each in values.items()]


def evaluated(
    directory: Path,
    series: Sequence[Mapping[str, str]],
    exprs: Sequence[str],
    *,
    at: str,
    every: str = "15s",
    rules: Path | None = None,
) -> list[list[Samples]]:
    """Give the answers to these queries over each of these sets of series, as Prometheus has them with these rules."""
    asked = [{"expr": expr, "eval_time": at, "exp_samples": [{"labels": '{never="met"}'}]} for expr in exprs]
    words = _tested(directory, rules, every,
        [{"input_series": _series(each), "promql_expr_test": asked} for each in series])  # fmt: skip
    answers = [
        [({name: _text(word) for name, word in _LABEL.findall(labels)}, float(value)) for labels,
            value in _SAMPLE.findall(said)]
        for said in re.findall(r"^\s+got:(.*)$", words, re.MULTILINE)
    ]  # fmt: skip
    assert len(answers) == len(series) * len(exprs), words[-2000:]
    return [answers[place : place + len(exprs)] for place in range(0, len(answers), len(exprs))]


def fired(
    rules: Path, series: Mapping[str, str], names: Iterable[str], directory: Path, after: str = "10m"
) -> dict[str, list[Alert]]:
    """Give the alerts of these names that fire after so long of these series, a sample a minute, as promtool renders
    them.
    """
    absent = [{"exp_labels": {"never": "there"}}]
    asked = [{"alertname": name, "eval_time": after, "exp_alerts": absent} for name in names]
    words = _tested(directory, rules, "1m", [{"input_series": _series(series), "alert_rule_test": asked}])
    found: dict[str, list[Alert]] = {}
    for part in re.split(r"^\s+alertname: ", words, flags=re.MULTILINE)[1:]:
        name, _, rest = part.partition(",")
        answers = rest.partition("got:")[2]
        labels, annotations = (
            [
                {key: _text(text) for key, text in _LABEL.findall(line)}
                for line in re.findall(rf"^\s+{what}:\{{(.*)\}},?$", answers, re.MULTILINE)
            ]
            for what in ("Labels", "Annotations")
        )
        found[name] = [Alert(*both) for both in zip(labels, annotations, strict=True)]
    return found


def _text(quoted: str) -> str:
    return str(json.loads(f'"{quoted}"'))
