"""Fuzz targets: for each kind of outside input a check that raises on whatever must not happen.

A check takes any bytes and returns nothing where they are refused as they should be. Tests, kept inputs and the fuzzer
that is guided by coverage run the same check.
"""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from fuzz import access, forgeries, state_file, words
from fuzz.sidecars import check_outputs, scratch, settings
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.config import resolve
from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.core import report
from sglang_tuning_exporter.core.explain import explain
from sglang_tuning_exporter.core.inputs import Logs
from sglang_tuning_exporter.core.lines import Reader
from sglang_tuning_exporter.core.page import page as report_page
from sglang_tuning_exporter.core.text import text as as_text
from sglang_tuning_exporter.recordings.recording import from_files
from sglang_tuning_exporter.sglang.args.printed import holds_secret, is_secret, parse_server_args
from sglang_tuning_exporter.sglang.metrics import exposition
from sglang_tuning_exporter.sglang.metrics import page_figures as facts
from sglang_tuning_exporter.sglang.metrics.page_cache import PageReader, ParsedPage
from sglang_tuning_exporter.sglang.server_info import parse_loads, parse_server_info

ROOT = Path(__file__).parent.parent
DATA = ROOT / "tests" / "data"
RECORDINGS = ROOT / "exporter" / "sglang_tuning_exporter" / "recordings"
FOUND = DATA / "fuzz"
_LAST_DIGIT = re.compile(r"[0-9]$", re.MULTILINE | re.ASCII)

Check = Callable[[bytes], None]


def parsed(text: str) -> dict[str, object] | None:
    found = parse_server_args(text)
    return None if found is None else found.args


@dataclass(frozen=True, slots=True)
class Target:
    """One kind of input. `seeds` are real inputs; `words` have a meaning for its reader; `longest` is in bytes."""

    name: str
    check: Check
    seeds: Callable[[], list[bytes]]
    words: tuple[bytes, ...]
    longest: int = 8192


def check_lines(data: bytes) -> None:
    """The reader gives each line one kind, the same every time, with finite figures and no secret; it does not raise."""
    lines, readers = data.split(b"\n"), (Reader(), Reader())
    events, again = ([event for line in lines for event in reader.read(line)] for reader in readers)
    assert repr(events) == repr(again)
    assert sum(readers[0].lines.values()) == len(lines)
    for event in (*events, *readers[0].end()):
        assert all(math.isfinite(figure) for figure in event.figures.values())
        assert event.time is None or math.isfinite(event.time)
        assert len(event.text) <= 1010
        assert not any(is_secret(name) for name in event.arguments)
    assert explain(lines)


def known(text: str) -> list[tuple[str, str, str]]:
    """Every sample as prometheus_client reads it. Raises `ValueError` where that refuses the page."""
    return sorted(
        (sample.name, repr(sorted(sample.labels.items())), repr(float(sample.value)))
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    )


def check_exposition(data: bytes) -> None:
    """The text that is passed through is always a valid page, and the client library reads the same samples."""
    text = data.decode("utf-8", "replace")
    page = exposition.scan(text)
    passed = exposition.passthrough(page).text
    read = sorted(
        (name, repr(sorted(exposition.labels(raw).items())), repr(value)) for name, raw, value, _ in page.samples
    )
    again = exposition.scan(passed)
    assert again.broken == 0
    assert exposition.passthrough(again) == exposition.SafePage(passed)
    theirs = known(passed)
    assert theirs == sorted(
        (name, repr(sorted(exposition.labels(raw).items())), repr(value)) for name, raw, value, _ in again.samples
    )
    if page.broken == 0:
        try:
            theirs = known(text)
        except Exception:  # noqa: BLE001 - that parser raises many things; we read what it refuses
            pass
        else:
            assert theirs == read
    sidecar = Sidecar(settings())
    for at in (0.0, 5.0):
        sidecar.watch.scrape(facts.read(text), sidecar.now() + at)
    check_outputs(sidecar)
    _check_reader(text.split(words.PART.decode()))


