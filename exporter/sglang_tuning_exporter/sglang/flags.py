"""SGLang's launch arguments: how each release prints, spells, accepts and refuses them, and the command line that sets
them. Pure.

`flags.json` beside this file has names, kinds, defaults and odd spellings, `choices.json` the choices, both generated
from the argument parsers and declared defaults of 34 released wheels (0.3.0 to 0.5.23); `refusals.json` has what their
argument checks reject and what their start-up code overrides. A server of a release between two of these is taken for
the one that its printed arguments fit best.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import Any, Literal, TypeAlias

from sglang_tuning_exporter.sglang.clean import REDACTED, is_secret, redacted

Kind = Literal["switch", "either", "value", "list", "json", "adapters", "none"]

_KINDS: dict[str, Kind] = {
    "s": "switch",
    "e": "either",
    "v": "value",
    "l": "list",
    "j": "json",
    "p": "adapters",
    "-": "none",
}
# DP attention multiplies --schedule-conservativeness by this and prints the product (srt/arg_groups/parallel_hook.py in
# 0.5.23; since 0.3.6).
_DP_ATTENTION_FACTOR = 0.3
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")
# A line that was cut lacks dozens of arguments, a whole one only the secrets.
_MISSING_OF_A_WHOLE_LINE = 3
_FEWEST_NAMES = 5


@dataclass(frozen=True, slots=True)
class Flag:
    """One argument in one release."""

    arg: str
    flag: str  # empty where it has none, not even a deprecated one
    kind: Kind  # `either` is a switch that also has a `--no-` form; `adapters` are LoRA adapters, `name=path` each
    default: object


@lru_cache(maxsize=3)
def _read(name: str) -> dict[str, Any]:
    """Return one of the JSON files beside this one."""
    document: dict[str, Any] = json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    return document


@lru_cache(maxsize=1)
def releases() -> tuple[str, ...]:
    """Return the releases whose flags are known, oldest first."""
    return tuple(_read("flags.json")["releases"])


def _span(first: str, last: str) -> range:
    """Return the places in `releases()` from a first to a last release; without a last one to the newest."""
    known = releases()
    return range(known.index(first), known.index(last) + 1 if last else len(known))


@lru_cache(maxsize=2)
def _spans(name: str) -> dict[str, list[tuple[range, list[Any]]]]:
    """Return the rows of each argument in one of the files, each with its releases."""
    rows = _read(name)["arguments"].items()
    return {arg: [(_span(first, last), row) for first, last, *row in spans] for arg, spans in rows}


def _row(name: str, arg: str, release: str) -> list[Any] | None:
    place = releases().index(release)
    return next((row for span, row in _spans(name).get(arg, ()) if place in span), None)


def _flag(arg: str, row: list[Any]) -> Flag:
    kind = _KINDS[row[0]]
    default = row[1] if len(row) > 1 else False if kind == "switch" else None
    flag = row[2] if len(row) > 2 else "" if kind == "none" else "--" + arg.replace("_", "-")
    return Flag(arg, flag, kind, default)


@lru_cache(maxsize=1)
def argument_names() -> frozenset[str]:
    """Return the names of all arguments of any release, except secrets, which are never among parsed arguments."""
    return frozenset(arg for arg in _spans("flags.json") if not is_secret(arg))


def spellings() -> frozenset[str]:
    """Return these names, and the flags that set them in any release."""
    rows = ((arg, row) for arg in argument_names() for _, row in _spans("flags.json")[arg])
    return argument_names().union(_flag(arg, row).flag for arg, row in rows)


def _counted(names: Iterable[str]) -> list[int]:
    """Return how many of these arguments each release has."""
    counts = Counter(place for arg in names for span, _ in _spans("flags.json")[arg] for place in span)
    return [counts[place] for place in range(len(releases()))]


@lru_cache(maxsize=1024)  # asked for every argument of a check
def flag_of(arg: str, release: str) -> Flag | None:
    """Return an argument's flag in one of `releases()`; None where that release does not have it.

    Raises ValueError for a release that is not one of them.
    """
    row = _row("flags.json", arg, release)
    return None if row is None else _flag(arg, row)


def nearest_flag(arg: str, release: str) -> Flag | None:
    """Return an argument's flag in the nearest release that has it; None where none has."""
    place, spans = releases().index(release), _spans("flags.json").get(arg, ())
    nearest = min(spans, key=lambda span: max(span[0].start - place, place - span[0].stop + 1, 0), default=None)
    return None if nearest is None else _flag(arg, nearest[1])


