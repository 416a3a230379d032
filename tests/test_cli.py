"""The installed program: a usage error prints one line and exits with status 2; signals end it."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import requests

from conftest import PROGRAM, complaint, environment, program


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sglang-url", "http://u:hunter2@h"], ["--sglang-url=…@h", "--api-key-file"]),
        (["--log-file", "x", "--listen-address", "n" * 64 + ":1"], ["--listen-address=nnn", "another port or address"]),
        ([], ["nothing to watch", "--sglang-url", "--log-file"]),
        (["--no-such-flag"], ["--no-such-flag", "--help"]),
    ],
)
def test_a_wrong_flag_is_one_line_with_key_value_and_remedy(arguments: list[str], words: list[str]) -> None:
    said = complaint("serve", *arguments)
    assert all(word in said for word in words), said
    assert "hunter2" not in said


@pytest.mark.parametrize(
    "flag", ["--api-key", "--admin-api-key", "--ssl-keyfile-password", "--nonsense", "--api-key-file", ""]
)
def test_no_error_repeats_a_value_that_may_be_a_key(flag: str) -> None:
    for key in ("sk-hunter2secret", "hunter2"):
        for arguments in ([flag, key], [f"{flag}={key}"] if flag else [key, key]):
            assert "hunter2" not in complaint("serve", *filter(None, arguments))
    assert "hunter2" not in complaint("sk-hunter2secret")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--api-key", "k"], "--api-key is SGLang's own flag: put the key into a file and give --api-key-file FILE"),
        (["--tp-size", "4"], "--tp-size is SGLang's own flag: give it to the server, not here"),
        (["--api-key-file", "/absent/key"], "--api-key-file=/absent/key: give a file"),
        (["--log", "x"], "unrecognized arguments: --log; see"),
        (["server.log", "--log-file", "x"], "1 word belongs to no flag; see sglang-tuning-exporter serve --help"),
    ],
)
def test_sglangs_own_and_shortened_flags_are_answered_by_name(arguments: list[str], said: str) -> None:
    assert said in complaint("serve", *arguments)


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        (["report", "--profile", "fast"], {}, "--profile=fast: give one of online, offline"),
        (["report", "--profile", "fast", "--threshold", "queue_upper=3"], {}, "--profile=fast: give one of online"),
        (["report", "--format", "pdf"], {"FORMAT": "json"}, "--format=pdf: give one of text, json, html"),
        (["report"], {"FORMAT": "pdf"}, "SGLANG_TUNING_FORMAT=pdf: give one of text, json, html"),
        (["report"], {"PROFILE": "fast"}, "SGLANG_TUNING_PROFILE=fast: give one of online, offline"),
        (["plan"], {"THRESHOLD": "queue_upper=x"}, "SGLANG_TUNING_THRESHOLD=queue_upper=x: give a number"),
        (
            ["plan"],
            {"THRESHOLD": "reserve_lower_gb=12"},
            "SGLANG_TUNING_THRESHOLD=reserve_lower_gb=12: give a number below",
        ),
    ],
)
def test_a_command_over_logs_refuses_a_setting_by_the_key_of_its_source(
    arguments: list[str], variables: dict[str, str], said: str
) -> None:
    given = {f"SGLANG_TUNING_{name}": value for name, value in variables.items()}
    assert said in complaint(*arguments, "server.log", **given)


@pytest.mark.parametrize(
    ("arguments", "meant", "where"),
    [
        (["serve", "--proifle", "offline"], "--profile", "sglang-tuning-exporter serve --help"),
        (["report", "--fromat=json", "x.log"], "--format", "sglang-tuning-exporter report --help"),
        (["serv"], "serve", "sglang-tuning-exporter --help"),
    ],
)
def test_a_mistyped_flag_or_command_is_answered_with_the_nearest_one(
    arguments: list[str], meant: str, where: str
) -> None:
    assert complaint(*arguments).endswith(f"; did you mean {meant}?; see {where}\n")


def test_a_closed_output_pipe_causes_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with subprocess.Popen(
        [*PROGRAM, "generate", "--check", "--output", "/nonexistent"],
        stdout=writer,
        stderr=subprocess.PIPE,
        env=environment(PYTHONUNBUFFERED="1"),
    ) as process:
        os.close(writer)
        _, said = process.communicate(timeout=30)
    assert b"Traceback" not in said
    assert process.returncode != 0


# Runs the program as `python -m` does; it gets the signal of the first argument when it looks for the module of the
# second.
SIGNALLED_AT_IMPORT = """
import os, runpy, signal, sys
number, module = int(sys.argv.pop(1)), sys.argv.pop(1)
class Finder:
    def find_spec(name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), number)
