"""Real log lines of ten releases, and what can be done to them."""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
_WORDS = (
    b"Decode batch, ", b"Prefill batch. ", b"KV cache pool is full. Retract requests. ", b"#retracted_reqs: ", b"#queue-req: ", b"token usage: ",
    b"] ", b"[",
    b"[2026-11-20 19:25:46 TP0] ", b"server_args={", b"ServerArgs(", b"torch.OutOfMemoryError: ",
    b"Traceback (most recent call last):\n", b"nan", b"inf", b"1e999",
    b"-1", b"9" * 30, b"\x00", b"\xff\xfe", b"\r", b"\x1b[31m", b'{"log":"', b"2025-11-20T11:40:11.5Z stderr P ", b"(Engine pid=1) ", b"'" * 40, b"{" * 200,
    b"\xef\xbc\x9a", b"cuda graph: True", b"#full token: ", b", " * 50,
)  # fmt: skip


def seeds() -> list[bytes]:
    """Lines of the fixtures and of the packaged recordings, without their line ends; a start's arguments once."""
    found: dict[bytes, None] = {}
    for path in sorted((ROOT / "tests" / "data" / "logs").glob("*.log")):
        found.update(dict.fromkeys(path.read_bytes().splitlines()))
    for path in sorted((ROOT / "exporter" / "sglang_tuning_exporter" / "recordings").glob("*/server.log.gz")):
        found.update(dict.fromkeys(gzip.decompress(path.read_bytes()).splitlines()))
    return [line for line in found if line]


def mutators(rng: random.Random, lines: list[bytes]) -> tuple[Callable[[bytes], bytes], ...]:
    """Ways to mutate one line. Long lines are cut first, because the arguments of one start take as long as a thousand batch lines."""

    def flip(line: bytes) -> bytes:
        at = rng.randrange(len(line) or 1)
        return line[:at] + bytes([rng.randrange(256)]) + line[at + 1 :]

    def cut(line: bytes) -> bytes:
        return line[rng.randrange(len(line) or 1) :] if rng.random() < 0.5 else line[: rng.randrange(len(line) or 1)]

    def insert(line: bytes) -> bytes:
        at = rng.randrange(len(line) + 1)
        return line[:at] + rng.choice(_WORDS) + line[at:]

    def splice(line: bytes) -> bytes:
        other = rng.choice(lines)[:2000]
        return line[: rng.randrange(len(line) or 1)] + other[rng.randrange(len(other) or 1) :]

    def figure(line: bytes) -> bytes:
        return line.replace(
            b"%d" % rng.randrange(10),
            rng.choice((b"", b"-", b".", b"7777777777777777777777", b"e9")),
            rng.randrange(1, 4),
        )

    def double(line: bytes) -> bytes:
        return line + b"\n" + line

    return (flip, cut, insert, splice, figure, double)