def _check_reader(pages: list[str]) -> None:
    """Each page of a sequence from one server, some with other figures only, is read as if it were the first."""
    readers = {passed: PageReader(passthrough=passed) for passed in (True, False)}
    later = [_LAST_DIGIT.sub(lambda digit: str(9 - int(digit[0])), page) for page in pages]
    for page in (*pages, *later, pages[0]):
        scrape, native = facts.read(page), exposition.passthrough(exposition.scan(page))
        for passed, reader in readers.items():
            # NaN is not itself, and a figure may be one.
            assert repr(reader.read(page)) == repr(
                ParsedPage(scrape, *((native.text, native.left_out) if passed else ("",)))
            )


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


def check_server_info(data: bytes) -> None:
    """No answer raises, and no secret is kept of any."""
    sidecar = Sidecar(settings())
    info = parse_server_info(data)
    if info is not None:
        harmless(info.args)
        sidecar.watch.inform(info)
    for load in parse_loads(data):
        sidecar.watch.load(load)
    check_outputs(sidecar)


def check_server_args(data: bytes) -> None:
    """No line of arguments raises, and no secret is kept of any; the same in a log."""
    text = data.decode("utf-8", "replace")
    arguments = parsed(text)
    if arguments is not None:
        harmless(arguments)
    sidecar = Sidecar(settings())
    reader, line = Reader(), b"[2026-01-31 12:00:00] " + data.replace(b"\n", b" ")
    for event in (*reader.read(line), *reader.end()):
        event.time = sidecar.now()
        sidecar.watch.take(event)
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


def parts(data: bytes) -> dict[str, bytes]:
    """The files of an input: each begins with `%%%% NAME` on a line of its own."""
    found: dict[str, bytes] = {}
    for part in (b"\n" + data).split(words.PART)[1:]:
        name, _, text = part.partition(b"\n")
        found[name.decode("utf-8", "replace")] = text
    return found


def check_recording(data: bytes) -> None:
    """Any directory gives a recording in order of time, or an error of one line."""
    try:
        recording = from_files(parts(data), name="x")
    except UsageError as error:
        assert ": " in str(error), error
        return
    positions = [[line.at for line in recording.lines], [scrape.at for scrape in recording.scrapes]]
    for at in positions:
        assert at == sorted(at)
        assert all(0 <= each < math.inf for each in at)
    assert 0 <= recording.length_seconds < math.inf
    for position in (-1.0, 0.0, recording.length_seconds / 2, recording.length_seconds + 1):
        recording.scrape_at(position)
        recording.phase_at(position)
        assert 0 <= recording.count_lines_until(position) <= len(recording.lines)


def check_report(data: bytes) -> None:
    """Any log, plain or compressed, gives a report in every form, or an error of one line."""
    packed = data[:1] == b"\x1f"
    with scratch("server.log.gz" if packed else "server.log", gzip.compress(data[1:], 1) if packed else data) as path:
        try:
            judged, profile = report.judge(Logs([str(path)]), PROFILES["offline"])
        except UsageError as error:
            assert ": " in str(error), error
            return
        json.dumps(report.document(judged), allow_nan=False)
        as_text(judged, profile)
        report_page(judged, profile)


def _texts(*patterns: str) -> list[bytes]:
    return [path.read_bytes() for pattern in patterns for path in sorted(DATA.glob(pattern))]


def _log_seeds() -> list[bytes]:
    found = []
    for text in _texts("logs/*.log"):
        lines = text.splitlines(keepends=True)
        found += [b"".join(lines[at : at + 12]) for at in range(0, len(lines), 12)]
    return found


def _page_seeds() -> list[bytes]:
    found = []
    for text in _texts("metrics/*.prom"):
        lines = text.splitlines(keepends=True)
        found += [b"".join(lines[at : at + 40]) for at in range(0, len(lines), 160)]
    short = [b"".join(page.splitlines(keepends=True)[:12]) for page in found[:3]]
    return [*found, words.PART.join(short)]


def _info_seeds() -> list[bytes]:
    recorded = [gzip.decompress(path.read_bytes()) for path in sorted(RECORDINGS.glob("*/server_info.json.gz"))]
    load = {"dp_rank": 0, "num_running_reqs": 3, "max_running_requests": 48, "memory": {"weight_gb": 1.5}}
    load |= {"queues": {"waiting": 2}}
    odd = {"$(x)": "\n", "a b": [1], "new_names": ["-x", "y"], "new_path": "a'b"}
    loads = json.dumps({"loads": [load, {**load, "dp_rank": 1}]}).encode()
    return [*recorded, loads, _small_info(), _small_info(**odd, version="0.5.23")]


