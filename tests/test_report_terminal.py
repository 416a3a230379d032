"""The report on a terminal, with colours and progress, and as plain text everywhere else."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import pytest

from conftest import environment
from sglang_tuning_exporter.cli import main
from sglang_tuning_exporter.diagnosis.wording import TONES, duration, figure
from sglang_tuning_exporter.recordings.replay import packaged
from sglang_tuning_exporter.report.report import WORTH_BYTES, Progress, progress_line
from sglang_tuning_exporter.report.terminal import Style
from sglang_tuning_exporter.report.wording import moment

if TYPE_CHECKING:
    from collections.abc import Iterator

RETRACT = str(packaged("retract") / "server.log.gz")
COMMAND = [sys.executable, "-m", "sglang_tuning_exporter", "report", RETRACT]
RECORDINGS = Path(__file__).parent / "recordings"
LOGS = sorted(RECORDINGS.glob("*/server.log*"))

Colour: TypeAlias = "tuple[int, int, int]"
WHITE, BLACK = (255, 255, 255), (0, 0, 0)
# The first sixteen colours are what a theme makes of them, the others of the 256 are the same everywhere.
XTERM: list[Colour] = [
    *((0, 0, 0), (205, 0, 0), (0, 205, 0), (205, 205, 0), (0, 0, 238), (205, 0, 205), (0, 205, 205), (229, 229, 229)),
    *((127, 127, 127), (255, 0, 0), (0, 255, 0), (255, 255, 0), (92, 92, 255), (255, 0, 255), (0, 255, 255), WHITE),
]
VGA: list[Colour] = [
    *((0, 0, 0), (170, 0, 0), (0, 170, 0), (170, 85, 0), (0, 0, 170), (170, 0, 170), (0, 170, 170), (170, 170, 170)),
    *((85, 85, 85), (255, 85, 85), (85, 255, 85), (255, 255, 85), (85, 85, 255), (255, 85, 255), (85, 255, 255), WHITE),
]
LEVELS = (0, 95, 135, 175, 215, 255)
CUBE: list[Colour] = [(red, green, blue) for red in LEVELS for green in LEVELS for blue in LEVELS]
GREYS: list[Colour] = [(8 + 10 * step,) * 3 for step in range(24)]
# A terminal: its ink, its paper, its sixteen colours.
TERMINALS = {
    "xterm, black on white": (BLACK, WHITE, XTERM),
    "xterm, white on black": ((229, 229, 229), BLACK, XTERM),
    "VGA, grey on black": ((170, 170, 170), BLACK, VGA),
    "VGA, black on white": (BLACK, WHITE, VGA),
    "Solarized, light": ((101, 123, 131), (253, 246, 227), XTERM),
}
READABLE = 4.5  # WCAG 2, level AA, for text of this size
SGR = re.compile(r"\x1b\[([0-9;]*)m")


def luminance(colour: Colour) -> float:
    red, green, blue = (
        part / 255 / 12.92 if part / 255 <= 0.03928 else ((part / 255 + 0.055) / 1.055) ** 2.4 for part in colour
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: Colour, other: Colour) -> float:
    dark, light = sorted(map(luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


def pieces(said: str, terminal: str) -> Iterator[tuple[str, Colour, Colour, bool]]:
    """The text as a terminal shows it: each piece with ink and paper, and whether the terminal's own are used."""
    own_ink, own_paper, colours = TERMINALS[terminal]
    palette = [*colours, *CUBE, *GREYS]
    ink: int | None = None  # places in the palette; None: the terminal's own
    paper: int | None = None
    is_bold = False
    texts = SGR.split(said)
    for text, codes in zip(texts[::2], [*texts[1::2], None], strict=True):
        if text.strip():
            brighter = 8 if is_bold and ink is not None and ink < 8 else 0  # most terminals do so
            shown = own_ink if ink is None else palette[ink + brighter]
            yield text, shown, own_paper if paper is None else palette[paper], ink is None and paper is None
        numbers = iter([] if codes is None else map(int, codes.split(";")))
        for number in numbers:
            if number == 0:
                ink = paper = None
                is_bold = False
            elif number == 1:
                is_bold = True
            elif 30 <= number <= 37:
                ink = number - 30
            else:
                assert (number, next(numbers)) in {(38, 5), (48, 5)}, said
                colour = next(numbers)
                ink, paper = (colour, paper) if number == 38 else (ink, colour)


