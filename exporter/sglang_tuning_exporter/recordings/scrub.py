"""Removes private data from logs and metrics: secrets, paths, hosts, addresses, model names, requests.

Pure. It keeps what is known to be harmless: lines of the kinds that the exporter reads, in words that SGLang itself
prints (`is_known`); every other word becomes `scrubbed`. Figures are kept, so that the recording is judged like the
original.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from sglang_tuning_exporter.core import lines
from sglang_tuning_exporter.core.events import Event, Rank
from sglang_tuning_exporter.sglang import clean, exposition, flags
from sglang_tuning_exporter.sglang.metrics import FAMILIES

ADDRESS, PATH, HOST, MODEL, OTHER = "127.0.0.1", "/path", "host", "model", "scrubbed"
_SHORTEST_KNOWN = 4  # shorter words also occur with other meanings
_LONGEST_WORD = 200
_LONGEST_FIGURES = 1000
_DEPTH = 12

_URL = re.compile(r"\b[a-zA-Z][a-zA-Z0-9+.-]{1,20}://[^\s'\"<>)\]}]+")
_IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?::\d{1,5})?(?![\w.])")
_IPV6 = re.compile(
    r"\[?(?<![\w:])(?:(?:[0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}"
    r"|(?:[0-9a-fA-F]{1,4}(?::[0-9a-fA-F]{1,4}){0,6})?::(?:[0-9a-fA-F]{1,4}(?::[0-9a-fA-F]{1,4}){0,6})?)"
    r"(?:%\w+)?(?![\w:])\]?(?::\d{1,5})?"
)
_ABSOLUTE = re.compile(r"(?<![\w.)\]>/])~?/(?:[^\s/'\":,;<>(){}\[\]]+/)*[^\s/'\":,;<>(){}\[\]]+/?")
_DOMAIN = re.compile(
    r"\b(?:[\w-]{1,63}[.@]){1,8}(?:local|internal|lan|corp|intranet|svc|home|com|net|org|edu|gov|io|ai|dev|cloud|app"
    r"|co|cn|de|uk|fr|jp|kr|in|eu|us|ru|ch|nl)\b(?:\.[a-z]{2,12})*",
    re.IGNORECASE,
)

# A number, a version, or words. Not words and numbers, of which names of hosts are made, and no address.
_NUMBER = re.compile(
    r"[+-]?(?:\d{1,10}(?:\.\d{1,24})?(?:e[+-]?\d{1,3})?|Inf)|\d{1,4}\.\d{1,4}\.\d{1,4}(?:\.?(?:post|rc|dev)\d{1,4})?"
    r"|\{\}|\[\]",
    re.ASCII,
)
_WORDS = re.compile(r"(?:--)?[a-z][a-z0-9]*(?:[ _+-][a-z][a-z0-9]*)*", re.IGNORECASE | re.ASCII)
_HOST_NAME = re.compile(
    r"(?<![\w#/.-])[a-zA-Z]{1,20}(?:-[a-zA-Z]{1,20}){0,4}(?:-\d{1,6}){1,8}(?![\w-])"
)  # ip-10-0-17-4
# Arguments that name a model.
_MODEL_KEY = re.compile(r"model_path|model_name|tokenizer_path|draft_model|^model$|revision|weight_version")

# Labels of SGLang's own, with words of its own.
_OWN_LABELS = frozenset({
    "le", "quantile", "tp_rank", "pp_rank", "dp_rank", "moe_ep_rank", "moe_dp_rank", "attn_cp_rank", "engine_type",
    "is_streaming",
    "priority", "mode", "stage", "phase", "method", "status_code", "status", "cache_type", "cache_source",
    "forward_overlap", "reason",
    "pid", "source", "state",
})  # fmt: skip
_SERIES = re.compile(r"sglang[:_]")

_ENDPOINTS = frozenset({
    "/", "/generate", "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages",
    "/v1/score",
    "/v1/rerank", "/rerank", "/encode", "/classify", "/health", "/health_generate", "/metrics", "/server_info",
    "/get_server_info",
    "/model_info", "/get_model_info", "/v1/models", "/v1/loads", "/flush_cache",
})  # fmt: skip
_ACCESS = re.compile(
    r'((?:INFO: +)?)(?:\S{1,80} - )?"([A-Z]{3,7}) ([^\s?"]{1,2000})[^\n"]{0,4000}" (\d{3})(?: [A-Z][\w ]{0,30})?\s*'
)
OF_LIFE = frozenset({"arguments", "pool", "limits", "memory", "ready", "known", "hang", "health", "end", "draining"})
"""Kinds of lines that a server prints while it starts and ends."""
_KEPT = OF_LIFE | {"decode", "prefill", "retraction", "out_of_memory", "traceback", "access", "server_error"}
_FRAME = re.compile(
    r'\s*File "|.*Traceback \(most recent call last\)|During handling of the above|The above exception was'
)
_ARGUMENT = re.compile(r"""(\w{3,60})\\?['"]?\s*[:=]\s*\\?['"]([^'"\\\s]{4,400})""")
_FIGURE = re.compile(r"#[\w-]{1,40}: ?-?[\d.]+(?: ?-> ?[\d.]+)?")
_RETRACTION_WORDS = frozenset(
    {"kv", "cache", "pool", "is", "full", "retract", "requests", "decode", "out", "of", "memory", "happened"}
)


class Scrubber:
    """Removes private words from texts, pages and a log.

    It learns them from the server's arguments, which must come first.

    Of the log's last line: its `kind`, whether it `starts` a server, and when it was `printed` (unix seconds).
    `left_out` counts lines.
    """

    def __init__(self, *, keep_request_text: bool = False) -> None:
        self._known: dict[str, str] = {}
        self._numbered: dict[tuple[str, str], str] = {}
        self._order: list[str] | None = []
        self._keep_request_text = keep_request_text
        self._wrapping = lines.Wrapping()
        self._reader = lines.Reader()
        self.left_out = 0
        self.starts = False
        self.kind = "other"
        self.printed: float | None = None

    def hide(self, word: str, replacement: str) -> None:
        """Replace `word` with `replacement` in all later texts."""
        if len(word) >= _SHORTEST_KNOWN and word not in (ADDRESS, PATH, HOST, MODEL, OTHER, clean.REDACTED):
            self._known[word] = clean.REDACTED if self._known.get(word) == clean.REDACTED else replacement
            self._order = None

    def text(self, text: str) -> str:
        """Return the text without secrets, addresses, hosts and absolute paths."""
        if self._order is None:
            self._order = sorted(self._known, key=len, reverse=True)
        for word in self._order:
            if word in text:
                text = text.replace(word, self._known[word])
        text = clean.without_secrets(text)
        text = _URL.sub(f"http://{HOST}", text)
        text = _IPV4.sub(ADDRESS, text)
        text = _IPV6.sub(ADDRESS, text)
        text = _ABSOLUTE.sub(PATH, text)
        text = _DOMAIN.sub(HOST, text)
        return _HOST_NAME.sub(HOST, text)

    def arguments(self, given: dict[str, Any], depth: int = 0) -> dict[str, object]:
        """Return arguments, or any JSON object, without secrets; paths and models get neutral names.

        `depth`: of nested objects.
        """
        cleaned: dict[str, object] = {}
        for key, value in given.items():
            name = str(key)
            if clean.is_secret(name) or name == "launch_command":
                self._learn_secret(value)
            elif is_known(name) and (name.isidentifier() or _NUMBER.fullmatch(name)):
                cleaned[name] = self._value(name, value, depth + 1)
        return cleaned

    def _learn_secret(self, value: Any) -> None:
        """Remove the value of a secret wherever it occurs."""
        if isinstance(value, str) and " " not in value:
            self.hide(value, clean.REDACTED)
        elif isinstance(value, list):
            for inner in value:
                self._learn_secret(inner)

    def _value(self, key: str, value: Any, depth: int) -> object:
        if depth > _DEPTH:
            return OTHER
        if isinstance(value, dict):
            return self.arguments(value, depth)
        if isinstance(value, (list, tuple)):
            words = " ".join(item for item in value if isinstance(item, str))
            return (
                clean.REDACTED if clean.holds_secret(words) else [self._value(key, inner, depth + 1) for inner in value]
            )
        return self._word(key.lower(), value) if isinstance(value, str) else value

    def _word(self, key: str, value: str) -> str:
        if not value.strip():
            return value
        replacement = MODEL if _MODEL_KEY.search(key) else ADDRESS if key == "host" else OTHER
        if replacement == OTHER and self._is_harmless(value):
            return value
        if re.fullmatch(r"[a-z_]{1,12}|[\d.]+", value) is None:  # else a common word: `auto`, `default`, a number
            self.hide(value, replacement)
        return replacement

    def _is_harmless(self, value: str) -> bool:
        return _is_plain(value) and not clean.holds_secret(value) and self.text(value) == value

    def page(self, page: str) -> str:
        """Return SGLang's own series of an exposition; labels of operators are numbered."""
        kept = []
        for line in page.splitlines():
            if line.startswith(("# TYPE ", "# HELP ")):
                words = line.split(" ", 3)
                if (
                    words[1] == "TYPE"
                    and words[-1] in exposition.TYPES
                    and _SERIES.match(words[2])
                    and is_known(words[2])
                ):
                    kept.append(line)
                continue
            for name, raw, value, _ in exposition.scan(line).samples:
                if _SERIES.match(name) and is_known(name):
                    kept.append(f"{name}{self._labels(raw)} {value!r}")
        return "\n".join(kept).replace(" inf\n", " +Inf\n").replace(" nan\n", " NaN\n") + "\n"

    def _labels(self, raw: str) -> str:
        written = ",".join(
            f'{self._name(name)}="{self._label(name, value)}"' for name, value in exposition.labels(raw).items()
        )
        return f"{{{written}}}" if written else ""

    def _name(self, name: str) -> str:
        """Return a label's name, or a number for a label of the operator."""
        if is_known(name):
            return name
        return self._numbered.setdefault(("", name), f"{OTHER}_{sum(1 for kind, _ in self._numbered if not kind) + 1}")

    def _label(self, name: str, value: str) -> str:
        if name == "model_name":
            self.hide(value, MODEL)
            return MODEL
        if not value or (name in _OWN_LABELS and _is_plain(value)):
            return value
        number = sum(1 for other, _ in self._numbered if other == name) + 1
        return self._numbered.setdefault((name, value), f"{OTHER}-{number}")

    def line(self, line: bytes) -> bytes | None:
        """Return the harmless part of a line of the log, which the exporter reads, without what surrounds it; None if
        there is none.

        Several lines where one proves the form of those before it, and where a runtime wrote a record of several lines.
        """
        self.starts, self.printed = False, None
        found = self._wrapping.lines(line.rstrip(b"\r\n"), open_text=self.kind == "traceback")
        bare = list(map(_bare, found))
        texts = [kept for text in bare for kept in self._kept(text)]
        self.left_out += bool(bare) and not texts
        if not texts:
            return None
        texts = texts if self._keep_request_text else [_only_known(text) for text in texts]
        return "".join(f"{text}\n" for text in texts).encode("utf-8", "replace")

    def _kept(self, line: bytes) -> list[str]:
        """Return what is kept of a line without what surrounds it, behind arguments that ended with it."""
        unreadable = self._reader.unreadable  # of this line
        unreadable.clear()
        events = self._reader.read(line)
        arguments = [self._start(event) for event in events if event.kind == "arguments"]
        kinds = [event.kind for event in events if event.kind in ("out_of_memory", "end")]
        self.kind = kinds[0] if kinds else self._reader.kind
        self.starts = self.starts or bool(arguments)
        if arguments or self.kind == "arguments":
            self._learn_secrets(line)
        found = lines.stamp_of(line)
        if found is not None and (found[0] or 0.0) >= lines.FIRST_DATED:
            self.printed = found[0]
        if self.kind == "arguments":
            return arguments
        start = 0 if found is None else found[2]
        head, message = (part.decode("utf-8", "replace") for part in (line[:start], line[start:]))
        kept = self._message(events, message.rstrip("\r\n"), unreadable)
        return arguments if kept is None else [*arguments, head + kept]

    def _message(self, events: tuple[Event, ...], message: str, unreadable: Mapping[str, int]) -> str | None:
        if self.kind not in _KEPT and not unreadable and not self._keep_request_text:
            return None
        if self.kind == "access":
            return _access(message)
        figures = _only_figures(events, message, strange="batch_key" in unreadable)
        if not self._keep_request_text and not _is_safe(events, self.kind, message, figures=figures):
            return None
        return None if clean.holds_secret(message) and not figures else self.text(message)

    def _learn_secrets(self, line: bytes) -> None:
        for name, value in _ARGUMENT.findall(line.decode("utf-8", "replace")):
            if clean.is_secret(name):
                self.hide(value, clean.REDACTED)

    def _start(self, event: Event) -> str:
        stamp = "" if event.time is None else _stamp(event.time, event.rank)
        return f"{stamp}server_args={self.arguments(event.arguments)!r}"


