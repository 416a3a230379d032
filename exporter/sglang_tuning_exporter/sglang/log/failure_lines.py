"""Tracebacks, allocation failures, and the liveness lines of a server's processes.

A traceback is printed in one record (`Scheduler hit an exception: Traceback (most recent call last):`, 0.3.6 on) or
after its head line (`Exception in ModelTpServer:`, 0.3.0), each line after the first without a prefix; lines of
other ranks may be between them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from signal import Signals

from sglang_tuning_exporter.sglang.events import NO_RANK, Liveness, LivenessKind, OutOfMemory, OutOfMemoryPhase, Rank
from sglang_tuning_exporter.sglang.log.prefix import DAY, clock_seconds

TRACEBACK = b"Traceback (most recent call last):"
TEXT_KEPT = 200
_OTHER_LINES_BETWEEN = 60
_LINES_AFTER_HEAD = 2
_RAISED_WITHIN = 120.0  # seconds between a rank's error line and the traceback of the same failure
_FAILED_RANKS_KEPT = 1024

_LIVENESS: tuple[tuple[re.Pattern[bytes], LivenessKind], ...] = (
    (re.compile(rb"The server is fired up and ready to roll!"), "ready"),
    (re.compile(rb"(?:([A-Z]\w{0,40}) )?[Ww]atchdog timeout \((?:self\.)?watchdog_timeout="), "watchdog_timeout"),
    (re.compile(rb"Health check failed\. Server couldn't get a response from detokenizer"), "health_check_failed"),
    (re.compile(rb"(?:Subp|P)rocess [^'\"\n]{0,120}\bcrashed with exit code -?\d+"), "process_died"),
    (re.compile(rb"Received sigquit from a child process"), "process_died"),
    (re.compile(rb"Child process unexpectedly failed with "), "process_died"),
    (re.compile(rb"(?:RuntimeError: )?Rank \d+ scheduler (?:died during initialization|is dead)"), "launch_failed"),
    (re.compile(rb"Initialization failed\. "), "launch_failed"),
    (re.compile(rb"SIGTERM received\. "), "draining"),
    (re.compile(rb"(?:[A-Z]\w{0,40}(?: [a-z]\w{0,20})?) hit an exception: "), "scheduler_exception"),
    (
        re.compile(rb"Exception in (?:ModelTpServer|run_tp_server|ControllerMulti|ControllerSingle)\b"),
        "scheduler_exception",
    ),
)

# The main process ends with these before it logs its arguments: argparse rejects a flag, or a check of the values fails.
_USAGE_ERROR = re.compile(rb"(?:sglang serve|launch_server\.py): error: [^\n]{1,1000}")
_UNRECOGNIZED = re.compile(rb"([^\n]{0,40}: error: unrecognized arguments: )([^\n]*)")
_MAIN = re.compile(rb'  File "[^"\n]{0,1000}/sglang/(?:launch_server|cli/\w{1,20})\.py", line \d+, in ')
_NO_ERROR = (b"KeyboardInterrupt", b"SystemExit")  # somebody ended it

_CRASHED = re.compile(
    rb"(?:Subp|P)rocess ([A-Za-z][\w.:-]{0,60})(?: [^'\"\n]{0,60})? crashed with exit code (-?\d{1,5})\b"
)

# The owner of a watchdog that is not the scheduler's (`debug_name`, 0.5.7 on).
_WATCHED = {b"DetokenizerManager": "detokenizer", b"TokenizerManager": "tokenizer"}

# A health check that failed: how long it took, when it began, and when the detokenizer last sent something (0.4.3 on).
_CHECK_TIMES = re.compile(
    rb"Health check failed\. [^\n]{0,80}for last (\d{1,5}) seconds\."
    rb" tic start time: (\d\d):(\d\d):(\d\d)\. last_heartbeat time: (\d\d):(\d\d):(\d\d)\s*$"
)
_CHECK_OFF = 2.0  # seconds: both times are printed without fractions

# Failed allocations that name their phase.
_ALLOCATIONS: tuple[tuple[re.Pattern[bytes], OutOfMemoryPhase], ...] = (
    (re.compile(rb"(?:RuntimeError: )?Prefill out of memory\. (?:Please )?[Tt]ry to lower"), "prefill"),
    (re.compile(rb"(?:RuntimeError: )?Decode out of memory\. (?:Please )?[Tt]ry to lower"), "decode"),
    (re.compile(rb"(?:RuntimeError: )?alloc_req_slots runs out of memory\."), "decode"),
    (re.compile(rb"ValueError: Failed to retract any request\. No space left"), "decode"),
    (re.compile(rb"ValueError: Out of memory even after retracting all other requests"), "decode"),
    (
        re.compile(
            rb"(?:RuntimeError: |ValueError: )?Not enough memory[.;] [Pp]lease try to increase --mem-fraction-static"
        ),
        "startup",
    ),
)
_CAPTURE = re.compile(rb"(?:\w+: )?Capture (?:[\w -]{0,40})?(?:cuda|CUDA) graph failed: (.*)")
_DEVICE = re.compile(
    rb"(?:torch\.(?:cuda\.)?OutOfMemoryError: "
    rb"|(?:torch\.AcceleratorError|RuntimeError): (?:CUDA|HIP|NPU|MUSA|XPU) (?:error: )?out of memory)"
    rb"|(?:torch\.)?OutOfMemoryError: "
)
# Any of these: most messages are none, and one look says so.
_POSSIBLE = re.compile(
    b"|".join(each.pattern for each in (*(each for each, _ in (*_LIVENESS, *_ALLOCATIONS)), _CAPTURE, _DEVICE))
)
_OUT_OF_MEMORY = re.compile(rb"out of memory", re.IGNORECASE)

_FRAME = re.compile(rb'  File "[^"\n]{0,1000}", line \d+, in (\S{1,200})')
_EXCEPTION = re.compile(rb"[A-Za-z_][\w.]{0,200}(?:: |$)")
_CHAINED = (b"During handling of the above exception", b"The above exception was the direct cause")
_IN_CAPTURE = re.compile(rb"capture|init_(?:device|cuda)_graphs|init_piecewise", re.IGNORECASE)
_IN_PREFILL = re.compile(rb"prefill|extend", re.IGNORECASE)
_IN_DECODE = re.compile(rb"decode|update_running_batch", re.IGNORECASE)
# The encoder takes all images, videos and sounds of a request at once, however small the chunk of its prompt is.
_IN_ENCODER = re.compile(rb"embed_mm_inputs|get_(?:image|img|video|audio)_features?$|encode_images")
_IN_LOOP = re.compile(rb"event_loop|forward_loop|process_input_requests|handle_request|forward_step")
_IN_START = re.compile(rb"__init__|init_|load_model|load_weights|alloc_memory_pool|profile_max_num_token|launch_")


def _is_timely(text: bytes, time: float | None) -> bool:
    """Whether a failed health check began as long before its line as it prints, after the last heartbeat."""
    match = _CHECK_TIMES.match(text)
    if match is None or time is None:
        return False
    began, beat = (clock_seconds(*match.group(at, at + 1, at + 2)) for at in (2, 5))
    off = (time % DAY - began - int(match[1]) + DAY / 2) % DAY - DAY / 2
    return abs(off) <= _CHECK_OFF and (began - beat) % DAY < DAY / 2


def _crash_text(text: bytes) -> str:
    """Return which process crashed and how, in the line's words; empty where the line does not say it."""
    match = _CRASHED.match(text)
    if match is None:
        return ""
    code = int(match[2])
    try:
        signal = Signals(-code).name if code < 0 else ""
    except ValueError:
        signal = ""
    by = "killed from outside, often by the kernel's OOM killer" if signal == "SIGKILL" else signal
    return f"{match[1].decode('ascii')} crashed with exit code {code}" + (f" ({by})" if by else "")


