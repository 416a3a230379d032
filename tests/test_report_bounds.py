"""Input that is not a log ends with one line, in bounded time and memory: compression bombs, sparse files, devices,
endless streams.

The tests lower the bounds, so that they write little.
"""

from __future__ import annotations

import gzip
import io
import itertools
import os
import threading
from pathlib import Path

import pytest

from sglang_tuning_exporter.cli import main
from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.core import inputs
from sglang_tuning_exporter.core.inputs import Logs

LINE = b"[2025-11-20 11:40:13] Decode batch, #running-req: 1, #token: 9, token usage: 0.89, #queue-req: 4\n"
ENDED = "; give a log, or how much to read at most with --max-gb"


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MOST_UNPACKED", 1 << 18)
    monkeypatch.setattr(inputs, "MOST_WITHOUT_END", 1 << 20)
    monkeypatch.setattr(inputs, "MOST_WITHOUT_A_LINE", 1 << 20)


class Endless(io.RawIOBase):
    """The same bytes without end, as `yes` and /dev/zero give them; what was read of it is counted."""

    def __init__(self, piece: bytes) -> None:
        self._piece, self.given = piece, 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = (self._piece * (size // len(self._piece) + 1))[:size]
        self.given += len(data)
        return data


def refused(*arguments: str, stdin: object = None, most: int | None = None) -> str:
    with pytest.raises(UsageError) as error:
        list(Logs(list(arguments), stdin, most=most).events())  # type: ignore[arg-type]
    return str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"\0" * (5 << 20), f"has no end of a line in 1 MiB{ENDED}"),
        (b"x" * (5 << 20), f"has no end of a line in 1 MiB{ENDED}"),
        (LINE + b"\0" * (5 << 20), f"unpacks to more than 100 times its size{ENDED}"),
        (LINE * 50_000, f"unpacks to more than 100 times its size{ENDED}"),
        (b"\n" * (5 << 20), f"unpacks to more than 100 times its size{ENDED}"),
    ],
    ids=["zeros", "one line", "zeros behind a line", "lines", "ends of lines"],
)
def test_a_compression_bomb_is_refused(tmp_path: Path, text: bytes, said: str) -> None:
    path = tmp_path / "server.log.gz"
    path.write_bytes(gzip.compress(text))
    message = refused(str(path)).removeprefix(f"{path}: ")
    assert message in {said, f"unpacks to more than 100 times its size{ENDED}"}


@pytest.mark.parametrize(("piece", "most"), [(b"\0", 4), (b"x", 4), (b"y\n", 2), (b"\n", 2)])
def test_a_stream_that_never_ends_is_refused(piece: bytes, most: int) -> None:
    stream = Endless(piece)
    message = refused("-", stdin=stream)
    assert message in {
        f"-: has no end of a line in 1 MiB{ENDED}",
        "-: no line of SGLang's in it; give a server's log, written at --log-level info",
    }
    assert stream.given <= most << 20


@pytest.mark.parametrize("piece", [b"y\n", b"\n"])
def test_endless_short_lines_are_refused_long_before_as_many_bytes_of_long_ones(
    piece: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "MOST_WITHOUT_A_LINE", 16 << 20)
    stream = Endless(piece)
    assert "no line of SGLang's in it" in refused("-", stdin=stream)
    assert stream.given <= 3 << 20


def test_a_pipe_that_never_ends_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)

    def write() -> None:
        with path.open("wb") as pipe:
            try:
                for _ in itertools.count():
                    pipe.write(b"\0" * 65536)
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), pipe.fileno())  # what it still holds goes there

    threading.Thread(target=write, daemon=True).start()
    assert refused(str(path)) == f"{path}: has no end of a line in 1 MiB{ENDED}"


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
def test_an_invalid_bound_is_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "/dev/null", f"--max-gb={value}"]) == 2
    assert capsys.readouterr().err == (
        f"sglang-tuning-exporter: --max-gb={float(value):g}: give a number above 0, up to 1000000\n"
    )
