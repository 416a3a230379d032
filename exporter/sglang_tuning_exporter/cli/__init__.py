"""The command line, which may import every other room. Its one public name is `main`."""

from __future__ import annotations

import os
import sys

__all__ = ["main"]
USAGE_STATUS = 2
INTERRUPTED_STATUS = 130  # the statuses that a shell reports after SIGINT and SIGPIPE
BROKEN_PIPE_STATUS = 141


def main(argv: list[str] | None = None) -> int:
    """Run one command; return its exit status. A user's mistake is one line on stderr and status 2."""
    try:  # around the imports too, so that Ctrl-C prints no traceback during the start
        return _run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        return INTERRUPTED_STATUS


def _run(argv: list[str]) -> int:
    _open_standard_streams()
    if argv[:1] == ["serve"]:
        from sglang_tuning_exporter.serve.process import outlive_hang_up

        outlive_hang_up()  # before the rest is imported: the start takes seconds
    from sglang_tuning_exporter.cli.commands import PROGRAM, run
    from sglang_tuning_exporter.config.files import NoThreadError
    from sglang_tuning_exporter.config.values import UsageError
    from sglang_tuning_exporter.sglang.clean import clean

    try:
        status = run(argv)
        sys.stdout.flush()
    except (UsageError, NoThreadError) as error:
        try:
            sys.stderr.write(f"{PROGRAM}: {clean(' '.join(str(error).split()))}\n")
        except OSError:  # a full disk or a closed pipe changes nothing about the status
            pass
        return USAGE_STATUS
    except BrokenPipeError:
        # The reader of our output has left. SIGPIPE stays ignored, as Python has it: the signal would end a server when
        # a client hangs up.
        return BROKEN_PIPE_STATUS
    finally:
        _discard_unwritten()
    return status


def _open_standard_streams() -> None:
    """Open `/dev/null` for closed standard streams: else the next file or socket would get their output."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # returns the lowest free number
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115 - until the end


def _discard_unwritten() -> None:
    """Discard output that a full disk or a closed pipe refuses.

    Python would try again to write it at the end, and replace the exit status by 120.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
