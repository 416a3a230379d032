"""Whether a server's own release accepts a change. All advice is checked here. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from sglang_tuning_exporter.diagnosis.command import typed_args
from sglang_tuning_exporter.sglang.args.flags import flag_of, releases
from sglang_tuning_exporter.sglang.args.refusals import Objection, choices_of, objection
from sglang_tuning_exporter.state.facts import ServerFacts

# Older and newer name of one argument.
_RENAMED = (("cuda_graph_max_bs", "cuda_graph_max_bs_decode"),)
# Without a known release, a flag that only the oldest releases lack is not doubted.
_LONG_AGO = 7


def settings(facts: ServerFacts) -> dict[str, object]:
    """Return the flag values in force: those typed, and the rest as the server printed them."""
    multiplied = {"schedule_conservativeness", "chunked_prefill_size"} & facts.args.keys()
    return {**facts.args, **{arg: facts.flag_value(arg) for arg in multiplied}, **(typed_args(facts) or {})}


def objection_to(facts: ServerFacts, changes: Mapping[str, object]) -> Objection | None:
    """Return the objection of the server's release; None if there is none, or the release is not known."""
    release = facts.release
    return None if release is None or not changes else objection(release, settings(facts), changes)


def by_release(facts: ServerFacts, arg: str, value: str) -> str:
    """Return a change in the spelling of each release; empty if the server's release is known, or all agree."""
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
