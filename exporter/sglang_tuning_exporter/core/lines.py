"""The kinds of SGLang's log lines as a table, and `Reader`, which turns a stream of lines into events.

To add a line, add a row to `ROWS`: the kind of its event, a pattern of the message behind the stamp, and the first release that prints it.
A group of the pattern that is named as a figure is one. Wordings are those of the released wheels 0.3.0 to 0.5.23 and of releases before.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from signal import Signals
from typing import NamedTuple, TypeAlias

from sglang_tuning_exporter.core.events import NO_RANK, Event, Rank
from sglang_tuning_exporter.core.trust import Trust
from sglang_tuning_exporter.core.wrapping import DAY, LONGEST, Line, Stamp, Wrapping, stamp_of, without_terminal
from sglang_tuning_exporter.sglang.args.printed import parse_server_args

_LONGEST_BATCH, _LONGEST_MEMORY = 4096, 16_384
_TEXT_KEPT = 1000


class Row(NamedTuple):
    """One line of SGLang's."""

    kind: str  # of its event; of a kind in `SILENT` there is none
    pattern: bytes
    since: str  # the first release seen
    word: str = ""  # of the event; a group `word` is looked up in `_WORDS`
    figures: dict[str, float] = {}  # besides the groups of the pattern


_N = rb"(-?\d{1,9}(?:\.\d{1,9})?)"
_BATCH_HEAD = rb"(?: ?\[[^\]]{0,24}\])?(?:\((?:mixed )?#running-req: ?(?P<mixed>\d+)\))?[ ]?[.,:]?[ ]?(?=[#\w]|$)"
SILENT = ("request", "known")
ROWS = (
    # Batches: srt/managers/tp_worker.py in 0.3.0, scheduler.py, scheduler_metrics_mixin.py; srt/observability later.
    Row("decode", rb"Decode batch" + _BATCH_HEAD, "0.3.0"),
    Row("decode", rb"(?=#running-req: )", "0.1.0"),
    Row("prefill", rb"Prefill batch" + _BATCH_HEAD, "0.3.0"),
    Row("prefill", rb"new fill batch\. (?=#)", "0.1.0"),
    Row(
        "retraction",
        rb"(?:[Dd]ecode out of memory happened|KV cache pool is full\b[\w .]{0,40})[ ]?[.,:]?[ ]?(?=#)",
        "0.3.0",
    ),
    Row("retraction", rb"Testing retraction\b[\w .]{0,40}[ ]?[.,:]?[ ]?(?=#)", "0.4.0", figures={"testing": 1}),
    # The start: model_runner.py, memory_pool.py, the graph runners, scheduler.py.
    Row("arguments", rb"server_args=", "0.3.0"),
    Row("pool", rb"KV Cache is allocated\.(?: dtype: [^,]{1,60},)? #tokens: (?P<tokens>\d{1,15})", "0.4.3"),
    Row(
        "pool",
        rb"Post-capture KV sizing: KV cache allocated\.(?: dtype: [^,]{1,60},)? #tokens: (?P<tokens>\d{1,15})",
        "0.5.16",
        figures={"resized": 1},
    ),
    Row("limits", rb"max_total_num_tokens=(?=\d{1,15}(?:,|$))", "0.3.0"),
    Row(
        "limits",
        rb"max_running_requests was reduced from the requested \d{1,12} to (?P<max_running_requests>\d{1,12})\b",
        "0.5.16",
    ),
    Row(
        "limits",
        rb"Post-capture KV sizing: max_running_requests \d{1,12} -> (?P<max_running_requests>\d{1,12})\b",
        "0.5.16",
    ),
    Row("limits", rb"max_running_requests is capped to (?P<max_running_requests>\d{1,12})\b", "0.5.16"),
    Row("memory", rb"Load weight begin\.", "0.3.0", "weights_begin"),
    Row("memory", rb"Load weight end\.", "0.3.0", "weights"),
    Row("memory", rb"Mamba Cache is allocated\.", "0.5.3", "state_cache"),
    Row("memory", rb"Memory pool end\.", "0.3.0", "pool"),
    Row("memory", rb"Capture (?:[\w -]{0,60}?)[Cc][Uu][Dd][Aa] graph begin\.", "0.3.0", "graph_begin"),
    Row("memory", rb"Capture (?:[\w -]{0,60}?)[Cc][Uu][Dd][Aa] graph end\.", "0.4.3", "graph"),
    Row("known", rb"Capture cuda graph bs \[", "0.4.3"),
    Row("known", rb"KV Cache |Post-capture KV sizing: |max_running_requests ", "0.5.16"),
    Row("ready", rb"The server is fired up and ready to roll!", "0.3.0"),
    # Life: srt/utils, srt/managers, srt/entrypoints/http_server.py, engine.py.
    Row(
        "hang",
        rb"(?:(?P<word>[A-Z]\w{0,40}) )?[Ww]atchdog timeout \((?:self\.)?watchdog_timeout=(?P<seconds>\d{1,9}(?:\.\d{1,9})?)?",
        "0.3.0",
    ),
    Row("health", rb"Health check failed\. Server couldn't get a response from detokenizer", "0.4.3"),
    Row("end", rb"(?:Subp|P)rocess [^'\"\n]{0,120}\bcrashed with exit code -?\d+", "0.5.7", "process_died"),
    Row("end", rb"Received sigquit from a child process", "0.4.0", "process_died"),
    Row("end", rb"SIGQUIT received\. signum=", "0.5.5.post3", "process_died"),
    Row("end", rb"Child process unexpectedly failed with ", "0.4.3", "process_died"),
    Row(
        "end",
        rb"(?:RuntimeError: )?Rank \d+ scheduler (?:died during initialization|is dead)",
        "0.4.3",
        "launch_failed",
    ),
    Row("end", rb"Initialization failed\. ", "0.3.0", "launch_failed"),
    Row("end", rb"[A-Z]\w{0,40}(?: [a-z]\w{0,20})? hit an exception: ", "0.3.6", "scheduler_exception"),
    Row(
        "end",
        rb"Exception in (?:ModelTpServer|run_tp_server|ControllerMulti|ControllerSingle)\b",
        "0.3.0",
        "scheduler_exception",
    ),
    Row("draining", rb"SIGTERM received\. ", "0.4.4"),
    # Failed allocations that name their phase.
    Row(
        "out_of_memory", rb"(?:RuntimeError: )?Prefill out of memory\. (?:Please )?[Tt]ry to lower", "0.3.0", "prefill"
    ),
    Row("out_of_memory", rb"(?:RuntimeError: )?Decode out of memory\. (?:Please )?[Tt]ry to lower", "0.3.0", "decode"),
    Row("out_of_memory", rb"ValueError: Failed to retract any request\. No space left", "0.4.0", "decode"),
    Row("out_of_memory", rb"ValueError: Loaded weights leave no GPU memory for the KV cache\b", "0.5.20", "startup"),
    Row("out_of_memory", rb"ValueError: Out of memory even after retracting all other requests", "0.5.3", "decode"),
    Row(
        "out_of_memory",
        rb"(?:RuntimeError: |ValueError: )?Not enough memory[.;] [Pp]lease try to increase --mem-fraction-static",
        "0.3.0",
        "startup",
    ),
    Row(
        "out_of_memory",
        rb"(?:\w+: )?Capture (?:[\w -]{0,40})?(?:cuda|CUDA) graph failed: (?=.{0,1000}[Oo][Uu][Tt] [Oo][Ff] [Mm][Ee][Mm][Oo][Rr][Yy])",
        "0.3.0",
        "graph_capture",
    ),
    Row(
        "out_of_memory",
        rb"(?:torch\.(?:cuda\.)?)?OutOfMemoryError: "
        rb"|(?:torch\.AcceleratorError|RuntimeError): (?:CUDA|HIP|NPU|MUSA|XPU) (?:error: )?out of memory",
        "0.3.0",
    ),
    # Prompts: validate_input_length, srt/managers/utils.py; _validate_one_request, tokenizer_manager.py.
    Row(
        "too_long",
        rb"Input length \((?P<tokens>\d{1,9}) tokens\) exceeds the maximum allowed length \((?P<most>\d{1,9}) tokens\)\.",
        "0.4.3",
    ),
    Row(
        "too_long",
        rb"Request length is longer than the KV cache pool size or the max context length\. Truncated\."
        rb" len\(req\.origin_input_ids\)=(?P<tokens>\d{1,9}), (?:self\.)?max_req_input_len=(?P<most>\d{1,9})\.",
        "0.3.6",
    ),
    Row(
        "too_long",
        rb"(?:\[http_server\] Error: )?The input \((?P<tokens>\d{1,9}) tokens\) is longer than the model's context length"
        rb" \((?P<most>\d{1,9}) tokens\)\.(?: Truncating the input\.)?$",
        "0.4.6",
    ),
    Row(
        "too_long",
        rb"\[http_server\] Error: Requested token count exceeds the model's maximum context length of (?P<most>\d{1,9}) tokens\."
        rb" You requested a total of (?P<tokens>\d{1,9}) tokens: [\w ,.]{0,200}limit\.$",
        "0.4.9",
    ),
    # Req.set_finish_with_abort, srt/managers/schedule_batch.py; srt/constrained/grammar_manager.py.
    Row(
        "refused",
        rb"Grammar-based generation \([\w, ]{1,80}\) is not supported when the server is launched with --grammar-backend none"
        rb", self\.rid='[\w-]{1,80}'$",
        "0.5.7",
        figures={"grammar": 1},
    ),
    Row("refused", rb"(?!Aborted by AbortReq)[A-Z][^\n]{8,2000}?, self\.rid='[\w-]{1,80}'$", "0.4.3"),
    # uvicorn's, and others with no text of anybody.
    Row(
        "known",
        rb"INFO: +(?:Started server process|Waiting for application|Application (?:startup|shutdown)|Uvicorn running on|Shutting down"
        rb"|Finished server process)|Endpoint '/\w{1,40}' is deprecated|Gracefully exiting|Sleeping \d+ seconds before crash diagnostics",
        "0.3.0",
    ),
    # Lines with text of a request or a model, which are no events.
    Row("request", rb"(?:Receive|Finish)(?: \w{1,20})?: obj=|in=[\w.<>]{0,60}(?:ReqInput|Req)\(", "0.3.0"),
    Row("request", rb"\{[^\n]{0,200}\"event\": ?\"request\.", "0.5.12"),
    Row("request", rb"Received output for rid=", "0.4.3"),
    Row("request", rb"Model attempted to call undefined function:|Tool '|Parsed value '|Failed to parse JSON", "0.4.6"),
    Row("request", rb"Error in detect_and_parse:", "0.4.6"),
    Row("request", rb"Req Time Stats\(|Req\(rid=", "0.5.3"),
)
_PATTERNS = tuple(re.compile(row.pattern) for row in ROWS)
# Most messages are none of them, and one look says so.
_ANY = re.compile(b"|".join(re.sub(rb"\?P<\w+>", b"?:", row.pattern) for row in ROWS))
_WATCHED = {b"DetokenizerManager": "detokenizer", b"TokenizerManager": "tokenizer"}  # 0.5.7
_UNKNOWN_BATCH = re.compile(rb"[A-Z]\w{2,20} batch(?: ?\[\d{1,12}\])?[.,] ?#[\w-]{1,40}: ?\d")

