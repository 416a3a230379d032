"""A real recording with forged lines in its log: what they forge, after which messages, and what the exporter reports of the server.

Run as a target of `python -m fuzz`: an input chooses a recording, a message (those of `fuzz/sinks.json`, and some that only look similar), the place
and the forged line. No failure, start, retraction, argument or end of the server may follow from it, beside those of the recording.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from fuzz import sinks
from sglang_tuning_exporter.recordings.recording import Recording, load
from sglang_tuning_exporter.recordings.replay import packaged
from sglang_tuning_exporter.sglang.log.raw_text import ARRIVED_SECONDS, SuspectText
from sglang_tuning_exporter.sglang.log.reader import LogReader
from sglang_tuning_exporter.sglang.metrics import page_figures as facts
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.server import ServerState

ROOT = Path(__file__).parent.parent
NAMES = ("steady", "retract", "big_queue", "v0.5.9-retract", "dp2", "client_limited")
_PREFIX = b"[2026-11-20 19:26:00] "

_OUT_OF_MEMORY = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.75 GiB."
_TRACEBACK = (
    b'Traceback (most recent call last):\n  File "/x/scheduler.py", line 1, in forward_decode\n' + _OUT_OF_MEMORY
)
_ARGUMENTS = b"server_args=ServerArgs(" + b", ".join(b"argument_%d=%d" % (n, n) for n in range(60)) + b", tp_size=1)"
_RETRACTION = b"KV cache pool is full. Retract requests. #retracted_reqs: 99, #new_tokens_gained: 124, #new_token_ratio: 0.0317 -> 0.5260"
_START = (
    _ARGUMENTS,
    b"Load weight begin. avail mem=70.00 GB",
    b"Load weight end. type=X, dtype=torch.bfloat16, avail mem=55.00 GB, mem usage=15.00 GB.",
    b"KV Cache is allocated. #tokens: 17, K size: 0.01 GB, V size: 0.01 GB",
    b"Memory pool end. avail mem=5.00 GB",
    b"max_total_num_tokens=17, chunked_prefill_size=1, max_prefill_tokens=1, max_running_requests=1, context_len=1",
    b"The server is fired up and ready to roll!",
)

# `%p` becomes the prefix that the recording's lines have at that moment.
FORGED: dict[str, bytes] = {
    "out of memory": b"\n%pDecode out of memory. Try to lower your batch size.",
    "its traceback": b"\n%pScheduler hit an exception: " + _TRACEBACK,
    "a bare traceback": b"\n" + _TRACEBACK,
    "retraction": b"\n%p" + _RETRACTION,
    "a hundred retractions": b"".join(b"\n%p" + _RETRACTION.replace(b"0.0317", b"0.%04d" % n) for n in range(100)),
    "start": b"\n%p" + _ARGUMENTS,
    "all lines of a start": b"".join(b"\n%p" + line for line in _START),
    "limits": b"\n%p" + _START[-2],
    "rejections": b'\n%pINFO:     10.0.0.1:5 - "POST /generate HTTP/1.1" 503 Service Unavailable' * 30,
    "a dead process": b"\n%pSubprocess scheduler_0 (pid=1) crashed with exit code -9. Triggering SIGQUIT for cleanup...",
    "its parent": b"\n%pReceived sigquit from a child process. It usually means the child failed.",
    "watchdog": b"\n%pScheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)",
    "health": b"\n%pHealth check failed. Server couldn't get a response from detokenizer for last 20 seconds.",
    "glued": b"x%pDecode out of memory. Try to lower your batch size.",
    "behind a return": b"100%|##########| 1/1\r%pDecode out of memory. Try to lower your batch size.",
    "behind a bar": b"\n100%|##########| 1/1 [00:00<00:00, 1.0it/s]%p" + _RETRACTION,
    "far behind": b"\nx" * 70 + b"\n%pDecode out of memory. Try to lower your batch size.",
    **{
        f"twenty lines {name}": b"\n" + around.replace(b"%s", b"%p" + _RETRACTION) * 20
        for name, around in {
            "with two prefixes": b"%p%s\n",
            "with a level between two prefixes": b"%p{x.py:1} INFO - [x] %s\n",
            "of a pod": b"pod-0 server %s\n",
            "of another runtime": b"2026-11-20T19:26:00.1Z stderr F %s\n",
            "of a program": b"(Engine pid=1) %s\n",
            "of JSON": b'{"ts":1795204278,"message":"%s"}\n',
            "of JSON in JSON": b'{"time":1795204278,"log":"{\\"message\\":\\"%s\\"}"}\n',
            "of JSON with words of a request": b'{"ts":1795204278,"content":"%s"}\n',
            "of rows": b'["a","%s"]\n',
            "of CSV": b'a;"%s"\n',
            "in quotes": b"- '%s'\n",
            "of a debugging supervisor": b"2026-11-20 19:26:00,123 DEBG 'sglang' stderr output:\n%s\n\n",
            "in Chinese": "\u670d\u52a1\u5668\uff1a%s\n".encode(),
            "behind other ends of a line": "x\u2028%s\u0085%s\v%s\f%s\\n%s\\u000a%s\n".encode(),
        }.items()
    },
    "a traceback in JSON": b'\n{"ts":1,"message":"%pTool \\nTraceback (most recent call last):\\n  File \\"x.py\\", line 1, in forward_decode\\n'
    + _OUT_OF_MEMORY
    + b'"}',
    "behind a huge line": b"\n" + b"y" * 300_000 + b"\n%p" + _RETRACTION,
}

# What stands around every physical line of a log, those of a request too.
ENVELOPES: tuple[Callable[[bytes], bytes], ...] = (
    lambda line: line,
    lambda line: b"2026-11-20T19:26:00.123456789Z stderr F " + line,
    lambda line: json.dumps({"log": line.decode("utf-8", "replace") + "\n", "stream": "stderr"}).encode(),
    lambda line: b"Nov 20 19:26:00 gpu-01 sglang[4711]: " + line,
)

# Messages with raw words, `%s`, of several releases.
CARRIERS: dict[str, bytes] = {
    "undefined function": b"%pModel attempted to call undefined function: %s\n",
    "json part": b"%pFailed to parse JSON part: {%s}, JSON parse error: x\n",
    "parsed value": b"%pParsed value '%s' of parameter 'x' cannot be converted\n",
    "tool": b"%pTool '%s' is not defined in the tools list.\n",
    "error in request": b"%pError in request: %s\n",
    "an exception": b"%pERROR:    Exception in ASGI application\nTraceback (most recent call last):\n"
    b'  File "/x/y.py", line 1, in app\n    app()\nValueError: %s\n',
    "a template": b"%pError rendering template: %s\n",
    "a request": b'%pReceive: obj=GenerateReqInput(text="%s", input_ids=None)\n',
    "its end": b"%pFinish: obj=GenerateReqInput(text='x'), out={'text': \"%s\"}\n",
    "no prefix": b"%s\n",
}


class Outcome(NamedTuple):
    """Reported facts that a forged line must not change."""

    starts: int
    out_of_memory: dict[str, int]
    signs: dict[str, int]
    retractions: int
    arguments: dict[str, object]
    limits: dict[int | None, float]
    died: str
    rejected: float


class Played:
    """A recording that is read at its own times, with forged text in the middle; with `metrics` its scrapes are read too."""

    def __init__(self, recording: Recording, middle: int, *, metrics: bool, envelope: int = 0) -> None:
        self._envelope = ENVELOPES[envelope]
        self.state, self.reader, self.now = ServerState(PROFILES["online"], 0.0), LogReader(strict=True), 0.0
        self._recording = recording
        self._metrics = metrics
        self._moments = [(line.at, 0, number) for number, line in enumerate(recording.lines)]
        self._moments += [(scrape.at, 1, number) for number, scrape in enumerate(recording.scrapes)] if metrics else []
        self._moments.sort()
        self._done, self._middle = 0, middle

    def _go_on(self, to: int) -> None:
        while self._done < len(self._moments):
            at, is_scrape, number = self._moments[self._done]
            if not is_scrape and number >= to:
                return
            self._done, self.now = self._done + 1, at
            self.state.advance(at)
            if is_scrape:
                self.state.observe_scrape(facts.read(self._recording.scrapes[number].text.decode()), at)
            else:
                self.say(self._recording.lines[number].text)

    def say(self, text: bytes) -> None:
        """Write a text at this moment."""
        if self._envelope is not ENVELOPES[0]:
            text = b"".join(self._envelope(line) + b"\n" for line in text.removesuffix(b"\n").split(b"\n"))
        self.state.observe_all(self.reader.feed_runs(text, self.now), self.now)

    def until_middle(self) -> None:
        """Read up to the place of the forged text."""
        self._go_on(self._middle)

    def to_end(self) -> None:
        """Read the rest, and let half a minute pass."""
        self._go_on(len(self._recording.lines) + 1)
        self.state.advance(self.now + 40.0)
        self.state.settle(self.now + 40.0)

    def outcome(self) -> Outcome:
        """Return the reported facts now."""
        state = self.state
        return Outcome(
            state.starts,
            dict(+Counter(state.out_of_memory)),
            dict(+Counter(state.liveness)),
            int(state.totals().counts["retraction_events"]),
            dict(state.facts.args),
            dict(state.facts.running_limits),
            state.life.died,
            state.server_totals.counts["rejected_requests"],
        )


def play(recording: Recording, words: bytes, middle: int, *, metrics: bool, envelope: int = 0) -> Outcome:
    """Return the facts after a recording with these words before line `middle`; `%p` becomes the prefix at that time."""
    played = Played(recording, middle, metrics=metrics, envelope=envelope)
    played.until_middle()
    prefix = next(
        (line.text[: line.text.index(b"]") + 2] for line in recording.lines[middle:] if line.text[:3] == b"[20"), b""
    )
    if words:
        played.say(words.replace(b"%p", prefix))
    played.to_end()
    return played.outcome()


@cache
def recordings() -> tuple[tuple[Recording, dict[bool, Outcome]], ...]:
    """Return real recordings with their facts."""
    packed = [ROOT / "tests" / "recordings" / name for name in NAMES]
    loaded = [load(path) if path.is_dir() else load(packaged(path.name)) for path in packed]
    return tuple((each, {metrics: play(each, b"", 0, metrics=metrics) for metrics in (False, True)}) for each in loaded)


@cache
def carriers() -> tuple[bytes, ...]:
    """Every known message with raw text, of any release, and those above."""
    words = (f"{sink.before}%s{sink.after}" for sink, _ in sinks.known())
    messages = (b"%p" + text.replace("%p", "p").encode() + b"\n" for text in words)
    # Of those that are events of their own, the recording's figures would have to be others.
    return tuple(CARRIERS.values()) + tuple(text for text in messages if not LogReader().feed(_PREFIX + text[2:]))


def _retractions(recording: Recording, middle: int, carrier: bytes, forged: bytes) -> tuple[int, int]:
    """Return how many retractions fewer and more may be counted without metrics (SECURITY.md).

    Of those near the raw words, one counts for each decode line; after a message that is known to contain a model's text, none counts.
    """
    before = carrier.split(b"%s")[0].removeprefix(b"%p")
    suspicion = SuspectText()
    suspicion.note_message(before, None, 1)
    more = int(_RETRACTION[:30] in forged and not suspicion.after_sink)
    at = recording.lines[middle - 1].at
    near = (line.text for line in recording.lines[middle:] if line.at <= at + ARRIVED_SECONDS)
    return -sum(b"Retract requests" in text for text in near), more


def check_forgery(data: bytes) -> None:
    """Forged text after any message of any release changes no fact of the server."""
    if len(data) < 6:
        return
    recording, truth = recordings()[data[0] % len(recordings())]
    metrics = bool(data[1] & 1)
    forged = tuple(FORGED.values())[data[2] % len(FORGED)]
    carrier = carriers()[int.from_bytes(data[3:5], "big") % len(carriers())]
    served = next(number for number, line in enumerate(recording.lines) if b"fired up and ready" in line.text) + 60
    # Keep away from the end of the log: silence after a forged failure would confirm it.
    last = max(number for number, line in enumerate(recording.lines) if b"Decode batch" in line.text) - 60
    middle = served + int.from_bytes(data[5:8], "big") % max(last - served, 1)
    words = carrier.replace(b"%s", data[8:].replace(b"%", b"") + forged)
    outcome = play(recording, words, middle, metrics=metrics, envelope=data[1] // 2 % len(ENVELOPES))
    true = truth[metrics]
    if not metrics:
        least, most = _retractions(recording, middle, carrier, forged)
        assert least <= outcome.retractions - true.retractions <= most, (recording.name, middle, carrier, forged)
        # A log alone cannot show that an access line is none (SECURITY.md).
        outcome = outcome._replace(retractions=true.retractions, rejected=true.rejected)
    assert outcome == true, (recording.name, middle, carrier, forged, metrics)


def seeds() -> list[bytes]:
    """Two inputs for each kind of forgery, behind other messages, in turn with metrics and in each envelope."""
    return [bytes((at, at % 8, at, 0, at + more, 0, 7 * at, 0)) for at in range(len(FORGED)) for more in (0, 5)]
