"""The report in words: figures with units, changes, findings, and the whole text on a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from functools import cache

import pytest

from conftest import PROGRAM, environment, program
from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.answer import Style, mark, text
from sglang_tuning_exporter.core.findings import TONES, Change, Figure
from sglang_tuning_exporter.recordings.replay import packaged
from test_core_report import RAISE, finding, judged

OFFLINE = PROFILES["offline"]
REPORT = ("report", str(packaged("retract") / "server.log.gz"))
SGR = re.compile(r"\x1b\[([0-9;]*)m")
PAINTED = re.compile(r"\x1b\[(?:1;)?38;5;(\d+);48;5;(\d+)m")


def said(*findings: object, style: Style | None = None, **more: object) -> str:
    return text(judged(*findings, **more), OFFLINE, None, style)  # type: ignore[arg-type]


def test_advice_to_people_is_a_sentence_and_a_flag_can_be_removed() -> None:
    assert Change(words="send fewer requests").line == "Send fewer requests."
    assert Change(arg="x", flag="--x", now=2048, removes=True).line == "Remove --x"


def test_the_head_has_the_verdict_its_confidence_its_times_and_the_notes() -> None:
    head = said(finding()).split("\n\n")[0].splitlines()
    assert head == [
        "SGLang kept retracting running requests. (confidence: high; from 10:10:00 to 10:35:00)",
        "server.log: 2025-11-20 10:00:00 to 2025-11-20 11:00:00 as printed, 60 min, serving 50 min; profile offline",
        "Most of the serving time (60 %): nothing limited the server.",
        "Note: 34 retractions, 14 of them beside text that clients can write",
        "Note: a note",
    ]


def test_a_finding_has_its_figures_its_changes_with_reasons_and_its_times() -> None:
    whole = finding(changes=(RAISE, Change(words="send less")), notes=("also seen live",))
    assert said(whole).split("\n\n")[1].splitlines() == [
        "1. SGLang kept retracting running requests. [warning, confidence high]",
        "   12 retractions a minute (limit 1/min).",
        "   Mean running requests: 233",
        "   Try --schedule-conservativeness 1.3, now 0.3",
        "   4 % more tokens.",
        "   Why: SGLang admits more requests than the KV cache can hold.",
        "   It costs: Above 1.0 it admits fewer.",
        "   It will not help if it is above 1.43.",
        "   Send less.",
        "   also seen live.",
        "   Guide: the guide.",
        "   Seen from 10:10:00 to 10:35:00, 20 min of that time.",
    ]


# The terminal


def luminance(place: str) -> float:
    """Of a colour of the 256 that is the same on every terminal: behind the theme's sixteen a cube, then greys."""
    number = int(place)
    assert number >= 16
    cube = [(0, 95, 135, 175, 215, 255)[(number - 16) // 6**power % 6] for power in (2, 1, 0)]
    parts = [part / 255 for part in (cube if number < 232 else [8 + 10 * (number - 232)] * 3)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@cache
def on_a_terminal(variables: tuple[tuple[str, str], ...] = ()) -> str:
    """The output on a real terminal of 80 columns."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    surroundings = environment(**{"TERM": "xterm", **dict(variables)})
    surroundings.pop("COLUMNS", None)
    process = subprocess.Popen([*PROGRAM, *REPORT], stdout=follower, stderr=follower, env=surroundings)
    os.close(follower)
    said = b""
    try:
        while piece := os.read(leader, 65536):
            said += piece
    except OSError:  # the other end is closed
        pass
    os.close(leader)
    assert process.wait(timeout=30) in {0, 1}
    return said.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("tone", TONES.values())
def test_each_tone_has_ink_and_paper_that_are_readable_on_any_terminal(tone: str) -> None:
    painted = PAINTED.findall(Style(colour=True).paint(tone, "a headline"))
    assert len(painted) == (tone != "calm")  # which has the terminal's own
    for pair in painted:
        dark, light = sorted(map(luminance, pair))
        assert (light + 0.05) / (dark + 0.05) >= 4.5  # WCAG 2, level AA, for text of this size


@pytest.mark.parametrize("columns", [60, 80])
def test_no_line_is_wider_than_the_terminal_and_no_word_is_lost(columns: int) -> None:
    shown = SGR.sub("", said(finding(), style=Style(colour=True, width=columns)))
    assert [line for line in shown.splitlines() if len(line) > columns] == []
    assert shown.replace(" \\\n", "\n").split() == said(finding()).split()


def test_a_broken_command_line_can_be_pasted_into_a_shell() -> None:
    whole = judged(finding())
    shown = text(whole, OFFLINE, None, Style(width=50))
    command = shown[shown.index("   python3") : shown.index("   Add --api-key")]
    assert command.count(" \\\n") >= 2
    read = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {command}"], capture_output=True, text=True, check=True
    ).stdout
    assert read.splitlines() == shlex.split(" ".join(whole.command))


def test_a_real_terminal_gets_colours_that_it_can_show_and_lines_that_fit() -> None:
    shown = on_a_terminal()
    assert shown.startswith(
        "\x1b[1;38;5;16;48;5;214mSGLang keeps retracting running requests: the KV cache is full.\x1b[0m"
    )
    assert [line for line in SGR.sub("", shown).splitlines() if len(line) > 80 and " " in line.strip()] == []


@pytest.mark.parametrize("variable", [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_color_or_a_dumb_terminal_turns_colours_off(variable: tuple[str, str]) -> None:
    assert "\x1b" not in on_a_terminal(variables=(variable,))


def test_a_terminal_gets_the_words_of_a_pipe_with_colour_and_progress() -> None:
    ended = program(*REPORT, TERM="xterm")
    assert "\x1b" not in ended.stdout
    assert ended.stderr == ""
    assert SGR.sub("", on_a_terminal()).replace(" \\\n", "\n").split() == ended.stdout.split()


def test_the_help_of_report_loads_neither_the_web_nor_the_page() -> None:
    code = (
        "import sys; from sglang_tuning_exporter.cli import main\n"
        "try: main(['report', '--help'])\nexcept SystemExit: pass\n"
        "heavy = {'jinja2', 'fastapi', 'requests', 'prometheus_client', 'sglang_tuning_exporter.core.report'}\n"
        "sys.exit(repr(heavy & sys.modules.keys()) if heavy & sys.modules.keys() else 0)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment())
    assert ended.returncode == 0, ended.stderr
    assert "--against" in ended.stdout


# A shown figure is good or bad as the judgement has it.

QUEUE, LONG = frozenset({"queue/above_range"}), "queue_too_long"
OFTEN, SELDOM = (Figure("serving time with a long queue", share, "share", 0.5, "above") for share in (0.87, 0.2))


def test_a_figure_is_bad_for_as_much_of_the_time_as_a_finding_of_its_row_says() -> None:
    answer = judged(finding(LONG, evidence=(OFTEN,)), checks={LONG: OFTEN})
    assert mark(answer, QUEUE) == ("bad", "87 % of the time")
    assert mark(answer, frozenset({"retractions"})) == ("", "")


def test_a_figure_is_good_where_its_rows_were_measured_and_none_holds() -> None:
    assert mark(judged(checks={LONG: SELDOM}), QUEUE) == ("good", "")
    assert mark(judged(checks={LONG: None}), QUEUE) == ("", "")


def test_a_figure_whose_row_holds_and_is_muted_or_explained_by_another_is_not_judged() -> None:
    assert mark(judged(checks={LONG: OFTEN}), QUEUE) == ("", "")


def test_a_figure_is_not_judged_while_it_is_mostly_between_good_and_bad() -> None:
    short = judged(checks={LONG: SELDOM}, shares={"queue": {"below_range": 0.8, "above_range": 0.2}})
    assert mark(short, QUEUE, between="queue/below_range") == ("", "")
    assert mark(short, QUEUE, between="queue/in_range") == ("good", "")


def test_a_figure_that_was_bad_before_is_not_bad_now() -> None:
    assert mark(judged(finding(LONG, evidence=(OFTEN,), over=True), checks={LONG: SELDOM}), QUEUE) == ("good", "")
