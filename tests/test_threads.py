"""An unexpected error in a thread of the exporter is logged and counted, and the thread goes on; one that always fails
ends the process.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from conftest import DECODE, Exporter, FakeSGLang, config, environment, wait_for
from sglang_tuning_exporter.collect import threads
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.collect.threads import Threads
from sglang_tuning_exporter.config.files import NoThreadError
from sglang_tuning_exporter.core.lines import Reader


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "PAUSES", (0.01, 0.01, 0.01))


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(threads.logger, "error", lambda words, *figures: lines.append(words % figures))
    return lines


def test_a_log_is_followed_again_after_an_unexpected_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    read = Reader.read

    def fails_at_bang(reader: Reader, line: bytes) -> object:
        if b"bang" in line:
            raise KeyError("\x1b[31mbang\nbang")
        return read(reader, line)

    monkeypatch.setattr(Reader, "read", fails_at_bang)
    log = tmp_path / "server.log"
    log.write_text("")
    sidecar = Sidecar(config(log_file=(str(log),)))
    sidecar.start()
    assert sidecar.log is not None
    book = sidecar.log
    with log.open("ab") as file:
        for text in (DECODE, b"bang\n", DECODE):
            lines = book.lines["decode"]
            file.write(text)
            file.flush()
            wait_for(lambda: sidecar.threads.errors["log"] == 1 if text == b"bang\n" else book.lines["decode"] > lines)  # noqa: B023 - waited for at once
    sidecar.stop()
    [line] = said
    assert line.startswith("log thread: unexpected error, please report it: KeyError: ")
    assert line.isprintable()
    assert (book.lines["decode"], sidecar.threads.failed) == (2, "")


def test_an_error_at_the_first_poll_does_not_stop_the_start_of_the_exporter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    log = tmp_path / "server.log"
    log.write_bytes(DECODE)
    monkeypatch.setattr(Reader, "read", lambda *_: 1 / 0)
    sidecar = Sidecar(config(log_file=(str(log),), from_start=True))
    sidecar.start()
    monkeypatch.undo()
    with log.open("ab") as file:
        file.write(DECODE)
    wait_for(lambda: sidecar.log is not None and sidecar.log.lines["decode"] == 1)
    sidecar.stop()
    assert (len(said), sidecar.threads.errors["log"]) == (1, 1)


def test_a_thread_that_fails_again_and_again_is_given_up(said: list[str]) -> None:
    group, given_up = Threads(threading.Event()), threading.Event()
    group.give_up = given_up.set
    group.start("log", lambda: 1 / 0)
    assert given_up.wait(60)
    assert (group.failed, group.errors["log"], group.up["log"]) == ("log", 4, False)
    assert said[-1] == "log thread: 4 errors in a row: the exporter ends"


def test_a_thread_that_cannot_be_started_is_one_line_and_not_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def limited(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    sidecar = Sidecar(config(sglang_url="http://127.0.0.1:9"))
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(threading.Thread, "start", limited)
        with pytest.raises(NoThreadError, match="the exporter can start no thread: raise its limit"):
            sidecar.start()
    assert sidecar.threads.up == {}
    sidecar.start()
    assert sorted(sidecar.threads.up) == ["scrape", "self-scrape"]
    sidecar.stop()


def test_errors_far_apart_do_not_count_as_repeated(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    monkeypatch.setattr(threads, "STEADY_SECONDS", 0.0)
    stopping = threading.Event()
    group = Threads(stopping)
    group.start("log", lambda: 1 / 0)
    wait_for(lambda: len(said) > 12)
    stopping.set()
    assert group.join(time.monotonic() + 60)
    assert group.failed == ""


BROKEN_THREADS = {
    "log": "from sglang_tuning_exporter.collect.follower import LogFollower as broken; broken.poll = fails",
    "scrape": "from sglang_tuning_exporter.collect.sidecar import Sidecar as broken; broken._receive = fails",
    "self-scrape": "from sglang_tuning_exporter.collect.sidecar import Sidecar as broken; broken._ask_limits = fails",
    "web-config": "from sglang_tuning_exporter.serve.web_config import ActiveConfig as broken; broken.reload = fails",
}


@pytest.mark.parametrize("name", BROKEN_THREADS)
def test_a_thread_that_fails_is_shown_with_its_place_and_the_process_ends(
    name: str, sglang: FakeSGLang, tmp_path: Path
) -> None:
    (tmp_path / "server.log").touch()
    (tmp_path / "web.yml").write_text("http_server_config: {http2: true}")
    broken = textwrap.dedent(f"""
        import sys, time
        from pathlib import Path
        from sglang_tuning_exporter.cli import main
        from sglang_tuning_exporter.collect import threads
        class Pauses(tuple):
            def __getitem__(self, place):
                while place == 2 and not Path({str(tmp_path / "seen")!r}).exists():
                    time.sleep(0.01)
                return 0.01
        threads.PAUSES = Pauses((1, 1, 1))  # the last one until it was seen
        def fails(*_):
            raise KeyError("a place")
        {BROKEN_THREADS[name]}
        sys.exit(main(["serve", "--listen-address", "127.0.0.1:0", *sys.argv[1:]]))
    """)
    flags = ["--log-file", tmp_path / "server.log", "--sglang-url", sglang.url, "--web-config", tmp_path / "web.yml"]
    process = subprocess.Popen(
        [sys.executable, "-c", broken, *map(str, flags)], stderr=subprocess.PIPE, env=environment()
    )
    running = Exporter(process)
    down = f'sglang_tuning_thread_up{{thread="{name}"}} 0.0'
    wait_for(lambda: down in running.get("/metrics").text, 60)
    (tmp_path / "seen").touch()
    assert process.wait(60) == 1
    running.end()
    said = [line for line in running.said if f"{name} thread: " in line]
    assert sum("unexpected error, please report it: KeyError: 'a place' (" in line for line in said) >= 3
    assert "fails)" in said[0]
    assert said[-1].rstrip().endswith(f"{name} thread: 4 errors in a row: the exporter ends")
    assert "Traceback" not in "".join(running.said)
