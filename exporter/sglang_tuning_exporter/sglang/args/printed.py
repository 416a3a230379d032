"""The arguments that the server prints at the start, without secrets.

`server_args=ServerArgs(a=…, b=…)` is a dataclass's repr (0.3.0 to 0.5.18), `server_args={'a': …}` a dict's (0.5.20 on;
sglang/srt/entrypoints/engine.py). Both have `api_key` in clear text, so secrets are dropped here, before anything else reads them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

from sglang_tuning_exporter.sglang.clean import redacted

LONGEST_TEXT = 262_144
_ARGUMENTS_KEPT = 2000
_VALUE_LENGTH = 4096
_NAME_LENGTH = 100

_START = re.compile(r"\s*(?:server_args\s*=\s*)?(?:\w+\.)*\w*[({]")
_NAMED = re.compile(r"\s*(?:([A-Za-z_]\w*)\s*=|['\"]([^'\"\\]{1,200})['\"]\s*:)(.*)", re.DOTALL)
_STRING = r"[bru]{0,2}(?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
_STRUCTURE = re.compile(_STRING + r"|<(?=[A-Za-z])|[()\[\]{}>,'\"]")
# Python prints an enum as `<LoadFormat.AUTO: 'auto'>`, and an object without a repr of its own in angle brackets too.
_OBJECT = re.compile(rf"({_STRING})|<\w+(?:\.\w+)*: ([^<>]*)>|(<[A-Za-z][^<>]*>)")

_USUAL = {"None": None, "True": True, "False": False, "0": 0, "1": 1}  # most values, which need no parser

# Arguments that change from start to start without tuning.
VARYING_ARGS = frozenset(
    {
        "random_seed", "port", "host", "nccl_port", "dist_init_addr", "node_rank", "log_level", "log_level_http",
        "grpc_port", "file_storage_path", "crash_dump_folder", "watchdog_timeout", "served_model_name", "tokenizer_path",
    }
)  # fmt: skip

# What a row, its advice or a suspect reads of 539: API and page send these.
READ_ARGUMENTS = frozenset({
    "attention_backend", "attn_dp_size", "chunked_prefill_size", "context_length", "cuda_graph_bs", "cuda_graph_bs_decode",
    "cuda_graph_config", "cuda_graph_max_bs", "cuda_graph_max_bs_decode", "cuda_graph_max_bs_prefill",
    "decode_log_interval", "device",
    "disable_cuda_graph", "disable_cuda_graph_padding", "disable_decode_cuda_graph",
    "disable_radix_cache", "disaggregation_mode", "dllm_algorithm", "dp_size",
    "enable_deepep_moe", "enable_deterministic_inference", "enable_dp_attention", "enable_ep_moe", "enable_hierarchical_cache",
    "enable_lmcache", "enable_lora", "enable_metrics", "enable_mis", "enable_mixed_chunk",
    "enable_prefill_delayer", "enable_priority_scheduling", "enable_torch_compile", "ep_size", "grammar_backend", "hicache_ratio", "hicache_size",
    "hicache_storage_backend", "is_embedding", "kv_cache_dtype", "load_balance_method", "log_level", "lora_paths",
    "mamba_full_memory_ratio", "max_mamba_cache_size", "max_micro_batch_size", "max_prefill_tokens", "max_queued_requests",
    "max_running_requests", "max_total_tokens", "mem_fraction_static", "min_free_slots_delay", "model_path", "moe_dense_tp_size",
    "page_size", "piecewise_cuda_graph_max_tokens",
    "pp_async_batch_depth", "pp_max_micro_batch_size", "pp_size",
    "prefill_decode_interval", "prefill_max_requests", "prefill_only_disable_kv_cache", "quantization", "schedule_conservativeness",
    "schedule_policy", "served_model_name", "speculative_algorithm", "speculative_num_draft_tokens", "speculative_num_steps", "stream_interval",
    "swa_full_tokens_ratio", "tokenizer_worker_num", "tp_size", "trust_remote_code", "watchdog_timeout",
})  # fmt: skip


def shown(arguments: Mapping[str, object], *, whole: bool) -> dict[str, object]:
    """Return the arguments that are sent: those that are read, or the `whole` of them."""
    return {name: value for name, value in arguments.items() if whole or name in READ_ARGUMENTS}


def are_same_settings(before: Mapping[str, object], after: Mapping[str, object]) -> bool:
    """Return whether two starts had the same arguments, of those that both have as a number, a switch or a string."""
    both = ((value, after[arg]) for arg, value in before.items() if arg in after and arg not in VARYING_ARGS)
    plain = (int, float, str, type(None))
    return all(old == new or not isinstance(old, plain) or not isinstance(new, plain) for old, new in both)


def is_argument(name: str) -> bool:
    """Return whether an argument can have this name, from which its flag is spelled: SGLang's are fields of a Python class."""
    return len(name) <= _NAME_LENGTH and name.isascii() and name.isidentifier()