def infer_version(args: Mapping[str, object]) -> tuple[str, str] | None:
    """Return the oldest and the newest release whose argument names fit those that a server printed.

    The names change with nearly every release. None where fewer than five names are SGLang's, as in a line that was cut
    early.
    """
    return _releases_with(frozenset(args))


@lru_cache(maxsize=64)  # asked again after every line of a start
def _releases_with(names: frozenset[str]) -> tuple[str, str] | None:
    known = names & argument_names()
    if len(known) < _FEWEST_NAMES:
        return None
    fits, whole = _counted(known), _counted(argument_names())
    fitting = [index for index, count in enumerate(fits) if count == max(fits)]
    missing = {index: whole[index] - fits[index] for index in fitting}
    fewest = min(missing.values())
    if fewest <= _MISSING_OF_A_WHOLE_LINE:
        fitting = [index for index in fitting if missing[index] == fewest]
    return releases()[fitting[0]], releases()[fitting[-1]]


def release_of(version: str | None, args: Mapping[str, object]) -> str | None:
    """Return the release in `releases()` whose flags a server has; None where neither version nor arguments show it.

    Printed arguments come before a version, which may still be that of the server before an upgrade. Of several
    releases with the same arguments, the one nearest to the version is taken, or the newest.
    """
    fitting = releases()
    wanted = version_tuple(version)
    bracket = infer_version(args)
    if bracket is not None:
        fitting = fitting[fitting.index(bracket[0]) : fitting.index(bracket[1]) + 1]
    if wanted is None:
        return None if bracket is None else fitting[-1]
    # The table has one of a release and its post releases, which stands for all of them.
    older = [release for release in fitting if (version_tuple(release) or wanted) <= wanted]
    return older[-1] if older else fitting[0]


def version_tuple(version: str | None) -> tuple[int, int, int] | None:
    """Return `0.5.10.post1` as (0, 5, 10); None where it is no release number."""
    match = _VERSION.match(version or "")
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def is_before(release: str, version: tuple[int, int, int]) -> bool:
    """Return whether a release in `releases()` is older than a version such as (0, 4, 4)."""
    found = version_tuple(release)
    return found is not None and found < version


# How SGLang changes the value of a flag: it prints some multiplied or divided, and divides others among ranks. Flags
# are compared and advised in their own unit, which `flag_value` computes from the printed value. Sources:
# docs/decisions.md, "Flags, values and command lines".


# Before this release DP attention halves the chunk; from it on it divides it by the ranks.
_HALVED_BEFORE = (0, 4, 4)


def number(value: object) -> float | None:
    """Return a number or a switch as a float; None for text, lists, absent values and what is no finite float."""
    if not isinstance(value, (int, float)):
        return None
    try:
        figure = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return figure if isfinite(figure) else None


def attention_ranks(args: Mapping[str, object]) -> int:
    """Return the ranks of attention data parallelism, 1 without it.

    0.5.21 to 0.5.23 have an argument for it, `attn_dp_size`, and print `dp_size=1`; before, it is `dp_size` with
    `enable_dp_attention`.
    """
    ranks = _count(args.get("attn_dp_size"))
    if ranks <= 1 and args.get("enable_dp_attention"):
        ranks = _count(args.get("dp_size"))
    return ranks


def print_factor(arg: str, args: Mapping[str, object], release: str | None) -> float:
    """Return the factor between the value of a flag and the printed one: printed = flag x factor."""
    ranks = attention_ranks(args)
    if ranks == 1 and not args.get("enable_dp_attention"):
        return 1.0
    if arg == "schedule_conservativeness":
        return _DP_ATTENTION_FACTOR
    if arg == "chunked_prefill_size":
        return 1 / 2 if release is not None and is_before(release, _HALVED_BEFORE) else 1 / ranks
    return 1.0


def flag_value(arg: str, args: Mapping[str, object], release: str | None) -> object:
    """Return the value that is typed to get the printed one; what is no number is returned unchanged."""
    printed, factor = args.get(arg), print_factor(arg, args, release)
    if factor == 1.0 or isinstance(printed, bool) or not isinstance(printed, (int, float)) or printed <= 0:
        return printed
    is_whole = isinstance(printed, int) and factor < 1 and arg != "schedule_conservativeness"
    return round(printed / factor, None if is_whole else 4)


def _in_force(arg: str, flag: float, args: Mapping[str, object], release: str | None) -> float:
    """Return the value in force on one rank for the value of a flag; `args` are flag values."""
    if arg == "max_running_requests":
        return flag // attention_ranks(args)
    factor = print_factor(arg, args, release)
    return flag * factor if factor >= 1 or arg == "schedule_conservativeness" else flag // (1 / factor)


