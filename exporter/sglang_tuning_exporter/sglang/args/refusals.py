"""Whether a release rejects the value of an argument, or ignores it. Pure.

Beside this file, `choices.json` has the choices of the releases' own argument parsers, `refusals.json` what their argument checks reject
and what their start-up code overrides, with the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from sglang_tuning_exporter.sglang.args.flags import (
    attention_ranks,
    flag_of,
    in_force,
    in_release,
    number,
    read_table,
    release_indexes,
)

Kind = Literal["refused", "ignored"]


@dataclass(frozen=True, slots=True)
class Objection:
    """Why a change of `arg` has no effect: the server rejects it, or ignores it."""

    kind: Kind
    arg: str
    words: str
    source: str


@dataclass(frozen=True, slots=True)
class ArgumentCheck:
    """One check of the releases from index `first` to `last`: what happens `then`, where all of `when` holds."""

    first: int
    last: int
    then: Kind
    arg: str
    when: list[tuple[str, str, Any]]  # argument, test, and what most tests compare with
    words: str
    source: str

    def holds(self, values: _Values) -> bool:
        """Return whether the server would reject or ignore these values."""
        return all(_TESTS[test](values.of(arg), values.resolved(other)) for arg, test, other in self.when)


@lru_cache(maxsize=1)
def _choices() -> dict[str, list[tuple[int, int, tuple[object, ...]]]]:
    indexes = release_indexes()
    return {
        arg: [(indexes[first], indexes[last], tuple(values)) for first, last, values in spans]
        for arg, spans in read_table("choices.json")["arguments"].items()
    }


@lru_cache(maxsize=1)
def checks() -> tuple[ArgumentCheck, ...]:
    """Return all checks of all releases."""
    indexes = release_indexes()
    rows = read_table("refusals.json")["checks"]
    return tuple(ArgumentCheck(**row | {end: indexes[row[end]] for end in ("first", "last")}) for row in rows)


def choices_of(arg: str, release: str) -> tuple[object, ...] | None:
    """Return the values that a release's parser accepts for a flag; None where it accepts any."""
    return in_release(_choices().get(arg, ()), release_indexes()[release])


def objection(release: str, values: Mapping[str, object], changes: Mapping[str, object]) -> Objection | None:
    """Return why `changes` to a server with these flag values would have no effect; None where they would.

    Rejected changes come before ignored ones. A check that already fails is skipped: the server runs. A change to None removes the flag.
    """
    for arg, value in changes.items():
        refused = _not_a_choice(release, arg, value)
        if refused is not None:
            return refused
    before, after = _Values(release, values), _Values(release, {**values, **changes})
    found = None
    index = release_indexes()[release]
    for check in checks():
        if not check.first <= index <= check.last:
            continue
        if check.then == "ignored" and (check.arg not in changes or found is not None):
            continue
        if check.holds(after) and (check.then == "ignored" or not check.holds(before)):
            found = Objection(check.then, check.arg, check.words, check.source)
            if check.then == "refused":
                return found
    return found


def _not_a_choice(release: str, arg: str, value: object) -> Objection | None:
    flag = flag_of(arg, release)
    if flag is None or not flag.flag:
        return Objection("refused", arg, "this release has no such flag", "srt/server_args.py, add_cli_args")
    taken = choices_of(arg, release)
    if taken is None or value is None or value in taken:
        return None
    words = f"{flag.flag} takes {', '.join(str(choice) for choice in taken)} only"
    return Objection("refused", arg, words, "srt/server_args.py, add_cli_args")


@dataclass(frozen=True, slots=True)
class _Values:
    """The flag values of a server, with the release's defaults for unknown ones."""

    release: str
    known: Mapping[str, object]

    def of(self, arg: str) -> object:
        """Return an argument's value, or a figure that is computed from several."""
        made = _COMPUTED.get(arg)
        if made is not None:
            return made(self)
        value = self.known.get(arg)
        if value is not None:
            return value
        flag = flag_of(arg, self.release)
        return None if flag is None else flag.default

    def resolved(self, other: Any) -> Any:
        """Return what a test compares with: the value of another argument by its name, else the value itself."""
        return self.of(other) if isinstance(other, str) else other

    def figure(self, arg: str) -> float | None:
        """Return an argument as a number; None where it is none."""
        value = self.of(arg)
        return None if isinstance(value, bool) else number(value)


def _of_a_rank(arg: str, values: _Values) -> float | None:
    figure = values.figure(arg)
    return None if figure is None else in_force(arg, figure, values.known, values.release)


_COMPUTED: dict[str, Callable[[_Values], object]] = {
    "attention_ranks": lambda values: attention_ranks(values.known),
    "ranks": lambda values: max(attention_ranks(values.known), values.figure("dp_size") or 1.0),
    "gpus": lambda values: (values.figure("tp_size") or 1.0) * (values.figure("pp_size") or 1.0),
    "chunk_of_a_rank": lambda values: _of_a_rank("chunked_prefill_size", values),
    "requests_of_a_rank": lambda values: _of_a_rank("max_running_requests", values),
}


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
