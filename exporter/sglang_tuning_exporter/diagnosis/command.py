"""The command line of a server whose facts are known. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from sglang_tuning_exporter.sglang.args import command
from sglang_tuning_exporter.sglang.args.command import Change, Command
from sglang_tuning_exporter.state.facts import ServerFacts

__all__ = ["Change", "Command", "command_line", "typed_args"]


def command_line(facts: ServerFacts, changes: Mapping[str, object]) -> Command | None:
    """Return the command line that starts the same server with `changes`; None if the arguments are not known."""
    return None if facts.args_are_cut else command.command_line(facts.release, facts.args, changes)


def typed_args(facts: ServerFacts) -> dict[str, object] | None:
    """Return the arguments that were typed to get this server's, by name; None if they are not known."""
    release, known = facts.release, facts.typed
    if release is None or facts.args_are_cut:
        return None
    if known is None or known[0] is not facts.args or known[1] != facts.revision:
        given = command.typed_args(release, facts.args)
        if given is None:
            return None
        known = facts.typed = (facts.args, facts.revision, given)
    return dict(known[2])
