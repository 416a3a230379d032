"""Targets without atheris: Hypothesis mutates real inputs, without coverage, and shrinks what it finds."""

from __future__ import annotations

import sys
import time
import traceback
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from fuzz.targets import Target

_ROUND = 100  # inputs between two looks at the clock


@st.composite
def spoiled(draw: st.DrawFn, seeds: list[bytes], words: tuple[bytes, ...]) -> bytes:
    """A real input, mutated: cut, joined with pieces of another, with meaningful and with random words."""
    text = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(text)))
        upto = at + draw(st.integers(0, 30))
        piece = draw(st.sampled_from(words) | st.binary(max_size=6) | st.just(draw(st.sampled_from(seeds))[-200:]))
        text = text[:at] + piece + text[upto:]
    return text[draw(st.sampled_from([0, 0, 0, 1, len(text) // 2])) :]


def run(target: Target, seconds: float, first: int, place: Path) -> int:
    """Try one target for this long. Returns 0, or 1 when something was found."""
    seeds = [each[: target.longest] for each in target.seeds()]
    begin, done, last = time.monotonic(), 0, b""
    number = first

    def tried(text: bytes) -> None:
        nonlocal done, last
        done, last = done + 1, text
        target.check(text)

    while done == 0 or time.monotonic() - begin < seconds:
        every = settings(
            max_examples=_ROUND,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        try:
            seed(number)(every(given(spoiled(seeds, target.words))(tried)))()
        except Exception:  # noqa: BLE001 - any exception is what is looked for
            traceback.print_exc()
            place.mkdir(parents=True, exist_ok=True)
            (place / "found").write_bytes(last)
            print(
                f"{target.name}: found something with seed {first}; the input is {place / 'found'}",
                file=sys.stderr,
            )
            return 1
        number += 1
    took = time.monotonic() - begin
    print(f"{target.name}: {done} inputs in {took:.0f} s by Hypothesis, nothing found, seed {first}", flush=True)
    return 0