def _count(value: object) -> int:
    """Return an argument as a count, 1 where it is none."""
    figure = number(value)
    return max(int(figure), 1) if figure is not None and figure < 1e9 else 1


# The arguments that the server prints at the start, without secrets: `server_args=ServerArgs(a=…, b=…)` is a
# dataclass's repr (0.3.0 to 0.5.18), `server_args={'a': …}` a dict's (0.5.20 on; sglang/srt/entrypoints/engine.py).
# Both have `api_key` in clear text, so secrets are dropped here, before anything else reads them.

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

_PLAIN_VALUES = {"None": None, "True": True, "False": False, "0": 0, "1": 1}  # most values, which need no parser

# Arguments that change from start to start without tuning.
VARYING_ARGS = frozenset(
    {
        "random_seed", "port", "host", "nccl_port", "dist_init_addr", "node_rank", "log_level", "log_level_http",
        "grpc_port", "file_storage_path", "crash_dump_folder", "watchdog_timeout", "served_model_name",
        "tokenizer_path",
    }
)  # fmt: skip

# What a row, its advice or a suspect reads of 539: API and page send these.
READ_ARGUMENTS = frozenset({
    "attention_backend", "attn_dp_size", "chunked_prefill_size", "context_length", "cuda_graph_bs",
    "cuda_graph_bs_decode",
    "cuda_graph_config", "cuda_graph_max_bs", "cuda_graph_max_bs_decode", "cuda_graph_max_bs_prefill",
    "decode_log_interval", "device",
    "disable_cuda_graph", "disable_cuda_graph_padding", "disable_decode_cuda_graph",
    "disable_radix_cache", "disaggregation_mode", "dllm_algorithm", "dp_size",
    "enable_deepep_moe", "enable_deterministic_inference", "enable_dp_attention", "enable_ep_moe",
    "enable_hierarchical_cache",
    "enable_lmcache", "enable_lora", "enable_metrics", "enable_mis", "enable_mixed_chunk",
    "enable_prefill_delayer", "enable_priority_scheduling", "enable_torch_compile", "ep_size", "grammar_backend",
    "hicache_ratio", "hicache_size",
    "hicache_storage_backend", "is_embedding", "kv_cache_dtype", "load_balance_method", "log_level", "lora_paths",
    "mamba_full_memory_ratio", "max_mamba_cache_size", "max_micro_batch_size", "max_prefill_tokens",
    "max_queued_requests",
    "max_running_requests", "max_total_tokens", "mem_fraction_static", "min_free_slots_delay", "model_path",
    "moe_dense_tp_size",
    "page_size", "piecewise_cuda_graph_max_tokens",
    "pp_async_batch_depth", "pp_max_micro_batch_size", "pp_size",
    "prefill_decode_interval", "prefill_delayer_max_delay_passes", "prefill_max_requests",
    "prefill_only_disable_kv_cache", "quantization",
    "schedule_conservativeness",
    "schedule_policy", "served_model_name", "speculative_algorithm", "speculative_num_draft_tokens",
    "speculative_num_steps", "stream_interval",
    "swa_full_tokens_ratio", "tokenizer_worker_num", "tp_size", "trust_remote_code", "watchdog_timeout",
})  # fmt: skip


def sent(arguments: Mapping[str, object], *, whole: bool) -> dict[str, object]:
    """Return the arguments that are sent: those that are read, or the `whole` of them."""
    return {name: value for name, value in arguments.items() if whole or name in READ_ARGUMENTS}


def are_same_settings(before: Mapping[str, object], after: Mapping[str, object]) -> bool:
    """Return whether two starts had the same arguments, of those that both have as a number, a switch or a string."""
    both = ((value, after[arg]) for arg, value in before.items() if arg in after and arg not in VARYING_ARGS)
    plain = (int, float, str, type(None))
    return all(old == new or not isinstance(old, plain) or not isinstance(new, plain) for old, new in both)


def is_argument(name: str) -> bool:
    """Return whether an argument can have this name, from which its flag is spelled: SGLang's are fields of a Python
    class.
    """
    return len(name) <= _NAME_LENGTH and name.isascii() and name.isidentifier()