def _phase_of_message(text: bytes) -> OutOfMemoryPhase | None:
    """Return the phase of a failed allocation that names it; `None` for any other text."""
    for pattern, phase in _ALLOCATIONS:
        if pattern.match(text):
            return phase
    match = _CAPTURE.match(text)
    return "graph_capture" if match is not None and _OUT_OF_MEMORY.search(match[1], 0, 1000) else None


@dataclass(slots=True)
class _Traceback:
    """An open traceback: its rank and time, and the phase that its frames show."""

    time: float | None
    rank: Rank
    expires: int  # an exception after this line number is not of this traceback
    counted: bool  # an earlier exception of the same chain is already an event
    sure: bool  # a scheduler announced it in a line that raw text cannot have produced
    chained: bool = False  # "During handling of the above exception…": the next traceback belongs to this failure
    phase: OutOfMemoryPhase | None = None
    in_loop: bool = False
    started: bool = False
    in_main: bool = False  # of the main process: it ends

    def read_frame(self, function: bytes, line: int) -> None:
        """Note the phase of a frame: the deepest one counts, but every frame inside a graph capture is capture, and inside an
        encoder neither prefill nor decode.
        """
        self.expires = line + _OTHER_LINES_BETWEEN
        if _IN_CAPTURE.search(function):
            self.phase = "graph_capture"
        elif _IN_ENCODER.search(function):
            self.phase = "unknown"
        elif _IN_LOOP.search(function):
            self.in_loop = True
        if self.phase not in {"graph_capture", "unknown"}:
            if _IN_PREFILL.search(function):
                self.phase = "prefill"
            elif _IN_DECODE.search(function):
                self.phase = "decode"
        if _IN_START.search(function):
            self.started = True


