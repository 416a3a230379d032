"""Faults of a real server, one after the other, and how exporter, Prometheus and Alertmanager report each.

Each fault has its own Prometheus, without data of the fault before. The server runs on from fault to fault while it lives.
`time_scale` divides every duration of the rules and of Alertmanager's grouping, as it does in
the demo; the exporter's own clocks (60 seconds without a token make a scheduler stuck) stay as they are.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import requests
from prometheus_client.parser import text_string_to_metric_families

from closed_loop import timeline
from closed_loop.faults import FAULTS, LOOP, Fault
from closed_loop.host import Host
from closed_loop.installation import RELEASES, Installation
from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.recordings.stack import Stack

PORT = 32000
STEADY_SECONDS = 10.0  # of requests, before anything happens
QUIET_SECONDS = (
    390.0  # after a repair that nothing may fire for: longer than any `for` of the rules, divided by the scale
)
TRUE_INTERVAL = "15s"  # what the committed prometheus.yml scrapes at


def run(
    installation: Installation,
    results: Path,
    *,
    faults: Sequence[Fault] = FAULTS,
    time_scale: float = 10.0,
    port: int = PORT,
    core: int | None = None,
    again: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Run every fault that has no result yet, and write each result as JSON. Raises `UsageError` if a server does not start."""
    folder = results / "liveness" / f"{installation.version}-x{time_scale:g}"
    folder.mkdir(parents=True, exist_ok=True)
    table_of = [fault.of_release(installation.version) for fault in faults]
    for storm in (False, True):
        rows = [f for f in table_of if f.storm is storm and (again or not (folder / f"{f.id}.json").exists())]
        if not rows:
            continue
        with tempfile.TemporaryDirectory(prefix="closed-loop-") as scratch:
            host = Host(installation, port=port, core=core, folder=Path(scratch) / "host", storm=storm)
            try:
                for fault in rows:
                    say(f"{installation.version} x{time_scale:g} {fault.id}")
                    outcome = one(fault, host, Path(scratch) / fault.id, time_scale, say)
                    outcome.update(version=installation.version, time_scale=time_scale)
                    (folder / f"{fault.id}.json").write_text(json.dumps(outcome, indent=1) + "\n", encoding="utf-8")
                    say(
                        f"  {json.dumps(outcome['seconds'])} {json.dumps(outcome['after_repair'])} {outcome['problems'] or 'as it must be'}"
                    )
            finally:
                host.close()
                if keep := os.environ.get("CLOSED_LOOP_KEEP_LOG"):
                    shutil.copytree(
                        host.folder,
                        Path(keep) / f"{installation.version}-{'storm' if storm else 'steady'}-{time.time():.0f}",
                    )
    return [
        outcome
        for outcome in collected(results)
        if (outcome["version"], outcome["time_scale"]) == (installation.version, time_scale)
    ]


def collected(results: Path) -> list[dict[str, Any]]:
    """Return every result: newest release first, true clocks first, in the order of the table."""
    return ordered(json.loads(path.read_text(encoding="utf-8")) for path in (results / "liveness").glob("*/*.json"))


