"""Nothing on SGLang's page makes Prometheus refuse the exporter's: checked with a real Prometheus, promtool and
prometheus_client.

If Prometheus refuses one line, it drops the whole page, and every rule is without data.
"""

from __future__ import annotations

import json
import logging
import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import requests
import yaml
from prometheus_client.parser import text_string_to_metric_families

from bench.server import answering
from conftest import wait_for
from fuzz.targets import settings
from promtool import PRESENT, promtool
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.recordings.demo import LOOPBACK, Process, free_port, program
from sglang_tuning_exporter.serve.metrics import collect
from sglang_tuning_exporter.serve.metrics.families import text_format
from sglang_tuning_exporter.sglang import exposition
from sglang_tuning_exporter.sglang.metrics import PageReader
from sglang_tuning_exporter.sglang.server_info import parse_server_info

pytestmark = pytest.mark.skipif(program("prometheus") is None or not PRESENT, reason="needs prometheus and promtool")
NUMBERS = (
    "1e400", "-1e999", "9" * 4000, "0." + "0" * 900 + "1", "+NaN", "-nan", "nan", "NAN", "infinity", "-Infinity",
    "+inf", "INF", "1.", ".5", "0x10", "1_0",
    "1e-400", "+1", "-0", "1e5 1e3", "1 1763638815000", "1 " + "9" * 30, "1.2.3", "", '1 # {a="b"} 1', "1\r", "\t1",
    "1\x00", "٣", "0b1", "1e",
    "1f", "1p3", "e5", "+",
)  # fmt: skip
LABELS = (
    '__name__="y"', '__a="y"', '__address__="y"', 'job="a"', 'a=""', 'le="foo"', 'le="1e400"', 'le="+Inf"', 'le="1.0"',
    'le="NaN"', 'le=""', 'quantile="foo"',
    'quantile="2"', 'a="b",a="c"', 'b="1",a="2"', "", ",", 'a="b",', '"a.b"="c"', 'é="1"', 'a="é"', 'a="\x01\x1b"',
    'a="\u2028\u202e"', 'a="\ufffe"',
    'a="\r"', 'a="\\t"', 'a="\\n\\\\\\""', 'a="}"', 'a="\x00"', 'a = "b"', "a=b", 'a="b" c="d"',
    'a="' + "z" * 600 + '"', ':="1"', '0="1"', 'instance="x"',
)  # fmt: skip
TEXTS = (
    "m",
    "a\x00b",
    "\x1b[2J",
    "\ud800",
    "\u2028\u202e",
    '"',
    "\\",
    "\n",
    "é",
    "\x7f\x85",
    "x" * 600,
    "\ufffe",
    "",
    "}",
    "\r",
)
LINES = (
    *(f"sglang:x {number}" for number in NUMBERS),
    *(f"sglang:x{{{label}}} 1" for label in LABELS),
    *(f"# TYPE sglang:h {kind}\nsglang:h{{{label}}} 1" for kind in ("histogram", "summary") for label in LABELS),
    *(f"# TYPE sglang:h {kind}\nsglang:h_bucket 1" for kind in ("gaugehistogram", "banana", "", "gauge extra", "GAUGE",
        "info", "counter")),
    *(f"# HELP sglang:x {text}\nsglang:x 1" for text in TEXTS),
    '{"sglang:x"} 1', '{"sglang:x",a="b"} 1', "sglang:é 1", "sglang: 1", "sglang:x:y 1", "#sglang", "# TYPE", "# HELP",
    "# EOF", "# UNIT sglang:x s",
    "sglang:x", "sglang:x{", 'sglang:x{a="', "sglang:x 1 2 3", "\t", "\r", "\x0b", "sglang:" + "x" * 900 + " 1",
        "sglang_tuning_up 3", "process_x 1",
)  # fmt: skip
# What was found once: each of them had Prometheus or promtool refuse the whole page.
FOUND = (
    "sglang:x 1e400",
    "sglang:x -1e999",
    f"sglang:x {'9' * 4000}",
    "sglang:x +NaN",
    "sglang:x -nan",
    'sglang:x{__name__="y"} 1',
    '# TYPE sglang:h histogram\nsglang:h_bucket{le="foo"} 1',
    '# TYPE sglang:h histogram\nsglang:h_bucket{le="1e400"} 1',
    '# TYPE sglang:h summary\nsglang:h{quantile="foo"} 1',
    '# TYPE sglang:a histogram\nsglang:a_bucket{le="1"} 1\n# TYPE sglang:a_bucket counter\nsglang:a_bucket{le="2"} 2',
)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="sglang_tuning_exporter")  # other tests of this process read the log


def page(line: str) -> str:
    return f"sglang:before 1\n{line}\nsglang:after 2\n"


