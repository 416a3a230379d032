"""How and when a fault was reported: Prometheus's series and Alertmanager's messages as seconds from the fault and from the repair. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from closed_loop.faults import DOWN, Fault

Series = Sequence[tuple[float, float]]  # (unix seconds, value)
# What a line of each kind begins with after its prefix: patterns of this module's own, so that the exporter is no witness of itself.
_LINES = {
    "decode": re.compile(r"^\[[^\]]*\] Decode batch"),
    "prefill": re.compile(r"^\[[^\]]*\] Prefill batch"),
    "retraction": re.compile(r"^\[[^\]]*\] .{0,40}KV cache pool is full\. Retract requests"),
    "start": re.compile(r"^\[[^\]]*\] server_args="),
}
KINDS = tuple(_LINES)


@dataclass(slots=True)
class FaultRecords:
    """All records of one fault. Times are unix seconds.

    Samples lie `step` seconds apart. `messages` are (time, webhook message). `counted` are the exporter's figures by the names of `KINDS`, `written` those
    of the log, `in_files` those of the log's files as they lie after rotation.
    """

    fault_at: float
    repair_at: float
    ready_at: float
    step: float = 1.0
    up: Series = ()
    firing: Mapping[str, Series] = field(default_factory=dict)
    events: Mapping[str, Series] = field(default_factory=dict)
    reasons: Mapping[str, Series] = field(default_factory=dict)
    starts: Series = ()
    messages: Sequence[tuple[float, Any]] = ()
    counted: Mapping[str, int] = field(default_factory=dict)
    written: Mapping[str, int] = field(default_factory=dict)
    in_files: Mapping[str, int] = field(default_factory=dict)


def count_lines(text: Iterable[str]) -> dict[str, int]:
    """Count the lines of each kind."""
    found = Counter(kind for line in text for kind, pattern in _LINES.items() if pattern.match(line))
    return {kind: found[kind] for kind in KINDS}


def first(series: Series, value: float, since: float) -> float | None:
    """Return the time of the first sample at or after `since` that has this value."""
    return next((at for at, data in series if at >= since and data == value), None)


def grew(series: Series, since: float) -> float | None:
    """Return the time of the first sample at or after `since` that is larger than the last one before; a counter begins at 0."""
    before = max((data for at, data in series if at < since), default=0.0)
    return next((at for at, data in series if at >= since and data > before), None)


def notified(messages: Iterable[tuple[float, Any]], alert: str, status: str, since: float) -> float | None:
    """Return the time of the first message with this state of an alert."""
    for at, message in messages:
        for each in message.get("alerts", ()):
            if at >= since and each["status"] == status and each["labels"]["alertname"] == alert:
                return at
    return None


def judged(fault: Fault, data: FaultRecords) -> dict[str, Any]:
    """Return seconds, counts and every deviation from the table of faults, as plain JSON."""
    down_at = first(data.up, 0.0, data.fault_at)
    fired = {name: at for name, series in data.firing.items() if (at := _begin(series, data.fault_at)) is not None}
    seconds: dict[str, float | None] = {"up_0": _after(down_at, data.fault_at)}
    counted_events = {name: grew(series, data.fault_at) for name, series in data.events.items()}
    after_repair: dict[str, float | None] = {"ready": _after(data.ready_at, data.repair_at)}
    if down_at is not None:
        after_repair["up_1"] = _after(first(data.up, 1.0, data.repair_at), data.repair_at)
    if fault.alert:
        seconds["firing"] = _after(fired.get(fault.alert), data.fault_at)
        seconds["webhook"] = _after(notified(data.messages, fault.alert, "firing", data.fault_at), data.fault_at)
        after_repair["not_firing"] = _after(_end(data.firing.get(fault.alert, ()), data.repair_at), data.repair_at)
        resolved = notified(data.messages, fault.alert, "resolved", data.repair_at)
        after_repair["resolved_webhook"] = _after(resolved, data.repair_at)
    starts = int(max((v for _, v in data.starts), default=0) - _before(data.starts, data.fault_at, fault))
    verdict = {
        "fault": fault.id,
        "alert": fault.alert,
        "step": data.step,
        "seconds": seconds,
        "events": {name: _after(at, data.fault_at) for name, at in counted_events.items() if at is not None},
        "reasons": sorted(
            name for name, series in data.reasons.items() if any(at >= data.fault_at for at, _ in series)
        ),
        "starts": starts,
        "after_repair": after_repair,
        "others": {n: _after(at, data.fault_at) for n, at in fired.items() if n != fault.alert},
        "lines": {
            kind: {"written": data.written[kind], "in_files": data.in_files.get(kind), "counted": data.counted[kind]}
            for kind in data.counted
        },
    }
    return {**verdict, "problems": _problems(fault, verdict)}


def _problems(fault: Fault, verdict: Mapping[str, Any]) -> list[str]:
    """Return every deviation from the table of faults."""
    seconds, after_repair, events = verdict["seconds"], verdict["after_repair"], verdict["events"]
    found = [f"{name} fired" for name in verdict["others"] if name not in fault.may_fire()]
    found += [f"no {name}" for name, value in {**seconds, **after_repair}.items() if value is None and name != "up_0"]
    if fault.alert == DOWN and seconds["up_0"] is None:
        found.append("sglang_tuning_up stayed 1")
    resolved, back = after_repair.get("resolved_webhook"), after_repair.get("up_1")
    if resolved is not None and back is not None and resolved < back - verdict["step"]:
        found.append(f"resolved {back - resolved:.0f} s before it answered")
    if fault.events and not any(name in events for name in fault.events):
        found.append(f"none of {', '.join(fault.events)} was counted")
    if verdict["starts"] != fault.starts:
        found.append(f"{verdict['starts']} starts counted, {fault.starts} were made")
    lines = verdict["lines"].items()
    found += [f"{k}: {n['counted']} counted, {n['written']} written" for k, n in lines if n["counted"] != n["written"]]
    return found


def _before(series: Series, since: float, fault: Fault) -> float:
    """Return a counter's value when the fault began, including a young server's start."""
    return 0.0 if fault.young else max((v for at, v in series if at < since), default=0.0)


def _begin(series: Series, since: float) -> float | None:
    return next((at for at, _ in series if at >= since), None)


def _end(series: Series, since: float) -> float | None:
    """Return the time of the last sample of an alert that fires, which is its end when it has ended."""
    last = max((at for at, _ in series), default=None)
    return None if last is None else max(last, since)


def _after(at: float | None, since: float) -> float | None:
    return None if at is None else round(at - since, 1)