@cache
def on_a_terminal(log: str = RETRACT, columns: int = 80, variables: tuple[tuple[str, str], ...] = ()) -> str:
    """The output on a real terminal."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    surroundings = environment(**{"TERM": "xterm", **dict(variables)})
    surroundings.pop("COLUMNS", None)
    process = subprocess.Popen([*COMMAND[:-1], log], stdout=follower, stderr=follower, env=surroundings)
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
    assert process.wait(timeout=30) in {0, 1}
    return said.decode().replace("\r\n", "\n")


def test_a_terminal_gets_the_headline_in_ink_and_paper_of_its_own() -> None:
    assert on_a_terminal().startswith(
        "\x1b[1;38;5;16;48;5;214mSGLang keeps retracting running requests: the KV cache is full.\x1b[0m (confidence:"
    )


def test_what_is_measured_is_contrast_and_bright_yellow_on_white_has_none() -> None:
    (_, ink, paper, is_own), plain = pieces("\x1b[1;33mtext\x1b[0m text", "xterm, black on white")
    assert (ink, paper, is_own, plain[3]) == ((255, 255, 0), WHITE, False, True)
    assert round(contrast(ink, paper), 2) == 1.07
    assert round(contrast(BLACK, WHITE), 2) == 21


@pytest.mark.parametrize("terminal", TERMINALS)
@pytest.mark.parametrize("tone", [*TONES.values(), "good", "calm", "bold"])
def test_each_tone_is_readable_on_a_white_and_on_a_black_terminal(tone: str, terminal: str) -> None:
    ((_, ink, paper, is_own),) = pieces(Style(colour=True).paint(tone, "a headline"), terminal)
    assert is_own or contrast(ink, paper) >= READABLE


@pytest.mark.parametrize("terminal", TERMINALS)
def test_everything_that_a_terminal_shows_is_readable_or_has_the_terminals_own_colours(terminal: str) -> None:
    shown = list(pieces(on_a_terminal(), terminal))
    assert [text for text, ink, paper, is_own in shown if not is_own and contrast(ink, paper) < READABLE] == []
    assert sum(not is_own for *_, is_own in shown) >= 3  # the headline and the severity of each finding


@pytest.mark.parametrize(
    ("log", "columns"),
    [*((str(log), 80) for log in LOGS), (RETRACT, 80), (RETRACT, 60)],
    ids=lambda each: Path(str(each)).parent.name,
)
def test_no_line_is_wider_than_the_terminal(log: str, columns: int) -> None:
    said = on_a_terminal(log, columns)
    lines = SGR.sub("", said).splitlines()
    assert len(lines) > 10
    # A path or a value in quotes is never broken, so that it can be copied.
    assert [line for line in lines if len(line) > columns and " " in line.strip()] == []


def test_a_narrow_terminal_gets_the_same_words_as_a_file() -> None:
    ended = subprocess.run(COMMAND, capture_output=True, text=True, env=environment(), check=False)
    said = SGR.sub("", on_a_terminal()).replace(" \\\n", "\n")
    assert said.split() == ended.stdout.split()


def test_a_broken_line_of_a_headline_has_its_colours_on_each_line_and_none_on_the_indent() -> None:
    style = Style(colour=True, width=40)
    first, second = style.fit(style.paint("bad", "one two three four five six seven eight nine")).split("\n")
    assert first == style.paint("bad", "one two three four five six seven eight")
    assert second == "  " + style.paint("bad", "nine")


def test_a_broken_command_line_can_be_pasted_into_a_shell() -> None:
    said = SGR.sub("", on_a_terminal())
    command = re.search(r"^   python3 -m sglang\.launch_server(?:.*\\\n)+.*", said, re.MULTILINE)
    assert command is not None
    read = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {command[0]}"], capture_output=True, text=True, check=True
    ).stdout
    ended = subprocess.run(COMMAND, capture_output=True, text=True, env=environment(), check=False)
    whole = re.search(r"^   (python3 -m sglang\.launch_server .*)", ended.stdout, re.MULTILINE)
    assert whole is not None
    assert read.splitlines() == shlex.split(whole[1])


def test_a_value_in_quotes_is_not_broken() -> None:
    words = [("", "command"), (" ", '--json \'{"a": 1, "b": 2, "c": 3, "d": 4}\''), (" ", "--last")]
    assert Style(width=40).fill(words, "  ", end=" \\").split("\n") == [
        "  command \\",
        '    --json \'{"a": 1, "b": 2, "c": 3, "d": 4}\' \\',
        "    --last",
    ]


@pytest.mark.parametrize("variable", [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_color_or_a_dumb_terminal_turns_colours_off(variable: tuple[str, str]) -> None:
    assert "\x1b" not in on_a_terminal(variables=(variable,))


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
