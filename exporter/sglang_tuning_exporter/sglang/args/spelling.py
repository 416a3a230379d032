"""A flag and its value as words: for SGLang's argument parser, for a shell, and for people. Pure."""

from __future__ import annotations

import json
import re
import shlex

from sglang_tuning_exporter.sglang.args.flags import Flag
from sglang_tuning_exporter.sglang.secrets import REDACTED

_PLAIN_FIGURE = re.compile(r"-?\d+(?:\.\d+)?")


def spelled(flag: Flag, value: object) -> list[str]:
    """Return the words of one argument for a shell; a variable in place of a secret, or of what cannot be typed."""
    words = typed(flag, value)
    like_flags = [word for word in words[1:] if word.startswith("-") and not _PLAIN_FIGURE.fullmatch(word)]
    one = len(words) == len(("flag", "value"))
    # The operator has a value that is not shown, and one that no list on a command line can hold.
    if value == REDACTED or not all(map(str.isprintable, words)) or (like_flags and not one):
        return [flag.flag, f'"${flag.arg.upper()}"']
    if like_flags:
        words = ["=".join(words)]  # alone it would be parsed as a flag
    return [shlex.quote(word) for word in words]


def typed(flag: Flag, value: object) -> list[str]:
    """Return the words that set a flag to a value; none if there is nothing to set."""
    if value is None or (flag.kind == "switch" and not value):
        return []
    if flag.kind == "switch":
        return [flag.flag]
    if flag.kind == "either":
        return [flag.flag if value else "--no-" + flag.flag[2:]]
    if flag.kind == "adapters":
        adapters = _adapters(value)
        return [flag.flag, *adapters] if adapters else []
    if flag.kind == "list":
        items = value if isinstance(value, list) else [value]
        return [flag.flag, *(_word(item) for item in items)] if items else []
    return [flag.flag, _word(value)]


def _adapters(value: object) -> list[str]:
    if isinstance(value, dict):
        return [f"{name}={path}" for name, path in value.items()]
    words = []
    for adapter in value if isinstance(value, list) else [value]:
        if not isinstance(adapter, dict):
            words.append(str(adapter))
        elif adapter.get("pinned"):
            words.append(json.dumps({key: adapter[key] for key in ("lora_name", "lora_path", "pinned")}))
        else:
            words.append(f"{adapter.get('lora_name')}={adapter.get('lora_path')}")
    return words


def _word(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float, dict, list)):
        return str(value)
    if isinstance(value, (dict, list)):
        return json.dumps(value)
    # SGLang's integer flags refuse `4096.0`; 0.1 + 0.2 means 0.3.
    whole = isinstance(value, int) or value.is_integer()  # false for infinity and NaN
    return str(int(value)) if whole else f"{value:.10g}"


def shown(value: object) -> str:
    """Return a flag's value for people."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "on" if value else "off"
    return _word(value)