def _args_seeds() -> list[bytes]:
    return [
        *_texts("server_args/*.log"),
        b"server_args={'model_path': 'm', '$(x)': '\\n', 'a b': [1], 'new_names': ['-x', 'y']}",
    ]


def _small_info(**more: object) -> bytes:
    memory = {"weight": 14.9, "kvcache": 40.1, "graph": 1.2, "startup_available": 7.1, "token_capacity": 400000}
    states = [{"last_gen_throughput": 12.5, "memory_usage": memory, "effective_max_running_requests_per_dp": 48}]
    args = {"model_path": "m", "tp_size": 2, "dp_size": 1, "schedule_conservativeness": 1.0}
    args |= {"mem_fraction_static": 0.88}
    return json.dumps(
        {**args, "api_key": "x", "version": "0.5.9", "status": "ready", "internal_states": states} | more
    ).encode()


def _config_seeds() -> list[bytes]:
    return [
        b"sglang_url: http://127.0.0.1:30000\nlog_file: [/var/log/a.log, '-']\nprofile: offline\n",
        b"sglang-url: http://[::1]:30000/\nlisten_address: '[::]:9741'\nscrape_timeout: 2.5\npassthrough: no\n",
        b"log_file: /var/log/*.log\nthreshold: {queue_upper: 500, time_to_first_token_seconds: 1}\nfrom_start: true\n",
        b"log_file: x\nthreshold: [queue_upper=500, queue_wait=2]\nmetrics_path: /m\nstate_file: /tmp/state.json\n",
        b"a: &a [1, 2]\nb: *a\n? [x]\n: !!float 1e3\n...\n---\n2025-01-31: !!binary aGk=\n",
    ]


def _recording_seeds() -> list[bytes]:
    log = b"".join(_texts("logs/0.5.9.log", "logs/0.5.7.log")[0].splitlines(keepends=True)[:20])
    events = b'{"t": 1763638813, "event": "start"}\n{"t": 1763638814.5, "event": "ready"}\n{"t": 1763638820, "event": "SIGKILL"}\n'
    about = b'{"sglang_version": "0.5.9", "log_utc_offset_seconds": 3600, "note": "x", "one_clock": true}'
    pieces = {
        b"server.log": log,
        b"events.jsonl": events,
        b"recording.json": about,
        b"server_info.json": _small_info(),
        b"metrics-1-1763638815000.prom": b"sglang:num_queue_reqs 1\n",
        b"metrics-2-1763638816000.prom": b"sglang:num_queue_reqs 2\n",
    }
    whole = b"".join(words.PART + name + b"\n" + text for name, text in pieces.items())
    alone = words.PART + b"server.log\n" + log
    return [whole, alone, alone + words.PART + b"events.jsonl\n" + events]


def _report_seeds() -> list[bytes]:
    plain = [seed for seed in _log_seeds() if b"batch" in seed]
    return plain + [b"\x1f" + seed for seed in plain[::5]]


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("lines", check_lines, _log_seeds, words.LOG),
        Target("exposition", check_exposition, _page_seeds, words.PAGE),
        Target("server_info", check_server_info, _info_seeds, words.JSON),
        Target("server_args", check_server_args, _args_seeds, words.ARGUMENT),
        Target("config", check_config, _config_seeds, words.CONFIG, 2048),
        Target("state_file", state_file.check_state_file, state_file.seeds, words.STATE),
        Target("state_values", state_file.check_state_values, lambda: [bytes(3), b"\x00\x31\x17"], (b"\0",), 3),
        Target("recording", check_recording, _recording_seeds, words.RECORDING),
        Target("report", check_report, _report_seeds, words.LOG),
        Target("forgery", forgeries.check_forgery, forgeries.seeds, words.LOG, 64),
        Target("web_config", access.check_web_config, access.web_config_seeds, access.WEB_CONFIG),
        Target("request", access.check_request, access.request_seeds, access.REQUEST, 2048),
    )
}