def exported(text: str, name: str = "m") -> bytes:
    """The answer of an exporter that has read this page of a server of this name."""
    sidecar = Sidecar(settings(log_file=(f"/nowhere/{name.replace(chr(0), '')}.log",)))
    info = parse_server_info(json.dumps({"model_path": name, "served_model_name": name, "version": name}))
    assert info is not None
    sidecar.watch.take_facts(info)
    scrape, native, *_ = PageReader().read(text)
    sidecar.watch.take_page(scrape, sidecar.now())
    return (text_format(collect(sidecar)) + native).encode()


def refused(pages: Sequence[bytes], folder: Path) -> set[int]:
    """Scrape each page with a real Prometheus, and read it with promtool, which has another parser; give those that one
    refuses.
    """
    url, found = f"http://{LOOPBACK}:{free_port()}", dict[int, str]()

    def all_scraped() -> bool:
        targets = requests.get(f"{url}/api/v1/targets?state=active", timeout=30).json()["data"]["activeTargets"]
        found.update({int(each["scrapePool"]): f"{each['health']} {each['lastError']}" for each in targets})
        # A busy machine: the page did not get there in time, and is scraped again.
        return len(found) == len(pages) and not any(re.match("unknown|down Get ", said) for said in found.values())

    with answering(lambda path: pages[int(path[1:])]) as served:
        targets = [{"targets": [served.removeprefix("http://")]}]
        jobs = [{"job_name": str(n), "metrics_path": f"/{n}", "static_configs": targets} for n in range(len(pages))]
        every = {"scrape_interval": "5s", "scrape_timeout": "5s"}
        (folder / "prometheus.yml").write_text(yaml.safe_dump({"global": every, "scrape_configs": jobs}))
        flags = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
        command = [str(program("prometheus")), *flags, f"--web.listen-address={url.removeprefix('http://')}"]
        prometheus = Process("prometheus", command, folder / "prometheus.log")
        try:
            prometheus.wait_until_ready(f"{url}/-/ready")
            wait_for(all_scraped, 120)
        finally:
            prometheus.stop()
    by_promtool = {
        place
        for place, each in enumerate(pages)
        if "error while linting" in promtool("check", "metrics", given=each.decode()).words
    }
    return {place for place, said in found.items() if said.startswith("down")} | by_promtool


def test_lines_found_by_fuzzing_are_refused_as_they_are_but_not_as_passed_on(tmp_path: Path) -> None:
    passed = [exposition.passthrough(exposition.scan(page(line)))[0] for line in FOUND]
    assert all("sglang:before 1\n" in each and "sglang:after 2\n" in each for each in passed)
    pages = [page(line).encode() for line in FOUND] + [each.encode() for each in passed]
    assert refused(pages, tmp_path) == set(range(len(FOUND)))


def test_no_odd_number_label_line_or_name_blinds_prometheus(tmp_path: Path) -> None:
    dice = random.Random(17)
    texts = [page("\n".join(dice.sample(LINES, 6))) for _ in range(40)]
    pages = [exported(page(line)) for line in LINES] + [exported(text, dice.choice(TEXTS)) for text in texts]
    for each in pages:
        assert list(text_string_to_metric_families(each.decode()))
    assert [pages[place] for place in refused(pages, tmp_path)] == []


@pytest.mark.parametrize("figure", ["1e400", "-1e999", "9" * 400])
def test_a_figure_beyond_any_float_is_left_out_and_counted(figure: str) -> None:
    reader = PageReader()
    assert reader.read(page("sglang:x 1"))[1] == page("sglang:x 1")
    _, native, dropped = reader.read(page(f"sglang:x {figure}"))
    assert (native, dropped["refused_metric_lines"]) == ("sglang:before 1\nsglang:after 2\n", 1)
    assert reader.read(page("sglang:x 3"))[1] == page("sglang:x 3")


@pytest.mark.parametrize(
    ("line", "left_out"),
    [
        ("sglang:x 1e400", 1),
        ('sglang:x{__name__="y"} 1', 1),
        ('{"sglang:x.y"} 1', 1),
        ("sglang:x 1\nsglang:x 2", 1),
        ('sglang:x{a="1",b="2"} 1\nsglang:x{b="2",a="1",c=""} 2', 1),
        ('sglang:x 1 # {trace="a"} 1', 0),
        ("process_x 1", 0),
        ("# any remark\n\n  \t\n#\n", 0),
    ],
)
def test_lines_left_out_because_prometheus_would_refuse_them_are_counted(line: str, left_out: int) -> None:
    for _ in range(2):
        assert PageReader().read(page(line))[2]["refused_metric_lines"] == left_out


@pytest.mark.parametrize(
    ("printed", "passed"),
    [("-nan", "NaN"), ("+NaN", "NaN"), ("infinity", "+Inf"), ("-Infinity", "-Inf"), ("inf", "+Inf"), ("1.50", "1.50")],
)
def test_nan_and_infinity_are_passed_on_in_one_spelling(printed: str, passed: str) -> None:
    assert exposition.passthrough(exposition.scan(f"sglang:x {printed}\n"))[0] == f"sglang:x {passed}\n"
