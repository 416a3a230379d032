"""Whether a release rejects the value of an argument, or ignores it. Pure.

Beside this file, `choices.json` has the choices of the releases' own argument parsers, `refusals.json` what their argument checks reject
and what their start-up code overrides, with the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias

from sglang_tuning_exporter.sglang.args import flags

Kind = Literal["refused", "ignored"]
Values: TypeAlias = Mapping[str, object]  # of flags; an unknown one has the release's default


class Objection(NamedTuple):
    """Why a change of `arg` has no effect: the server rejects it, or ignores it."""

    kind: Kind
    arg: str
    words: str
    source: str


# Of the releases with these indexes, first and last: argument, test, and what most tests compare with. Where all hold, the objection is made.
Check: TypeAlias = tuple[int, int, list[tuple[str, str, Any]], Objection]


@lru_cache(maxsize=1)
def _choices() -> dict[str, list[tuple[int, int, tuple[object, ...]]]]:
    indexes = flags.release_indexes()
    return {
        arg: [(indexes[first], indexes[last], tuple(values)) for first, last, values in spans]
        for arg, spans in flags.read_table("choices.json")["arguments"].items()
    }


@lru_cache(maxsize=1)
def checks() -> tuple[Check, ...]:
    """Return all checks of all releases."""
    indexes, rows = flags.release_indexes(), flags.read_table("refusals.json")["checks"]
    return tuple(
        (
            indexes[row["first"]],
            indexes[row["last"]],
            row["when"],
            Objection(row["then"], row["arg"], row["words"], row["source"]),
        )
        for row in rows
    )


def choices_of(arg: str, release: str) -> tuple[object, ...] | None:
    """Return the values that a release's parser accepts for a flag; None where it accepts any."""
    return flags.in_release(_choices().get(arg, ()), flags.release_indexes()[release])


def objection(release: str, values: Values, changes: Values) -> Objection | None:
    """Return why `changes` to a server with these flag values would have no effect; None where they would.

    Rejected changes come before ignored ones. A check that already fails is skipped: the server runs. A change to None removes the flag.
    """
    for arg, value in changes.items():
        refused = _not_a_choice(release, arg, value)
        if refused is not None:
            return refused
    found, index, after = None, flags.release_indexes()[release], {**values, **changes}
    for first, last, when, said in checks():
        if not first <= index <= last or (said.kind == "ignored" and (said.arg not in changes or found is not None)):
            continue
        if _hold(when, after, release) and (said.kind == "ignored" or not _hold(when, values, release)):
            found = said
            if said.kind == "refused":
                return said
    return found


def _not_a_choice(release: str, arg: str, value: object) -> Objection | None:
    flag, taken = flags.flag_of(arg, release), choices_of(arg, release)
    if flag is None or not flag.flag:
        return Objection("refused", arg, "this release has no such flag", "srt/server_args.py, add_cli_args")
    if taken is None or value is None or value in taken:
        return None
    words = f"{flag.flag} takes {', '.join(str(choice) for choice in taken)} only"
    return Objection("refused", arg, words, "srt/server_args.py, add_cli_args")


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
