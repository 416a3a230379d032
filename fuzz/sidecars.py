"""A sidecar for a check: its settings, its files, and all of its outputs."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.config import OPTIONS, Config
from sglang_tuning_exporter.config.values import Address
from sglang_tuning_exporter.serve.api import render as as_json
from sglang_tuning_exporter.serve.metrics import collect
from sglang_tuning_exporter.serve.metrics.families import text_format
from sglang_tuning_exporter.serve.pages.page import render as as_page
from sglang_tuning_exporter.sglang.args.command import command_line

# What a shell takes as plain words: as they stand, quoted, or a variable of the operator's.
ONE_COMMAND = re.compile(r"""(?:(?: |^)(?:"\$[A-Z0-9_]+"|(?:[\w@%+=:,./-]|'[^']*'|"'")+))+""", re.ASCII)


def settings(**given: Any) -> Config:
    """Return settings of an exporter without a server."""
    defaults: dict[str, Any] = {option.name: option.default for option in OPTIONS}
    defaults |= {"sglang_url": "http://127.0.0.1:9", "listen_address": Address("127.0.0.1", 0)}
    return Config(**(defaults | given))


@contextmanager
def scratch(name: str, data: bytes) -> Iterator[Path]:
    """Make a file of these bytes in a directory of its own."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
        path = Path(directory) / name
        path.write_bytes(data)
        yield path


def check_outputs(sidecar: Sidecar) -> None:
    """Check all outputs of a sidecar: metrics must be readable, and page, JSON and command line must be written."""
    families = list(text_string_to_metric_families(text_format(collect(sidecar))))
    series = [(sample.name, tuple(sorted(sample.labels.items()))) for each in families for sample in each.samples]
    assert len(set(series)) == len(series), "one series twice"
    as_page(sidecar, still=False).encode("utf-8", "backslashreplace")
    json.loads(as_json(sidecar), parse_constant=_no_constant)
    facts = sidecar.watch.server.facts
    command = command_line(facts.release, facts.arguments, {"schedule_conservativeness": 1.3})
    assert command is None or ONE_COMMAND.fullmatch(command.text), command


def _no_constant(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")