def parse_server_args(text: str) -> tuple[dict[str, object], bool] | None:
    """Return the arguments of a `server_args=…` line or of its value, and whether it was cut; None where none can be
    read. Never raises.

    A line that was cut gives the arguments before the cut. Nested mappings stay dicts, lists and tuples become lists,
    enums their values, `nan` and unresolved defaults None, values with a secret `<redacted>`.
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
            found[name] = _value_of_text(named[3].strip())
    args = redacted(found, is_word)
    return (args, is_cut) if args else None


def _parts(text: str, position: int) -> tuple[list[str], bool]:
    """Cut the inside of a bracket at its commas, those of strings and inner brackets left out; also return whether its
    end is missing.
    """
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


def _value_of_text(text: str) -> object:
    """Return the value that Python prints so; other text unchanged."""
    if text in _PLAIN_VALUES:
        return _PLAIN_VALUES[text]
    if text[:1] == "'" == text[-1:] and "\\" not in text and text.count("'") == 2:
        return text[1:-1]
    try:
        return _value_of_node(ast.parse(text, mode="eval").body, text.encode())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text[:_VALUE_LENGTH]


def _value_of_node(node: ast.expr, source: bytes) -> object:
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
            value = [_value_of_node(item, source) for item in node.elts[:_ARGUMENTS_KEPT]]
        case ast.Dict():
            pairs = zip(node.keys, node.values, strict=True)
            value = {
                str(_value_of_node(key, source)): _value_of_node(item, source) for key, item in pairs if key is not None
            }
        case ast.Call() if node.keywords:
            fields = {each.arg or "": _value_of_node(each.value, source) for each in node.keywords}
            value = None if "default_factory" in fields else fields  # such a call is not the value in force
    return value


# Whether a release takes the value of an argument, or rejects or ignores it.

_Settings: TypeAlias = Mapping[str, object]  # of flags; an unknown one has the release's default


@lru_cache(maxsize=1)
def checks() -> tuple[tuple[range, dict[str, Any]], ...]:
    """Return all checks, each with the places in `releases()` of those that have it."""
    return tuple((_span(row["first"], row["last"]), row) for row in _read("refusals.json")["checks"])


def choices_of(arg: str, release: str) -> list[object] | None:
    """Return the values that a release's parser accepts for a flag; None where it accepts any."""
    row = _row("choices.json", arg, release)
    return None if row is None else row[0]


# Values inside of JSON arguments: of rope_scaling and of KV events.
_WORDS = frozenset({"yarn", "linear", "dynamic", "llama3", "longrope", "default", "zmq", "kv-events"})


@lru_cache(maxsize=1)
def words() -> frozenset[str]:
    """Return the values that flags of any release take."""
    spans = _spans("choices.json").values()
    return _WORDS.union(str(value) for rows in spans for _, [values] in rows for value in values)


def is_word(text: str) -> bool:
    """Whether a text is a value that a flag takes."""
    return text in words()


def have_effect(release: str, changes: _Settings, values: _Settings) -> bool:
    """Whether `changes` to a server with these flag values take effect: the release neither rejects nor ignores them.

    What it would reject of the values as they are is no reason: the server runs. A change to None removes the flag.
    """
    place, after = releases().index(release), {**values, **changes}
    return all(_is_a_choice(release, arg, value) for arg, value in changes.items()) and not any(
        _hold(row["when"], after, release)
        and (row["arg"] in changes if row["then"] == "ignored" else not _hold(row["when"], values, release))
        for span, row in checks()
        if place in span
    )


def _is_a_choice(release: str, arg: str, value: object) -> bool:
    flag, taken = flag_of(arg, release), choices_of(arg, release)
    return flag is not None and flag.flag != "" and (taken is None or value is None or value in taken)


def _hold(when: list[tuple[str, str, Any]], values: _Settings, release: str) -> bool:
    """Return whether the server would reject or ignore these values; a test that compares with a word means the
    argument of that name.
    """
    return all(
        _TESTS[test](_value(arg, values, release), _value(other, values, release) if isinstance(other, str) else other)
        for arg, test, other in when
    )


def _value(arg: str, values: _Settings, release: str) -> Any:
    """Return an argument's value, or a figure that is computed from several."""

    def figure(name: str) -> float | None:
        value = _value(name, values, release)
        return None if isinstance(value, bool) else number(value)

    match arg:
        case "attention_ranks":
            return attention_ranks(values)
        case "ranks":
            return max(attention_ranks(values), figure("dp_size") or 1.0)
        case "gpus":
            return (figure("tp_size") or 1.0) * (figure("pp_size") or 1.0)
        case "chunk_of_a_rank" | "requests_of_a_rank":
            name = "chunked_prefill_size" if arg == "chunk_of_a_rank" else "max_running_requests"
            printed = figure(name)
            return None if printed is None else _in_force(name, printed, values, release)
    value, flag = values.get(arg), flag_of(arg, release)
    return flag.default if value is None and flag is not None else value


