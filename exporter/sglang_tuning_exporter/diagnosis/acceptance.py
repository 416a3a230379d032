"""Whether a server's own release accepts a change: the one place that all advice goes through. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_tuning_exporter.diagnosis.command import typed_args
from sglang_tuning_exporter.sglang.args.flags import flag_of, releases
from sglang_tuning_exporter.sglang.args.refusals import Objection, choices_of, objection

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sglang_tuning_exporter.state.facts import ServerFacts

# One argument by its older and its newer name.
_RENAMED = (("cuda_graph_max_bs", "cuda_graph_max_bs_decode"),)
# Without the release's name, what the last releases before this one lack is no reason to doubt a flag.
_LONG_AGO = 7


def settings(facts: ServerFacts) -> dict[str, object]:
    """Give the flag values in force: what was typed, and what the server printed of the rest."""
    values: dict[str, object] = dict(facts.args)
    for arg in ("schedule_conservativeness", "chunked_prefill_size"):
        if arg in values:
            values[arg] = facts.flag_value(arg)
    return {**values, **(typed_args(facts) or {})}


def objection_to(facts: ServerFacts, changes: Mapping[str, object]) -> Objection | None:
    """Say what the server's release would object to; None for nothing, and where the release is not known."""
    release = facts.release
    return None if release is None or not changes else objection(release, settings(facts), changes)


def by_release(facts: ServerFacts, arg: str, value: str) -> str:
    """Write a change for each release that spells or takes it differently; empty where the server's release is known, or all agree."""
    if facts.release is not None or not arg:
        return ""
    names = next((pair for pair in _RENAMED if arg in pair), (arg,))
    if any(name in facts.args for name in names) and len(names) > 1:
        return ""
    known = releases()
    spans = [(name, [r for r in known if _takes(r, name, value)]) for name in names]
    doubted = known[_LONG_AGO:] if arg not in facts.args else known
    if len(names) == 1 and (
        set(spans[0][1]) >= set(doubted) or (choices_of(arg, known[-1]) is None and arg in facts.args)
    ):
        return ""
    return ", ".join(f"{_spelled(name, value)} ({_span(taking, known)})" for name, taking in spans if taking)


def _takes(release: str, arg: str, value: str) -> bool:
    flag, choices = flag_of(arg, release), choices_of(arg, release)
    return flag is not None and bool(flag.flag) and (choices is None or not value or value in choices)


def _spelled(arg: str, value: str) -> str:
    return f"--{arg.replace('_', '-')} {value}".rstrip()


def _span(taking: list[str], known: tuple[str, ...]) -> str:
    first, last = (release.partition(".post")[0] for release in (taking[0], taking[-1]))
    if taking[-1] == known[-1]:
        return f"from SGLang {first} on"
    return f"up to SGLang {last}" if taking[0] in known[:_LONG_AGO] else f"SGLang {first} to {last}"
