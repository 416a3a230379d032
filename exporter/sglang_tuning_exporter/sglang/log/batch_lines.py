"""`Decode batch…`, `Prefill batch…` and retraction lines as events.

The wordings are those of the released wheels 0.3.0 to 0.5.23 (sglang/srt/managers: tp_worker.py in 0.3.0, scheduler.py,
scheduler_metrics_mixin.py; sglang/srt/observability later) and of the guide's older editions. Fields are read by name,
never by position: each release moved some.
"""

from __future__ import annotations

import re

from sglang_tuning_exporter.sglang.events import DecodeBatch, PrefillBatch, Rank, Retraction

LONGEST_BATCH_LINE = 4096
_UNKNOWN_KEYS_KEPT = 8
_UNKNOWN_KEY_LENGTH = 40
_FIELDS_READ = 64

Fields = dict[bytes, bytes]

_BATCH_HEAD = re.compile(
    rb"(?:Decode|Prefill) batch(?: ?\[[^\]]{0,24}\])?(?:\((?:mixed )?#running-req: ?(\d+)\))?[ ]?[.,:]?[ ]?(?=[#\w])"
)
# 0.1: `new fill batch. #seq: 7. #cached_token: 1541. #new_token: 4. #remaining_req: 0. #running_req: 0. …`
_FILL_HEAD = re.compile(rb"new fill batch\. (?=#)")
_FILL_NAMES = {
    b"#seq": b"#new-seq",
    b"#new_seq": b"#new-seq",
    b"#new_token": b"#new-token",
    b"#cached_token": b"#cached-token",
    b"#remaining_req": b"#queue-req",
    b"#running_req": b"#running-req",
}
_RETRACTION_HEAD = re.compile(
    rb"(?:[Dd]ecode out of memory happened|KV cache pool is full\b[\w .]{0,40}|(Testing retraction))[ ]?[.,:]?[ ]?(?=#)"
)
_OTHER_LINE = re.compile(rb"\[20\d\d-\d\d-\d\d ")  # another process wrote into this line: the rest is its line
# What may follow the last value of a line: marks of HTML and tables, closing quotation marks, other fields.
_END = rb"(?=$|[ \t]*[<|)\]}\"'`]|[ \t]+[\w.]+=)"
_NUMBER = re.compile(rb"(-?\d{1,18}(?:\.\d{1,18})?(?:[eE][+-]?\d{1,3})?)[ ]?(%?)" + _END)
_MISSING = (b"nan", b"nan%", b"-nan", b"inf", b"-inf", b"inf%", b"None")
_RATIO = re.compile(rb"(\d+(?:\.\d+)?)[ ]?->[ ]?(\d+(?:\.\d+)?)" + _END)
_GRAPH = re.compile(rb"(cuda|cpu|npu|musa|xpu|hpu|hip) graph$")

# The layouts that most servers print: a decode line's running requests, usage, graph and queue; a prefill line's new sequences, new
# tokens, cached tokens, usage, running requests, queue and waiting tokens.
_USUAL_GRAPH = rb"(?:cuda|cpu|npu|musa) graph: (?:True|False)"
USUAL_DECODE = (
    rb"Decode batch[.,] #running-req: ([0-9]{1,9}), #token: [0-9]{1,15}, token usage: ([0-9]\.[0-9][0-9]), ((?:%b, )?)"
    rb"gen throughput \(token/s\): [0-9]{1,9}\.[0-9][0-9], #queue-req: ([0-9]{1,9}),? ?\r?"
) % _USUAL_GRAPH
USUAL_PREFILL = (
    rb"Prefill batch[.,] #new-seq: ([0-9]{1,9}), #new-token: ([0-9]{1,9}), #cached-token: ([0-9]{1,12}), "
    rb"token usage: ([0-9]\.[0-9][0-9]), #running-req: ([0-9]{1,9}), #queue-req: ([0-9]{1,9})"
    rb"(?:, #pending-token: ([0-9]{1,12}))?(?:, %b)?"
    rb"(?:, input throughput \(token/s\): [0-9]{1,9}\.[0-9][0-9](?:, %b)?)?,? ?\r?"
) % (_USUAL_GRAPH, _USUAL_GRAPH)
_FIRST_LETTERS = (b"D", b"P", b"K", b"d")
_WHOLE_LINE = re.compile(
    USUAL_DECODE
    + rb"|"
    + USUAL_PREFILL
    + rb"|(?:Decode out of memory happened|decode out of memory happened|KV cache pool is full)[\w .]{0,40}[.,:]? "
    rb"#retracted_reqs: \d+, (?:#[a-z_]+: \d+, ){0,3}#new_token_ratio: [01]\.\d{4} -> [01]\.\d{4}"
)

