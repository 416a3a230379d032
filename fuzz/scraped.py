"""Whole pages of the exporter, made from mutated pages and names of a server, read by Prometheus, promtool and prometheus_client.

If Prometheus refuses one line, it drops the whole page, and every rule is without data.
"""

from __future__ import annotations

import json
import random
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from fuzz import words
from fuzz.prometheus import Prometheus, prometheus, unreadable
from fuzz.promtool import PRESENT
from fuzz.sidecars import settings
from fuzz.targets import TARGETS
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.recordings.stack import program
from sglang_tuning_exporter.serve.metrics import collect
from sglang_tuning_exporter.serve.metrics.families import text_format
from sglang_tuning_exporter.sglang.metrics import exposition
from sglang_tuning_exporter.sglang.metrics.page_cache import PageReader
from sglang_tuning_exporter.sglang.server_info import parse_server_info

BATCH = 400
FAILURE = Path("build/fuzz/scraped.prom")
_FIGURE = re.compile(r" [0-9]+(?:\.[0-9]*)?$", re.MULTILINE)
NUMBERS = (
    "1e400", "-1e999", "9" * 4000, "0." + "0" * 900 + "1", "+NaN", "-nan", "nan", "NAN", "infinity", "-Infinity", "+inf", "INF", "1.", ".5", "0x10", "1_0",
    "1e-400", "+1", "-0", "1e5 1e3", "1 1763638815000", "1 " + "9" * 30, "1.2.3", "", '1 # {a="b"} 1', "1\r", "\t1", "1\x00", "٣", "0b1", "1e",
    "1f", "1p3", "e5", "+",
)  # fmt: skip
LABELS = (
    '__name__="y"', '__a="y"', '__address__="y"', 'job="a"', 'a=""', 'le="foo"', 'le="1e400"', 'le="+Inf"', 'le="1.0"', 'le="NaN"', 'le=""', 'quantile="foo"',
    'quantile="2"', 'a="b",a="c"', 'b="1",a="2"', "", ",", 'a="b",', '"a.b"="c"', 'é="1"', 'a="é"', 'a="\x01\x1b"', 'a="\u2028\u202e"', 'a="\ufffe"',
    'a="\r"', 'a="\\t"', 'a="\\n\\\\\\""', 'a="}"', 'a="\x00"', 'a = "b"', "a=b", 'a="b" c="d"', 'a="' + "z" * 600 + '"', ':="1"', '0="1"', 'instance="x"',
)  # fmt: skip
LINES = (
    '{"sglang:x"} 1', '{"sglang:x",a="b"} 1', "sglang:é 1", "sglang: 1", "sglang:x:y 1", "#sglang", "# TYPE", "# HELP", "# EOF", "# UNIT sglang:x s",
    "sglang:x", "sglang:x{", 'sglang:x{a="', "sglang:x 1 2 3", "\t", "\r", "\x0b", "sglang:" + "x" * 900 + " 1", "sglang_tuning_up 3", "process_x 1",
)  # fmt: skip
TYPES = (*exposition.TYPES, "gaugehistogram", "banana", "", "gauge extra", "GAUGE")
SUFFIXES = ("", "_bucket", "_sum", "_count", "_total", "_created", "_info", "_gsum", "_bucket_bucket")
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


def spoiled_page(rng: random.Random, seeds: Sequence[str]) -> str:
    """Make a page of a server from real lines and from invalid ones."""
    lines = rng.choice(seeds).splitlines()
    bases = ["sglang:h", "sglang:c", "sglang_c", "sglang:h_bucket", "sglang:x"]
    for _ in range(rng.randrange(1, 12)):
        name = rng.choice(bases) + rng.choice(SUFFIXES)
        labels = ",".join(rng.sample(LABELS, rng.randrange(3)))
        made = (
            f"{name}{{{labels}}} {rng.choice((*NUMBERS, '1', '2'))}",
            f"{name}{{{labels}}} {rng.randrange(9)}",
            f"{name} {rng.randrange(9)}",
            f"# TYPE {rng.choice(bases)} {rng.choice(TYPES)}",
            f"# TYPE {name} {rng.choice(TYPES)}",
            f"# HELP {name} {rng.choice(TEXTS)}",
            rng.choice(LINES),
            rng.choice(lines) if lines else "",
        )
        lines.insert(rng.randrange(len(lines) + 1), rng.choice(made))
    return "\n".join(lines) + rng.choice(("\n", "", "\n\n"))


def exported(rng: random.Random, pages: Sequence[str]) -> bytes:
    """The answer of an exporter that has read these pages of one server in turn, and hostile names."""
    name = rng.choice(TEXTS)
    sidecar = Sidecar(settings(log_file=(f"/nowhere/{name.replace(chr(0), '')}.log",)))
    info = parse_server_info(json.dumps({"model_path": name, "served_model_name": name, "version": rng.choice(TEXTS)}))
    if info is not None:
        sidecar.watch.inform(info)
    reader, native = PageReader(), ""
    for page in pages:
        scrape, native, _ = reader.read(exposition.bounded(page).text)
        sidecar.watch.scrape(scrape, sidecar.now())
    return (text_format(collect(sidecar)) + native).encode()


def _refused_by_the_client(page: bytes) -> str:
    try:
        list(text_string_to_metric_families(page.decode()))
    except Exception as error:  # noqa: BLE001 - that parser raises many things
        return f"prometheus_client: {error!r}"
    return ""


def refused(rng: random.Random, count: int, running: Prometheus) -> list[tuple[bytes, str]]:
    """Make `count` pages and give those that one of the readers refuses, with its message."""
    seeds = [seed.decode() for seed in TARGETS["exposition"].seeds() if words.PART not in seed]
    pages = []
    for _ in range(count):
        first = spoiled_page(rng, seeds)
        # The second page of the same server differs in figures only, and is read with the cached line structure.
        second = _FIGURE.sub(lambda _: " " + rng.choice((*NUMBERS[:3], "7", "+Inf")), first)
        pages.append(exported(rng, rng.choice(([first], [first, second], [first, first]))))
    refusals = {place: said for place, page in enumerate(pages) if (said := _refused_by_the_client(page))}
    refusals |= {place: f"promtool: {said}" for place, said in unreadable(pages).items()}
    refusals |= {place: f"Prometheus: {said}" for place, said in running.refused(pages).items()}
    return [(pages[place], said) for place, said in sorted(refusals.items())]


def run(seconds: float, seed: int) -> int:
    """Try pages until the time is over. Returns the exit status."""
    if program("prometheus") is None or not PRESENT:
        print("scraped: prometheus and promtool are not installed: left out", file=sys.stderr)
        return 0
    rng, done, begin = random.Random(seed), 0, time.monotonic()
    with prometheus() as running:
        while time.monotonic() - begin < seconds:
            for page, said in refused(rng, BATCH, running):
                FAILURE.parent.mkdir(parents=True, exist_ok=True)
                FAILURE.write_bytes(page)
                print(f"scraped: {said}; seed {seed}; the page is {FAILURE}", file=sys.stderr)
                return 1
            done += BATCH
    print(
        f"scraped: {done} pages read by Prometheus, promtool and prometheus_client, {time.monotonic() - begin:.0f} s, nothing found, seed {seed}"
    )
    return 0
