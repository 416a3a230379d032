"""The exporter while it runs, beside its peers: memory and CPU at rest, what a scrape through it adds, from a line to
`/metrics`, and to the webhook.
"""

from __future__ import annotations

import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

from bench import processes, server
from bench.processes import Running, wait_for
from bench.table import Table, quantile, verdict
from sglang_tuning_exporter.recordings.demo import Stack, program

SECONDS = 75
INTERVAL = 15
WARM_UP = 10  # scrapes before the measurement, so that caches are filled
MOST_MB, MOST_PERCENT = 55.0, 0.2
ACCESS = b'[2026-01-01 00:00:00] INFO:     127.0.0.1:40000 - "GET /metrics HTTP/1.1" 200 OK\n'


def at_rest(directory: Path) -> Table:
    """Return memory and CPU of idle programs over `SECONDS`, scraped every `INTERVAL`."""
    table = Table(
        "Memory and CPU at rest",
        "`serve` on a log and on a server's `/metrics`, mtail on the same log, and Debian's exporter of machine"
        f" metrics, side by side for {SECONDS} s, each scraped every {INTERVAL} s after {WARM_UP} scrapes at once; the"
        " server logs each scrape, as SGLang does. RSS at the end; CPU is the share of one core, user and system, of"
        " all threads.",
        ["what", "RSS", "against the last", "CPU", "against the last", f"aims: {MOST_MB:.0f} MB, {MOST_PERCENT} %"],
    )
    with ExitStack() as stack:
        logs, running = _start(stack, directory)
        for each in running.values():
            for _ in range(WARM_UP):
                each.get()
        before = {name: each.cpu for name, each in running.items()}
        for _ in range(SECONDS // INTERVAL):
            time.sleep(INTERVAL - 1)
            for each in running.values():
                each.get()
            for log in logs:
                with log.open("ab") as file:
                    file.write(ACCESS)
            time.sleep(1)
        used = {
            name: (each.memory_kib() / 2**10, 100 * (each.cpu - before[name]) / SECONDS)
            for name, each in running.items()
        }
    last = list(used.values())[-1]
    for name, (megabytes, percent) in used.items():
        ours = name.startswith("serve")
        aims = f"{verdict(megabytes, MOST_MB)}, {verdict(percent, MOST_PERCENT)}" if ours else ""
        ratios = [f"{megabytes / last[0]:.1f}x", f"{percent / last[1]:.1f}x" if last[1] else "-"]
        table.rows.append([name, f"{megabytes:.1f} MB", ratios[0], f"{percent:.2f} %", ratios[1], aims])
    table.notes.append(
        f"mtail {processes.version('mtail')}, node exporter {processes.version('prometheus-node-exporter')}. Both are"
        " Go programs; of our memory an interpreter, OpenSSL, FastAPI and Pydantic take most before a line of ours"
        " runs."
    )
    table.notes.append(_start_time())
    return table


def _start(stack: ExitStack, directory: Path) -> tuple[list[Path], dict[str, Running]]:
    logs, running = list[Path](), dict[str, Running]()
    for ranks in RANKS:
        log = directory / f"idle-{ranks}.log"
        logs.append(log)
        url = stack.enter_context(server.running(ranks))
        running[f"serve, {ranks} rank{'s' * (ranks > 1)}"] = stack.enter_context(processes.exporter(url, log))
    peers = {"mtail": processes.mtail(logs[0]), "node exporter": processes.node_exporter()}
    for name, peer in peers.items():
        found = stack.enter_context(peer)
        if found is not None:
            running[name] = found
    return logs, running


def _start_time() -> str:
    """Return how long `--help` takes, beside an interpreter that does nothing."""
    taken: dict[str, list[float]] = {"-m sglang_tuning_exporter --help": [], "-c pass": []}
    for _ in range(7):
        for arguments, seconds in taken.items():
            begin = time.perf_counter()
            subprocess.run([sys.executable, *arguments.split()], check=True, stdout=subprocess.DEVNULL)
            seconds.append(time.perf_counter() - begin)
    helped, bare = (statistics.median(seconds) for seconds in taken.values())
    return f"`--help` takes {helped:.2f} s, `python -c pass` {bare:.2f} s (median of 7, in turn)."


# Scrapes and lines

REQUESTS = 300
LINES = 100
MOST_LINE_MS = 300.0
RANKS = {1: 5.0, 8: 8.0}  # ranks, and the milliseconds that a scrape through us may add
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
        f"{REQUESTS} requests to a stand-in for SGLang that answers with a recorded page at a constant cost, and"
        f" {REQUESTS} to our `/metrics`, which asks it and passes its page on behind our own figures; in turn, one at a"
        " time, a connection each. The page of 8 ranks is the recorded one with each scheduler's series once for every"
        " rank.",
        [
            "page",
            "samples, size",
            "direct p50",
            "p99",
            "through us p50",
            "p99",
            "added p50",
            "ratio",
            "aims: " + ", ".join(f"{most:.0f} ms" for most in RANKS.values()),
        ],
    )
    for ranks, most in RANKS.items():
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
                verdict(own - theirs, most),
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
        f"{LINES} retractions, each written after a pause of 0.2 to 0.5 s; `/metrics` is asked again and again until"
        " the counter has moved. Each has a log of its own, in turn, both with their defaults. `serve` reads no"
        " metrics here: beside them a retraction waits for the server's counter.",
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
        "A scrape has the log read before it answers, so what it shows is as old as the scrape, not as the last look at"
        " the log."
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


