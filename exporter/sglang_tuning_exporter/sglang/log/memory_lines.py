"""The memory lines of a start: weights, KV cache, captured graphs, limits.

Wordings of 0.3.0 to 0.5.23 (sglang/srt/model_executor/model_runner.py, sglang/srt/mem_cache/memory_pool.py, the graph
runners; sglang/srt/managers/scheduler.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from sglang_tuning_exporter.sglang.events import KvPool, Limits, Memory, Rank

LONGEST_MEMORY_LINE = 16_384
_SIZES_KEPT = 1024

_NUMBER = rb"(-?\d{1,9}(?:\.\d{1,9})?)"
_AVAILABLE = re.compile(rb"avail mem=" + _NUMBER + rb" ?GB")
_USED = re.compile(rb"mem usage=" + _NUMBER + rb" ?GB")
_POOL = re.compile(
    rb"(?:KV Cache is allocated\.|Post-capture KV sizing: KV cache allocated\.)"
    rb"(?: dtype: [^,]{1,60},)? #tokens: (\d{1,15})"
    rb"(?:, K size: " + _NUMBER + rb" GB, V size: " + _NUMBER + rb" GB|, KV size: " + _NUMBER + rb" GB)?"
)
_WEIGHTS = re.compile(rb"Load weight (begin|end)\.")
_STATE_CACHE = re.compile(rb"Mamba Cache is allocated\.")
_STATES = re.compile(rb"max_mamba_cache_size: (\d{1,12})\b")
_STATE_SIZE = re.compile(rb"_(?:state|cache) size: " + _NUMBER + rb" ?GB")
_POOL_END = re.compile(rb"Memory pool end\.")
_GRAPH = re.compile(rb"Capture ([\w -]{0,60}?)cuda graph (begin|end)\.", re.IGNORECASE)
_GRAPH_SIZES_LINE = re.compile(rb"Capture cuda graph bs \[")
_SIZES = re.compile(rb"\bbs[= ]\[([\d, ]{0,12000})\]")
_LIMITS = re.compile(rb"max_total_num_tokens=(\d{1,15})(?:,|$)")
_RUNNING_LIMIT = re.compile(
    rb"max_running_requests was reduced from the requested \d{1,12} to (\d{1,12})\b"
    rb"|Post-capture KV sizing: max_running_requests \d{1,12} -> (\d{1,12})\b"
    rb"|max_running_requests is capped to (\d{1,12})\b"
)
_LIMIT = re.compile(rb"(\w{1,60})=(-?\d{1,15}(?:\.\d{1,9})?)(?: ?GB)?(?:,|\s|$)")
_OF_PREFILL = re.compile(rb"prefill|piecewise|breakable", re.IGNORECASE)
_DECODE_GRAPHS = frozenset({b"", b"target decode", b"target verify", b"decode"})


def _gigabytes(pattern: re.Pattern[bytes], text: bytes) -> float | None:
    match = pattern.search(text)
    return float(match[1]) if match else None


def _sizes(text: bytes) -> tuple[int, ...]:
    match = _SIZES.search(text)
    if match is None:
        return ()
    return tuple(int(size) for size in match[1].split(b",")[:_SIZES_KEPT] if size.strip().isdigit() and len(size) < 12)


def parse_pool(text: bytes, time: float | None, rank: Rank) -> KvPool | None:
    """Read `KV Cache is allocated. …` or `Post-capture KV sizing: KV cache allocated. …`.

    `KV Cache VA upper bound.` (0.5.20 on) reserves addresses, not memory: the post-capture line gives the real figure,
    so the bound is no event. Nor is the KV cache of a draft model, which has a label before these words (0.5.20 on).
    """
    match = _POOL.match(text)
    if match is None:
        return None
    tokens, keys, values, both = match.groups()
    gigabytes = float(both) if both else float(keys) + float(values) if keys else None
    return KvPool(time, rank, tokens=int(tokens), gigabytes=gigabytes, resized=text.startswith(b"Post-capture"))


def parse_limits(text: bytes, time: float | None, rank: Rank) -> Limits | None:
    """Read `max_total_num_tokens=…, chunked_prefill_size=…, …[, available_gpu_mem=x GB]`, and the lines that lower
    `max_running_requests` later, which have no other figure.
    """
    if lowered := _RUNNING_LIMIT.match(text):
        return Limits(time, rank, max_running_requests=int(lowered[lowered.lastindex or 0]))
    if _LIMITS.match(text) is None:
        return None
    values: Mapping[bytes, bytes] = dict(_LIMIT.findall(text[:LONGEST_MEMORY_LINE]))

    def count(key: bytes) -> int | None:
        return int(float(values[key])) if key in values else None

    limits = Limits(
        time,
        rank,
        max_total_num_tokens=count(b"max_total_num_tokens"),
        max_running_requests=count(b"max_running_requests"),
        chunked_prefill_size=count(b"chunked_prefill_size"),
    )
    for key, value in values.items():
        if key.startswith(b"available_") and key.endswith(b"_mem") and len(key) <= 30:
            limits.available_gb = float(value)
            limits.memory_device = key[len(b"available_") : -len(b"_mem")].decode("ascii", "replace")
    return limits


class MemoryLines:
    """Reads the memory lines of one start.

    Keeps the graph sizes: releases print them on a line of their own, or with the begin or the end of the capture.
    """

    def __init__(self) -> None:
        self._sizes: tuple[int, ...] = ()

    def restart(self) -> None:
        """Forget the graph sizes of the server before."""
        self._sizes = ()

    def parse(self, text: bytes, time: float | None, rank: Rank) -> Memory | None:
        """Read a memory line; `None` for a line that only announces, and for any other line."""
        text = text[:LONGEST_MEMORY_LINE]
        stage: Literal["weights_begin", "weights", "state_cache", "pool", "graph_begin", "graph"]
        used_gb = _gigabytes(_USED, text)
        sizes: tuple[int, ...] = ()
        of_prefill, states = False, None
        if match := _WEIGHTS.match(text):
            stage = "weights_begin" if match[1] == b"begin" else "weights"
        elif _STATE_CACHE.match(text):
            stage, parts = "state_cache", _STATE_SIZE.findall(text)
            used_gb = sum(map(float, parts)) if parts else None
            states = int(count[1]) if (count := _STATES.search(text)) else None
        elif _POOL_END.match(text):
            stage = "pool"
        elif _GRAPH_SIZES_LINE.match(text):
            self._sizes = _sizes(text)
            return None
        elif match := _GRAPH.match(text):
            stage = "graph_begin" if match[2].lower() == b"begin" else "graph"
            of_prefill = bool(_OF_PREFILL.search(match[1]))
            if match[1].strip().lower() in _DECODE_GRAPHS:
                self._sizes = _sizes(text) or self._sizes
                sizes = self._sizes if stage == "graph" else ()
        else:
            return None
        return Memory(
            time,
            rank,
            stage,
            available_gb=_gigabytes(_AVAILABLE, text),
            used_gb=used_gb,
            graph_sizes=sizes,
            of_prefill=of_prefill,
            states=states,
        )