def _bare(line: lines.Line) -> bytes:
    """Return a line as SGLang prints it; what a runtime printed in place of its stamp as a stamp."""
    replaced = line.headed or (lines.stamp_of(line.text) is None and lines.WORDS.match(line.text) is not None)
    stamp = _stamp(line.time, line.rank) if replaced and line.time is not None else ""
    return stamp.encode() + line.text


def _stamp(time: float, rank: Rank) -> str:
    at = dt.datetime.fromtimestamp(time, dt.timezone.utc)
    numbers = {"DP": rank.dp, "PP": rank.pp, "TP": rank.tp}
    ranks = "".join(f" {name}{number}" for name, number in numbers.items() if number is not None)
    return f"[{at:%Y-%m-%d %H:%M:%S}{ranks}] " if time >= lines.FIRST_DATED else f"[{at:%H:%M:%S}{ranks}] "


def _access(message: str) -> str | None:
    match = _ACCESS.match(message)
    if match is None:
        return None
    level, method, path, status = match.groups()
    return f'{level}{ADDRESS}:0 - "{method} {path if path in _ENDPOINTS else PATH} HTTP/1.1" {status}'


def _is_plain(value: str) -> bool:
    """Return whether a value is a number, a version, or words of SGLang's own."""
    if _NUMBER.fullmatch(value) is not None:
        return True
    return len(value) <= _LONGEST_WORD and _WORDS.fullmatch(value) is not None and is_known(value)


