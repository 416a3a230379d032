"""SGLang's lines of several releases, made of figures; their forms are data, starts are cut from real ones.

Times are UTC.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from functools import lru_cache
from time import gmtime, strftime
from typing import Any

from truth.cases import data
from truth.recording import ROOT

RELEASES = ("0.3.0", "0.3.6", "0.4.3", "0.4.6", "0.4.9", "0.5.3", "0.5.7", "0.5.12", "0.5.20", "0.5.23")
_FORMS = data("lines.yaml")
_POOLS = {"swa_usage": "window", "mamba_usage": "states"}
_FIELDS = set(re.findall(r"\{(\w+)", str(_FORMS)))


def _of(forms: Mapping[str, str], release: str) -> str:
    return next(forms[each] for each in reversed(RELEASES[: RELEASES.index(release) + 1]) if each in forms)


def _line(at: float, release: str, rank: str, text: str) -> str:
    rank = rank or ("TP0" if RELEASES.index(release) < RELEASES.index("0.4.6") else "")
    stamp = strftime("%H:%M:%S" if release == "0.3.0" else "%Y-%m-%d %H:%M:%S", gmtime(at))
    return f"[{stamp}{rank and ' ' + rank}] {text}"


@lru_cache(maxsize=256)
def _form(kind: str, release: str, given: frozenset[str]) -> str:
    pool = _FORMS["pool"][next((form for field, form in _POOLS.items() if field in given), "plain")].split(", ")
    shown = ", ".join(part for part in pool if kind == "decode" or "usage" in part)
    parts = enumerate(re.split(r"\[([^]]*)\]", _of(_FORMS[kind], release)))  # each second one if its figures are given
    kept = [part for n, part in parts if n % 2 == 0 or given.issuperset(re.findall(r"\{(\w+)", part))]
    return "".join(kept).replace("{pool}", shown)


def _filled(kind: str, release: str, fields: Mapping[str, Any]) -> str:
    if unknown := {*fields} - _FIELDS:
        raise TypeError(f"no release prints {', '.join(sorted(unknown))}")
    return _form(kind, release, frozenset(name for name in fields if fields[name] is not None)).format(**fields)


def decode(
    at: float, release: str = "0.5.23", *, rank: str = "", running: int, tokens: int, usage: float, **more: Any
) -> str:
    """Print a decode line; more: `queue`, which it always has, `throughput`, `graph` (None: not said), `accept_len`,
    `swa_usage` …
    """
    given = {"running": running, "tokens": tokens, "usage": usage}
    given = {"largest_len": 3120, "throughput": 20.0 * running, "graph": True, **more, **given}
    return _line(at, release, rank, _filled("decode", release, given))


def prefill(
    at: float, release: str = "0.5.23", *, rank: str = "", new_seqs: int, new_tokens: int, cached: int, **more: Any
) -> str:
    """Print a prefill line; more: `usage`, `running` and `queue`, which it always has,
    `pending_token`, `throughput` …
    """
    given = {"new_seqs": new_seqs, "new_tokens": new_tokens, "cached": cached, **more}
    usual = {"throughput": new_tokens / 0.6, "graph": False, "optimistic": 0 if "bootstrap" in more else None}
    usual["pending_token"] = more["queue"] * new_tokens // max(1, new_seqs)
    usual["hit_rate"] = 100.0 * cached / max(1, new_tokens + cached)
    return _line(at, release, rank, _filled("prefill", release, usual | given))


def retraction(
    at: float, release: str = "0.5.23", *, rank: str = "", requests: int, ratio: float, gained: int | None = None
) -> str:
    """Print a retraction of one rank; `ratio` is the estimate after it."""
    figures = {"requests": requests, "ratio": ratio, "before": max(0.0, ratio - 0.25), "aborted": 0}
    figures["gained"] = 1790 * requests if gained is None else gained
    return _line(at, release, rank, _filled("retraction", release, figures))


def out_of_memory(at: float, release: str, phase: str, rank: str = "TP0") -> list[str]:
    """Print an end for want of memory in `prefill`, `decode`, `capture` or `load`; `prefill pool`: the allocator's
    words.
    """
    first, *rest = _of(_FORMS["out_of_memory"][phase], release).splitlines()
    return [_line(at, release, rank, first), *rest]


@lru_cache
def _printed(release: str) -> tuple[str, ...]:
    path = next((ROOT / "tests/data/logs").glob(f"{release}.[lp]*"))
    lines = path.read_text(encoding="utf-8").splitlines()
    return tuple(lines[: next(n for n, line in enumerate(lines) if line.endswith("ready to roll!")) + 1])


def _sizes(largest: int) -> list[int]:
    usual = (1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 513, 16), *range(544, 2049, 32))
    return sorted({*(size for size in usual if size < largest), largest})


def _arguments(printed: str, given: dict[str, Any]) -> str:
    """Print the arguments with others in place; `cuda_graph_max_bs` is the decode one where a release has two."""
    call = ast.parse(printed, mode="eval").body
    keywords = call.keywords if isinstance(call, ast.Call) else []
    values = {str(k.arg): ast.literal_eval(k.value) for k in keywords} or ast.literal_eval(printed)
    if graphs := values.get("cuda_graph_config"):
        if "cuda_graph_max_bs" in given:
            given["cuda_graph_max_bs_decode"] = given.pop("cuda_graph_max_bs")
        graphs["decode"]["max_bs"] = given.get("cuda_graph_max_bs_decode") or 256
        graphs["decode"]["bs"] = _sizes(graphs["decode"]["max_bs"])
        for graph in graphs.values() if given.get("disable_cuda_graph") else ():
            graph["backend"] = "disabled"
    if "model_path" in given:
        given = {"tokenizer_path": given["model_path"], "served_model_name": given["model_path"], **given}
    if unknown := {*given} - {*values}:
        raise TypeError(f"this release has no {', '.join(sorted(unknown))}")
    values |= given
    return f"ServerArgs({', '.join(f'{k}={v!r}' for k, v in values.items())})" if keywords else repr(values)


def start(at: float, release: str = "0.5.23", **arguments: Any) -> list[str]:
    """Print a start until the server is ready, with arguments of that release in place and what it measures.

    Measured: `weights` and `available_gpu_mem` (GB), `architecture`, `max_total_num_tokens`, `context_len`,
    `running_limit`.
    """
    figures: dict[str, Any] = {"available_gpu_mem": 9.87, "weights": 16.46, "architecture": "LlamaForCausalLM"}
    figures |= {"max_total_num_tokens": 1040384, "context_len": 131072}
    figures |= {name: arguments.pop(name) for name in (*figures, "running_limit") if name in arguments}
    figures |= {"free": 78.71 - figures["weights"], "before": figures["available_gpu_mem"] + 2.06}
    figures["half"] = (figures["free"] - figures["before"]) / 2  # of the KV cache
    figures.setdefault("running_limit", arguments.get("max_running_requests") or 4096)
    figures |= {
        name: arguments.get(name, old) for name, old in (("chunked_prefill_size", 8192), ("max_prefill_tokens", 16384))
    }
    swaps = {old: form.format(**figures) for old, form in _FORMS["start"].items()}
    most, ranks = int(arguments.get("cuda_graph_max_bs") or 256), int(arguments.get("dp_size") or 1)
    one = RELEASES.index(release) >= RELEASES.index("0.4.6") and arguments.get("tp_size") == 1
    lines = []
    for line in _printed(release):
        if arguments.get("disable_cuda_graph") and re.search(r"Capture .*graph", line, re.IGNORECASE):
            continue
        found = re.match(r"\[(?:\S+ )?(\d\d):(\d\d):(\d\d)( TP0)?\] (.*)", line)
        text = found[5] if found else line
        if text.startswith("server_args="):
            text = "server_args=" + _arguments(text.removeprefix("server_args="), dict(arguments))
        else:
            text = re.sub(r"(bs[ =])\[[\d, ]+256\]", lambda sizes: f"{sizes[1]}{_sizes(most)}", text)
            text = re.sub("|".join(swaps), lambda old: swaps[old[0]], text)
        if not found:
            lines.append(text)
            continue
        stamp = _line(at + int(found[1]) * 3600 + int(found[2]) * 60 + int(found[3]) - 41900, release, "-", "")
        for rank in range(ranks if found[4] else 1):
            named = [f"DP{rank}"] * (ranks > 1) + ["TP0"] * (not one) if found[4] else []
            lines.append(stamp.replace(" -", "".join(f" {name}" for name in named)) + text)
    return lines