_FIGURES = {
    b"#running-req": "running",
    b"#queue-req": "queued",
    b"#token": "tokens",
    b"#full token": "tokens",
    b"#gpu token": "tokens",
    b"token usage": "usage",
    b"full token usage": "usage",
    b"gpu token usage": "usage",
    b"swa token usage": "swa_usage",
    b"mamba usage": "mamba_usage",
    b"gen throughput (token/s)": "throughput",
    b"accept len": "accept_length",
    b"#new-seq": "sequences",
    b"#new-token": "tokens",
    b"#cached-token": "cached",
    b"#pending-token": "pending",
    b"#prealloc-req": "prealloc",
    b"#transfer-req": "transfer",
    b"#retracted-req": "retracted",
    b"#bootstrap-req": "bootstrap",
    b"#inflight-req": "inflight",
    b"#unbootstrapped-req": "unbootstrapped",
    b"#transferring-req": "transferring",
    b"#optimistic-req": "optimistic",
    b"#host-receive-req": "host_receive",
    b"waiting-image-req": "waiting_image",
    b"#waiting-image-req": "waiting_image",
    b"#retracted_reqs": "requests",
    b"#retracted_req": "requests",
    b"#aborted_retracted_reqs": "aborted",
    b"#new_tokens_gained": "gained",
    # 0.1: `new fill batch. #seq: 7. #cached_token: 1541. …`
    b"#seq": "sequences",
    b"#new_seq": "sequences",
    b"#new_token": "tokens",
    b"#cached_token": "cached",
    b"#remaining_req": "queued",
    b"#running_req": "running",
}
_OTHER_FIGURES = frozenset(
    (
        b"input throughput (token/s),#cpu token,#mamba num,#remaining-req,#replay-token,#swa token,accept rate,block accept len,"
        b"cache hit rate,cap len,cpu token usage,est. decode TFLOPS/s (per GPU),est. prefill TFLOPS/s (per GPU),"
        b"est. read BW (GB/s per GPU),est. write BW (GB/s per GPU),fwd occupancy,hit_tokens,largest-len,mamba num,"
        b"pre-allocated usage,tree_cache_hit_rate,windowed_cache_hit_rate"
    ).split(b",")
)
_GRAPH = re.compile(rb"(cuda|cpu|npu|musa|xpu|hpu|hip) graph$")
# What may follow the last value: marks of HTML and tables, closing quotation marks, other fields.
_END = rb"(?=$|[ \t]*[<|)\]}\"'`]|[ \t]+[\w.]+=)"
_NUMBER = re.compile(rb"(-?\d{1,18}(?:\.\d{1,18})?(?:[eE][+-]?\d{1,3})?)[ ]?(%?)" + _END)
_NO_NUMBER = (b"nan", b"nan%", b"-nan", b"inf", b"-inf", b"inf%", b"None")
_RATIO = re.compile(rb"(\d+(?:\.\d+)?)[ ]?->[ ]?(\d+(?:\.\d+)?)" + _END)
_LARGEST = 2.0**53  # above, a float cannot count

