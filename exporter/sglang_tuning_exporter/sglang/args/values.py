"""How SGLang changes the value of a flag: it prints some multiplied or divided, and divides others among ranks. Pure.

Flags are compared and advised in their own unit, which `flag_value` computes from the printed value. Sources: docs/decisions.md, "Flags,
values and command lines".
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from sglang_tuning_exporter.sglang.args.flags import DP_ATTENTION_FACTOR, is_before

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