# (value, what it is compared with) -> whether the test holds
_TESTS: dict[str, Callable[[Any, Any], bool]] = {
    "on": lambda value, _: bool(value),
    "off": lambda value, _: not value,
    "set": lambda value, _: bool(value),
    "in": lambda value, among: value in among,
    "not in": lambda value, among: value is not None and value not in among,
    "above": lambda value, bound: _is_figure(value) and value > bound,
    "not above": lambda value, bound: _is_figure(value) and not value > bound,
    "below": lambda value, bound: _is_figure(value) and value < bound,
    "not below": lambda value, bound: _is_figure(value) and not value < bound,
    "not multiple of": lambda value, of: _is_figure(value) and _is_figure(of) and of > 0 and value % of != 0,
}


def _is_figure(value: object) -> bool:
    return isinstance(value, (int, float))


# The whole new command line: the running server's own arguments with the advice in them. SGLang prints its arguments
# after it has filled in defaults and multiplied some of them, so the typed values are found first:
#
# * Left out: what equals the release's default; what SGLang takes from another argument (`tokenizer_path`,
#   `served_model_name`); a drawn `random_seed`; the usual `device`; lists of graph sizes that follow from the largest;
#   what SGLang fills in at nearly every start (`_USUAL`).
# * Written although SGLang may have filled them in, because tuning depends on them: `mem_fraction_static`,
#   `chunked_prefill_size`, `max_running_requests`, `attention_backend`, `page_size`, `cuda_graph_max_bs` (up to
#   0.5.13), a graph that is off.
# * Undone: DP attention multiplies `schedule_conservativeness` by 0.3 and divides `chunked_prefill_size` by the ranks
#   (by 2 up to 0.4.3; srt/server_args.py, srt/arg_groups/parallel_hook.py).
#
# Secrets are not among the arguments. Environment variables and wrappers are not known here.

_PLAIN_FIGURE = re.compile(r"-?\d+(?:\.\d+)?")


def _spelled(flag: Flag, value: object) -> list[str]:
    """Return the words of one argument for a shell; a variable in place of a secret, or of what cannot be typed."""
    words = _typed(flag, value)
    like_flags = [word for word in words[1:] if word.startswith("-") and not _PLAIN_FIGURE.fullmatch(word)]
    one = len(words) == len(("flag", "value"))
    # The operator has a value that is not shown, and one that no list on a command line can hold.
    if value == REDACTED or not all(map(str.isprintable, words)) or (like_flags and not one):
        return [flag.flag, f'"${flag.arg.upper()}"']
    if like_flags:
        words = ["=".join(words)]  # alone it would be parsed as a flag
    return [shlex.quote(word) for word in words]


def _typed(flag: Flag, value: object) -> list[str]:
    """Return the words that set a flag to a value; none if there is nothing to set."""
    if value is None or (flag.kind == "switch" and not value):
        return []
    if flag.kind == "switch":
        return [flag.flag]
    if flag.kind == "either":
        return [flag.flag if value else "--no-" + flag.flag[2:]]
    if flag.kind == "adapters":
        adapters = _adapters(value)
        return [flag.flag, *adapters] if adapters else []
    if flag.kind == "list":
        items = value if isinstance(value, list) else [value]
        return [flag.flag, *(_word(item) for item in items)] if items else []
    return [flag.flag, _word(value)]


def _adapters(value: object) -> list[str]:
    if isinstance(value, dict):
        return [f"{name}={path}" for name, path in value.items()]
    words = []
    for adapter in value if isinstance(value, list) else [value]:
        if not isinstance(adapter, dict):
            words.append(str(adapter))
        elif adapter.get("pinned"):
            words.append(json.dumps({key: adapter[key] for key in ("lora_name", "lora_path", "pinned")}))
        else:
            words.append(f"{adapter.get('lora_name')}={adapter.get('lora_path')}")
    return words


def _word(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float, dict, list)):
        return str(value)
    if isinstance(value, (dict, list)):
        return json.dumps(value)
    # SGLang's integer flags refuse `4096.0`; 0.1 + 0.2 means 0.3.
    whole = isinstance(value, int) or value.is_integer()  # false for infinity and NaN
    return str(int(value)) if whole else f"{value:.10g}"