def _is_safe(events: Iterable[Event], kind: str, message: str, *, figures: bool) -> bool:
    """Return whether a line cannot contain words of a request, which may imitate lines or occur in exceptions."""
    if kind in {"decode", "prefill", "retraction", "other"}:
        return figures
    if kind == "traceback":
        return _FRAME.match(message) is not None
    return "server_args" not in message and not any(event.marked for event in events)


def _only_figures(events: Iterable[Event], message: str, *, strange: bool) -> bool:
    """Return whether a message consists of numbers and of names that are known or belong to the server.

    `strange`: it has names that no release prints.
    """
    if len(message) > _LONGEST_FIGURES:
        return False
    if any(event.kind == "retraction" for event in events):
        words = re.findall(r"[^\W\d_]+", _FIGURE.sub("", message).lower())
        return set(words) <= _RETRACTION_WORDS
    return _FIGURES.fullmatch(message) is not None and not (strange and any(event.marked for event in events))


# `Decode batch, #running-req: 6, token usage: 0.04, cuda graph: False, gen throughput (token/s): 801.47`
_FIGURES = re.compile(
    r"(?:\w+ ){0,2}\w+(?: ?\[\d+\])?[.,] (?:[#\w ./()-]{1,60}: ?(?:-?[\d.]+%?|True|False|None|inf|nan)(?:, |,? *$))+"
)