_QUEUES = {
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
}
_KNOWN = frozenset(_QUEUES) | frozenset(
    (
        b"#cached-token,#full token,#gpu token,#new-seq,#new-token,#pending-token,#queue-req,#running-req,#token,full token usage,"
        b"gen throughput (token/s),gpu token usage,input throughput (token/s),mamba usage,swa token usage,token usage,#cpu token,#mamba num,"
        b"#remaining-req,#replay-token,#swa token,accept len,accept rate,block accept len,cache hit rate,cap len,cpu token usage,"
        b"est. decode TFLOPS/s (per GPU),est. prefill TFLOPS/s (per GPU),est. read BW (GB/s per GPU),est. write BW (GB/s per GPU),"
        b"fwd occupancy,hit_tokens,largest-len,mamba num,pre-allocated usage,tree_cache_hit_rate,windowed_cache_hit_rate"
    ).split(b",")
)


def normalise(text: bytes) -> bytes:
    """Replace Chinese punctuation by SGLang's, and cut text that cannot belong to a batch line."""
    text = text[:LONGEST_BATCH_LINE].rstrip()
    if (other := _OTHER_LINE.search(text)) is not None:
        text = text[: other.start()]
    if b"\xef" in text or b"\xe3" in text:
        text = text.replace(b"\xef\xbc\x9a", b": ").replace(b"\xef\xbc\x8c", b", ").replace(b"\xe3\x80\x82", b". ")
        text = text.replace(b"\xef\xbc\x88", b"(").replace(b"\xef\xbc\x89", b")")
    return text


def start_of_next_line(text: bytes) -> int:
    """Return where the line of another process starts that was written after the end of this one; 0 where there is none, or where this
    line had not ended.
    """
    other = _OTHER_LINE.search(text, 1, LONGEST_BATCH_LINE) if text[:1] in _FIRST_LETTERS else None
    if other is None:
        return 0
    return other.start() if _WHOLE_LINE.fullmatch(text, 0, other.start()) else 0


_LARGEST = 2.0**53
_SURE_DIGITS = 16  # fewer are below it


def _fields(text: bytes, start: int) -> Fields:
    """Return the `key: value` pairs after the head, the first of each key; other text is left out."""
    found: Fields = {}
    for part in text[start:].split(b",", _FIELDS_READ)[:_FIELDS_READ]:
        key, colon, value = part.partition(b":")
        if colon:
            found.setdefault(key.strip(), value.strip())
    return found


def _fill_fields(text: bytes, start: int) -> Fields:
    found = (part.partition(b": ") for part in text[start:].rstrip(b". ").split(b". ", _FIELDS_READ))
    return {_FILL_NAMES.get(key, key): value for key, _, value in found}


def _figure(fields: Fields, *keys: bytes) -> float | None:
    for key in keys:
        value = fields.get(key)
        if value is None:
            continue
        match = _NUMBER.match(value)
        if match is None:
            return None
        number = float(match[1])
        # Above 2**53 a float cannot count, and `1e999` is infinite: no server prints either.
        return (number / 100 if match[2] else number) if 0 <= number <= _LARGEST else None
    return None


def _count(fields: Fields, *keys: bytes) -> int | None:
    if len(value := fields.get(keys[0], b"")) < _SURE_DIGITS and value.isdigit():
        return int(value)
    number = _figure(fields, *keys)
    return None if number is None else int(number)


def _usage(fields: Fields, *keys: bytes) -> float | None:
    """Return a share of a pool: 0 to 1, a little more when overcommitted; `None` for any other value, of a damaged line."""
    number = _figure(fields, *keys)
    return number if number is not None and number <= 2 else None


def _unknown_keys(fields: Fields) -> tuple[str, ...]:
    unknown = [key for key in fields if key not in _KNOWN and not _GRAPH.match(key)][:_UNKNOWN_KEYS_KEPT]
    return tuple(key[:_UNKNOWN_KEY_LENGTH].decode("utf-8", "replace")[:_UNKNOWN_KEY_LENGTH] for key in unknown)


