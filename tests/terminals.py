"""A real terminal, and what its colours look like on several of them."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

from conftest import environment
from sglang_tuning_exporter.recordings.replay import packaged

if TYPE_CHECKING:
    from collections.abc import Iterator

RETRACT = str(packaged("retract") / "server.log.gz")
COMMAND = [sys.executable, "-m", "sglang_tuning_exporter", "report", RETRACT]

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
