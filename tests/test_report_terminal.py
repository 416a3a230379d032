"""The report on a terminal, with colours and progress, and as plain text everywhere else."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import environment
from sglang_tuning_exporter.cli import main
from sglang_tuning_exporter.diagnosis.wording import duration, figure
from sglang_tuning_exporter.recordings.replay import packaged
from sglang_tuning_exporter.report.report import WORTH_BYTES, Progress, progress_line
from sglang_tuning_exporter.report.wording import moment

RETRACT = str(packaged("retract") / "server.log.gz")
COMMAND = [sys.executable, "-m", "sglang_tuning_exporter", "report", RETRACT]


def on_a_terminal(**variables: str) -> str:
    """The output on a real terminal of 80 columns."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        COMMAND, stdout=follower, stderr=follower, env=environment(**{"TERM": "xterm", "COLUMNS": "80", **variables})
    )
    os.close(follower)
    said = b""
    while True:
        try:
            piece = os.read(leader, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        said += piece
    os.close(leader)
    assert process.wait(timeout=30) == 1
    return said.decode()


def test_a_terminal_gets_colours_and_lines_that_fit() -> None:
    said = on_a_terminal()
    assert said.startswith("\x1b[1;33mSGLang keeps retracting running requests: the KV cache is full.\x1b[0m")
    why = re.search(r"Why: .*?\n(?=   It costs)", said.replace("\r", ""), re.DOTALL)
    assert why is not None
    assert max(len(line) for line in why[0].splitlines()) <= 80


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_color_or_a_dumb_terminal_turns_colours_off(variables: dict[str, str]) -> None:
    assert "\x1b" not in on_a_terminal(**variables)


def test_a_pipe_gets_neither_colour_nor_progress() -> None:
    ended = subprocess.run(COMMAND, capture_output=True, env=environment(TERM="xterm"), check=False)
    assert b"\x1b" not in ended.stdout
    assert ended.stderr == b""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_on_a_terminal_and_taken_away_again() -> None:
    terminal = Terminal()
    progress = Progress(terminal, WORTH_BYTES)
    time.sleep(0.25)
    progress.add(WORTH_BYTES // 2)
    progress.clear()
    assert " 50 %" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")


@pytest.mark.parametrize(("stream", "total"), [(io.StringIO(), WORTH_BYTES), (Terminal(), WORTH_BYTES - 1)])
def test_no_progress_for_a_file_or_a_short_log(stream: io.StringIO, total: int) -> None:
    progress = Progress(stream, total)
    time.sleep(0.25)
    progress.add(total)
    progress.clear()
    assert stream.getvalue() == ""


def test_a_progress_line_has_a_bar_and_the_time_left_or_what_was_read() -> None:
    assert progress_line(512 << 20, 1 << 30, 4.0) == "[###############               ]  50 %  512 MB of 1024, 4 s left"
    assert progress_line(512 << 20, 0, 4.0) == "512 MB read, 128 MB/s"
    assert progress_line(2 << 30, 1 << 30, 4.0).startswith("[##############################] 100 %")


def test_figures_are_written_as_people_do() -> None:
    assert [figure(0.876, "share"), figure(0.4355, "ratio"), figure(4.444, "per_minute")] == ["88 %", "0.44", "4.4/min"]
    assert [figure(1234.5, "count"), figure(16.0, "count"), figure(4.64, "GB")] == ["1,234", "16", "4.6 GB"]
    assert [duration(5), duration(600), duration(9000)] == ["5 s", "10 min", "2.5 h"]
    assert moment({"start": None, "at": 3725}) == "+1:02:05"
    assert moment({"start": "2025-11-20T10:00:00.250Z", "at": 0}) == "2025-11-20 10:00:00"


def test_a_finding_that_was_too_short_for_its_alert_says_so() -> None:
    ended = subprocess.run(COMMAND, capture_output=True, text=True, env=environment(), check=False)
    assert "No alert would have fired. What was found did not last long enough for an alert." in ended.stdout


@pytest.mark.parametrize(("stamp", "has_times"), [("[2025-11-20 10:00:00] ", True), ("", False)])
def test_a_log_of_one_second_has_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stamp: str, *, has_times: bool
) -> None:
    path = tmp_path / "server.log"
    path.write_text(f"{stamp}server_args=ServerArgs(model_path='m', port=30000, tp_size=1)\n")
    main(["report", str(path)])
    assert ("The log has no times" in capsys.readouterr().out) is not has_times


def test_the_help_of_report_loads_neither_the_web_nor_the_page() -> None:
    code = (
        "import sys; from sglang_tuning_exporter.cli import main\n"
        "try: main(['report', '--help'])\nexcept SystemExit: pass\n"
        "heavy = {'jinja2', 'fastapi', 'requests', 'prometheus_client', 'sglang_tuning_exporter.report'}\n"
        "sys.exit(repr(heavy & sys.modules.keys()) if heavy & sys.modules.keys() else 0)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment())
    assert ended.returncode == 0, ended.stderr
    assert "--against" in ended.stdout


def test_a_night_that_was_good_on_the_whole_says_what_was_wrong_for_a_part(tmp_path: Path) -> None:
    line = (
        "[2025-11-20 {:02}:{:02}:{:02}] Decode batch, #running-req: {}, #token: 9, token usage: 0.40, cuda graph: True, "
        "gen throughput (token/s): 44.70, #queue-req: {}\n"
    )
    log = tmp_path / "server.log"
    bad = range(1800)
    log.write_text(
        "[2025-11-20 10:00:00] server_args=ServerArgs(model_path='m', tp_size=1, max_running_requests=4)\n"
        + "".join(
            line.format(10 + s // 3600, s // 60 % 60, s % 60, 4 if s in bad else 1, 60 if s in bad else 0)
            for s in range(5, 3 * 3600, 5)
        )
    )
    ended = subprocess.run(
        [*COMMAND[:-1], str(log)], capture_output=True, text=True, env=environment(), check=False, timeout=60
    )
    lines = ended.stdout.splitlines()
    assert lines[0] == (
        "Nothing limits this server: most of the time nothing waits for long. Nothing needs to be changed."
        " (confidence: high; at 2025-11-20 12:59:55, the end of the log)"
    )
    assert lines[2].startswith("But for a part of the time alerts would have fired: Requests wait because SGLang runs")
    assert re.search(r"SGLangRunningAtLimit 2025-11-20 10:\d\d:\d\d  for \d\d min", ended.stdout)


def test_advice_that_findings_share_is_printed_once_and_referred_to(capsys: pytest.CaptureFixture[str]) -> None:
    main(["report", str(Path(__file__).parent / "recordings" / "v0.5.9-retract" / "server.log.gz")])
    said = capsys.readouterr().out
    reasons = re.findall(r"Why: .*", said)
    assert len(reasons) == len(set(reasons)) > 1
    assert "Try --schedule-conservativeness 1.3, as for finding 1\n" in said
