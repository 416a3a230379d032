"""With the log alone: after a line about the end of the server, and no later line, the verdict is not healthy."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import Page, config
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.diagnosis.evidence import past_of
from sglang_tuning_exporter.diagnosis.findings import judge
from sglang_tuning_exporter.serve.metrics import collect
from sglang_tuning_exporter.serve.metrics.families import text_format
from sglang_tuning_exporter.sglang.events import ENDS
from sglang_tuning_exporter.sglang.log.reader import LogReader
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.server import ServerState

AT = "[2025-11-20 11:38:20] "
START = AT + "server_args=ServerArgs(model_path='tiny', schedule_conservativeness=1.0)\n"
DECODE = (
    AT + "Decode batch, #running-req: 20, #token: 1009, token usage: 0.40, cuda graph: True, "
    "gen throughput (token/s): 100.70, #queue-req: 0\n"
)
WATCHDOG = AT + "Watchdog timeout (self.watchdog_timeout=300)\n"
CHECK = AT + "Health check failed. Server couldn't get a response from detokenizer for last 20 seconds.\n"
TERM = AT + "SIGTERM received. signum=15 frame=None. Draining requests and shutting down...\n"
# As releases print them.
DEATHS = {
    "a child that failed": (AT + "Received sigquit from a child process. It usually means the child failed.\n", "process_died"),
    "a process that crashed": (AT + "Subprocess scheduler_0 crashed with exit code -9\n", "process_died"),
    "an exception": (AT + "Scheduler hit an exception: Traceback (most recent call last):\n", "scheduler_exception"),
    "an exception of 0.3.0": (AT + "Exception in ModelTpServer:\n", "scheduler_exception"),
    "a start that failed": (AT + "Initialization failed. Traceback:\n", "launch_failed"),
    "a rank that died": (AT + "Rank 0 scheduler died during initialization (exit code: -9).\n", "launch_failed"),
}  # fmt: skip


def after(*texts: str, every: float = 5.0) -> ServerState:
    """A state that has read these lines, one each `every` seconds from 0 on."""
    state, reader = ServerState(PROFILES["online"], 0.0), LogReader()
    for place, text in enumerate(texts):
        state.observe_all(reader.feed(text.encode()), place * every)
    return state


def verdict(state: ServerState, now: float) -> str:
    state.advance(now)
    return judge(past_of(state, now, starting=state.life.starts(now))).verdict


@pytest.mark.parametrize("later", [1.0, 300.0, 1200.0, 40_000.0])
@pytest.mark.parametrize("death", DEATHS)
def test_after_its_death_a_server_is_down_until_it_is_back(death: str, later: float) -> None:
    line, event = DEATHS[death]
    state = after(START, *[DECODE] * 20, line)
    assert state.liveness[event] == 1
    assert event in ENDS
    assert verdict(state, 105.0 + later) == "server_down"
    state.observe_all(LogReader().feed(START.encode()), 105.0 + later)
    assert verdict(state, 105.0 + later) == "starting"


@pytest.mark.parametrize("death", DEATHS)
def test_the_sentence_says_that_it_comes_from_the_log(death: str) -> None:
    state = after(START, DECODE, DEATHS[death][0])
    (found,) = [f for f in judge(past_of(state, 60.0)).findings if f.diagnosis.id == "server_down"]
    assert found.sentence.startswith("its log says that ")


@pytest.mark.parametrize(
    ("line", "crash"),
    [
        (
            "Subprocess scheduler_0 (pid=4711) crashed with exit code -9. Triggering SIGQUIT for cleanup...",
            "scheduler_0 crashed with exit code -9 (killed from outside, often by the kernel's OOM killer)",
        ),
        ("Subprocess detokenizer crashed with exit code -11", "detokenizer crashed with exit code -11 (SIGSEGV)"),
        ("Process scheduler_3 crashed with exit code 1", "scheduler_3 crashed with exit code 1"),
        ("Subprocess scheduler_0 crashed with exit code -999", "scheduler_0 crashed with exit code -999"),
    ],
)
def test_the_headline_quotes_which_process_crashed_and_how(line: str, crash: str) -> None:
    state = after(START, DECODE, f"{AT}{line}\n", DEATHS["a child that failed"][0])
    (found,) = [f for f in judge(past_of(state, 60.0)).findings if f.diagnosis.id == "server_down"]
    assert found.headline == f"SGLang has ended: {crash}."
    assert found.sentence == f"its log says that {crash}"
    state.observe_all(LogReader().feed((START + DECODE + DEATHS["a child that failed"][0]).encode()), 70.0)
    (found,) = [f for f in judge(past_of(state, 80.0)).findings if f.diagnosis.id == "server_down"]
    assert found.headline == "SGLang does not answer."


@pytest.mark.parametrize("later", [1.0, 300.0, 1200.0, 40_000.0])
def test_after_a_watchdogs_line_and_nothing_since_it_hangs(later: float) -> None:
    state = after(START, *[DECODE] * 20, WATCHDOG)
    assert verdict(state, 105.0 + later) == "scheduler_stuck"


def test_a_watchdogs_line_is_old_once_the_server_works_again() -> None:
    state = after(*[WATCHDOG, *[DECODE] * 200])
    assert verdict(state, 1000.0) != "scheduler_stuck"
    assert verdict(after(WATCHDOG, START), 1000.0) == "starting"


@pytest.mark.parametrize("later", [1.0, 300.0, 1200.0, 40_000.0])
def test_after_a_minute_of_health_checks_in_vain_and_nothing_since_it_hangs(later: float) -> None:
    state = after(START, DECODE, *[CHECK] * 8, every=10.0)
    assert verdict(state, 90.0 + later) == "scheduler_stuck"
    state.observe_all(LogReader().feed(DECODE.encode()), 90.0 + later)
    assert verdict(state, 90.0 + later + 100.0) != "scheduler_stuck"


def test_one_failed_health_check_is_no_hang() -> None:
    assert verdict(after(START, DECODE, CHECK), 400.0) != "scheduler_stuck"


# A line that prints the text of a tool call raw: the lines after it may be text of a model.
WORDS = "[2025-11-20 11:36:00] Tool 'weather' is not defined in the tools list.\n"


def failed_check(line: int, began: int | None = None) -> str:
    """A failed health check, logged `line` seconds after 11:38:00, which says that it began 20 s before."""
    began = line - 20 if began is None else began
    return (
        f"[2025-11-20 11:{38 + line // 60}:{line % 60:02d}] Health check failed. Server couldn't get a response from"
        f" detokenizer for last 20 seconds. tic start time: 11:{38 + began // 60}:{began % 60:02d}."
        f" last_heartbeat time: 11:37:40\n"
    )


def beside_work(*checks: str) -> ServerState:
    """Failed checks every 20 s after raw text of requests, and ten seconds after each the scheduler decodes."""
    state, reader = ServerState(PROFILES["online"], 0.0), LogReader()
    state.observe_all(reader.feed((START + DECODE * 5 + WORDS).encode()), 0.0)
    for place, check in enumerate(checks):
        now = 20.0 * (place + 1)
        state.observe_all(reader.feed(check.encode()), now)
        line = DECODE.replace("11:38:20", f"11:{38 + int(now + 10) // 60}:{int(now + 10) % 60:02d}")
        state.observe_all(reader.feed(line.encode()), now + 10)
        state.advance(now + 10)
    return state


def test_failed_health_checks_beside_a_scheduler_that_decodes_are_a_detokenizer_that_hangs() -> None:
    state = beside_work(*(failed_check(20 * place) for place in range(1, 8)))
    assert verdict(state, 160.0) == "scheduler_stuck"
    hang = state.hang(160.0)
    assert hang is not None
    assert hang.stage == "detokenizer"


@pytest.mark.parametrize("off", [-15, -3, 3, 40])
def test_failed_health_checks_whose_times_do_not_agree_are_refused_where_the_scheduler_decodes(off: int) -> None:
    state = beside_work(*(failed_check(20 * place, 20 * place - 20 + off) for place in range(1, 8)))
    assert state.hang(160.0) is None
    assert state.liveness["health_check_failed"] == 0


def test_a_server_that_is_stopped_on_purpose_has_not_died() -> None:
    state = after(START, *[DECODE] * 20, TERM)
    assert state.liveness["draining"] == 1
    assert verdict(state, 5000.0) not in {"server_down", "scheduler_stuck"}


@pytest.mark.parametrize("death", [*(line for line, _ in DEATHS.values()), WATCHDOG])
def test_an_exporter_that_is_started_later_gives_the_same_verdict(death: str, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(START + DECODE + death)
    sidecar = Sidecar(config(log_file=(str(log),)))
    assert sidecar.log is not None
    sidecar.log.poll()
    with sidecar.view() as now:
        assert sidecar.judge(now).verdict == ("scheduler_stuck" if death == WATCHDOG else "server_down")
    with log.open("a") as file:
        file.write(START)
    sidecar.log.poll()
    with sidecar.view() as now:
        assert sidecar.judge(now).verdict == "starting"


def test_every_event_is_counted_from_0_on(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.touch()
    sidecar = Sidecar(config(log_file=(str(log),)))
    assert sidecar.log is not None
    sidecar.log.poll()
    name = "sglang_tuning_liveness_events_total"
    born = Page(text_format(collect(sidecar)))
    log.write_text("".join(line for line, _ in DEATHS.values()) + WATCHDOG + CHECK + TERM)
    sidecar.log.poll()
    page = Page(text_format(collect(sidecar)))
    for labels in page.labels(name):
        assert born.value(name, **labels) == 0
        assert (page.value(name, **labels) or 0) > 0 or labels["event"] == "ready"
    assert {labels["event"] for labels in page.labels(name)} >= {*ENDS, "watchdog_timeout", "health_check_failed"}


def test_an_end_in_the_log_is_not_final_while_the_exporter_still_catches_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = tmp_path / "server.log"
    log.write_text(START + DEATHS["an exception"][0])
    sidecar = Sidecar(config(log_file=(str(log),), from_start=True))
    assert sidecar.log is not None
    sidecar.log.poll()
    with sidecar.view() as now:
        assert sidecar.judge(now).verdict == "server_down"
        monkeypatch.setattr(type(sidecar.log), "is_catching_up", property(lambda _: True))
        assert sidecar.judge(now).verdict != "server_down"


def test_an_end_in_the_log_is_old_once_the_server_has_answered_for_a_minute() -> None:
    state = after(DEATHS["an exception"][0])
    state.life.answers(30.0)
    assert state.life.died == "scheduler_exception"
    state.life.answers(61.0)
    assert (state.life.died, verdict(state, 62.0)) == ("", "not_enough_data")


def test_with_metrics_a_watchdogs_line_is_a_matter_of_ten_minutes() -> None:
    state = after(WATCHDOG)
    assert verdict(state, 500.0) == "scheduler_stuck"
    state._scraped = True
    assert verdict(state, 700.0) != "scheduler_stuck"


TERMINATED = AT + "Subprocess detokenizer (pid=31) crashed with exit code -15. Triggering SIGQUIT for cleanup...\n"


@pytest.mark.parametrize("line", [TERMINATED, *(line for line, event in DEATHS.values() if event == "process_died")])
def test_the_processes_of_a_server_that_was_asked_to_end_do_not_crash(line: str) -> None:
    state = after(START, *[DECODE] * 20, TERM, line)
    assert state.liveness["process_died"] == 0
    assert verdict(state, 5000.0) not in {"server_down", "scheduler_stuck"}


def test_a_crash_after_the_next_start_counts_again() -> None:
    state = after(START, *[DECODE] * 20, TERM, START, *[DECODE] * 20, DEATHS["a process that crashed"][0])
    assert state.liveness["process_died"] == 1
    assert verdict(state, 5000.0) == "server_down"