# The words that SGLang itself prints in the lines that the exporter reads; all others may be private. The names of
# arguments and series are those of the released wheels. The others are from the lines of starts, batches, failures and
# health, the frames of tracebacks, and the values of arguments, in ten releases.
_TOKEN = re.compile(r"[^\W_]+")
# Figures with the letters that SGLang prints before or after them: 8GB, 60s, 1e6, TP0, 0.5.9.post1, fp8, sm90.
_FIGURE_WITH_UNIT = re.compile(
    r"\d{1,24}(?:s|ms|us|[kmgt]i?b?|b|x|d|e\d{1,3})?|(?:tp|dp|pp|ep|cp|moe|attn|post|rc|dev|fp|bf|int|sm|v|h|a)?\d{1,4}"
)
_LINES = """
a aborted acceleratorerror accept after all alloc allocate allocated allocation allocator allreduce already an and app
application applications architecture are args asgi assertion assertionerror at attention attn attribute attributeerror
avail available await backend background base batch be because been before begin bfloat bind bits body bootstrap
breakable bs but by bytes cache cached call called can cannot capture captured capturing causing chained child chunk
chunked client code command common communicator compile config context could couldn count cp cpu crashed cuda cudaerror
current custom data deadlock debug decode decoding default deps detokenizer detokenizermanager device dict did died
direct direction disagg dispatch does don done down draft draining dtype due dump during e elapsed elem empty
encountered end ending engine enough ep error errors even event events exc exceeded except exception exhausted exit
exited expected extend failed failure false fastapi fd file filenotfounderror fill finished fired flash flashinfer float
for forward forwarded fragmentation frame free from full func function gained gb gen generate generation get gib gpu
gpus graceful graph graphs group h handle handled handler handling happened has have head headers health hip hit host
http id idle if ignore illegal image impl importerror in include included includedrouter increase index indexerror inf
info init initialization initialize initializing inner input instead int internal invalid io is it item items its kernel
key keyboardinterrupt keyerror kill killed kv kvcache largest last launch layer layers leaving len length lens less
likely limit line list llamaforcausallm load loaded loader loading local loop low lower main make mamba manager master
matmul max may mb mem memory memoryerror message method mib middleware min minutes mixin mm mode model module more most
move multi multiprocessing name nan nccl need needed new next no node non none not notimplementederror npu num object of
offload on one only op opt optimistic option or order oserror other out outer outofmemoryerror output over own packages
packed page paged param parameter parent part pass path peak pending per pid piecewise please pool pools port post pre
prealloc prefill prefix prepare previous priority process processed processes processing profile progress protocols
proxy ptr pull push py pynccl python pytorch q quant query queue quit raise ran rank ranks rate ratio reached read ready
reason receive received recent recommended recover recv reduce release req reqs request requests res reserved resource
response restart result results retract retracted retracting retraction retry return returned returns rocm roll route
router run runner running runs runtime runtimeerror s safe sample sampler sampling scale schedule scheduler scope second
seconds self send sending sent seq sequence server set setting several sglang shape shared shm shutting sigint sigkill
signal signum sigquit sigterm size sizes slot slots small so socket space spawn spec speculative srt stack stage
starlette start started starting startup state status step still stop stopped stream subprocess success such super swa
sync system t table take target task telemetry tensor tensors than that the their them then there thread threads
throughput time timed timeout times to token tokenizer tokenizermanager tokens took torch total tp traceback track
transfer transferring tree tried triton true try trying tuning type typeerror unable unbootstrapped unexpected
unexpectedly unknown unload unspecified until up update usage use used user using utilization utils uvicorn v value
valueerror values verify version wait waiting warmup warning was watchdog weight weights were when where which while
will with within without worker workers workspace would write wrong x you zmq
"""
_VALUES = """
abort admin amd ascend asynchronous auto awq best bf bfs breadth cascade chain clip compressed coreweave cutlass deep
deepep deepgemm deterministic dfs direct disabled dummy dynamic e4m3 e4m3fn e5m2 eager eagle effort fa fa2 fa3 fa4 fcfs
file first flash flashmla float16 float32 fp4 fp8 frozen fused gguf gptq half hf hpu huggingface int4 int8 intel kv
latency layer layerwise length llguidance lof lora low lpm lru marlin mha minimum mla modelopt mooncake musa mxfp4 nextn
ngram nixl none normal npu null nvfp4 off outlines packed pinned pytorch queue qwen random robin round routing
safetensors selective serial shortest sigmoid simple split standalone static tc through torchao total trivial trtllm
trtllm_mha unified w8a8 write xgrammar xpu zero
"""
_ANSWERS = """
accept aggregate available cache capacity code compute cp decode delete device disaggregation dp effective engine extend
forward gb gen get graph head hit host info input internal is kvcache last le loads memory method mode moe num output
overlap phase pid pp prefill put quantile queues rank rate ready reason reqs request running scheduler source
speculative stage startup state states status step storage streaming swa throughput time timestamp token tp type usage
used utilization verify version waiting weight
"""


@lru_cache(maxsize=1)
def _words() -> frozenset[str]:
    names = (token for name in (*flags.argument_names(), *FAMILIES) for token in _TOKEN.findall(name.lower()))
    return frozenset((*f"{_LINES} {_VALUES} {_ANSWERS}".split(), *names))


def is_known(text: str) -> bool:
    """Whether a text consists of SGLang's words and figures."""
    return all(map(_is_token, _TOKEN.findall(text)))


def _only_known(text: str) -> str:
    """Return the text with every word that is not SGLang's written as `scrubbed`."""
    return _TOKEN.sub(lambda token: token[0] if _is_token(token[0]) else OTHER, text)


@lru_cache(maxsize=4096)
def _is_token(token: str) -> bool:
    lowered = token.lower()
    return token.isascii() and (
        lowered in _words() or lowered == OTHER or _FIGURE_WITH_UNIT.fullmatch(lowered) is not None
    )
