"""Whether a release takes the value of an argument, or rejects or ignores it. Pure.

Beside this file, `choices.json` has the choices of the releases' own argument parsers, `refusals.json` what their argument checks reject
and what their start-up code overrides, with the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeAlias

from sglang_tuning_exporter.sglang.args import flags

Values: TypeAlias = Mapping[str, object]  # of flags; an unknown one has the release's default


@lru_cache(maxsize=1)
def _choices() -> dict[str, list[tuple[int, int, tuple[object, ...]]]]:
    indexes = flags.release_indexes()
    return {
        arg: [(indexes[first], indexes[last], tuple(values)) for first, last, values in spans]
        for arg, spans in flags.read_table("choices.json")["arguments"].items()
    }


@lru_cache(maxsize=1)
def checks() -> tuple[tuple[int, int, dict[str, Any]], ...]:
    """Return all checks: the indexes of the first and the last release that has it, and the row."""
    indexes = flags.release_indexes()
    return tuple(
        (indexes[row["first"]], indexes[row["last"]], row) for row in flags.read_table("refusals.json")["checks"]
    )


def choices_of(arg: str, release: str) -> tuple[object, ...] | None:
    """Return the values that a release's parser accepts for a flag; None where it accepts any."""
    return flags.in_release(_choices().get(arg, ()), flags.release_indexes()[release])


def have_effect(release: str, changes: Values, values: Values) -> bool:
    """Whether `changes` to a server with these flag values take effect: the release neither rejects nor ignores them.

    What it would reject of the values as they are is no reason: the server runs. A change to None removes the flag.
    """
    index, after = flags.release_indexes()[release], {**values, **changes}
    return all(_is_a_choice(release, arg, value) for arg, value in changes.items()) and not any(
        _hold(row["when"], after, release)
        and (row["arg"] in changes if row["then"] == "ignored" else not _hold(row["when"], values, release))
        for first, last, row in checks()
        if first <= index <= last
    )


def _is_a_choice(release: str, arg: str, value: object) -> bool:
    flag, taken = flags.flag_of(arg, release), choices_of(arg, release)
    return flag is not None and flag.flag != "" and (taken is None or value is None or value in taken)


def _hold(when: list[tuple[str, str, Any]], values: Values, release: str) -> bool:
    """Return whether the server would reject or ignore these values; a test that compares with a word means the argument of that name."""
    return all(
        _TESTS[test](_value(arg, values, release), _value(other, values, release) if isinstance(other, str) else other)
        for arg, test, other in when
    )


def _value(arg: str, values: Values, release: str) -> Any:
    """Return an argument's value, or a figure that is computed from several."""

    def figure(name: str) -> float | None:
        value = _value(name, values, release)
        return None if isinstance(value, bool) else flags.number(value)

    match arg:
        case "attention_ranks":
            return flags.attention_ranks(values)
        case "ranks":
            return max(flags.attention_ranks(values), figure("dp_size") or 1.0)
        case "gpus":
            return (figure("tp_size") or 1.0) * (figure("pp_size") or 1.0)
        case "chunk_of_a_rank" | "requests_of_a_rank":
            name = "chunked_prefill_size" if arg == "chunk_of_a_rank" else "max_running_requests"
            printed = figure(name)
            return None if printed is None else flags.in_force(name, printed, values, release)
    value, flag = values.get(arg), flags.flag_of(arg, release)
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