sys.meta_path.insert(0, Finder)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # pytest may run under nohup,
signal.signal(signal.SIGINT, signal.default_int_handler)  # or in the background of a script
runpy.run_module("sglang_tuning_exporter", run_name="__main__", alter_sys=True)
"""

REFUSED = ["--log-file", "x", "--listen-address", "n" * 64 + ":1"]  # ends `serve` after its imports


def signalled(number: signal.Signals, module: str) -> list[str]:
    """The command line of a program that gets this signal while it imports this module."""
    return [sys.executable, "-c", SIGNALLED_AT_IMPORT, str(int(number)), module]


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("--version", "sglang_tuning_exporter.cli.commands"),
        ("report", "sglang_tuning_exporter.config.values"),
        ("serve", "sglang_tuning_exporter.serve.process"),
        ("serve", "sglang_tuning_exporter.serve.run"),
        ("serve", "uvicorn"),
    ],
)
def test_an_interrupt_during_the_start_ends_it_without_a_traceback(command: str, module: str) -> None:
    arguments = [command, *REFUSED] if command == "serve" else [command]
    ended = subprocess.run(
        [*signalled(signal.SIGINT, module), *arguments], capture_output=True, env=environment(), timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (130, b"")


def test_a_closed_terminal_ends_it_during_the_start() -> None:
    terminal, standard_input = pty.openpty()
    python, option, script, *signalled_at = signalled(signal.SIGHUP, "uvicorn")
    script = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n" + script
    ended = subprocess.run(
        [python, option, script, *signalled_at, "serve", *REFUSED],
        stdin=standard_input, start_new_session=True, env=environment(), timeout=60, check=False,
    )  # fmt: skip
    os.close(terminal)
    os.close(standard_input)
    assert ended.returncode == -signal.SIGHUP


@pytest.mark.parametrize("command", ["report", "plan", "explain"])
def test_what_is_printed_is_utf_8_in_any_locale_and_a_full_disk_is_one_line(command: str, tmp_path: Path) -> None:
    log = tmp_path / "größe.log"
    log.write_text("[2026-11-20 10:00:00] Decode batch, #running-req: 1, größe\n" * 3, encoding="utf-8")
    call = [*PROGRAM, command, str(log)]
    in_ascii = environment() | {"PYTHONIOENCODING": "ascii"}
    printed = subprocess.run(call, capture_output=True, env=in_ascii, timeout=60, check=False)
    assert b"Traceback" not in printed.stderr
    assert printed.stdout.decode("utf-8")
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(call, stdout=full, stderr=subprocess.PIPE, env=environment(), timeout=60, check=False)
    assert ended.returncode == 2
    assert (
        ended.stderr
        == b"sglang-tuning-exporter: standard output: No space left on device; give a file that can be written\n"
    )


def test_a_demo_without_prometheus_says_what_is_not_installed(tmp_path: Path) -> None:
    ran = program("demo", "--seconds", "2", cwd=tmp_path, PATH=str(tmp_path))
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "Not installed: Prometheus and Alertmanager. No notification;" in ran.stdout


def test_a_demo_whose_output_pipe_is_closed_leaves_no_exporter_running(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*PROGRAM, "demo"],
        stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment(PATH=str(tmp_path)),
    )  # fmt: skip
    assert process.stdout is not None
    address = next(found[1] for line in process.stdout if (found := re.match(r"  exporter +(http://\S+)", line)))
    assert requests.get(f"{address}/-/ready", timeout=10).ok
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    with pytest.raises(requests.ConnectionError):
        requests.get(f"{address}/-/ready", timeout=10)


def test_a_service_at_rest_loads_neither_pages_nor_what_generates_or_records() -> None:
    """Each is loaded by its own command, or by the first request for its page."""
    ask = (
        "import sys, sglang_tuning_exporter.cli.commands, sglang_tuning_exporter.serve.run; "
        "print(*sorted({'.'.join(name.split('.')[:3]) for name in sys.modules}))"
    )
    loaded = set(subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout.split())
    package = "sglang_tuning_exporter"
    assert {f"{package}.core.watch", f"{package}.serve.app"} <= loaded
    rooms = {f"{package}.{name}" for name in ("mixin", "recordings", "core.report", "core.page", "core.runbooks")}
    assert (
        loaded
        & {
            *rooms,
            f"{package}.serve.web_config",
            "bcrypt",
            "fastapi",
            "pydantic",
            "jinja2",
            "yaml",
            "markdown_it",
            "requests",
            "urllib3",
            "encodings.idna",
        }
        == set()
    )
