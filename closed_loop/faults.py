"""Faults of a server, and the alerts that must report them. Data.

`alert` is the only alert that must fire; where it is empty, none may. `ALWAYS` has the alerts of every server on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

DOWN, LOOP, STUCK = "SGLangServerDown", "SGLangRestartLoop", "SGLangSchedulerStuck"
OUT_OF_MEMORY = "SGLangOutOfMemory"  # what the starts that fail here fail with
# No graphs are captured on a CPU, and what SGLang prints as free GPU memory is the machine's.
ALWAYS = frozenset({"SGLangCudaGraphOff", "SGLangMemoryReserveTooLarge"})
# Requests that hung, or were put back, were late when they came.
WAITED = frozenset(
    {f"SGLang{what}Burning{pace}" for what in ("TimeToFirstToken", "InterTokenLatency") for pace in ("Fast", "Slow")}
)
# A storm of retractions is what makes the log worth counting.
STORM_ALERTS = WAITED | {"SGLangRetractingTooOften", "SGLangConservativenessIneffective", "SGLangQueueTooLong"}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `begins` and `ends` name methods of `host.Host`; the second is called after the alert.

    `events` are values of `event` in sglang_tuning_liveness_events_total, one of which must be counted; none where a
    release prints nothing of it. `starts` are the starts that must be counted, from the first line of the fault to its
    repair. With `storm` the load makes SGLang retract.
    """

    id: str
    title: str
    begins: tuple[str, ...]
    ends: tuple[str, ...]
    alert: str = ""
    events: tuple[str, ...] = ()
    starts: int = 0
    storm: bool = False
    young: bool = False  # the server has only just come up when it happens
    also: frozenset[str] = frozenset()  # may fire besides
    unnoticed: tuple[str, ...] = ()  # releases whose main process goes on as if nothing had happened

    def of_release(self, version: str) -> Fault:
        """Return the fault as a release shows it: where no check notices, only the missing progress is visible."""
        return replace(self, alert=STUCK, events=()) if version in self.unnoticed else self

    def may_fire(self) -> frozenset[str]:
        """Return every alert that may fire."""
        more = STORM_ALERTS if self.storm else frozenset()
        return ALWAYS | self.also | more | ({self.alert} if self.alert else frozenset())


FAULTS: tuple[Fault, ...] = (
    Fault("kill_main", "SIGKILL of the main process", ("kill_main",), ("start",), DOWN, starts=1),
    Fault(
        "kill_main_young",
        "SIGKILL of the main process, half a minute after the start",
        ("kill_main",),
        ("start",),
        DOWN,
        starts=2,
        young=True,
    ),
    Fault(
        "kill_scheduler",
        "SIGKILL of the scheduler",
        ("kill_scheduler",),
        ("clear", "start"),
        DOWN,
        ("process_died",),
        starts=1,
        also=WAITED,
        unnoticed=("0.5.9", "0.4.9.post6"),
    ),
    Fault(
        "stop_scheduler", "SIGSTOP of the scheduler, then SIGCONT", ("stop_scheduler",), ("go_on",), STUCK, also=WAITED
    ),
    Fault(
        "crash_in_start",
        "stopped and started with arguments that fail in a scheduler",
        ("stop", "start_in_vain"),
        ("start",),
        DOWN,
        ("launch_failed", "process_died", "scheduler_exception"),
        starts=2,
        also=frozenset({OUT_OF_MEMORY}),
    ),
    Fault(
        "crash_before_arguments",
        "stopped and started with a model that is not there",
        ("stop", "start_without_model"),
        ("start",),
        DOWN,
        starts=1,
    ),
    Fault("restart_append", "stopped and started, log appended to", ("stop",), ("start",), starts=1),
    Fault("restart_truncate", "stopped and started, log begun anew", ("stop",), ("start_anew",), starts=1),
    Fault("drain", "SIGTERM with requests running, then started", ("drain",), ("start",), "", ("draining",), starts=1),
    Fault("rotate_rename", "log renamed and opened anew, twice", ("rotate", "rotate"), (), storm=True),
    Fault("rotate_copy", "log copied and truncated, twice", ("copytruncate", "copytruncate"), (), storm=True),
    Fault(
        "restart_loop",
        "four starts that end at once",
        ("stop", "start_in_vain", "start_in_vain", "start_in_vain", "start_in_vain"),
        ("start",),
        LOOP,
        starts=5,
        also=frozenset({DOWN, OUT_OF_MEMORY}),
    ),
)


def named(name: str) -> Fault:
    """Return a fault by its id. Raises `StopIteration` if there is none."""
    return next(fault for fault in FAULTS if fault.id == name)
