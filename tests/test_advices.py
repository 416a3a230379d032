"""What SGLang says about its own flags: a message in, the text that it is out.

The texts are those of its wheels (`release/advices.py`); lines are as real servers printed them.
"""

from __future__ import annotations

import re
import tarfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tuning_exporter.sglang.advices import Advice, is_text, pieces_of, recognise, table
from sglang_tuning_exporter.sglang.flags import argument_names

CAPTURES = sorted((Path(__file__).parent / "captures").glob("*.tar.xz"))
NO_CACHE = (
    "Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.88. Raise --mem-fraction-static"
    " above 0.912 (minimum viable = 1 - available/pre = 0.9113). If using speculative decoding, draft weights are now"
    " counted."
)
CAPPED = (
    "max_running_requests is capped to 9 by the mamba state cache (max_mamba_cache_size=47, 5 state slots per request)."
    " To raise it: increase --mamba-full-memory-ratio or --max-mamba-cache-size, or halve the state size with"
    " --mamba-ssm-dtype bfloat16."
)
BATCH = (
    "Decode batch. #running-req: 12, #token: 6144, token usage: 0.09, cuda graph: True, gen throughput (token/s):"
    " 512.10, #queue-req: 0"
)


def advice(text: str) -> Advice:
    found = recognise(text)
    assert found is not None, text
    return found


def test_an_error_that_names_a_flag_explains_the_end() -> None:
    found = advice(NO_CACHE)
    assert (found.role, found.ways) == ("explains", {"--mem-fraction-static": "increase"})


def test_a_flag_that_a_text_only_speaks_of_is_not_advised() -> None:
    found = advice(CAPPED)
    assert found.role == "recommends"
    assert found.ways == {
        "--mamba-full-memory-ratio": "increase",
        "--max-mamba-cache-size": "increase",
        "--mamba-ssm-dtype": "set",
        "--max-running-requests": "",
    }


@pytest.mark.parametrize(
    "text",
    [
        BATCH,
        "",
        "--",
        "_",
        "a user asks about --mem-fraction-static",
        f"user said: {NO_CACHE}",
        "Raise --mem-fraction-static above 0.95.",
        "Please increase --schedule-conservativeness to 9.",
        "in=GenerateReqInput(text='Not enough memory. Please try to increase --mem-fraction-static.')",
    ],
)
def test_words_of_others_are_no_text_of_sglang(text: str) -> None:
    assert recognise(text) is None


def test_each_text_is_recognised_as_itself_or_as_one_that_says_the_same() -> None:
    unlike = []
    for words, known in table():
        found = recognise(_spoken(words))
        if found is None or (found.role, found.ways.keys()) != (known.role, known.ways.keys()):
            unlike.append((words, found))
    assert len(unlike) <= len(table()) / 100, unlike  # two texts of which one fits into the hole of the other


def test_every_text_has_its_own_name_and_names_a_flag_or_a_variable() -> None:
    known = {"--" + name.replace("_", "-") for name in argument_names()}
    names = Counter(each.pattern for *_, each in table())
    assert set(names.values()) == {1}
    flags = {flag for *_, each in table() for flag in each.ways}
    assert len(flags & known) > 300
    assert all(each.ways for *_, each in table())
    assert {each.role for *_, each in table()} == {"explains", "recommends", "decision", "request"}


@given(
    st.sampled_from(table()),
    st.lists(st.text(alphabet=st.characters(codec="utf-8"), max_size=60), min_size=1, max_size=4),
    st.data(),
)
def test_what_varies_in_a_text_may_be_anything(
    row: tuple[str, Advice], fillings: list[str], data: st.DataObject
) -> None:
    text = re.sub(r"\{n?\}", lambda _: data.draw(st.sampled_from(fillings)), _constant(row[0]))
    recognise(text)


def test_the_search_for_a_text_costs_no_more_than_the_length_of_the_message() -> None:
    counted = [0]

    class Message(str):
        """A message that counts the letters that are searched."""

        __slots__ = ()

        def find(self, *arguments: object) -> int:
            found = str.find(self, *arguments)  # type: ignore[arg-type]  # as they were given
            counted[0] += (found if found >= 0 else len(self)) - int(str(arguments[1]))
            return found

    for words, *_ in table():
        pieces = pieces_of(words)
        message = Message(pieces[0] + " ".join(pieces[1:-1]) * 200)
        counted[0] = 0
        is_text(message, pieces)
        assert counted[0] <= len(message) * 2


# The arguments; and what SGLang prints in colour of any option that it renames: the flag is typed, no part of a text,
# and still obeyed.
_OF_NO_TEXT = re.compile(r"server_args=|\x1b\[1;33m'--[a-z-]+' is deprecated and will be removed in a future release\.")


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda path: path.name.partition(".")[0])
def test_lines_of_a_real_server_that_name_a_flag_are_recognised(capture: Path) -> None:
    with tarfile.open(capture) as archive:
        logs = [archive.extractfile(each) for each in archive if "server.log" in each.name]
        lines = [line.decode("utf-8", "replace") for log in logs if log is not None for line in log]
    unread = []
    for line in lines:
        stamped = re.match(r"\[\d{4}-\d\d-\d\d [\d:]{8}[^\]]*\] (.*)", line)
        if stamped and _names_a_flag(stamped[1]) and not _OF_NO_TEXT.match(stamped[1]):
            found = recognise(stamped[1])
            if found is None or (found.role == "recommends" and not _ADVISES.search(stamped[1])):
                unread.append(stamped[1])
    assert not unread


_ADVISES = re.compile(r"KV pool holds \d+ tokens, fewer than --context-length|set proper `?--max-total-tokens")


def _names_a_flag(message: str) -> bool:
    return re.search(r"(?<![\w-])--[a-z][a-z-]+[a-z](?![\w-])", message) is not None and not message.startswith(
        ("Receive", "Finish")
    )


def _constant(words: str) -> str:
    """A text of the table with its constant number."""
    return re.sub(r"\{n=([^}]*)\}", r"\1", words)


def _spoken(words: str) -> str:
    """A text of the table as a server could print it."""
    return re.sub(r"\{n?\}", "7", _constant(words)).replace("{{", "{").replace("}}", "}")
