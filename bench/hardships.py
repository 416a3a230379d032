"""`python -m bench.hardships [NAME …] [--seconds N]`: what takes too long or too much for a test, each with a real
`serve`. Part of `make soak`.

| name | |
|---|---|
| `line` | a line of 2 GB in the log, then usual ones |
| `files` | a glob that matches 10,000 short files, of which one grows |
| `state` | a state file of 100 MB, and one that another program wrote |
| `memory` | a cgroup of 80 MB, with a log of 50 MB and a scrape each second |
| `frozen` | stopped for ten minutes (SIGSTOP), and continued: nothing is called down, and no counter jumps |

Each prints a line; what this machine forbids is said. Exit status 1 where one ends otherwise than docs/faults.md says.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from bench.processes import Exporter, wait_for
from bench.server import running

DECODE = (
    b"[2025-11-20 11:40:10] Decode batch, #running-req: 2, #token: 90, token usage: 0.09, cuda graph: True, "
    b"gen throughput (token/s): 44.70, #queue-req: 4\n"
)
FROZEN_SECONDS = 600.0
LINE_BYTES, FILES, STATE_BYTES, CGROUP_BYTES, LOG_BYTES = 2 << 30, 10_000, 100 << 20, 80 << 20, 50 << 20
GROWTH_KIB = 64 << 10


class ForbiddenError(Exception):
    """This machine does not allow it."""


def line(place: Path, _: float) -> str:
    """A line of 2 GB."""
    if shutil.disk_usage(place).free < 2 * LINE_BYTES:
        raise ForbiddenError("too little disk")
    log = place / "server.log"
    log.touch()
    with Exporter("--log-file", str(log)) as running_one, log.open("ab", buffering=0) as file:
        before = running_one.memory_kib()
        piece = b"x" * (8 << 20)
        for _number in range(LINE_BYTES // len(piece)):
            file.write(piece)
        file.write(b"\n" + DECODE)
        wait_for(lambda: running_one.value("log_dropped_lines_total") == 1, 600)
        wait_for(lambda: 'kind="decode"} 1.0' in running_one.get(), 60)
        more = running_one.memory_kib("VmHWM") - before
        assert more < GROWTH_KIB, f"it took {more} KiB more"
    return f"dropped and counted, the next line read, {more / 1024:.1f} MiB more at most"


def files(place: Path, _: float) -> str:
    """10,000 files."""
    for number in range(FILES):
        (place / f"{number}.log").write_bytes(DECODE)
    begin = time.monotonic()
    with Exporter("--log-file", str(place / "*.log")) as running_one:
        started = time.monotonic() - begin
        left_out = running_one.value("log_files_left_out") or 0.0
        followed = running_one.get().count("sglang_tuning_log_up{")
        assert followed + left_out == FILES, f"{followed} followed, {left_out} left out"
        with (place / "17.log").open("ab") as file:
            file.write(DECODE)
        wait_for(lambda: (running_one.value("log_lines_total") or 0) >= 1, 120)
        held = running_one.memory_kib()
    return (
        f"{followed} followed, {left_out:.0f} left out and counted, started in {started:.1f} s, {held / 1024:.1f} MiB"
    )


def state(place: Path, _: float) -> str:
    """A state file of 100 MB, and a foreign one."""
    log = place / "server.log"
    log.touch()
    large, foreign = place / "large", place / "foreign"
    head = b'{"schema":1,"program":"sglang-tuning-exporter","at":1,"positions":{'
    large.write_bytes(head + b'"x":' + b"[" * (STATE_BYTES - len(head) - 4))
    foreign.write_bytes(b"somebody's own words\n")
    found = []
    for file in (large, foreign):
        with Exporter("--log-file", str(log), "--state-file", str(file)) as running_one:
            assert "sglang_tuning_log_up" in running_one.get(), "it serves"
            word = next(each for each in running_one.said if "state file" in each).partition(": ")[2][:60]
            found.append(f"{file.name}: “{word}”, {running_one.memory_kib('VmHWM') / 1024:.1f} MiB at most")
            assert running_one.memory_kib("VmHWM") < 160 << 10
    assert foreign.read_bytes() == b"somebody's own words\n"
    return "; ".join(found)


def cgroup() -> tuple[Path, str]:
    """Make a cgroup of 80 MB; return its folder and the file that takes a process."""
    name = f"sglang-tuning-{int(time.time())}"
    for root, limits in (
        (Path("/sys/fs/cgroup/memory"), ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")),
        (Path("/sys/fs/cgroup"), ("memory.max",)),
    ):
        folder = root / name
        try:
            folder.mkdir()
            (folder / limits[0]).write_text(str(CGROUP_BYTES))
        except OSError as error:
            with suppress(OSError):
                folder.rmdir()
            reason = f"{folder}: {error.strerror}"
            continue
        for each in limits[1:]:
            with suppress(OSError):
                (folder / each).write_text(str(CGROUP_BYTES))
        return folder, "cgroup.procs"
    raise ForbiddenError(reason)


def memory(place: Path, seconds: float) -> str:
    """A cgroup of 80 MB."""
    folder, procs = cgroup()
    log = place / "server.log"
    log.touch()
    enter = ["sh", "-c", f'echo $$ > "{folder / procs}" && exec "$@"', "sh"]
    try:
        with (
            running(1) as sglang,
            Exporter("--log-file", str(log), "--sglang-url", sglang, prefix=enter) as running_one,
            log.open("ab", buffering=0) as file,
        ):
            lines = 0
            for _ in range(max(int(seconds / 20), 5)):
                file.write(DECODE * (LOG_BYTES // 20 // len(DECODE)))
                lines += LOG_BYTES // 20 // len(DECODE)
                running_one.get()
                running_one.get("/")
                time.sleep(1)
            wait_for(lambda: f'kind="decode"}} {float(lines)}' in running_one.get(), 300)
            assert running_one.process.poll() is None
            held = running_one.memory_kib("VmHWM")
    finally:
        time.sleep(0.5)
        with suppress(OSError):
            folder.rmdir()
    return f"{lines:,} lines counted, {held / 1024:.1f} MiB at most"


def frozen(place: Path, seconds: float) -> str:
    """Stopped for ten minutes."""
    log = place / "server.log"
    log.write_bytes(DECODE)
    with (
        running(1) as sglang,
        Exporter("--log-file", str(log), "--sglang-url", sglang) as running_one,
        log.open("ab", buffering=0) as file,
    ):
        for _ in range(8):
            file.write(DECODE)
            running_one.get()
            time.sleep(1)
        before, begin = running_one.value("state_seconds_total") or 0.0, time.monotonic()
        running_one.process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        running_one.process.send_signal(signal.SIGCONT)
        frozen_for = time.monotonic() - begin
        verdicts, firing = set(), set()
        for _ in range(15):
            file.write(DECODE)
            verdicts.add(json.loads(running_one.get("/api/v1/findings"))["verdict"])
            page = running_one.get()
            firing |= set(re.findall(r'^sglang_tuning_alert\{diagnosis="([^"]+)"[^}]*\} 1.0$', page, re.MULTILINE))
            assert "sglang_tuning_up 1.0" in page
            time.sleep(1)
        counted = (running_one.value("state_seconds_total") or 0.0) - before
    bad = {"server_down", "scheduler_stuck", "crashed"} & (verdicts | firing)
    assert not bad, f"it says {bad}"
    return (
        f"{frozen_for:.0f} s: verdicts {sorted(verdicts)}, alerts {sorted(firing)}, {counted:.0f} s more in five"
        " signals"
    )


PARTS = {each.__name__: each for each in (line, files, state, memory, frozen)}


def main() -> int:
    """Run the parts that are named, or all."""
    parser = argparse.ArgumentParser(prog="python -m bench.hardships", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument(
        "--seconds", type=float, default=FROZEN_SECONDS, help="how long it is frozen (default ten minutes)"
    )
    arguments = parser.parse_args()
    status = 0
    for name in arguments.names or PARTS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                print(f"{name}: {PARTS[name](Path(folder), arguments.seconds)}", flush=True)
            except ForbiddenError as error:
                print(f"{name}: not here: {error}", flush=True)
            except AssertionError as error:
                print(f"{name}: wrong: {error}", flush=True)
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
