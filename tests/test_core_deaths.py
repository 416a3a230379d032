"""How a server ends, with the log alone: what its last lines say holds until it is back."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest

from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.lines import Reader
from sglang_tuning_exporter.core.watch import Watch
from test_core_course import BEGIN, decode, found, judged, prefill, stamp, start
from test_core_watch import SIGTERM

SIGQUIT = "Received sigquit from a child process. It usually means the child failed."
# As releases print them.
DEATHS = {
    "a child that failed": SIGQUIT,
    "a process that crashed": "Subprocess scheduler_0 crashed with exit code -9",
    "an exception": "Scheduler hit an exception: Traceback (most recent call last):",
    "an exception of 0.3.0": "Exception in ModelTpServer:",
    "a start that failed": "Initialization failed. Traceback:",
    "a rank that died": "Rank 0 scheduler died during initialization (exit code: -9).",
}


def after(*lines: str) -> Watch:
    """Return a watch that has read these lines; those without a time happened after a minute."""
    watch, reader = Watch(PROFILES["online"], BEGIN, reads=True, scrapes=False), Reader()
    add(watch, reader, *lines)
    return watch


def add(watch: Watch, reader: Reader, *lines: str) -> None:
    for line in lines:
        for event in reader.read(line.encode()):
            event.time = BEGIN + 60 if event.time is None else event.time
            watch.take_line(event)


def verdict(watch: Watch, at: float) -> str:
    return watch.judge(BEGIN + at).verdict


SERVED = [*start(), *(decode(12 + at) for at in range(0, 60, 2))]


@pytest.mark.parametrize("later", [1.0, 300.0, 1200.0, 40_000.0])
@pytest.mark.parametrize("death", DEATHS)
def test_a_server_that_ended_has_crashed_however_long_ago_until_it_starts_again(death: str, later: float) -> None:
    watch = after(*SERVED, stamp(73) + DEATHS[death])
    before = verdict(watch, 73 + later)
    add(watch, Reader(), start(74 + later)[0])
    assert (before, verdict(watch, 700 + later)) == (
        "crashed",
        "starting",
    )  # of the last ten minutes a crash is a finding


# Health checks


def clock(at: float) -> str:
    return f"{datetime.fromtimestamp(BEGIN + at, timezone.utc):%H:%M:%S}"


def failed_check(at: float, began: float | None = None, beat: float | None = None) -> str:
    """A failed health check, which says that it began 20 s before, and the last token came 20 s earlier."""
    began = at - 20 if began is None else began
    beat = at - 40 if beat is None else beat
    return (
        f"{stamp(at)}Health check failed. Server couldn't get a response from detokenizer for last 20 seconds."
        f" tic start time: {clock(began)}. last_heartbeat time: {clock(beat)}"
    )


def test_failed_health_checks_are_a_hang_though_clients_give_up_and_come_again() -> None:
    probe = prefill(103, 1, running=0, usage=0.0)
    again = [prefill(112, running=0), decode(113, running=15)]
    watch = after(*SERVED, probe, failed_check(104), *again, failed_check(124), failed_check(144))
    assert verdict(watch, 145) == "scheduler_stuck"


def test_one_failed_health_check_beside_long_prompts_is_none() -> None:
    prompts = [prefill(at, 8192, running=60) for at in range(72, 132)]
    watch = after(*SERVED, *prompts[:30], failed_check(102), *prompts[30:])
    assert verdict(watch, 133) != "scheduler_stuck"


def test_two_failed_health_checks_alone_are_a_hang_since_the_last_token() -> None:
    watch = after(*(failed_check(at, beat=42) for at in (100, 130)))
    assert verdict(watch, 131) == "scheduler_stuck"
    assert [hang.begin for hang in watch.server.hangs] == [BEGIN + 42]


@pytest.mark.parametrize("seconds", [[100], [100, 101], [100, 300]])
def test_failed_health_checks_that_are_not_two_in_a_row_are_no_hang(seconds: list[int]) -> None:
    checks = (failed_check(at, beat=42) for at in seconds)
    assert verdict(after(*checks), seconds[-1] + 1) != "scheduler_stuck"


def test_a_token_between_two_failed_health_checks_shows_that_the_server_works() -> None:
    assert verdict(after(failed_check(100, beat=42), failed_check(130, beat=105)), 131) != "scheduler_stuck"


def test_a_batch_between_two_failed_health_checks_shows_that_the_server_works() -> None:
    prompts = [prefill(at, 8192, running=60) for at in range(72, 150, 5)]
    lines = sorted([*prompts, failed_check(102), failed_check(132)])
    assert verdict(after(*SERVED, *lines), 151) != "scheduler_stuck"


def test_a_hang_that_health_checks_show_is_no_idle_time_in_the_course() -> None:
    course = judged([*SERVED, *(failed_check(at, beat=72) for at in (130, 160, 190))]).course
    assert [(each.what, each.words) for each in course][-1] == ("silent", "SGLang hung")


def test_failed_health_checks_of_a_server_that_is_paused_are_none_until_it_continues() -> None:
    access = 'INFO:     127.0.0.1:48044 - "POST /{}_generation HTTP/1.1" 200 OK'
    watch = after(*SERVED, stamp(73) + access.format("pause"), *(failed_check(at) for at in range(100, 240, 20)))
    before = verdict(watch, 241)
    add(watch, Reader(), stamp(242) + access.format("continue"), *(failed_check(at) for at in range(280, 360, 20)))
    assert (before, verdict(watch, 361)) == ("no_limit_in_log", "scheduler_stuck")


def test_how_the_processes_of_a_server_end_that_was_asked_to_end_is_no_crash() -> None:
    watch = after(*SERVED, stamp(73) + SIGTERM, stamp(75) + DEATHS["a process that crashed"])
    assert (watch.server.counted["ends"], verdict(watch, 110)) == (0, "stopped")


def test_a_log_that_ends_with_the_watchdogs_line_ends_with_a_hang() -> None:
    watched = f"{stamp(380)}Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)"
    assert found(judged([*SERVED, watched])) & {"scheduler_stuck", "crashed"} == {"scheduler_stuck"}


# What a death follows from

OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


def because(watch: Watch, at: float, name: str) -> tuple[str, ...]:
    found = {each.diagnosis: each for each in watch.judge(BEGIN + at).findings}
    return found[name].because


@pytest.mark.parametrize(("seconds", "cause"), [(30, ("out_of_memory_any",)), (400, ())])
def test_a_crash_follows_from_a_failure_that_the_server_did_not_survive_for_a_minute(
    seconds: int, cause: tuple[str, ...]
) -> None:
    on = [decode(at) for at in range(76, 74 + seconds, 2)]
    watch = after(*SERVED, stamp(73) + OUT_OF_MEMORY, *on, stamp(75 + seconds) + DEATHS["a process that crashed"])
    assert because(watch, 80 + seconds, "crashed") == cause


def test_the_crash_of_a_failure_keeps_its_cause_while_the_next_start_serves() -> None:
    again = [*start(80), *(decode(at) for at in range(92, 292, 2))]
    watch = after(*SERVED, stamp(73) + OUT_OF_MEMORY, stamp(75) + DEATHS["a process that crashed"], *again)
    assert because(watch, 292, "crashed") == ("out_of_memory_any",)


def test_little_memory_left_at_the_start_is_no_cause_of_a_death() -> None:
    short = [*start(left=0.6), *(decode(at) for at in range(12, 73, 2))]
    watch = after(*short, stamp(73) + SIGQUIT)
    assert verdict(watch, 80) == "crashed"
    assert because(watch, 81, "crashed") == ()


def test_a_crash_of_a_later_start_does_not_follow_from_an_earlier_failure() -> None:
    again = [*start(80), *(decode(at) for at in range(92, 292, 2))]
    watch = after(*SERVED, stamp(73) + OUT_OF_MEMORY, *again, stamp(293) + DEATHS["a process that crashed"])
    assert because(watch, 300, "crashed") == ()


def test_what_several_processes_say_of_one_end_is_one() -> None:
    lines = [DEATHS["an exception"], DEATHS["a process that crashed"], SIGQUIT]
    watch = after(*SERVED, *(stamp(73 + place) + line for place, line in enumerate(lines)))
    assert watch.server.counted["ends"] == 1


FRAME = '  File "/sglang/srt/managers/scheduler.py", line 4, in {}'
FULL = (
    "{} out of memory. Try to lower your batch size.\nTry to allocate 2048 tokens.\nAvailable tokens: 1519"
    " (available_size=1211 + evictable_size=308)"
)
SPACE = "Failed to allocate memory for batch_prefill_tmp_v with size 435814400 and alignment 16 in AlignedAllocator"
CHUNK, BATCH = "--chunked-prefill-size", "--max-running-requests"
NO_MEMORY = {  # the function and its error; the flag, and what is said of it
    "a full KV cache in prefill": ("alloc", "RuntimeError: " + FULL.format("Prefill"), CHUNK,
        "the KV cache had no room"),
    "a full KV cache in decode": ("alloc", "RuntimeError: " + FULL.format("Decode"), BATCH, "the KV cache had no room"),
    "a GPU in prefill": ("run_batch_prefill", "torch.OutOfMemoryError: CUDA out of memory.", CHUNK,
        "then lower --mem-fraction-static"),
    "a workspace": ("event_loop_normal", "RuntimeError: " + SPACE, CHUNK, "in chunks of this many tokens"),
}  # fmt: skip


@pytest.mark.parametrize("error", NO_MEMORY)
def test_the_allocation_that_failed_decides_which_flag_is_lowered(error: str) -> None:
    where, lines, flag, said = NO_MEMORY[error]
    watch = after(decode(60), stamp(73) + DEATHS["an exception"], FRAME.format(where), *lines.split("\n"))
    change = watch.judge(BEGIN + 80).findings[0].changes[0]
    assert (change.flag, change.direction) == (flag, "lower")
    assert said in change.why + change.not_if