def _shown(value: object) -> str:
    """Return a flag's value for people."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "on" if value else "off"
    return _word(value)


_PROGRAM = "python3 -m sglang.launch_server"
# SGLang draws seeds from 0 to 2**30 (srt/server_args.py): one this small was typed.
_GIVEN_SEED_BELOW = 100_000
# What SGLang fills in at nearly every start, on any machine and for any model.
_USUAL: dict[str, object] = {
    "boundary_reduction": "rs+rsv",
    "dcp_comm_backend": "ag_rs",
    "device": "cuda",
    "encoder_transfer_backend": "zmq_to_scheduler",
    "enable_tf32_matmul": False,
    "enable_tp_lm_head_all_to_all": False,
    "ep_dispatch_algorithm": "static",
    "expert_distribution_recorder_buffer_size": 1000,
    "grammar_backend": "xgrammar",
    "hicache_ratio": 2.0,
    "mamba_full_memory_ratio": 0.9,
    "mamba_scheduler_strategy": "no_buffer",
    "mm_enable_dp_encoder": False,
    "mm_feature_transport": "cpu",
    "page_size": 1,
    "prefill_decode_interval": 0,
    "sampling_backend": "flashinfer",  # taken wherever it is installed
    "speculative_moe_runner_backend": "auto",
    "swa_full_tokens_ratio": 0.8,
}
_DECODE_GRAPH_OFF = ("disable_cuda_graph", "disable_decode_cuda_graph")
_PREFILL_BACKENDS = ("breakable", "tc_piecewise")  # by platform and release, if not set
_GRAPH_SIZES_BY_MACHINE = (8, 16, 24, 32, 48, 80, 160, 256, 512)  # by memory and TP size, if not set
_OFF = "disabled"


def _known_flag(arg: str, args: Mapping[str, object], release: str) -> Flag | None:
    """Return the flag of an argument in a server's release; None if it has none."""
    flag = flag_of(arg, release)
    if flag is None and arg in args:
        flag = nearest_flag(arg, release) or _flag_of_a_later_release(arg, args[arg], release)
    return flag if flag is not None and flag.flag else None


def _flag_of_a_later_release(arg: str, value: object, release: str) -> Flag | None:
    """Return the flag of an argument that no known release has: the newest one stands for later ones, too."""
    if release != releases()[-1] or arg.startswith("_"):
        return None
    kind: Kind = "switch" if isinstance(value, bool) else "list" if isinstance(value, list) else "value"
    return Flag(arg, "--" + arg.replace("_", "-"), kind, False if kind == "switch" else None)


def command_line(
    release: str | None, args: Mapping[str, object], changes: Mapping[str, object]
) -> tuple[tuple[str, ...], tuple[tuple[str, str, str], ...], tuple[str, ...]] | None:
    """Return the command line that starts the same server with `changes`, for a shell; None if the arguments are not
    known.

    It comes in pieces, the program and each flag with its values. Then what it changes: flag, value before (`not set`
    where SGLang chose one and did not print it), value after. At last the flags of secrets, which are not read, so that
    it is not known whether they are set.

    `args` are the printed arguments, none cut off. `changes` maps arguments to flag values as typed (numbers, words,
    switches). An argument that the release renamed may have either name.
    """
    given = typed_args(release, args)
    if release is None or given is None:
        return None
    changed = []
    for arg, value in _renamed(changes, args, release).items():
        if (flag := _known_flag(arg, args, release)) is None:
            continue
        old = given.get(arg, flag.default)
        if _typed(flag, old) != _typed(flag, value):
            changed.append((flag.flag, _shown(old), _shown(value)))
        given[arg] = value
    known = ((_known_flag(arg, args, release), value) for arg, value in given.items())
    pieces = (" ".join(_spelled(flag, value)) for flag, value in known if flag is not None)
    secrets = [flag_of(arg, release) for arg in ("api_key", "admin_api_key") if arg not in given]
    return (
        (_PROGRAM, *filter(None, pieces)), tuple(changed), tuple(flag.flag for flag in secrets if flag is not None),
    )  # fmt: skip


def typed_args(release: str | None, args: Mapping[str, object]) -> dict[str, object] | None:
    """Return the arguments that were typed to get the printed ones, by name, the model first; None if they are not
    known.
    """
    if release is None or not isinstance(args.get("model_path"), str):
        return None
    given: dict[str, object] = {"model_path": args["model_path"]}
    for arg, value in args.items():
        flag = _known_flag(arg, args, release)
        if flag is not None and arg not in given and not _is_left_out(args, flag, value):
            given[arg] = value
    _undo_dp_attention(args, release, given)
    _undo_graph_config(args, given)
    # `unquant` is printed as nothing; without it the draft is quantized as the model
    draft = "speculative_draft_model_quantization"
    drafts = args.get("quantization") and args.get("speculative_algorithm") and args.get(draft, "") is None
    if drafts and "unquant" in (choices_of(draft, release) or ()):
        given[draft] = "unquant"
    if "ssl_certfile" in given:  # SGLang requires both
        given["ssl_keyfile"] = REDACTED
    return given