class FailureLines:
    """Reads failures line by line; keeps the open traceback, and which rank has already logged its failure."""

    def __init__(self) -> None:
        self._open: _Traceback | None = None
        self._closed: _Traceback | None = None
        self._first_line = 0  # the first line of the open one
        self._line = 0
        self._reported: dict[Rank, tuple[OutOfMemoryPhase, float | None, bool]] = {}
        self._announced: tuple[int, float | None, Rank, bool] | None = None
        self.starting = False  # a start has been seen, its end not yet
        self.serving = False  # ready, or a batch was printed

    def is_in_traceback(self, line: int) -> bool:
        """Whether the `line`-th line may belong to a traceback, whose last line contains raw text."""
        return self._open is not None and line <= self._open.expires

    def restart(self) -> None:
        """Forget what is open of the server before."""
        self._open = self._closed = self._announced = None
        self._reported.clear()
        self.starting = True
        self.serving = False

    def parse_message(
        self, text: bytes, time: float | None, rank: Rank, line: int, *, sure: bool = True
    ) -> Liveness | OutOfMemory | None:
        """Read a message directly after a prefix; `sure`: raw text cannot have produced it."""
        if text.rstrip().endswith(TRACEBACK):
            self._open_traceback(time, rank, line)
        if _POSSIBLE.match(text) is None:
            return None
        phase = _phase_of_message(text)
        if phase is not None:
            if len(self._reported) >= _FAILED_RANKS_KEPT:
                self._reported.clear()
            self._reported[rank] = (phase, time, sure)
            return _out_of_memory(time, rank, phase, text)
        if _DEVICE.match(text):
            failure = _out_of_memory(time, rank, self._phase_without_frames(), text)
            failure.suspect = True  # an exception's own text behind the prefix: any other text may stand there as well
            return failure
        for pattern, what in _LIVENESS:
            if match := pattern.match(text):
                if what == "scheduler_exception":
                    self._announce(line, time, rank, sure=sure)
                elif what == "ready":
                    self.serving = True
                stage = _WATCHED.get(match[1] or b"", "scheduler") if what == "watchdog_timeout" else ""
                timely = what == "health_check_failed" and _is_timely(text, time)
                return Liveness(time, rank, what, stage=stage, detail=_crash_text(text), timely=timely)
        return None

    def _announce(self, line: int, time: float | None, rank: Rank, *, sure: bool) -> None:
        """Note that a scheduler logged an exception: the traceback in this record, or in the next lines, is its own."""
        self._announced = (line, time, rank, sure)
        if self._open is not None and self._first_line == line:
            self._open.sure = sure

    def _open_traceback(
        self, time: float | None, rank: Rank, line: int, *, counted: bool = False, sure: bool = False
    ) -> _Traceback:
        self._closed, self._first_line = None, line
        self._open = _Traceback(time, rank, line + _OTHER_LINES_BETWEEN, counted=counted, sure=sure)
        return self._open

    def parse_bare(
        self, text: bytes, time: float | None, line: int
    ) -> tuple[str | None, Liveness | OutOfMemory | None]:
        """Read a line without a prefix: its kind (`traceback`, `out_of_memory`, `liveness`) and event.

        The kind is `None` where the line belongs to no traceback.
        """
        is_open = self.is_in_traceback(line)
        if not self.serving and _USAGE_ERROR.match(text):
            return "liveness", _no_start(text, time)
        if text.startswith(TRACEBACK):
            self._open_without_head(time, line)
        elif frame := _FRAME.match(text):
            traceback = (self._open if is_open else None) or self._open_without_head(time, line)
            traceback.read_frame(frame[1], line)
            traceback.in_main = traceback.in_main or _MAIN.match(text) is not None
        elif self._closed is not None and text.startswith(_CHAINED):
            self._closed.chained = True
        elif not is_open:
            return None, None
        elif _EXCEPTION.match(text):
            return self._close(text, time)
        elif text[:1] != b" ":
            return None, None
        return "traceback", None

    def _open_without_head(self, time: float | None, line: int) -> _Traceback:
        """Open a traceback without a head: chained to the one before, announced by the line before, or of a process that
        prints no prefix.
        """
        closed, announced = self._closed, self._announced
        if closed is not None and closed.chained and line <= closed.expires:
            return self._open_traceback(closed.time, closed.rank, line, counted=closed.counted, sure=closed.sure)
        if announced is not None and line - announced[0] <= _LINES_AFTER_HEAD:
            return self._open_traceback(announced[1], announced[2], line, sure=announced[3])
        return self._open_traceback(time, NO_RANK, line)

    def _close(self, text: bytes, time: float | None) -> tuple[str, Liveness | OutOfMemory | None]:
        traceback = self._open
        assert traceback is not None
        self._open, self._closed = None, traceback
        when = traceback.time if traceback.time is not None else time
        for pattern, what in _LIVENESS:
            if what == "launch_failed" and pattern.match(text):
                return "liveness", Liveness(when, traceback.rank, what, suspect=not traceback.sure)
        phase = _phase_of_message(text)
        if phase is None:
            if not _DEVICE.match(text):
                ends = traceback.in_main and not self.serving and not text.startswith(_NO_ERROR)
                return ("liveness", _no_start(text, when)) if ends else ("traceback", None)
            phase = self._phase_of_frames(traceback)
        elif self._already_reported(traceback, phase):
            traceback.counted = True
        if traceback.counted:
            return "traceback", None
        traceback.counted = True
        failure = _out_of_memory(when, traceback.rank, phase, text)
        failure.suspect = not traceback.sure
        return "out_of_memory", failure

    def _already_reported(self, traceback: _Traceback, phase: OutOfMemoryPhase) -> bool:
        """Whether this is the failure that the rank logged as an error before it raised it (0.4.4 on).

        An error line that raw text may have forged does not replace a traceback that it cannot have forged.
        """
        reported, time, sure = self._reported.pop(traceback.rank, (None, None, False))
        if reported != phase or (traceback.sure and not sure):
            return False
        return time is None or traceback.time is None or abs(traceback.time - time) <= _RAISED_WITHIN

    def _phase_without_frames(self) -> OutOfMemoryPhase:
        return "startup" if self.starting and not self.serving else "unknown"

    def _phase_of_frames(self, traceback: _Traceback) -> OutOfMemoryPhase:
        if traceback.phase == "graph_capture":
            return "graph_capture"
        if self.starting and not self.serving:
            return "startup"
        if traceback.phase is not None:
            return traceback.phase
        return "startup" if traceback.started and not traceback.in_loop and not self.serving else "unknown"


def _no_start(text: bytes, time: float | None) -> Liveness:
    if match := _UNRECOGNIZED.match(text):  # without their values: one may be a key
        text = match[1] + b" ".join(word.partition(b"=")[0] for word in match[2].split() if word[:1] == b"-")
    detail = text.decode("utf-8", "replace").strip().rstrip(".") if b": " in text else ""
    detail = detail if len(detail) <= TEXT_KEPT else detail[:TEXT_KEPT].rpartition(" ")[0] + " …"
    return Liveness(time, NO_RANK, "launch_failed", suspect=True, detail=detail)


def _out_of_memory(time: float | None, rank: Rank, phase: OutOfMemoryPhase, text: bytes) -> OutOfMemory:
    return OutOfMemory(time, rank, phase, text=text[: TEXT_KEPT * 4].decode("utf-8", "replace").strip()[:TEXT_KEPT])