# The usual batch lines, read by one expression.
_USUAL_GRAPH = rb"(?:cuda|cpu|npu|musa) graph: (?:True|False)"
_USUAL_DECODE = (
    rb"Decode batch[.,] #running-req: (\d{1,9}), #token: (\d{1,15}), token usage: (\d\.\d\d), (?:(cuda|cpu|npu|musa) graph: (True|False), )?"
    rb"gen throughput \(token/s\): (\d{1,9}\.\d\d), #queue-req: (\d{1,9}),? ?\r?"
)
_USUAL_PREFILL = (
    rb"Prefill batch[.,] #new-seq: (\d{1,9}), #new-token: (\d{1,9}), #cached-token: (\d{1,12}), token usage: (\d\.\d\d),"
    rb" #running-req: (\d{1,9}), #queue-req: (\d{1,9})(?:, #pending-token: (\d{1,12}))?(?:, %b)?"
    rb"(?:, input throughput \(token/s\): \d{1,9}\.\d\d(?:, %b)?)?,? ?\r?"
) % (_USUAL_GRAPH, _USUAL_GRAPH)
_USUAL_STAMP = rb"(\[[-0-9 :]{19}[^\]\n]{0,40}\] )"
_USUAL = re.compile(_USUAL_STAMP + b"(?:" + _USUAL_DECODE + b"|" + _USUAL_PREFILL + b")")
_WHOLE = re.compile(
    _USUAL_DECODE
    + b"|"
    + _USUAL_PREFILL
    + rb"|(?:[Dd]ecode out of memory happened|KV cache pool is full)[\w .]{0,40}[.,:]? "
    rb"#retracted_reqs: \d+, (?:#[a-z_]+: \d+, ){0,3}#new_token_ratio: [01]\.\d{4} -> [01]\.\d{4}"
)
_OTHER_LINE = re.compile(rb"\[20\d\d-\d\d-\d\d ")  # another process wrote into this line

_ACCESS = re.compile(rb'(?:INFO: +)?(?:\S{1,80} - )?"(GET|POST|PUT|DELETE|HEAD|OPTIONS|PATCH) ')
_ANSWERED = re.compile(rb'[^"\n]{1,2000} HTTP/\d(?:\.\d)?" (\d{3})\b')
_PAUSED = re.compile(rb"/(pause|continue)_generation HTTP/")
_USUAL_ACCESS = re.compile(
    _USUAL_STAMP + rb'INFO:     [^ \n]{1,80} - "(?:GET|POST) /(?!pause_|continue_)[^"\n]{1,200} HTTP/1\.1" 200 OK'
)
_ASGI = re.compile(rb"(?:ERROR: *)?Exception in ASGI application\s*$")


def _fields(text: bytes, start: int, comma: bytes = b",") -> dict[bytes, bytes]:
    """Return the `key: value` pairs from `start` on, the first of each key."""
    found: dict[bytes, bytes] = {}
    for part in text[start:].split(comma, 64)[:64]:
        key, colon, value = part.partition(b":")
        if colon:
            found.setdefault(key.strip(), value.strip())
    return found


