"""Fuzz targets: for each kind of outside input a check that raises on whatever must not happen.

A check takes any bytes and returns nothing where they are refused as they should be. Hypothesis mutates real inputs
(`seeds`) with pieces of others; the tests do the same for a moment, and try again what once failed (`FOUND`).
"""

from __future__ import annotations

import gzip
import json
import math
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from fuzz import forgeries
from sglang_tuning_exporter.collect.log import Logbook
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.config import OPTIONS, Config, resolve
from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.core import report
from sglang_tuning_exporter.core.answer import text as as_text
from sglang_tuning_exporter.core.explain import explain
from sglang_tuning_exporter.core.inputs import Logs
from sglang_tuning_exporter.core.lines import Reader
from sglang_tuning_exporter.core.page import page as report_page
from sglang_tuning_exporter.core.watch import Watch
from sglang_tuning_exporter.serve.metrics import collect
from sglang_tuning_exporter.serve.metrics.families import text_format
from sglang_tuning_exporter.serve.pages import as_json
from sglang_tuning_exporter.serve.pages import render as as_page
from sglang_tuning_exporter.sglang import exposition
from sglang_tuning_exporter.sglang import metrics as facts
from sglang_tuning_exporter.sglang.clean import holds_secret, is_secret
from sglang_tuning_exporter.sglang.flags import command_line, parse_server_args
from sglang_tuning_exporter.sglang.metrics import PageReader
from sglang_tuning_exporter.sglang.server_info import parse_loads, parse_server_info

ROOT = Path(__file__).parent.parent
DATA = ROOT / "tests" / "data"
FOUND = DATA / "fuzz"
RECORDINGS = ROOT / "exporter" / "sglang_tuning_exporter" / "recordings"
PART = b"\n%%%% "  # begins a file inside an input that stands for several
NOW = 1_763_640_000.0
_LAST_DIGIT = re.compile(r"[0-9]$", re.MULTILINE | re.ASCII)
# What a shell takes as plain words: as they stand, quoted, or a variable of the operator's.
_ONE_COMMAND = re.compile(r"""(?:(?: |^)(?:"\$[A-Z0-9_]+"|(?:[\w@%+=:,./-]|'[^']*'|"'")+))+""", re.ASCII)
# What no reader expects, beside the words of real inputs.
_ODD = (
    b"", b"\x00", b"\xff\xfe", b"\r", b"\r\n", b"\x1b[31m", b"nan", b"-inf", b"1e999", b"-1", b"9" * 30,
        b"0x" + b"f" * 40, b"\\ud800", b'"\\UFFFFFFFF"',
    b"'" * 40, b"{" * 200, b", " * 50, b'"', b"\\n", b"null", b"true", b"!!int ", b"&a ", b"*a", b"---\n", b'{"log":"',
        b"2025-11-20T11:40:11.5Z stderr P ",
    b"(Engine pid=1) ", b'le="+Inf"', b" NaN", b" # {} 1 2", b"_created", PART,
)  # fmt: skip

Check = Callable[[bytes], None]


