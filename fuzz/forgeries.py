"""A real recording with forged lines in its log: what they forge, after which messages, and what the exporter reports
of the server.

Run as a target of `python -m fuzz`: an input chooses a recording, a message that holds raw words (one of SGLang's, or
any text), the place, the forged line, and who scrapes how often. With metrics nothing may follow from it, and nothing
that happened may be lost. With the log alone it counts, but is marked, and the server is never called healthy.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.lines import Reader
from sglang_tuning_exporter.core.watch import Watch
from sglang_tuning_exporter.recordings.recording import Recording, load
from sglang_tuning_exporter.recordings.replay import packaged
from sglang_tuning_exporter.sglang import metrics as facts

ROOT = Path(__file__).parent.parent
NAMES = ("steady", "retract", "big_queue", "v0.5.9-retract", "dp2", "client_limited")
_PREFIX = b"[2026-11-20 19:26:00] "
READY = 1_763_640_000.0  # unix seconds at which every recording is ready
# How often each of two scrapers scrapes, seconds: within half a minute, else a line counts as with the log alone.
SCRAPERS = ((1.0, 1.0), (2.0, 5.0), (5.0, 5.0), (10.0, 3.0), (8.0, 10.0))
_SETTLES = 40.0  # seconds after the end in which the last page is scraped again
_OF_CARRIERS = "server_errors"  # the message with the raw text is one itself

_OUT_OF_MEMORY = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.75 GiB."
_TRACEBACK = (
    b'Traceback (most recent call last):\n  File "/x/scheduler.py", line 1, in forward_decode\n' + _OUT_OF_MEMORY
)
_ARGUMENTS = b"server_args=ServerArgs(" + b", ".join(b"argument_%d=%d" % (n, n) for n in range(60)) + b", tp_size=1)"
_RETRACTION = (
    b"KV cache pool is full. Retract requests. #retracted_reqs: 99, #new_tokens_gained: 124,"
    b" #new_token_ratio: 0.0317 -> 0.5260"
)
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
    "a dead process": b"\n%pSubprocess scheduler_0 (pid=1) crashed with exit code -9."
    b" Triggering SIGQUIT for cleanup...",
    "its parent": b"\n%pReceived sigquit from a child process. It usually means the child failed.",
    "watchdog": b"\n%pScheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)",
    "an order to end": b"\n%pSIGTERM received. signum=None frame=None. Draining requests and shutting down...",
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
    "a traceback in JSON": b'\n{"ts":1,"message":"%pTool \\nTraceback (most recent call last):\\n  File \\"x.py\\",'
    b" line 1, in forward_decode\\n" + _OUT_OF_MEMORY + b'"}',
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
    "no prefix": b"> %s\n",
    "profiling": b"%pProfiling starts%s. Traces will be saved to: /x (with profile id: y)\n",
    "its own variable": b"%p%s = False. Using native triton kernel cache.\n",
}


def play(
    recording: Recording, words: bytes, middle: int, *, scrapers: tuple[float, float] | None, envelope: int = 0
) -> tuple[Watch, float]:
    """Watch a recording at its own times, with these words before line `middle` (`%p`: the prefix at that time), and
    some time after it.

    `scrapers`: with metrics, scraped so often. Return the watch and its time at the end.
    """
    watch = Watch(PROFILES["online"], READY, reads=True, scrapes=scrapers is not None)
    reader, now, last, scrapes = Reader(), READY, None, recording.scrapes
    moments = [(line.at, 0, number) for number, line in enumerate(recording.lines)]
    moments += [(scrapes[number].at, 1, number) for number in _scraped(recording, scrapers)]

    def say(text: bytes) -> None:
        for line in text.removesuffix(b"\n").split(b"\n"):
            for event in reader.read(ENVELOPES[envelope](line)):
                event.time = now
                watch.take_line(event)

    for at, is_scrape, number in sorted(moments):
        if words and not is_scrape and number == middle:
            stamped = (line.text for line in recording.lines[middle:] if line.text[:3] == b"[20")
            say(words.replace(b"%p", next((text[: text.index(b"]") + 2] for text in stamped), b"")))
        now = READY + at
        watch.advance(now)
        if is_scrape:
            last = facts.read(scrapes[number].text.decode())
            watch.take_page(last, now)
        else:
            say(recording.lines[number].text)
    end = now + _SETTLES
    while now < end:
        now += 5.0
        if last is not None:
            watch.take_page(last, now)
        watch.advance(now)
    return watch, now


def outcome(watch: Watch) -> list[object]:
    """Return what a forged line must not change: counts, arguments, limits, the pool, and how the server ended."""
    server = watch.server
    # An order to end is taken as it is printed: a server that works on is not down, whoever ordered what.
    counted = {name: number for name, number in server.counted.items() if number and name != "liveness_events.draining"}
    return [counted, dict(server.facts.arguments), dict(server.facts.limits), server.facts.pool(), server.ended]


def _scraped(recording: Recording, scrapers: tuple[float, float] | None) -> list[int]:
    """Return the numbers of the pages that two scrapers get."""
    due, found = [0.0, 0.0], []
    for number, page in enumerate(recording.scrapes if scrapers is not None else ()):
        came = [who for who, at in enumerate(due) if page.at >= at]
        for who in came:
            due[who] = page.at + (scrapers or due)[who]
        found += [number] if came else []
    return found


@cache
def recordings() -> tuple[Recording, ...]:
    """Return real recordings."""
    packed = [ROOT / "tests" / "recordings" / name for name in NAMES]
    return tuple(load(path) if path.is_dir() else load(packaged(path.name)) for path in packed)


@cache
def true(place: int, scrapers: tuple[float, float] | None) -> Watch:
    """Return the facts of a recording, and see that none is lost."""
    recording = recordings()[place]
    watch, _ = play(recording, b"", 0, scrapers=scrapers)
    retractions = sum(b"Retract requests. #" in line.text for line in recording.lines)
    assert watch.server.counted["retraction_events"] == retractions, (recording.name, scrapers)
    return watch


def carrier(number: int, text: bytes) -> tuple[bytes, bytes]:
    """Return a message with raw words, `%s`, and what stands in it before the forged line: one of SGLang's, or any that
    is no event.
    """
    if (number := number % (len(CARRIERS) + 1)) < len(CARRIERS):
        return tuple(CARRIERS.values())[number], text.replace(b"%", b"")
    before, _, after = text.replace(b"%", b"").partition(b"|")
    # Of those that are events of their own, the recording's figures would have to be others.
    own = any(Reader().read(line) for line in (_PREFIX + before).split(b"\n"))
    return b"%p" + (b"" if own else before) + b"%s\n", after


def check_forgery(data: bytes) -> None:
    """Forged text after any message of any release changes no fact of a server with metrics; with the log alone it is
    marked.
    """
    if len(data) < 6:
        return
    place = data[0] % len(recordings())
    recording = recordings()[place]
    scrapers = SCRAPERS[data[1] // 8 % len(SCRAPERS)] if data[1] & 1 else None
    forged = tuple(FORGED.values())[data[2] % len(FORGED)]
    message, text = carrier(int.from_bytes(data[3:5], "big"), data[8:])
    served = next(number for number, line in enumerate(recording.lines) if b"fired up and ready" in line.text) + 60
    # SGLang's counter of retractions is on its page from the first request on.
    pages = (recording.scrapes[number] for number in _scraped(recording, scrapers))
    counted = next((page.at for page in pages if b"sglang:num_retracted_reqs" in page.text), 0.0)
    served = max(served, recording.count_lines_until(counted))
    # Keep away from the end of the log: silence after a forged failure would confirm it.
    last = max(number for number, line in enumerate(recording.lines) if b"Decode batch" in line.text) - 60
    middle = served + int.from_bytes(data[5:8], "big") % max(last - served, 1)
    words = message.replace(b"%s", text + forged)
    watch, now = play(recording, words, middle, scrapers=scrapers, envelope=data[1] // 2 % len(ENVELOPES))
    expected, where = true(place, scrapers), (recording.name, middle, message, forged, scrapers)
    if scrapers is not None:
        assert outcome(watch) == outcome(expected), where
        return
    theirs = message.startswith(b"%p%s")  # all of it
    for name, number in ({} if theirs else watch.server.counted).items():
        if name != _OF_CARRIERS and not name.startswith("liveness_events."):  # lines, marked or not
            marked = sum(totals.get(f"marked.{name}", 0.0) for _, totals in watch.server.buckets)
            assert number - marked <= expected.server.counted.get(name, 0), (name, where)
    assert watch.judge(now).verdict != "healthy", where


def seeds() -> list[bytes]:
    """Two inputs for each kind of forgery, behind other messages, in turn with metrics and in each envelope."""
    return [
        bytes((at, at % 8 + 8 * (at % len(SCRAPERS)), at, 0, at + more, 0, 7 * at, 0))
        for at in range(len(FORGED))
        for more in (0, 5)
    ]
