"""The delay from a condition to the webhook: the whole chain beside the shortest one that Prometheus and Alertmanager allow."""

from __future__ import annotations

import random
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from bench import server
from bench.processes import wait_for
from bench.table import Table
from sglang_tuning_exporter.recordings.stack import Stack, program

if TYPE_CHECKING:
    from collections.abc import Iterator

TRIALS = 6
TIME_SCALE = 60.0
INTERVAL = "1s"
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
    """The shortest chain: the gauge instead of the exporter, and one rule; intervals and grouping are those of the real chain."""

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


def measure(directory: Path) -> Table:
    """Let both chains fire at the same time, several times."""
    table = Table(
        "From a condition to the webhook",
        f"A traceback of an out-of-memory is written to the log; `serve` reads it, Prometheus scrapes and evaluates the committed rules every "
        f"{INTERVAL}, Alertmanager groups and posts. All durations of rules and grouping are divided by {TIME_SCALE:.0f} (`generate "
        f"--time-scale`), so its `group_wait` of 30 s is 0.5 s. Beside it a gauge on a static page is turned at the same moment: one rule, the same `for`, "
        f"intervals and grouping, a Prometheus and an "
        f"Alertmanager of its own. {TRIALS} times, at random phases of the intervals.",
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

        settings: dict[str, Any] = {"time_scale": TIME_SCALE, "scrape_interval": INTERVAL, "on_message": hear}
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
