"""What SGLang's errors say: `python -m release.messages WHEEL …` reads the wheels of its releases.

    pip download --no-deps --only-binary=:all: --ignore-requires-python sglang==0.5.23 -d build/wheels
    python -m release.messages build/wheels/*.whl

Every text that SGLang raises, asserts or logs as an error is a row of
`exporter/sglang_tuning_exporter/sglang/messages.json`, with `{}` for what varies. `sglang/messages.py` quotes errors by
this table. Texts of `advices.json` are not repeated. Nothing of SGLang's code is kept.
"""

from __future__ import annotations

import json
import re
import sys
import zipfile
from pathlib import Path

from release import advices

PLACE = advices.PLACE.with_name("messages.json")
ABOUT = (
    "Texts that SGLang (Apache-2.0, see NOTICE) raises, asserts or logs as errors, with `{}` for what varies; without"
    " those of advices.json. Generated from its wheels by `python -m release.messages`. Exceptions: the types that"
    " SGLang raises or defines."
)
_KINDS = frozenset({"raise", "assert", "error", "critical"})
_TYPE = re.compile(r"(?:[A-Za-z_]\w*\.)*([A-Z]\w*(?:Error|Exception|Exit|Timeout|Interrupt|Failure))")
_DEFINED = re.compile(r"^class ([A-Z]\w*)\((?:[\w.]*(?:Error|Exception))\)", re.MULTILINE)
_LEAST_LETTERS = 12  # that are constant; a text with fewer is nobody's in particular
_LONGEST = 400


def main(wheels: list[str]) -> int:
    """Read the wheels and write the table."""
    texts, types = set[str](), set[str]()
    for path in map(Path, wheels):
        wheel = advices.wheel_of(path, every_text=True)
        types |= {match[1] for text in wheel.texts if (match := _TYPE.fullmatch(text.exception))}
        texts |= {_written(text.words) for text in wheel.texts if text.kind in _KINDS}
        with zipfile.ZipFile(path) as packed:
            for name in packed.namelist():
                if name.endswith(".py") and name.startswith("sglang/srt/"):
                    types |= set(_DEFINED.findall(packed.read(name).decode("utf-8", "replace")))
        print(f"{path.name.split('-')[1]}: {len(texts)} texts, {len(types)} types", flush=True)
    known = {re.sub(r"\{n(?:=([^}]*))?\}", lambda match: match[1] or "{}", row[1]) for row in _advices()}
    kept = sorted(text for text in texts - known if _letters(text) >= _LEAST_LETTERS)
    head = json.dumps({"about": ABOUT, "exceptions": sorted(types)}, ensure_ascii=False)[:-1]
    lines = ",\n".join(json.dumps(text, ensure_ascii=False) for text in kept)
    PLACE.write_text(f'{head}, "texts": [\n{lines}\n]}}\n', encoding="utf-8")
    print(f"altogether: {len(kept)} texts")
    return 0


def _advices() -> list[list[str]]:
    rows: list[list[str]] = json.loads(advices.PLACE.read_text(encoding="utf-8"))["texts"]
    return rows


def _written(words: str) -> str:
    """Return a text as it stands in the table: on one line, cut where it is very long."""
    text = " ".join(words.replace("{", "{{").replace("}", "}}").replace("\0", "{}").split())
    return re.sub(r"(?:\{\}){2,}", "{}", text if len(text) <= _LONGEST else text[:_LONGEST].rpartition(" ")[0] + " {}")


def _letters(text: str) -> int:
    return sum(map(str.isalpha, text.replace("{}", "")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