def _number(value: bytes) -> float | None:
    if len(value) < 16 and value.isdigit():
        return int(value)
    match = _NUMBER.match(value)
    if match is None:
        return None
    number = float(match[1]) / (100 if match[2] else 1)
    return number if 0 <= number <= _LARGEST else None


@dataclass(slots=True)
class _Traceback:
    """An open traceback, and what its frames show."""

    time: float | None
    rank: Rank
    until: int  # the number of the last line that can belong to it
    announced: bool = False  # by a line of SGLang's
    counted: bool = False  # an earlier exception of the chain is an event already
    chained: bool = False  # "During handling of the above exception…"
    phase: str = ""
    in_loop: bool = False
    in_start: bool = False
    in_main: bool = False


TRACEBACK = b"Traceback (most recent call last):"
_OTHERS_BETWEEN = 60  # lines of other processes in a traceback
_RAISED_WITHIN = 120.0  # seconds between a rank's error line and the traceback of the same failure
_FRAME = re.compile(rb'  File "[^"\n]{0,1000}", line \d+, in (\S{1,200})')
_EXCEPTION = re.compile(rb"[A-Za-z_][\w.]{0,200}(?:: |$)")
_CHAINED = (b"During handling of the above exception", b"The above exception was the direct cause")
_IN_CAPTURE = re.compile(rb"capture|init_(?:device|cuda)_graphs|init_piecewise", re.IGNORECASE)
_IN_PREFILL = re.compile(rb"prefill|extend", re.IGNORECASE)
_IN_DECODE = re.compile(rb"decode|update_running_batch", re.IGNORECASE)
# The encoder takes all images of a request at once, however small the chunk of its prompt is.
_IN_ENCODER = re.compile(rb"embed_mm_inputs|get_(?:image|img|video|audio)_features?$|encode_images")
_IN_LOOP = re.compile(rb"event_loop|forward_loop|process_input_requests|handle_request|forward_step")
_IN_START = re.compile(rb"__init__|init_|load_model|load_weights|alloc_memory_pool|profile_max_num_token|launch_")
_IN_MAIN = re.compile(rb'  File "[^"\n]{0,1000}/sglang/(?:launch_server|cli/\w{1,20})\.py", line \d+, in ')
_USAGE_ERROR = re.compile(rb"(?:sglang serve|launch_server\.py): error: [^\n]{1,1000}")
_UNRECOGNIZED = re.compile(rb"([^\n]{0,40}: error: unrecognized arguments: )([^\n]*)")
_BY_SOMEBODY = (b"KeyboardInterrupt", b"SystemExit")
_CRASHED = re.compile(
    rb"(?:Subp|P)rocess ([A-Za-z][\w.:-]{0,60})(?: [^'\"\n]{0,60})? crashed with exit code (-?\d{1,5})\b"
)
_CHECK = re.compile(
    rb"Health check failed\. [^\n]{0,80}for last (\d{1,5}) seconds\."
    rb" tic start time: (\d\d):(\d\d):(\d\d)\. last_heartbeat time: (\d\d):(\d\d):(\d\d)\s*$"
)


def _words(text: bytes) -> str:
    return text[: _TEXT_KEPT * 4].decode("utf-8", "replace").strip()[:_TEXT_KEPT]


def _is_timely(text: bytes, time: float | None) -> bool:
    """Whether a health check began as long before its line as the line says, after the last heartbeat (0.4.3)."""
    match = _CHECK.match(text)
    if match is None or time is None:
        return False
    last, *clocks = map(int, match.groups())
    began, beat = (clocks[at] * 3600 + clocks[at + 1] * 60 + clocks[at + 2] for at in (0, 3))
    off = (time % DAY - began - last + DAY / 2) % DAY - DAY / 2
    return abs(off) <= 2.0 and (began - beat) % DAY < DAY / 2


def _crash(text: bytes) -> str:
    """Say which process crashed and how; empty where the line does not."""
    match = _CRASHED.match(text)
    if match is None:
        return ""
    code = int(match[2])
    by = Signals(-code).name if -code in {each.value for each in Signals} else ""
    by = "killed from outside, often by the kernel's OOM killer" if by == "SIGKILL" else by
    return f"{match[1].decode('ascii')} crashed with exit code {code}" + (f" ({by})" if by else "")


def _launch_failure(text: bytes) -> str:
    """Say why a launch failed, without the values of arguments: one may be a key."""
    if match := _UNRECOGNIZED.match(text):
        text = match[1] + b" ".join(word.partition(b"=")[0] for word in match[2].split() if word[:1] == b"-")
    detail = text.decode("utf-8", "replace").strip().rstrip(".") if b": " in text else ""
    return detail if len(detail) <= _TEXT_KEPT else detail[:_TEXT_KEPT].rpartition(" ")[0] + " …"


_SIZES = re.compile(rb"\bbs[= ]\[([\d, ]{0,12000})\]")
_GRAPH_OF = re.compile(rb"Capture ([\w -]{0,60}?)cuda graph", re.IGNORECASE)
_OF_PREFILL = re.compile(rb"prefill|piecewise|breakable", re.IGNORECASE)
_OF_DECODE = (b"", b"target decode", b"target verify", b"decode")
_LIMIT = re.compile(rb"(\w{1,60})=(-?\d{1,15}(?:\.\d{1,9})?)(?: ?GB)?(?:,|\s|$)")
_LIMITS = ("max_total_num_tokens", "max_running_requests", "chunked_prefill_size", "context_len", "max_prefill_tokens")
_POOL_SIZES = re.compile(rb", K size: " + _N + rb" GB, V size: " + _N + rb" GB|, KV size: " + _N + rb" GB")
_MEMORY = {
    name: re.compile(pattern + _N + rb" ?GB")
    for name, pattern in (("available", rb"avail mem="), ("used", rb"mem usage="))
}
_STATES, _STATE_SIZE = (
    re.compile(rb"max_mamba_cache_size: (\d{1,12})\b"),
    re.compile(rb"_(?:state|cache) size: " + _N + rb" ?GB"),
)