def has_unreadable_value(text: bytes) -> bool:
    """Whether a known field of a batch line has no value: the line was cut, or processes wrote into each other."""
    fields, _ = _body(normalise(text))
    if _FILL_HEAD.match(text):
        fields = _fill_fields(text, 0)
    return _OTHER_LINE.search(text) is not None or any(
        key in _KNOWN and value not in _MISSING and not _NUMBER.match(value) for key, value in fields.items()
    )


def _queues(fields: Fields) -> dict[str, int]:
    return {_QUEUES[key]: count for key in fields.keys() & _QUEUES.keys() if (count := _count(fields, key)) is not None}


def _body(text: bytes) -> tuple[Fields, re.Match[bytes] | None]:
    head = _BATCH_HEAD.match(text)
    return _fields(text, head.end() if head else 0), head


def parse_decode(text: bytes, time: float | None, rank: Rank) -> DecodeBatch | None:
    """Read a decode line, or the status line without a keyword of releases before 0.3. None where it has no figures."""
    text = normalise(text)
    fields, _ = _body(text)
    running = _count(fields, b"#running-req")
    tokens = _count(fields, b"#token", b"#full token", b"#gpu token")
    if running is None and tokens is None:
        return None
    event = DecodeBatch(
        time,
        rank,
        running=running,
        queued=_count(fields, b"#queue-req"),
        tokens=tokens,
        full_usage=_usage(fields, b"token usage", b"full token usage", b"gpu token usage"),
        swa_usage=_usage(fields, b"swa token usage"),
        mamba_usage=_usage(fields, b"mamba usage"),
        generation_throughput=_figure(fields, b"gen throughput (token/s)"),
        accept_length=_figure(fields, b"accept len"),
        queues=_queues(fields),
        unknown_keys=_unknown_keys(fields),
    )
    graph = next((key for key in fields if key.endswith(b" graph")), b"")
    if fields.get(graph) in (b"True", b"False") and (match := _GRAPH.match(graph)) is not None:
        event.graph, event.graph_device = fields[graph] == b"True", match[1].decode()
    return event


def parse_prefill(text: bytes, time: float | None, rank: Rank) -> PrefillBatch | None:
    """Read a prefill line; with mixed chunks 0.3.0 puts the running requests into its head. None where it has no figures."""
    text = normalise(text)
    fields, head = _body(text)
    if (fill := _FILL_HEAD.match(text)) is not None:
        fields = _fill_fields(text, fill.end())
    sequences = _count(fields, b"#new-seq")
    tokens = _count(fields, b"#new-token")
    if sequences is None and tokens is None:
        return None
    mixed = head[1] if head else None
    return PrefillBatch(
        time,
        rank,
        new_sequences=sequences,
        new_tokens=tokens,
        cached_tokens=_count(fields, b"#cached-token"),
        running=int(mixed) if mixed else _count(fields, b"#running-req"),
        queued=_count(fields, b"#queue-req"),
        pending_tokens=_count(fields, b"#pending-token"),
        full_usage=_usage(fields, b"token usage", b"full token usage", b"gpu token usage"),
        swa_usage=_usage(fields, b"swa token usage"),
        mamba_usage=_usage(fields, b"mamba usage"),
        queues=_queues(fields),
        unknown_keys=_unknown_keys(fields),
    )


def is_retraction(text: bytes) -> bool:
    """Whether this is the head of a retraction line: `Decode out of memory happened.` (to 0.4.6), later
    `KV cache pool is full. Retract requests.`, or that of SGLANG_TEST_RETRACT.
    """
    return _RETRACTION_HEAD.match(normalise(text)) is not None


def parse_retraction(text: bytes, time: float | None, rank: Rank) -> Retraction | None:
    """Read a retraction line in any wording. None where it has no figures."""
    text = normalise(text)
    head = _RETRACTION_HEAD.match(text)
    if head is None:
        return None
    fields = _fields(text, head.end())
    requests = _count(fields, b"#retracted_reqs", b"#retracted_req")
    if requests is None:
        return None
    ratio = _RATIO.match(fields.get(b"#new_token_ratio", b""))
    return Retraction(
        time,
        rank,
        requests=requests,
        aborted=_count(fields, b"#aborted_retracted_reqs"),
        new_tokens_gained=_count(fields, b"#new_tokens_gained"),
        ratio_before=float(ratio[1]) if ratio else None,
        ratio_after=float(ratio[2]) if ratio else None,
        testing=head[1] is not None,
    )