@dataclass(frozen=True, slots=True)
class Target:
    """One kind of input. `seeds` are real inputs; `longest` is in bytes."""

    name: str
    check: Check
    seeds: Callable[[], list[bytes]]
    longest: int = 8192

    def inputs(self) -> st.SearchStrategy[bytes]:
        """Give real inputs, mutated: cut, joined with pieces and words of others, and with odd and random ones."""
        seeds = [seed[: self.longest] for seed in self.seeds()]
        words = sorted(set(re.findall(rb"[\w.:/-]+|[^\w\s]+|\s", b"\n".join(seeds)[:500_000])))
        piece = st.sampled_from(words) | st.sampled_from(_ODD) | st.sampled_from(seeds).map(lambda seed: seed[-200:])

        @st.composite
        def spoiled(draw: st.DrawFn) -> bytes:
            text = draw(st.sampled_from(seeds))
            for _ in range(draw(st.integers(0, 4))):
                at = draw(st.integers(0, len(text)))
                text = text[:at] + draw(piece | st.binary(max_size=6)) + text[at + draw(st.integers(0, 30)) :]
            return text[draw(st.sampled_from([0, 0, 0, 1, len(text) // 2])) :]

        return spoiled()


# A sidecar, its files, and all of its outputs


def settings(**given: Any) -> Config:
    """Return settings of an exporter without a server."""
    defaults: dict[str, Any] = {option.name: option.default for option in OPTIONS}
    defaults |= {"sglang_url": "http://127.0.0.1:9", "listen_address": "127.0.0.1:0"}
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
    found = sidecar.watch.server.facts
    command = command_line(found.release, found.arguments, {"schedule_conservativeness": 1.3})
    assert command is None or _ONE_COMMAND.fullmatch(" ".join(command[0])), command


def _no_constant(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")


# The checks


def check_lines(data: bytes) -> None:
    """The reader gives each line one kind, the same every time, with finite figures and no secret; nothing raises that
    reads or judges them.
    """
    lines, readers = data.split(b"\n"), (Reader(), Reader())
    events, again = ([event for line in lines for event in reader.read(line)] for reader in readers)
    assert repr(events) == repr(again)
    assert sum(readers[0].lines.values()) == len(lines)
    watch = Watch(PROFILES["offline"], NOW, reads=True, scrapes=False)
    for number, event in enumerate((*events, *readers[0].end())):
        assert all(math.isfinite(figure) for figure in event.figures.values())
        assert event.time is None or math.isfinite(event.time)
        assert len(event.text) <= 1010
        assert not any(is_secret(name) for name in event.arguments)
        event.time = NOW + number
        watch.take_line(event)
    watch.judge(NOW + len(events))
    assert explain(lines)


def known(text: str) -> list[tuple[str, str, str]]:
    """Every sample as prometheus_client reads it. Raises `ValueError` where that refuses the page."""
    return sorted(
        (sample.name, repr(sorted(sample.labels.items())), repr(float(sample.value)))
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    )


def check_exposition(data: bytes) -> None:
    """The text that is passed through is always a valid page, and the client library reads the same samples.

    Each page of a sequence from one server, some with other figures only, is read as if it were the first.
    """
    text = data.decode("utf-8", "replace")
    page = exposition.scan(text)
    passed, _ = exposition.passthrough(page)
    again = exposition.scan(passed)
    assert again.broken == 0
    assert exposition.passthrough(again) == (passed, 0)
    assert known(passed) == sorted(
        (name, repr(sorted(exposition.labels(raw).items())), repr(value)) for name, raw, value, _ in again.samples
    )
    sidecar = Sidecar(settings())
    for at in (0.0, 5.0):
        sidecar.watch.take_page(facts.read(text), sidecar.now() + at)
    check_outputs(sidecar)
    pages = text.split(PART.decode())
    later = [_LAST_DIGIT.sub(lambda digit: str(9 - int(digit[0])), page) for page in pages]
    reader = PageReader(passthrough=True)
    for each in (exposition.bounded(page)[0] for page in (*pages, *later, pages[0])):
        native, refused = exposition.passthrough(exposition.scan(each))
        scrape, passed, dropped = reader.read(each)
        # NaN is not itself, and a figure may be one.
        assert repr(scrape) == repr(facts.read(each))
        assert (passed, dropped["refused_metric_lines"]) == (native, refused)


def harmless(value: object) -> None:
    """Raise for a key or a word that may hold a secret."""
    if isinstance(value, dict):
        for key, inner in value.items():
            assert not is_secret(str(key)), key
            harmless(inner)
    elif isinstance(value, (list, tuple)):
        assert not holds_secret(" ".join(word for word in value if isinstance(word, str))), value
        for inner in value:
            harmless(inner)
    elif isinstance(value, str):
        assert not holds_secret(value), value


def check_arguments(data: bytes) -> None:
    """No answer about the server and no line of its arguments raises, and no secret is kept of any."""
    sidecar, printed = Sidecar(settings()), parse_server_args(data.decode("utf-8", "replace"))
    harmless(printed[0] if printed else None)
    if (info := parse_server_info(data)) is not None:
        harmless(info.args)
        sidecar.watch.take_facts(info)
    for load in parse_loads(data):
        sidecar.watch.take_facts(load)
    reader = Reader()
    for event in (*reader.read(b"[2026-01-31 12:00:00] " + data.replace(b"\n", b" ")), *reader.end()):
        event.time = sidecar.now()
        sidecar.watch.take_line(event)
    harmless(dict(sidecar.watch.server.facts.arguments))
    check_outputs(sidecar)


def check_config(data: bytes) -> None:
    """A file gives settings, or an error of one line."""
    with scratch("exporter.yml", data) as path:
        try:
            config = resolve({"config": str(path)}, {})
        except UsageError as error:
            assert ": " in str(error), error
            return
    assert config.sglang_url or config.log_file
    PROFILES[config.profile].with_thresholds(config.threshold)
    assert repr(config)


def check_report(data: bytes) -> None:
    """Any log, plain or compressed, gives a report in every form, or an error of one line."""
    packed = data[:1] == b"\x1f"
    with scratch("server.log.gz" if packed else "server.log", gzip.compress(data[1:], 1) if packed else data) as path:
        try:
            judged, profile = report.judge_logs(Logs([str(path)]), PROFILES["offline"])
        except UsageError as error:
            assert ": " in str(error), error
            return
        json.dumps(report.document(judged), allow_nan=False)
        as_text(judged, profile)
        report_page(judged, profile)


def check_state_file(data: bytes) -> None:
    """Any state file is restored or ignored, all outputs are written, and the file that is saved afterwards is restored
    again.
    """
    with scratch("state.json", data) as path:
        log = path.with_name("server.log")
        log.write_bytes(b"".join(_log_seeds()[:1]))
        given = settings(log_file=(str(log),), state_file=path)
        sidecar = Sidecar(given)
        assert sidecar.log is not None
        try:
            sidecar.log.poll()
            check_outputs(sidecar)
        finally:
            sidecar.stop()
        path.write_bytes(data)
        saved: list[tuple[Any, dict[str, int]]] = []
        for _ in range(2):
            watch = Watch(PROFILES["online"], NOW, reads=True, scrapes=False)
            book = Logbook(given, watch, nullcontext(), clock=lambda: NOW)
            try:
                book.poll()
                watch.judge(NOW + 1.0)
                saved.append((watch.saved(NOW + 1.0)["counted"], dict(book.lines)))
            finally:
                book.close()
        assert saved[0] == saved[1], "a restart changed what had been counted"
        if path.read_bytes() != data:
            assert not data.strip(b"\0 \r\n") or data.lstrip()[:1] == b"{", "a file of somebody else was overwritten"


# Real inputs


def _texts(pattern: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted(DATA.glob(pattern))]


@cache
def _log_seeds() -> list[bytes]:
    """Twelve lines of each release's log, and of the packaged recordings."""
    texts = [
        *_texts("logs/*.log"),
        *(gzip.decompress(path.read_bytes()) for path in RECORDINGS.glob("*/server.log.gz")),
    ]
    lines = [text.splitlines(keepends=True)[:400] for text in texts]
    return [b"".join(each[at : at + 12]) for each in lines for at in range(0, len(each), 12)]


def _page_seeds() -> list[bytes]:
    """Parts of pages, and a sequence of them."""
    lines = [text.splitlines(keepends=True) for text in _texts("metrics/*.prom")]
    found = [b"".join(each[at : at + 40]) for each in lines for at in range(0, len(each), 160)]
    return [*found, PART.join(b"".join(page.splitlines(keepends=True)[:12]) for page in found[:3])]


def _argument_seeds() -> list[bytes]:
    """Answers of `/server_info` and `/v1/loads`, and printed arguments."""
    load = {
        "dp_rank": 0,
        "num_running_reqs": 3,
        "max_running_requests": 48,
        "memory": {"weight_gb": 1.5},
        "queues": {"waiting": 2},
    }
    states = {
        "last_gen_throughput": 12.5,
        "memory_usage": {"weight": 14.9},
        "effective_max_running_requests_per_dp": 48,
    }
    info = {"model_path": "m", "tp_size": 2, "api_key": "x", "version": "0.5.9", "internal_states": [states]}
    odd = {"$(x)": "\n", "a b": [1], "new_names": ["-x", "y"], "new_path": "a'b", "api_key": "x"}
    recorded = [gzip.decompress(path.read_bytes()) for path in sorted(RECORDINGS.glob("*/server_info.json.gz"))]
    made = [json.dumps(each).encode() for each in ({"loads": [load, {**load, "dp_rank": 1}]}, info, {**info, **odd})]
    return [*recorded, *made, *_texts("server_args/*.log"), f"server_args={odd!r}".encode()]


def _config_seeds() -> list[bytes]:
    return [
        b"sglang_url: http://127.0.0.1:30000\nlog_file: [/var/log/a.log, '-']\nprofile: offline\n",
        b"sglang-url: http://[::1]:30000/\nlisten_address: '[::]:9741'\nscrape_timeout: 2.5\npassthrough: no\n",
        b"log_file: /var/log/*.log\nthreshold: {queue_upper: 500, time_to_first_token_seconds: 1}\nfrom_start: true\n",
        b"log_file: x\nthreshold: [queue_upper=500, queue_wait=2]\nmetrics_path: /m\nstate_file: /tmp/state.json\n",
        b"a: &a [1, 2]\nb: *a\n? [x]\n: !!float 1e3\n...\n---\n2025-01-31: !!binary aGk=\n",
        "".join(f"{option.name}: 1\n" for option in OPTIONS).encode(),
    ]


def _report_seeds() -> list[bytes]:
    plain = [seed for seed in _log_seeds() if b"batch" in seed]
    return plain + [b"\x1f" + seed for seed in plain[::5]]


@cache
def _state_seeds() -> list[bytes]:
    """An exporter's own state file after a log and after a server that retracts, none, and one of an older release."""
    found = [b"", b'{"schema": 1, "positions": {"patterns": [], "files": []}}']
    for text in (b"".join(_log_seeds()[:20]), b"\n".join(line.text for line in forgeries.recordings()[1].lines[:800])):
        with scratch("state.json", b"") as path:
            log = path.with_name("server.log")
            log.write_bytes(text)
            sidecar = Sidecar(settings(log_file=(str(log),), state_file=path, from_start=True))
            assert sidecar.log is not None
            sidecar.log.poll()
            sidecar.watch.judge(time.time())
            sidecar.stop()
            found.insert(0, path.read_bytes())
    return found


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("lines", check_lines, _log_seeds),
        Target("exposition", check_exposition, _page_seeds),
        Target("arguments", check_arguments, _argument_seeds),
        Target("config", check_config, _config_seeds, 2048),
        Target("state_file", check_state_file, _state_seeds, 1 << 20),
        Target("report", check_report, _report_seeds),
        Target("forgery", forgeries.check_forgery, forgeries.seeds, 64),
    )
}
