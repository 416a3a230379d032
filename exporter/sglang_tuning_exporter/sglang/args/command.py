"""The whole new command line: the running server's own arguments with the advice in them. Pure.

SGLang prints its arguments after it has filled in defaults and multiplied some of them. So the typed values are found first:

* Left out: what equals the release's default; what SGLang takes from another argument (`tokenizer_path`, `served_model_name`); a drawn
  `random_seed`; the usual `device`; lists of graph sizes that follow from the largest; what SGLang fills in at nearly every start (`_USUAL`).
* Written although SGLang may have filled them in, because tuning depends on them: `mem_fraction_static`, `chunked_prefill_size`,
  `max_running_requests`, `attention_backend`, `page_size`, `cuda_graph_max_bs` (up to 0.5.13), a graph that is off.
* Undone: DP attention multiplies `schedule_conservativeness` by 0.3 and divides `chunked_prefill_size` by the ranks (by 2 up to 0.4.3;
  srt/server_args.py, srt/arg_groups/parallel_hook.py).

Secrets are not among the arguments. Environment variables and wrappers are not known here.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping

from sglang_tuning_exporter.sglang.args.flags import (
    Flag,
    Kind,
    attention_ranks,
    flag_of,
    flag_value,
    is_before,
    nearest_flag,
    releases,
)
from sglang_tuning_exporter.sglang.args.refusals import choices_of
from sglang_tuning_exporter.sglang.clean import REDACTED

# A flag and its value as words: for SGLang's argument parser, for a shell, and for people.


_PLAIN_FIGURE = re.compile(r"-?\d+(?:\.\d+)?")


def spelled(flag: Flag, value: object) -> list[str]:
    """Return the words of one argument for a shell; a variable in place of a secret, or of what cannot be typed."""
    words = typed(flag, value)
    like_flags = [word for word in words[1:] if word.startswith("-") and not _PLAIN_FIGURE.fullmatch(word)]
    one = len(words) == len(("flag", "value"))
    # The operator has a value that is not shown, and one that no list on a command line can hold.
    if value == REDACTED or not all(map(str.isprintable, words)) or (like_flags and not one):
        return [flag.flag, f'"${flag.arg.upper()}"']
    if like_flags:
        words = ["=".join(words)]  # alone it would be parsed as a flag
    return [shlex.quote(word) for word in words]


def typed(flag: Flag, value: object) -> list[str]:
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


def shown(value: object) -> str:
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


def _flag(arg: str, args: Mapping[str, object], release: str) -> Flag | None:
    """Return the flag of an argument in a server's release; None if it has none."""
    found = flag_of(arg, release)
    if found is None and arg in args:
        found = nearest_flag(arg, release)
        # The newest known release stands for later ones, which may have arguments of their own.
        if found is None and release == releases()[-1] and not arg.startswith("_"):
            value = args[arg]
            kind: Kind = "switch" if isinstance(value, bool) else "list" if isinstance(value, list) else "value"
            return Flag(arg, "--" + arg.replace("_", "-"), kind, False if kind == "switch" else None)
    return found if found is not None and found.flag else None


def command_line(
    release: str | None, args: Mapping[str, object], changes: Mapping[str, object]
) -> tuple[tuple[str, ...], tuple[tuple[str, str, str], ...], tuple[str, ...]] | None:
    """Return the command line that starts the same server with `changes`, for a shell; None if the arguments are not known.

    It comes in pieces, the program and each flag with its values. Then what it changes: flag, value before (`not set` where SGLang chose one
    and did not print it), value after. At last the flags of secrets, which are not read, so that it is not known whether they are set.

    `args` are the printed arguments, none cut off. `changes` maps arguments to flag values as typed (numbers, words, switches). An argument
    that the release renamed may have either name.
    """
    given = typed_args(release, args)
    if release is None or given is None:
        return None
    changed = []
    for arg, value in _renamed(changes, args, release).items():
        if (flag := _flag(arg, args, release)) is None:
            continue
        old = given.get(arg, flag.default)
        if typed(flag, old) != typed(flag, value):
            changed.append((flag.flag, shown(old), shown(value)))
        given[arg] = value
    known = ((_flag(arg, args, release), value) for arg, value in given.items())
    pieces = (" ".join(spelled(flag, value)) for flag, value in known if flag is not None)
    secrets = [flag_of(arg, release) for arg in ("api_key", "admin_api_key") if arg not in given]
    return (
        (_PROGRAM, *filter(None, pieces)), tuple(changed), tuple(flag.flag for flag in secrets if flag is not None),
    )  # fmt: skip