def ordered(found: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return results in the order of the table; of two for one fault, the later one."""
    places = {fault.id: place for place, fault in enumerate(FAULTS)}
    newest = {(outcome["version"], outcome["time_scale"], outcome["fault"]): outcome for outcome in found}
    return sorted(newest.values(), key=lambda t: (RELEASES.index(t["version"]), t["time_scale"], places[t["fault"]]))


def one(
    fault: Fault, host: Host, folder: Path, time_scale: float, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Run one fault with a new Prometheus; the server serves afterwards."""
    folder.mkdir(parents=True)
    if fault.young:
        host.close()
    elif not host.serves:
        host.start()
    time.sleep(3)  # a start's own request
    messages: list[tuple[float, Any]] = []
    stack = Stack(
        folder,
        sglang_url=host.url,
        log_file=host.log,
        profile="online",
        time_scale=time_scale,
        scrape_interval=TRUE_INTERVAL if time_scale == 1 else "1s",
        on_message=lambda message: messages.append((time.time(), message)),
    )
    stack.start()
    try:
        read_from, before, begun = host.witness.stat().st_size, timeline.count_lines(_lines(host.files())), time.time()
        fault_at, repair_at, ready_at = _live(fault, host, stack, messages, time_scale)
        say(f"  repaired after {repair_at - fault_at:.0f} s, serves {ready_at - repair_at:.0f} s later")
        host.pause()
        time.sleep(2.0)
        in_files = timeline.count_lines(_lines(host.files()))
        outcome = timeline.FaultRecords(
            fault_at=fault_at,
            repair_at=repair_at,
            ready_at=ready_at,
            step=15.0 if time_scale == 1 else 1.0,
            messages=messages,
            counted=_counted(stack),
            written=timeline.count_lines(_tail(host.witness, read_from)),
            # A log that was begun anew has lost its lines, and was meant to.
            in_files={} if "start_anew" in fault.ends else {kind: in_files[kind] - before[kind] for kind in in_files},
            **_series(stack, begun, time.time(), 15 if time_scale == 1 else 1),
        )
    except TimeoutError as error:
        raise UsageError(f"{fault.id}: {error}") from None
    finally:
        host.pause()
        stack.stop()
    return timeline.judged(fault, outcome)


def _live(
    fault: Fault, host: Host, stack: Stack, messages: list[tuple[float, Any]], time_scale: float
) -> tuple[float, float, float]:
    """Run the fault, wait for its alert, repair it; return the times of the fault, the repair and the first answer."""
    if fault.young:
        host.start()
    host.send()
    time.sleep(STEADY_SECONDS * (3 if time_scale == 1 else 1))
    _wait(lambda: _up(stack) == 1, 60, "the exporter did not see the server up")
    fault_at = time.time()
    for step in fault.begins:
        if step in {"start_in_vain", "start_without_model"} and fault.alert != LOOP:
            fault_at = time.time()  # the stop before it is no fault
        getattr(host, step)()
    if fault.alert:
        with suppress(TimeoutError):  # a missing alert is part of the result
            _wait(
                lambda: timeline.notified(messages, fault.alert, "firing", fault_at) is not None,
                30 * 60 / time_scale + 120,
                fault.alert,
            )
    repair_at = time.time()
    for step in fault.ends:
        getattr(host, step)()
    if host.traffic is None:
        host.send()
    _wait(lambda: host.serves, 300, "the server did not serve after its repair")
    ready_at = time.time()
    if not fault.alert:
        time.sleep(QUIET_SECONDS / time_scale)
        return fault_at, repair_at, ready_at
    with suppress(TimeoutError):
        _wait(
            lambda: timeline.notified(messages, fault.alert, "resolved", repair_at) is not None,
            (45 if fault.alert == LOOP else 12) * 60 / time_scale + 120,
            "resolved",
        )
    time.sleep(5.0)
    return fault_at, repair_at, ready_at


def _series(stack: Stack, begin: float, end: float, step: int) -> dict[str, Any]:
    def asked(expression: str) -> list[dict[str, Any]]:
        answer = stack.get(
            f"{stack.prometheus_url}/api/v1/query_range",
            query=expression,
            start=f"{begin:.3f}",
            end=f"{end:.3f}",
            step=str(step),
        )
        return list(answer["data"]["result"])

    def by(expression: str, label: str) -> dict[str, timeline.Series]:
        return {each["metric"].get(label, ""): _points(each) for each in asked(expression)}

    return {
        "up": by("sglang_tuning_up", "")[""],
        "firing": by('max by (alertname) (ALERTS{alertstate="firing"})', "alertname"),
        "events": by("sum by (event) (sglang_tuning_liveness_events_total)", "event"),
        "reasons": by("sglang_tuning_scrape_error_info == 1", "reason"),
        "starts": by("sglang_tuning_server_starts_total", "").get("", ()),
    }


def _points(series: dict[str, Any]) -> timeline.Series:
    return [(float(at), float(value)) for at, value in series["values"]]


def _counted(stack: Stack) -> dict[str, int]:
    """Return the exporter's counts: lines of each kind, or events of retractions."""
    found = dict.fromkeys(("decode", "prefill", "retraction"), 0)
    for family in text_string_to_metric_families(stack.page()):
        for sample in family.samples:
            if sample.name == "sglang_tuning_log_lines_total" and sample.labels["kind"] in {"decode", "prefill"}:
                found[sample.labels["kind"]] += int(sample.value)
            elif sample.name == "sglang_tuning_retraction_events_total":
                found["retraction"] += int(sample.value)
    return found


def _up(stack: Stack) -> float | None:
    with suppress(requests.RequestException, KeyError, ValueError):
        found = stack.query("sglang_tuning_up")
        return float(found[0]["value"][1]) if found else None
    return None


def _wait(holds: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.25)


def _lines(paths: Iterable[Path]) -> list[str]:
    return [line for path in paths for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]


def _tail(path: Path, begin: int) -> list[str]:
    with path.open("rb") as file:
        file.seek(begin)
        return file.read().decode("utf-8", "replace").splitlines()


def table(outcome: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return results as a Markdown table: seconds, and lines counted of lines written."""
    shown = [
        "| release | clocks | fault | alert | up 0 | fires | notified | serves again | resolved | notified | lines counted of written |",
        "|---|---|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    titles = {fault.id: fault.title for fault in FAULTS}
    for each in outcome:
        seconds, after = each["seconds"], each["after_repair"]
        clocks = "true" if each["time_scale"] == 1 else f"{each['time_scale']:g} times as fast"
        figures = [seconds.get(name) for name in ("up_0", "firing", "webhook")]
        figures += [after.get(name) for name in ("ready", "not_firing", "resolved_webhook")]
        lines = each["lines"]
        written, counted = (sum(lines[kind][which] for kind in lines) for which in ("written", "counted"))
        words = [each["version"], clocks, titles[each["fault"]], each["alert"] or "nothing"]
        words += ["" if figure is None else f"{figure:.0f}" for figure in figures]
        ending = f"{counted:,} of {written:,}" + "".join(f"; {problem}" for problem in each["problems"])
        shown.append(f"| {' | '.join(words)} | {ending} |")
    return shown