class Reader:
    """Turns the lines of one stream into events. `kind` is that of the last line; `lines` counts them by kind."""

    def __init__(self) -> None:
        self.kind = "other"
        self.lines: Counter[str] = Counter()
        self.unreadable: Counter[str] = Counter()
        self.wrapping = Wrapping()
        self.trust = Trust()
        self.number = 0  # of the last line
        self.around = ""  # the text around it
        self._events: list[Event] = []
        self._origins: dict[bytes, tuple[float, Rank]] = {}  # by stamp
        self._time: float | None = None  # the last one printed
        self._clock: float | None = None
        self._day = 0
        self._stamped = False  # SGLang prints stamps in this stream
        self._starting = self._serving = False
        self._exceptions_due = 0  # answers with 500 whose exception was not printed yet
        self._sizes: tuple[int, ...] = ()  # of captured graphs
        self._cut: tuple[Event, bytes] | None = None  # arguments that may go on in the next line
        self._open: _Traceback | None = None
        self._closed: _Traceback | None = None
        self._announced: tuple[int, float | None, Rank] = (-9, None, NO_RANK)
        self._reported: dict[Rank, tuple[str, float | None]] = {}

    def read(self, line: bytes) -> tuple[Event, ...]:
        """Return the events of a line without its newline. Never raises."""
        self.number += 1
        usual = _USUAL.fullmatch(line)
        if usual is not None and (event := self._usual(usual)) is not None:
            self.around = ""
            self._count(event.kind, event.time)
            if self._cut is None:
                event.marked = bool(self.trust.carrier) and self.trust.is_near(self.number, event.time)
                self.trust.mark(event.kind, self.number, event.time, ())
                return (event,)
            events = [*self.end(), event]
            self.trust.mark(event.kind, self.number, event.time, events)
            return tuple(events)
        if self.wrapping.is_bare and self._cut is None and _USUAL_ACCESS.fullmatch(line) is not None:
            self.around = ""
            self._count("access", self._time)
            return ()
        self._events = []
        kinds = [self._read(each) for each in self.wrapping.lines(line, open_text=self._in_traceback())]
        kind = kinds[-1] if kinds else self.wrapping.waits
        self._count(kind, self._time)
        self.trust.mark(kind, self.number, self._time, self._events)
        return tuple(self._events)

    def end(self) -> tuple[Event, ...]:
        """Return what waits for a further line: arguments that were cut."""
        cut, self._cut = self._cut, None
        return () if cut is None else (cut[0],)

    def _count(self, kind: str, time: float | None) -> None:
        self.kind = kind
        self.lines[kind] += 1
        self._time = time

    def _usual(self, match: re.Match[bytes]) -> Event | None:
        """Return the event of a usual batch line."""
        prefix = match[1]
        origin = self._origins.get(prefix)
        if origin is None:
            stamp = stamp_of(prefix)
            if stamp is None or stamp[1] != len(prefix) or stamp[0].time is None:
                return None
            if len(self._origins) >= 4096:
                self._origins.clear()
            origin = self._origins[prefix] = (stamp[0].time, stamp[0].rank)
        self._serving = self._stamped = True
        self.wrapping.is_usual()
        _, running, tokens, usage, device, graph, throughput, queued, *prefill = match.groups()
        if running is not None:
            figures: dict[str, float] = {
                "running": int(running),
                "queued": int(queued),
                "tokens": int(tokens),
                "usage": float(usage),
                "throughput": float(throughput),
            }
            if graph is None:
                return Event("decode", *origin, figures)
            figures["graph"] = graph == b"True"
            return Event("decode", *origin, figures, device.decode())
        sequences, tokens, cached, usage, running, queued, pending = prefill
        figures = {
            "sequences": int(sequences),
            "tokens": int(tokens),
            "cached": int(cached),
            "running": int(running),
            "queued": int(queued),
            "usage": float(usage),
        }
        if pending is not None:
            figures["pending"] = int(pending)
        return Event("prefill", *origin, figures)

    def _add(
        self,
        kind: str,
        time: float | None,
        rank: Rank,
        figures: dict[str, float] | None = None,
        word: str = "",
        text: str = "",
    ) -> Event:
        event = Event(kind, time, rank, {} if figures is None else figures, word, text)
        self._events.append(event)
        return event

    def _read(self, line: Line) -> str:
        """Read a line without what is around it; return its kind."""
        text, self.around = without_terminal(line.text), line.around
        found = stamp_of(text)
        if line.glued:
            self.trust.mark("glued", self.number, self._time, ())
        if found is None and not line.headed:
            return self._read_unstamped(text, line)
        self._events.extend(self.end())
        stamp, start = found or (Stamp(None, None, line.rank), 0)
        timed = stamp.time is not None or stamp.clock is not None
        time, clock = (stamp.time, stamp.clock) if timed else (line.time, None)
        if clock is None and time is not None and time < 1e9:
            time, clock = None, time
        if clock is not None:
            time = self._since_first_midnight(clock)
        self._time = self._time if time is None else time
        if self._stamped and not timed and not line.headed:
            return "other"
        kind = self._read_stamped(text, start, time, stamp.rank if stamp.rank != NO_RANK else line.rank)
        for more in line.more:
            self._read_traceback(more, time)
        self._stamped = self._stamped or (timed and kind not in ("other", "access", "traceback"))
        return kind

    def _since_first_midnight(self, clock: float) -> float:
        """Return a time without a date (0.3.0) as seconds since the midnight of the first day."""
        last = self._clock
        if last is not None:
            if clock < last - DAY / 2:
                self._day += 1
            elif last < 120 and clock > DAY - 120 and self._day:  # processes write out of order
                return (self._day - 1) * DAY + clock
        self._clock = clock
        return self._day * DAY + clock

    def _read_stamped(self, text: bytes, start: int, time: float | None, rank: Rank) -> str:
        """Read the message behind a stamp, and the line of another process that follows its end without a newline."""
        glued = _OTHER_LINE.search(text, start + 1, start + _LONGEST_BATCH)
        if glued is None or _WHOLE.fullmatch(text, start, glued.start()) is None:
            return self._read_message(text[start:], time, rank)
        kind = self._read_message(text[start : glued.start()], time, rank)
        if (other := stamp_of(text, glued.start())) is not None:
            self._read_message(text[other[1] :], other[0].time, other[0].rank)
        return kind

    def _read_unstamped(self, text: bytes, line: Line) -> str:
        """Read a line without a stamp: arguments that go on, a part of a traceback, an access line, or of a log without stamps.

        The text around it may have the time of another zone than SGLang's stamps: those come first.
        """
        if self._cut is not None and self._read_rest(text, *self._cut):
            return "arguments"
        self._events.extend(self.end())
        time = line.time
        if self._stamped:
            time = self._time
        elif time is not None and time < 1e9:
            time = self._since_first_midnight(time)
        kind = self._read_access(text, time, line.rank) if _ACCESS.match(text) else self._read_traceback(text, time)
        if not kind and not self._stamped:
            self._time = self._time if time is None else time
            kind = self._read_message(text, time, line.rank)
        for more in line.more:
            self._read_traceback(more, time)
        return kind or ("other" if text.strip() else "empty")

    def _read_message(self, text: bytes, time: float | None, rank: Rank) -> str:
        """Read a message by the table."""
        text = without_terminal(text)
        if _ACCESS.match(text):
            return self._read_access(text, time, rank)
        if text.rstrip().endswith(TRACEBACK):
            self._open, self._closed = _Traceback(time, rank, self.number + _OTHERS_BETWEEN), None
        if _ANY.match(text) is not None:
            for row, pattern in zip(ROWS, _PATTERNS, strict=True):
                if (match := pattern.match(text)) is not None:
                    return self._read_row(row, match, time, rank)
        if text.rstrip().endswith(TRACEBACK):
            return "traceback"
        if _ASGI.match(text):  # uvicorn, of a request that an exception ended; that of a stream has status 200
            if self._exceptions_due:
                self._exceptions_due -= 1
            else:
                self._add("server_error", time, rank)
            return "server_error"
        if _UNKNOWN_BATCH.match(text):
            self.unreadable["batch_line"] += 1
        return "other"

    def _read_row(self, row: Row, match: re.Match[bytes], time: float | None, rank: Rank) -> str:
        if row.kind in ("pool", "limits", "memory"):
            self._starting = True
        special = _SPECIAL.get(row.kind)
        if row.kind == "refused" and not row.figures:
            self._add(row.kind, time, rank)
            return "request"  # its error may quote the request
        if special is not None:
            return special(self, row, match, time, rank)
        if row.kind in SILENT:
            return row.kind
        groups = match.groupdict()
        word = groups.pop("word", None)
        figures = row.figures | {name: float(value) for name, value in groups.items() if value is not None}
        if row.kind == "hang":
            self._add(row.kind, time, rank, figures, _WATCHED.get(word or b"", "scheduler"))
        else:
            self._add(row.kind, time, rank, figures, row.word)
        return row.kind

    def _read_batch(self, row: Row, match: re.Match[bytes], time: float | None, rank: Rank) -> str:
        """Read a batch or retraction line by the names of its fields."""
        text = match.string[:_LONGEST_BATCH].rstrip()
        torn = _OTHER_LINE.search(text)
        text = text[: torn.start()] if torn is not None else text
        for foreign, own in ((b"\xef\xbc\x9a", b": "), (b"\xef\xbc\x8c", b", "), (b"\xe3\x80\x82", b". ")):
            text = text.replace(foreign, own)
        is_oldest = text.startswith(b"new fill")
        fields = _fields(text.rstrip(b". ") if is_oldest else text, match.end(), b". " if is_oldest else b",")
        figures, word, known = dict(row.figures), "", set[str]()
        for key, value in fields.items():
            name = _FIGURES.get(key)
            if name is not None and name not in known:
                known.add(name)
                number = _number(value)
                if number is not None and (number <= 2 or not name.endswith("usage")):
                    figures[name] = (
                        number if "usage" in name or name in ("throughput", "accept_length") else int(number)
                    )
            elif row.kind == "decode" and (graph := _GRAPH.match(key)) and value in (b"True", b"False"):
                figures["graph"], word = float(value == b"True"), graph[1].decode()
        if row.kind == "retraction":
            return self._read_retraction(fields, figures, time, rank)
        if mixed := match.groupdict().get("mixed"):
            figures["running"] = int(mixed)
        if not figures.keys() & ({"running", "tokens"} if row.kind == "decode" else {"sequences", "tokens"}):
            self.unreadable["batch_line"] += 1
            return "other"
        unknown = [key for key in fields if key not in _FIGURES and key not in _OTHER_FIGURES and not _GRAPH.match(key)]
        self.unreadable["batch_key"] += len(unknown[:8])
        self.unreadable["batch_line"] += torn is not None or any(
            (key in _FIGURES or key in _OTHER_FIGURES) and value not in _NO_NUMBER and not _NUMBER.match(value)
            for key, value in fields.items()
        )
        self._serving = True
        self._add(row.kind, time, rank, figures, word)
        return row.kind

    def _read_retraction(
        self, fields: dict[bytes, bytes], figures: dict[str, float], time: float | None, rank: Rank
    ) -> str:
        if "requests" not in figures:
            self.unreadable["retraction_line"] += 1
            return "other"
        if ratio := _RATIO.match(fields.get(b"#new_token_ratio", b"")):
            figures["ratio_before"], figures["ratio_after"] = float(ratio[1]), float(ratio[2])
        kept = ("requests", "aborted", "gained", "ratio_before", "ratio_after", "testing")
        self._add("retraction", time, rank, {name: figures[name] for name in kept if name in figures})
        return "retraction"

    def _read_arguments(self, row: Row, match: re.Match[bytes], time: float | None, rank: Rank) -> str:
        self._open = self._closed = None
        self._reported.clear()
        self._starting, self._serving, self._sizes = True, False, ()
        arguments = parse_server_args(match.string.decode("utf-8", "replace"))
        if arguments is None:
            self.unreadable["server_args"] += 1
            return "known"
        event = Event(row.kind, time, rank, arguments=arguments.args)
        if arguments.is_cut:
            event.figures["cut"] = 1
            self._cut = (event, match.string)
        else:
            self._events.append(event)
        return row.kind

    def _read_rest(self, rest: bytes, event: Event, before: bytes) -> bool:
        """Add the arguments that a shipper put into a line of their own: Docker cuts lines at 16 KiB."""
        whole = (before.rstrip(b"\r") + rest)[:LONGEST]
        arguments = parse_server_args(whole.decode("utf-8", "replace"))
        if arguments is None or len(arguments.args) <= len(event.arguments):
            return False
        event.arguments = arguments.args
        self._cut = (event, whole)
        if not arguments.is_cut:
            event.figures.pop("cut", None)
            self._events.extend(self.end())
        return True

    def _read_pool(self, row: Row, match: re.Match[bytes], time: float | None, rank: Rank) -> str:
        figures = row.figures | {"tokens": int(match["tokens"])}
        if sizes := _POOL_SIZES.match(match.string, match.end()):
            figures["gigabytes"] = sum(float(size) for size in sizes.groups() if size)
        self._add(row.kind, time, rank, figures)
        return row.kind

    def _read_limits(self, row: Row, match: re.Match[bytes], time: float | None, rank: Rank) -> str:
        figures, word = {name: int(value) for name, value in match.groupdict().items()}, ""
        if not figures:
            values = {name.decode(): float(value) for name, value in _LIMIT.findall(match.string[:_LONGEST_MEMORY])}
            figures = {name: int(values[name]) for name in _LIMITS if name in values}
            for name, value in values.items():
                if name.startswith("available_") and name.endswith("_mem") and len(name) <= 30:
                    self._add(
                        row.kind, time, rank, figures | {"available_gb": value}, name[len("available_") : -len("_mem")]
                    )
                    return row.kind
        self._add(row.kind, time, rank, dict(figures), word)
        return row.kind

    def _read_memory(self, row: Row, match: re.Match[bytes], time: float | None, rank: Rank) -> str:
        """Read what is left after a stage of the start. Releases print the sizes of graphs on a line of their own, or with one of these."""
        text = match.string[:_LONGEST_MEMORY]
        figures = {name: float(found[1]) for name, pattern in _MEMORY.items() if (found := pattern.search(text))}
        sizes: tuple[int, ...] = ()
        if row.word == "state_cache":
            parts = _STATE_SIZE.findall(text)
            figures |= {"used": sum(map(float, parts))} if parts else {}
            figures |= {"states": int(states[1])} if (states := _STATES.search(text)) else {}
        elif (graph := _GRAPH_OF.match(text)) is not None:
            if _OF_PREFILL.search(graph[1]):
                figures["prefill"] = 1
            if graph[1].strip().lower() in _OF_DECODE:
                self._sizes = _sizes(text) or self._sizes
                sizes = self._sizes if row.word == "graph" else ()
        self._add(row.kind, time, rank, figures, row.word).sizes = sizes
        return row.kind

    def _read_known(self, row: Row, match: re.Match[bytes], time: float | None, rank: Rank) -> str:
        if row.pattern.startswith(b"Capture"):
            self._sizes = _sizes(match.string[:_LONGEST_MEMORY])
        return row.kind

    def _read_health(self, row: Row, match: re.Match[bytes], time: float | None, rank: Rank) -> str:
        self._add(row.kind, time, rank, {"timely": 1} if _is_timely(match.string, time) else {})
        return row.kind

    def _read_ready(self, row: Row, match: re.Match[bytes], time: float | None, rank: Rank) -> str:
        self._serving = True
        self._add(row.kind, time, rank)
        return row.kind

    def _read_end(self, row: Row, match: re.Match[bytes], time: float | None, rank: Rank) -> str:
        if row.word == "scheduler_exception":
            self._announced = (self.number, time, rank)
            if self._open is not None and self._open.until == self.number + _OTHERS_BETWEEN:
                self._open.announced = True
        self._add(row.kind, time, rank, word=row.word, text=_crash(match.string))
        return row.kind

    def _read_out_of_memory(self, row: Row, match: re.Match[bytes], time: float | None, rank: Rank) -> str:
        if row.word:
            if len(self._reported) >= 1024:
                self._reported.clear()
            self._reported[rank] = (row.word, time)
        word = row.word or ("startup" if self._starting and not self._serving else "unknown")
        self._add(row.kind, time, rank, word=word, text=_words(match.string))
        return row.kind

    def _read_too_long(self, row: Row, match: re.Match[bytes], time: float | None, rank: Rank) -> str:
        most, tokens = sorted((int(match["tokens"]), int(match["most"])))
        self._add(row.kind, time, rank, {"tokens": tokens, "most": most})
        return row.kind

    def _read_access(self, text: bytes, time: float | None, rank: Rank) -> str:
        """Read an access line: a request that failed, or a pause. Health checks and scrapes are no requests."""
        access = _ACCESS.match(text)
        assert access is not None
        answer = _ANSWERED.match(text, access.end())
        if answer is None:
            return "access"
        if answer[1] in (b"500", b"503"):
            self._exceptions_due += answer[1] == b"500"
            if access[1] == b"POST":
                self._add("rejected" if answer[1] == b"503" else "server_error", time, rank)
        elif answer[1] == b"200" and access[1] == b"POST" and (pause := _PAUSED.match(text, access.end())):
            self._add("pause" if pause[1] == b"pause" else "resume", time, rank)
        return "access"

    def _in_traceback(self) -> bool:
        return self._open is not None and self.number <= self._open.until

    def _read_traceback(self, text: bytes, time: float | None) -> str:
        """Read a line without a stamp as part of a traceback; return its kind, empty where it belongs to none."""
        is_open = self._in_traceback()
        if not self._serving and _USAGE_ERROR.match(text):
            self._add("end", time, NO_RANK, word="launch_failed", text=_launch_failure(text))
            return "end"
        if text.startswith(TRACEBACK):
            self._open_traceback(time)
        elif (frame := _FRAME.match(text)) is not None:
            traceback = self._open if is_open and self._open is not None else self._open_traceback(time)
            self._read_frame(traceback, frame[1])
            traceback.in_main = traceback.in_main or _IN_MAIN.match(text) is not None
        elif self._closed is not None and text.startswith(_CHAINED):
            self._closed.chained = True
        elif not is_open or self._open is None:
            return ""
        elif _EXCEPTION.match(text):
            return self._close_traceback(self._open, text, time)
        elif text[:1] != b" ":
            return ""
        return "traceback"

    def _open_traceback(self, time: float | None) -> _Traceback:
        """Open a traceback without a head: chained to the one before, announced by the line before, or of another process."""
        closed, announced = self._closed, self._announced
        until = self.number + _OTHERS_BETWEEN
        if closed is not None and closed.chained and self.number <= closed.until:
            self._open = _Traceback(closed.time, closed.rank, until, announced=closed.announced, counted=closed.counted)
        elif self.number - announced[0] <= 2:
            self._open = _Traceback(announced[1], announced[2], until, announced=True)
        else:
            self._open = _Traceback(time, NO_RANK, until)
        self._closed = None
        return self._open

    def _read_frame(self, traceback: _Traceback, function: bytes) -> None:
        """Note the phase of a frame: the deepest one counts, but all inside a capture is capture, and an encoder is no phase."""
        traceback.until = self.number + _OTHERS_BETWEEN
        if _IN_CAPTURE.search(function):
            traceback.phase = "graph_capture"
        elif _IN_ENCODER.search(function):
            traceback.phase = "unknown"
        elif _IN_LOOP.search(function):
            traceback.in_loop = True
        if traceback.phase not in ("graph_capture", "unknown"):
            if _IN_PREFILL.search(function):
                traceback.phase = "prefill"
            elif _IN_DECODE.search(function):
                traceback.phase = "decode"
        traceback.in_start = traceback.in_start or _IN_START.search(function) is not None

    def _close_traceback(self, traceback: _Traceback, text: bytes, time: float | None) -> str:
        """Read the exception at the end of a traceback."""
        self._open, self._closed = None, traceback
        when = time if traceback.time is None else traceback.time
        rows = (
            row
            for row, pattern in zip(ROWS, _PATTERNS, strict=True)
            if row.kind in ("end", "out_of_memory") and pattern.match(text)
        )
        row = next(rows, None)
        if row is not None and row.word == "launch_failed":
            self._add("end", when, traceback.rank, word=row.word)
            return "exception"
        if row is None or row.kind == "end":
            if traceback.in_main and not self._serving and not text.startswith(_BY_SOMEBODY):
                self._add("end", when, NO_RANK, word="launch_failed", text=_launch_failure(text))
            elif traceback.announced and not traceback.counted:
                self._add("exception", when, traceback.rank, text=_words(text))
            return "exception"
        if row.word:
            reported, at = self._reported.pop(traceback.rank, ("", None))
            close = at is None or traceback.time is None or abs(traceback.time - at) <= _RAISED_WITHIN
            traceback.counted = traceback.counted or (reported == row.word and close)
        if not traceback.counted:
            traceback.counted = True
            self._add("out_of_memory", when, traceback.rank, word=row.word or self._phase(traceback), text=_words(text))
        return "exception"

    def _phase(self, traceback: _Traceback) -> str:
        if traceback.phase == "graph_capture":
            return traceback.phase
        if self._starting and not self._serving:
            return "known"
        if traceback.phase:
            return traceback.phase
        return "startup" if traceback.in_start and not traceback.in_loop and not self._serving else "unknown"


def _sizes(text: bytes) -> tuple[int, ...]:
    match = _SIZES.search(text)
    sizes = match[1].split(b",")[:1024] if match is not None else []
    return tuple(int(size) for size in sizes if size.strip().isdigit() and len(size) < 12)


_Special: TypeAlias = Callable[[Reader, Row, "re.Match[bytes]", "float | None", Rank], str]
# Kinds whose figures are not the groups of their pattern.
_SPECIAL: dict[str, _Special] = {
    "decode": Reader._read_batch,
    "prefill": Reader._read_batch,
    "retraction": Reader._read_batch,
    "arguments": Reader._read_arguments,
    "pool": Reader._read_pool,
    "limits": Reader._read_limits,
    "memory": Reader._read_memory,
    "known": Reader._read_known,
    "health": Reader._read_health,
    "ready": Reader._read_ready,
    "end": Reader._read_end,
    "out_of_memory": Reader._read_out_of_memory,
    "too_long": Reader._read_too_long,
}
