"""`/server_info`, `/get_server_info` and `/v1/loads` as plain figures, secrets left out.

Pure. `/server_info` (`/get_server_info` up to 0.5.5) is the server's arguments flat at the top, and the state of
its schedulers: among the arguments in 0.4.3 to 0.4.5, in the list `internal_states`, one entry a DP rank, from 0.4.6
on (`srt/entrypoints/http_server.py`, `srt/managers/scheduler.py: get_internal_state`). It holds `api_key` in clear, in
the arguments, in every internal state and in `launch_command`. Memory is in GB as SGLang counts it (2**30 bytes).
Nothing here raises: an answer that cannot be read is None.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

from sglang_tuning_exporter.sglang.clean import redacted
from sglang_tuning_exporter.sglang.flags import is_argument, is_word
from sglang_tuning_exporter.sglang.metrics import MOST, RankFigures

_LIMIT = "effective_max_running_requests_per_dp"
# Fields of the answer that are no arguments. launch_command repeats the command line with its secrets.
_NOT_ARGUMENTS = frozenset({
    "internal_states", "launch_command", "scheduler_pids", "startup_time", "status", "version", "frontend", "kv_events",
    "hicache_object_layout", "max_total_num_tokens", "max_req_input_len", "last_gen_throughput", "memory_usage",
    "avg_spec_accept_length",
    _LIMIT,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """One answer of `/server_info`. `args` holds no secret; its values are JSON values."""

    version: str | None = None
    args: dict[str, object] = field(default_factory=dict)
    ranks: list[RankFigures] = field(default_factory=list)  # without their DP ranks: in the order of the answers
    graph_batch_sizes: tuple[int, ...] = ()  # decode batch sizes with a captured graph, where known


def parse_server_info(text: str | bytes) -> ServerInfo | None:
    """Read an answer of `/server_info`; None for what is not one (an error page, other JSON)."""
    document = _document(text)
    if not isinstance(document, dict) or not {"model_path", "version", "internal_states"} & document.keys():
        return None
    states, version = document.get("internal_states"), document.get("version")
    found = [state for state in states if isinstance(state, dict)] if isinstance(states, list) else []
    if not found and {"last_gen_throughput", "memory_usage"} & document.keys():
        found = [document]  # 0.4.3 to 0.4.5
    return ServerInfo(
        version=version if isinstance(version, str) and version else None,
        args=redacted(
            {key: value for key, value in document.items() if key not in _NOT_ARGUMENTS and is_argument(key)}, is_word
        ),
        ranks=[_rank(state) for state in found],
        graph_batch_sizes=max(map(_graph_sizes, found), key=len, default=()),
    )


def parse_loads(text: str | bytes) -> list[RankFigures]:
    """Read an answer of `/v1/loads` (0.5.8 on); no schedulers for what is not one (0.5.9 can answer 500)."""
    document = _document(text)
    listed = document.get("loads") if isinstance(document, dict) else document
    return [_load(load) for load in listed if isinstance(load, dict)] if isinstance(listed, list) else []


def _document(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # not JSON, not UTF-8, a number of a million digits; a million brackets
        return None


def _rank(state: dict[str, Any]) -> RankFigures:
    memory = state.get("memory_usage")
    memory = memory if isinstance(memory, dict) else {}
    return RankFigures(
        weight_memory_gb=_figure(memory.get("weight")),
        kv_memory_gb=_figure(memory.get("kvcache")),
        graph_memory_gb=_graph_gb(memory.get("graph", memory.get("cuda_graph"))),  # cuda_graph up to 0.5.2
        available_gpu_memory_gb=_figure(memory.get("startup_available")),
        kv_pool_tokens=_count(memory.get("token_capacity")),
        running_limit=_count(state.get(_LIMIT)),  # 0.5.8 on
    )


def _graph_sizes(state: dict[str, Any]) -> tuple[int, ...]:
    sizes = state.get("decode_cuda_graph_bs")
    return tuple(size for size in map(_count, sizes if isinstance(sizes, list) else []) if size is not None)


def _graph_gb(value: Any) -> float | None:
    """Return the sum of the capture phases that later releases show separately."""
    if isinstance(value, dict):
        phases = [figure for figure in map(_figure, value.values()) if figure is not None]
        return math.fsum(phases) if phases else None
    return _figure(value)


def _load(load: dict[str, Any]) -> RankFigures:
    return RankFigures(dp=_count(load.get("dp_rank")), running_limit=_count(load.get("max_running_requests")))


def _figure(value: Any) -> float | None:
    """Return a number; None for anything else, true and false included."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) <= MOST else None


def _count(value: Any) -> int | None:
    figure = _figure(value)
    return None if figure is None or figure < 0 else int(figure)