def typed_args(release: str | None, args: Mapping[str, object]) -> dict[str, object] | None:
    """Return the arguments that were typed to get the printed ones, by name, the model first; None if they are not known."""
    if release is None or not isinstance(args.get("model_path"), str):
        return None
    given: dict[str, object] = {"model_path": args["model_path"]}
    for arg, value in args.items():
        flag = _flag(arg, args, release)
        if flag is not None and arg not in given and not _is_left_out(args, flag, value):
            given[arg] = value
    _undo_dp_attention(args, release, given)
    _undo_graph_config(args, given)
    draft = "speculative_draft_model_quantization"  # `unquant` is printed as nothing; without it the draft is quantized as the model
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
        value, flag = flag_value(arg, args, release), _flag(arg, args, release)
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
    for phase, usual, follows in (
        ("decode", ("full",), _follows_from_the_machine), ("prefill", _PREFILL_BACKENDS, _follows_from_the_chunk),
    ):  # fmt: skip
        settings = config.get(phase) if isinstance(config, dict) else None
        if not isinstance(settings, dict) or args.get("device") == "cpu":  # a CPU server has no CUDA graphs
            continue
        backend, most, sizes = settings.get("backend"), settings.get("max_bs"), settings.get("bs")
        # A decode-only server disables the prefill graph by itself.
        is_off = args.get("disable_cuda_graph") or (phase == "prefill" and args.get("disaggregation_mode") == "decode")
        if (
            isinstance(backend, str)
            and backend not in usual
            and not is_off
            and not args.get(f"disable_{phase}_cuda_graph")
        ):
            given.setdefault(f"cuda_graph_backend_{phase}", backend)
        if backend == _OFF or f"cuda_graph_bs_{phase}" in given:
            continue
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
    for old, new in (("cuda_graph_max_bs", "cuda_graph_max_bs_decode"), ("cuda_graph_bs", "cuda_graph_bs_decode")):
        name, other = (new, old) if flag_of(new, release) is not None else (old, new)
        if other in wanted:
            wanted.setdefault(name, wanted.pop(other))
        listed = name.replace("_max", "")
        sizes = args[listed] if isinstance(args.get(listed), list) else graphs.get("bs")
        if (
            name in wanted
            and name != listed
            and isinstance(sizes, list)
            and sizes
            and not _follows_from_its_largest(sizes)
        ):
            wanted.setdefault(listed, None)  # a list of sizes has priority over the largest size
    if any(wanted.get(arg) is False for arg in _DECODE_GRAPH_OFF):  # remove whichever switch it is
        wanted = {arg: value for arg, value in wanted.items() if arg not in _DECODE_GRAPH_OFF}
        wanted |= {arg: False for arg in _DECODE_GRAPH_OFF if args.get(arg)}
        if not args.get("disable_cuda_graph") and graphs.get("backend") == _OFF:
            wanted["cuda_graph_backend_decode"] = None
    if wanted.get("enable_dp_attention") and flag_of("attn_dp_size", release) is not None:
        del wanted["enable_dp_attention"]
        replicas = args.get("dp_size")
        replicas = replicas if isinstance(replicas, int) and replicas > 0 else 1
        wanted["attn_dp_size"] = wanted.pop("dp_size", None) or replicas
        if replicas > 1 and attention_ranks(args) == 1:
            wanted["dp_size"] = 1  # SGLang refuses replicas together with attention ranks
    return wanted


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