def parse_server_args(text: str) -> tuple[dict[str, object], bool] | None:
    """Return the arguments of a `server_args=…` line or of its value, and whether it was cut; None where none can be read. Never raises.

    A line that was cut gives the arguments before the cut. Nested mappings stay dicts, lists and tuples become lists, enums their values,
    `nan` and unresolved defaults None, values with a secret `<redacted>`.
    """
    text = text[:LONGEST_TEXT]
    if "<" in text:
        text = _OBJECT.sub(lambda match: match[1] or match[2] or repr(match[3] or ""), text)
    start = _START.match(text)
    if start is None:
        return None
    parts, is_cut = _parts(text, start.end())
    found: dict[str, object] = {}
    for part in parts:
        named = _NAMED.match(part)
        if named is None:
            is_cut = is_cut or bool(part.strip())
            break
        name = named[1] or named[2]
        if is_argument(name):
            found[name] = _value(named[3].strip())
    args = redacted(found)
    return (args, is_cut) if args else None


def _parts(text: str, position: int) -> tuple[list[str], bool]:
    """Cut the inside of a bracket at its commas, those of strings and inner brackets left out; also return whether its end is missing."""
    parts, depth = list[str](), 0
    for match in _STRUCTURE.finditer(text, position):
        mark = match[0]
        if mark in ("'", '"') or len(parts) == _ARGUMENTS_KEPT:
            break
        if mark in ("(", "[", "{", "<"):
            depth += 1
        elif mark in (")", "]", "}", ">") and depth:
            depth -= 1
        elif mark in (",", ")", "}") and not depth:
            parts.append(text[position : match.start()])
            position = match.end()
            if mark != ",":
                return parts, False
    return parts, True


def _value(text: str) -> object:
    """Return the value that Python prints so; other text unchanged."""
    if text in _USUAL:
        return _USUAL[text]
    if text[:1] == "'" == text[-1:] and "\\" not in text and text.count("'") == 2:
        return text[1:-1]
    try:
        return _value_of(ast.parse(text, mode="eval").body, text.encode())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text[:_VALUE_LENGTH]


def _value_of(node: ast.expr, source: bytes) -> object:
    value: object = source[node.col_offset : node.end_col_offset].decode("utf-8", "replace")[:_VALUE_LENGTH]
    match node:
        case ast.Constant(value=str() as text):
            value = text[: 4 * _VALUE_LENGTH]
        case ast.Constant(value=int() | float() | None as number):
            value = number
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            value = -number
        case ast.Name(id="nan" | "inf" as name):
            value = None if name == "nan" else float(name)
        case ast.List() | ast.Tuple() | ast.Set():
            value = [_value_of(item, source) for item in node.elts[:_ARGUMENTS_KEPT]]
        case ast.Dict():
            pairs = zip(node.keys, node.values, strict=True)
            value = {str(_value_of(key, source)): _value_of(item, source) for key, item in pairs if key is not None}
        case ast.Call() if node.keywords:
            fields = {each.arg or "": _value_of(each.value, source) for each in node.keywords}
            value = None if "default_factory" in fields else fields  # such a call is not the value in force
    return value