# Notifications

TRIALS = 6
TIME_SCALE = 60.0
EVALUATED = "1s"
ALERT = "SGLangOutOfMemoryDecode"
MINIMAL = "Minimal"
TIMEOUT_SECONDS = 60.0
# What SGLang prints when memory runs out while it generates; the alert looks back ten minutes and has no `for`.
FAILURE = """\
[2025-11-20 11:30:{:02} TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "/srv/sglang/managers/scheduler.py", line 2111, in run_scheduler_process
    scheduler.event_loop_overlap()
  File "/srv/sglang/managers/schedule_batch.py", line 1100, in prepare_for_decode
    self.out_cache_loc = self.alloc_token_slots(bs)
RuntimeError: Decode out of memory. Try to lower your batch size.
Try to allocate {} tokens.
"""


class _Minimal(Stack):
    """The shortest chain: the gauge instead of the exporter, and one rule; intervals and grouping are those of the real
    chain.
    """

    def __init__(self, directory: Path, url: str, **settings: Any) -> None:
        super().__init__(directory, sglang_url=None, log_file=None, profile="online", **settings)
        self.exporter_url = url
        self._folder = directory

    def _start_exporter(self) -> None:
        pass

    def _write_rules(self) -> None:
        super()._write_rules()
        rule = {"alert": MINIMAL, "expr": "condition > 0", "for": "0m", "labels": {"severity": "critical"}}
        rules = self._folder / "alerts" / "rules" / "sglang-tuning.rules.yml"
        rules.write_text(yaml.safe_dump({"groups": [{"name": "minimal", "rules": [rule]}]}), encoding="utf-8")
        path = self._folder / "alerts" / "alertmanager.yml"
        configuration = yaml.safe_load(path.read_text(encoding="utf-8"))
        kept = {key: configuration[key] for key in ("global", "route")} | {"receivers": configuration["receivers"][:1]}
        path.write_text(yaml.safe_dump(kept), encoding="utf-8")


def chains(directory: Path) -> Table:
    """Let both chains fire at the same time, several times."""
    table = Table(
        "From a condition to the webhook",
        "A traceback of an out-of-memory is written to the log; `serve` reads it, Prometheus scrapes and evaluates the"
        f" committed rules every {EVALUATED}, Alertmanager groups and posts. All durations of rules and grouping are"
        f" divided by {TIME_SCALE:.0f} (`generate --time-scale`), so its `group_wait` of 30 s is 0.5 s. Beside it a"
        " gauge on a static page is turned at the same moment: one rule, the same `for`, intervals and grouping, a"
        f" Prometheus and an Alertmanager of its own. {TRIALS} times, at random phases of the intervals.",
        ["chain", "median", "shortest", "longest", "against the shortest chain"],
    )
    if program("prometheus") is None or program("alertmanager") is None:
        table.notes.append("Prometheus or Alertmanager is not installed, so there is no figure.")
        return table
    taken = list(_trials(directory))
    base = statistics.median(each[1] for each in taken)
    for name, figures in (("ours", [each[0] for each in taken]), ("shortest", [each[1] for each in taken])):
        middle = statistics.median(figures)
        ratio = f"{middle - base:+.2f} s, {middle / base:.2f}x"
        table.rows.append([name, f"{middle:.2f} s", f"{min(figures):.2f} s", f"{max(figures):.2f} s", ratio])
    return table


def _trials(directory: Path) -> Iterator[tuple[float, float]]:
    """Return the seconds until each webhook received the alert, ours first.

    Each trial has programs of its own: a failure counts for ten minutes, and an alert that stands does not fire again.
    """
    choose = random.Random(1)
    for number in range(TRIALS):
        places = [directory / f"{name}-{number}" for name in ("ours", "shortest")]
        for place in places:
            place.mkdir()
        log, flag = directory / f"chain-{number}.log", [0]
        log.touch()
        heard: dict[str, float] = {}  # when a webhook received an alert

        def hear(message: Any, heard: dict[str, float] = heard) -> None:
            heard.update({each["labels"]["alertname"]: time.monotonic() for each in message["alerts"]})

        settings: dict[str, Any] = {"time_scale": TIME_SCALE, "scrape_interval": EVALUATED, "on_message": hear}
        with (
            server.answering(lambda _, flag=flag: b"# TYPE condition gauge\ncondition %d\n" % flag[0]) as url,  # type: ignore[misc]
            ExitStack() as running,
        ):
            real = Stack(places[0], sglang_url=None, log_file=log, profile="online", **settings)
            for chain in (real, _Minimal(places[1], url, **settings)):
                running.callback(chain.stop)
                chain.start()
            # Prometheus takes about five seconds to begin.
            wait_for(lambda real=real: bool(real.query("sglang_tuning_out_of_memory_total")), TIMEOUT_SECONDS)  # type: ignore[misc]
            time.sleep(2 + choose.uniform(0, 1))
            begin = time.monotonic()
            flag[0] = 1
            with log.open("a", encoding="utf-8") as file:
                file.write(FAILURE.format(number, 100 + number))
            wait_for(lambda heard=heard: {ALERT, MINIMAL} <= heard.keys(), TIMEOUT_SECONDS)  # type: ignore[misc]
            yield heard[ALERT] - begin, heard[MINIMAL] - begin
