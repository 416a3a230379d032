"""The flag and the default of each argument, release by release.

`flags.json` beside this file has names, kinds, defaults and odd spellings, generated from the argument parsers and declared defaults of
34 released wheels (0.3.0 to 0.5.23). A server of a release between two of these is taken for the one that its printed arguments fit
best.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import Any, Literal, TypeVar

from sglang_tuning_exporter.sglang.clean import is_secret

T = TypeVar("T")
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
# DP attention multiplies --schedule-conservativeness by this and prints the product (srt/arg_groups/parallel_hook.py in 0.5.23; since 0.3.6).
DP_ATTENTION_FACTOR = 0.3
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


def read_table(name: str) -> dict[str, Any]:
    """Return one of the JSON files beside this one."""
    document: dict[str, Any] = json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    return document


def in_release(spans: Iterable[tuple[int, int, T]], index: int) -> T | None:
    """Return what holds in the release with this index, of values from a first to a last release; None where nothing does."""
    return next((value for first, last, value in spans if first <= index <= last), None)


@lru_cache(maxsize=1)
def _table() -> tuple[tuple[str, ...], dict[str, int], dict[str, list[tuple[int, int, Flag]]]]:
    document = read_table("flags.json")
    names = tuple(document["releases"])
    indexes = {release: index for index, release in enumerate(names)} | {"": len(names) - 1}
    rows = {
        arg: [(indexes[row[0]], indexes[row[1]], _flag(arg, row)) for row in spans]
        for arg, spans in document["arguments"].items()
    }
    return names, indexes, rows


def release_indexes() -> dict[str, int]:
    """Return the index of each release in `releases()`; an empty name is the newest."""
    return _table()[1]


def _flag(arg: str, row: list[Any]) -> Flag:
    kind = _KINDS[row[2]]
    default = row[3] if len(row) > 3 else False if kind == "switch" else None
    flag = row[4] if len(row) > 4 else "" if kind == "none" else "--" + arg.replace("_", "-")
    return Flag(arg, flag, kind, default)


@lru_cache(maxsize=1)
def argument_names() -> frozenset[str]:
    """Return the names of all arguments of any release, except secrets, which are never among parsed arguments."""
    return frozenset(arg for arg in _table()[2] if not is_secret(arg))


def _counted(names: Iterable[str]) -> list[int]:
    """Return how many of these arguments each release has."""
    found = Counter(index for arg in names for first, last, _ in _table()[2][arg] for index in range(first, last + 1))
    return [found[index] for index in range(len(releases()))]


def releases() -> tuple[str, ...]:
    """Return the releases whose flags are known, oldest first."""
    return _table()[0]


def flag_of(arg: str, release: str) -> Flag | None:
    """Return an argument's flag in one of `releases()`; None where that release does not have it.

    Raises ValueError for a release that is not one of them.
    """
    names, _, rows = _table()
    return in_release(rows.get(arg, ()), names.index(release))


def nearest_flag(arg: str, release: str) -> Flag | None:
    """Return an argument's flag in the nearest release that has it; None where none has."""
    names, _, rows = _table()
    index, spans = names.index(release), rows.get(arg, ())
    return min(spans, key=lambda span: max(span[0] - index, index - span[1], 0))[2] if spans else None


def infer_version(args: Mapping[str, object]) -> tuple[str, str] | None:
    """Return the oldest and the newest release whose argument names fit those that a server printed.

    The names change with nearly every release. None where fewer than five names are SGLang's, as in a line that was cut early.
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

    Printed arguments come before a version, which may still be that of the server before an upgrade. Of several releases with the same
    arguments, the one nearest to the version is taken, or the newest.
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


# How SGLang changes the value of a flag: it prints some multiplied or divided, and divides others among ranks. Flags are compared and advised
# in their own unit, which `flag_value` computes from the printed value. Sources: docs/decisions.md, "Flags, values and command lines".


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

    0.5.21 to 0.5.23 have an argument for it, `attn_dp_size`, and print `dp_size=1`; before, it is `dp_size` with `enable_dp_attention`.
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
        return DP_ATTENTION_FACTOR
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


def in_force(arg: str, flag: float, args: Mapping[str, object], release: str | None) -> float:
    """Return the value in force on one rank for the value of a flag; `args` are flag values."""
    if arg == "max_running_requests":
        return flag // attention_ranks(args)
    factor = print_factor(arg, args, release)
    return flag * factor if factor >= 1 or arg == "schedule_conservativeness" else flag // (1 / factor)


def _count(value: object) -> int:
    """Return an argument as a count, 1 where it is none."""
    figure = number(value)
    return max(int(figure), 1) if figure is not None and figure < 1e9 else 1