def _is_left_out(args: Mapping[str, object], flag: Flag, value: object) -> bool:
    arg = flag.arg
    if value is None or _same(value, flag.default) or arg == "cuda_graph_config":  # written as flags of its own
        return True
    explicitly = args.get(f"_{arg}_explicitly_set")  # SGLang's own note (0.5.20 on), of a few arguments
    if isinstance(explicitly, bool):
        return not explicitly
    if _is_empty(value) and _is_empty(flag.default) and flag.kind != "either":
        return True
    follows = _FOLLOWS.get(arg)
    is_usual = arg in _USUAL and value == _USUAL[arg]
    return is_usual or (follows is not None and follows(args, value))


def _same(value: object, default: object) -> bool:
    """Return whether a value is the default; 0 is not off, and 1 is not on."""
    return isinstance(value, bool) is isinstance(default, bool) and value == default


def _is_empty(value: object) -> bool:
    """Return whether there is nothing to type; zero is a value."""
    return value is None or value is False or (isinstance(value, (str, list, dict)) and not value)


def _undo_dp_attention(args: Mapping[str, object], release: str, given: dict[str, object]) -> None:
    ranks = attention_ranks(args)
    if not args.get("enable_dp_attention") and ranks == 1:
        return
    for arg in ("schedule_conservativeness", "chunked_prefill_size"):
        value, flag = flag_value(arg, args, release), _known_flag(arg, args, release)
        if value != args.get(arg):
            given[arg] = value
        if flag is not None and given.get(arg) == flag.default:
            given.pop(arg, None)
    if is_before(release, (0, 4, 4)):
        given.pop("dp_size", None)  # always tp_size
    if flag_of("attn_dp_size", release) is not None:
        # The new flag replaces the old pair, which is deprecated.
        given.pop("enable_dp_attention", None)
        if given.pop("dp_size", None) is not None or "attn_dp_size" in given:
            given["attn_dp_size"] = ranks


def _undo_graph_config(args: Mapping[str, object], given: dict[str, object]) -> None:
    """Write `cuda_graph_config` (0.5.14 on) as flags: the JSON would fix every list of sizes."""
    config = args.get("cuda_graph_config")
    if isinstance(config, dict) and args.get("device") != "cpu":  # a CPU server has no CUDA graphs
        for phase in ("decode", "prefill"):
            if isinstance(config.get(phase), dict):
                _undo_graph_phase(phase, config[phase], args, given)


def _undo_graph_phase(
    phase: str, settings: Mapping[str, Any], args: Mapping[str, object], given: dict[str, object]
) -> None:
    backend, most, sizes = settings.get("backend"), settings.get("max_bs"), settings.get("bs")
    usual = ("full",) if phase == "decode" else _PREFILL_BACKENDS
    # A decode-only server disables the prefill graph by itself.
    is_off = args.get("disable_cuda_graph") or args.get(f"disable_{phase}_cuda_graph")
    is_off = is_off or (phase == "prefill" and args.get("disaggregation_mode") == "decode")
    if isinstance(backend, str) and backend not in usual and not is_off:
        given.setdefault(f"cuda_graph_backend_{phase}", backend)
    if backend == _OFF or f"cuda_graph_bs_{phase}" in given:
        return
    follows = _follows_from_the_machine if phase == "decode" else _follows_from_the_chunk
    if isinstance(sizes, list) and sizes and not _follows_from_its_largest(sizes, phase):
        given[f"cuda_graph_bs_{phase}"] = sizes
        given.pop(f"cuda_graph_max_bs_{phase}", None)
    elif isinstance(most, int) and most > 0 and not follows(args, most):
        given.setdefault(f"cuda_graph_max_bs_{phase}", most)


def _follows_from_its_largest(sizes: list[object], phase: str = "decode") -> bool:
    """Return whether SGLang lists these sizes by itself for the largest one.

    Its lists start with 1, 2 (decode) or 4, 8 (prefill), and have every multiple of 8 or 16 among the first.
    """
    figures = [size for size in sizes if isinstance(size, int)]
    first, step = ([1, 2], 8) if phase == "decode" else ([4, 8], 16)
    if figures[:2] != first:
        return figures == [1]
    return set(range(step, min(figures[-1], 64) + 1, step)) <= set(figures)


def _follows_from_the_chunk(args: Mapping[str, object], most: object) -> bool:
    """Return whether this is SGLang's default for the largest prefill graph."""
    chunk, pool = args.get("chunked_prefill_size"), args.get("max_total_tokens")
    limits = {limit for limit in (chunk, pool) if isinstance(limit, int) and limit > 0}
    return most in limits | {2048, 4096, 8192}


