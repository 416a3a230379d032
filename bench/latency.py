"""The delay of figures through the exporter: a scrape beside SGLang's own page, and a log line beside mtail."""

from __future__ import annotations

import random
import re
import time
from typing import TYPE_CHECKING

from bench import processes, server
from bench.table import Table, quantile, verdict

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

REQUESTS = 300
LINES = 100
MOST_ADDED_MS = 10.0
MOST_LINE_MS = 300.0
RANKS = (1, 8)
RETRACTION = (
    "[2025-11-20 11:40:10] KV cache pool is full. Retract requests. "
    "#retracted_reqs: 5, #new_tokens_gained: {}, #new_token_ratio: 0.3002 -> 0.5783\n"
)
_OURS = re.compile(rb"^sglang_tuning_retraction_events_total (\S+)$", re.MULTILINE)
_MTAIL = re.compile(rb"^retraction_events_total(?:\{[^\n]*\})? (\S+)", re.MULTILINE)


def scrapes(directory: Path) -> Table:
    """Scrape an imitated SGLang and the exporter in turn."""
    table = Table(
        "What a scrape through the sidecar adds",
        f"{REQUESTS} requests to a stand-in for SGLang that answers with a recorded page at a constant cost, and {REQUESTS} to our `/metrics`, "
        "which asks it and passes its page on behind our own figures; in turn, one at a time, a connection each. "
        "The page of 8 ranks is the recorded one with each "
        "scheduler's series once for every rank.",
        [
            "page",
            "samples, size",
            "direct p50",
            "p99",
            "through us p50",
            "p99",
            "added p50",
            "ratio",
            f"aim: {MOST_ADDED_MS:.0f} ms",
        ],
    )
    for ranks in RANKS:
        with server.running(ranks) as url, processes.exporter(url, directory / f"scrapes-{ranks}.log") as ours:
            text = processes.page(url)
            for _ in range(20):
                processes.page(ours.url)
            direct, through = [], []
            for _ in range(REQUESTS):
                direct.append(_milliseconds(lambda: processes.page(url)))
                through.append(_milliseconds(lambda: processes.page(ours.url)))
        own, theirs = quantile(through, 0.5), quantile(direct, 0.5)
        samples = sum(not line.startswith(b"#") for line in text.splitlines())
        table.rows.append(
            [
                f"{ranks} rank{'s' * (ranks > 1)}",
                f"{samples:,}, {len(text) / 1e6:.2f} MB",
                *(f"{quantile(figures, share):.1f} ms" for figures in (direct, through) for share in (0.5, 0.99)),
                f"{own - theirs:.1f} ms",
                f"{own / theirs:.1f}x",
                verdict(own - theirs, MOST_ADDED_MS),
            ]
        )
    table.notes.append(
        "SGLang itself takes longer for its page than the stand-in: it collects it from the files of its processes."
    )
    return table


def lines(directory: Path) -> Table:
    """Write a line and scrape until its counter has changed; mtail and the exporter in turn."""
    table = Table(
        "From a line of the log to `/metrics`",
        f"{LINES} retractions, each written after a pause of 0.2 to 0.5 s; `/metrics` is asked again and again until the counter has moved. "
        "Each has a log of its own, in turn, both with their defaults. `serve` reads no metrics here: beside them a retraction waits for the server's counter.",
        ["what", "p50", "p99", "against mtail (p50)", f"aim: p99 {MOST_LINE_MS:.0f} ms"],
    )
    logs = {"serve": directory / "lines-ours.log", "mtail": directory / "lines-mtail.log"}
    with processes.exporter(None, logs["serve"]) as ours, processes.mtail(logs["mtail"]) as peer:
        asked = {"serve": (ours, _OURS)} | ({"mtail": (peer, _MTAIL)} if peer is not None else {})
        taken: dict[str, list[float]] = {name: [] for name in asked}
        choose = random.Random(1)
        for number in range(LINES):
            for name, (running, counter) in asked.items():
                time.sleep(choose.uniform(0.2, 0.5))
                before = _counted(running.url, counter)
                line = RETRACTION.format(9000 + number)
                taken[name].append(_milliseconds(lambda: _await(logs[name], line, running.url, counter, before)))  # noqa: B023
    base = quantile(taken["mtail"], 0.5) if "mtail" in taken else None
    for name, figures in taken.items():
        half, most = quantile(figures, 0.5), quantile(figures, 0.99)
        ratio = f"{half / base:.2f}x" if base else "-"
        table.rows.append(
            [name, f"{half:.0f} ms", f"{most:.0f} ms", ratio, verdict(most, MOST_LINE_MS) if name == "serve" else ""]
        )
    table.notes.append(
        "A scrape has the log read before it answers, so what it shows is as old as the scrape, not as the last look at the log."
    )
    return table


def _await(log: Path, line: str, url: str, counter: re.Pattern[bytes], before: float) -> None:
    with log.open("a", encoding="utf-8") as file:
        file.write(line)
    deadline = time.monotonic() + 5
    while _counted(url, counter) <= before:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{line!r} never showed at {url}")


def _counted(url: str, counter: re.Pattern[bytes]) -> float:
    found = counter.search(processes.page(url))
    return float(found[1]) if found else 0.0


def _milliseconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - begin)
