"""Completion scripts for bash, zsh and fish."""

from __future__ import annotations

import shlex
from argparse import Action
from collections.abc import Mapping

from sglang_tuning_exporter.config import FAIL_ON, REPORT_FORMATS
from sglang_tuning_exporter.config.profiles import PROFILES

# Values that a flag takes; any other flag's value is completed as a file name.
VALUES = {"--profile": tuple(PROFILES), "--format": REPORT_FORMATS, "--fail-on": FAIL_ON}

_BASH = """\
_sglang_tuning_exporter() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" words=""
  COMPREPLY=()
  case "${{COMP_WORDS[COMP_CWORD-1]}}" in
{values}
  esac
  if [ -z "$words" ] && [ "$COMP_CWORD" -eq 1 ]; then
    words="{commands}"
  elif [ -z "$words" ] && [ "${{current#-}}" != "$current" ]; then
    case "${{COMP_WORDS[1]}}" in
{flags}
    esac
  fi
  if [ -n "$words" ]; then
    COMPREPLY=($(compgen -W "$words" -- "$current"))
  fi
}}
complete -o default -F _sglang_tuning_exporter {program}
"""
_ZSH = "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n"


def script(program: str, shell: str, commands: Mapping[str, Mapping[str, Action]]) -> str:
    """Return the completion script of `program` for bash, zsh or fish; `commands` maps commands to flags."""
    if shell == "fish":
        return _fish(program, commands)
    text = _BASH.format(
        program=program,
        commands=" ".join(commands),
        values="\n".join(f'    {flag}) words="{" ".join(values)}" ;;' for flag, values in VALUES.items()),
        flags="\n".join(f'      {name}) words="{" ".join(flags)}" ;;' for name, flags in commands.items()),
    )
    return (_ZSH if shell == "zsh" else "") + text


def _fish(program: str, commands: Mapping[str, Mapping[str, Action]]) -> str:
    lines = [f"complete -c {program} -n __fish_use_subcommand -f -a {shlex.quote(' '.join(commands))}"]
    for name, flags in commands.items():
        for flag, action in flags.items():
            if not flag.startswith("--"):
                continue
            values = f" -x -a {shlex.quote(' '.join(VALUES[flag]))}" if flag in VALUES else ""
            about = shlex.quote((action.help or "").replace("%%", "%"))
            lines.append(
                f"complete -c {program} -n '__fish_seen_subcommand_from {name}' -l {flag[2:]}{values} -d {about}"
            )
    return "\n".join(lines) + "\n"