def _follows_from_the_machine(args: Mapping[str, object], most: object) -> bool:
    """Return whether SGLang chooses this largest decode graph by GPU memory and TP size, or caps it there.

    From 0.5.14 on typed flags stand beside it, so this is only about values from the JSON. A cap at `--max-running-
    requests`, written out, would outlive that limit.
    """
    requests = args.get("max_running_requests")
    share = requests // attention_ranks(args) if isinstance(requests, int) else None
    return most in _GRAPH_SIZES_BY_MACHINE or most in (requests, share)


def _renamed(changes: Mapping[str, object], args: Mapping[str, object], release: str) -> dict[str, object]:
    """Return the changes under the release's names, with what else must change for them to take effect."""
    wanted = dict(changes)
    config = args.get("cuda_graph_config")
    graphs = config.get("decode") if isinstance(config, dict) else None
    if not isinstance(graphs, dict):
        graphs = {"backend": args.get("cuda_graph_backend_decode")}
    _rename_graph_sizes(wanted, args, graphs.get("bs"), release)
    if any(wanted.get(arg) is False for arg in _DECODE_GRAPH_OFF):  # remove whichever switch it is
        wanted = {arg: value for arg, value in wanted.items() if arg not in _DECODE_GRAPH_OFF}
        wanted |= {arg: False for arg in _DECODE_GRAPH_OFF if args.get(arg)}
        if not args.get("disable_cuda_graph") and graphs.get("backend") == _OFF:
            wanted["cuda_graph_backend_decode"] = None
    if wanted.get("enable_dp_attention") and flag_of("attn_dp_size", release) is not None:
        _rename_attention_ranks(wanted, args)
    return wanted


def _rename_graph_sizes(wanted: dict[str, object], args: Mapping[str, object], captured: object, release: str) -> None:
    """Spell the sizes of decode graphs for a release; a list of the sizes that are `captured` must go for a largest
    one.
    """
    for old, new in (("cuda_graph_max_bs", "cuda_graph_max_bs_decode"), ("cuda_graph_bs", "cuda_graph_bs_decode")):
        name, other = (new, old) if flag_of(new, release) is not None else (old, new)
        if other in wanted:
            wanted.setdefault(name, wanted.pop(other))
        listed = name.replace("_max", "")
        sizes = args[listed] if isinstance(args.get(listed), list) else captured
        is_listed = isinstance(sizes, list) and sizes and not _follows_from_its_largest(sizes)
        if name in wanted and name != listed and is_listed:
            wanted.setdefault(listed, None)  # a list of sizes has priority over the largest size


def _rename_attention_ranks(wanted: dict[str, object], args: Mapping[str, object]) -> None:
    """Replace the switch of DP attention by the number of its ranks, in the changes to a server."""
    del wanted["enable_dp_attention"]
    replicas = args.get("dp_size")
    replicas = replicas if isinstance(replicas, int) and replicas > 0 else 1
    wanted["attn_dp_size"] = wanted.pop("dp_size", None) or replicas
    if replicas > 1 and attention_ranks(args) == 1:
        wanted["dp_size"] = 1  # SGLang refuses replicas together with attention ranks


# Arguments that SGLang takes from others, or draws, if they are not set.
_FOLLOWS: dict[str, Callable[[Mapping[str, object], object], bool]] = {
    "tokenizer_path": lambda args, value: value == args["model_path"],
    "served_model_name": lambda args, value: value == args["model_path"],
    "random_seed": lambda _, value: not isinstance(value, int) or value >= _GIVEN_SEED_BELOW,
    "load_balance_method": lambda args, value: (
        value == "round_robin" and args.get("disaggregation_mode") in (None, "null", "decode")
    ),
    "speculative_draft_model_quantization": lambda args, value: value == args.get("quantization"),
    "torch_compile_max_bs": lambda args, _: not args.get("enable_torch_compile"),
    "piecewise_cuda_graph_max_tokens": _follows_from_the_chunk,
    **dict.fromkeys(
        ("cuda_graph_bs", "cuda_graph_bs_decode"),
        lambda _, sizes: not isinstance(sizes, list) or _follows_from_its_largest(sizes),
    ),
    **dict.fromkeys(
        ("cuda_graph_bs_prefill", "piecewise_cuda_graph_tokens"),
        lambda _, sizes: not isinstance(sizes, list) or _follows_from_its_largest(sizes, "prefill"),
    ),
}
