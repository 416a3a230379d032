"""Errors quoted by the texts of SGLang and its libraries: an error in, the words that everybody may read out."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas import at
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.config import resolve
from sglang_tuning_exporter.core.events import Event, public
from sglang_tuning_exporter.serve import pages
from sglang_tuning_exporter.serve.metrics import MOST_END_WORDS, collect
from sglang_tuning_exporter.serve.metrics.families import text_format
from sglang_tuning_exporter.sglang import messages

if TYPE_CHECKING:
    from pathlib import Path

WORDS = "zqcanaryqz"  # of a request
VALUES = [f"{WORDS} 17", f"'{WORDS}'", f"--{WORDS}", f"{WORDS}=5", f"<http://x/{WORDS}|y>"]
TEXTS = sorted(text for known in messages._by_word().values() for text in known)
NO_ROOM = "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."
OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.75 GiB. GPU 0 has a total capacity of 79.11 GiB"
    " of which 911.38 MiB is free. Process 4711 has 78.20 GiB memory in use."
)
BATCH = (
    "Decode batch, #running-req: 20, #token: 1020, token usage: 0.08, cuda graph: True,"
    " gen throughput (token/s): 4500.10, #queue-req: 0"
)


@pytest.mark.parametrize(
    "text",
    [
        NO_ROOM,
        OUT_OF_MEMORY,
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "OSError: [Errno 98] Address already in use",
        "ValueError: Cannot use the fast tokenizer in slow tokenizer mode.",
        "launch_server.py: error: unrecognized arguments: --kv-cahce-dtype",
        "scheduler_0 crashed with exit code -11 (SIGSEGV)",
        "AssertionError",
        "",
    ],
)
def test_words_of_sglang_stay_with_their_figures_and_flags(text: str) -> None:
    assert messages.quoted(text) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"ValueError: Unknown role: my {WORDS} has a rash", "ValueError"),
        (f"KeyError: '{WORDS}'", "KeyError"),
        (f"AssertionError: input_ids=[1, 2] text={WORDS} and more", "AssertionError"),
        (f"jinja2.exceptions.TemplateError: roles must alternate, got {WORDS}", "jinja2.exceptions.TemplateError"),
        (f"json.JSONDecodeError: Expecting value: {WORDS}", "json.JSONDecodeError: Expecting value …"),
        (f"ValueError: bad role <!channel> <http://evil.example/{WORDS}|Open Grafana>", "ValueError"),
        (f"Error: {WORDS} out of memory, --tp-size {WORDS}", "… out of memory … --tp-size …"),
        (f"KVTransferError(room={WORDS}): Duplicate decode bootstrap room",
            "KVTransferError: Duplicate decode bootstrap room"),
        (f"{WORDS} said nothing", messages.UNKNOWN),
    ],
)  # fmt: skip
def test_words_of_a_request_are_left_out(text: str, said: str) -> None:
    assert messages.quoted(text) == said


def test_a_type_or_a_flag_beside_text_of_others_is_shown_only_if_it_is_known() -> None:
    assert messages.quoted("CanaryError: hello", marked=True) == messages.UNKNOWN
    assert messages.quoted("CanaryError: hello") == "CanaryError"
    assert (
        messages.quoted("launch_server.py: error: unrecognized arguments: --canary", marked=True)
        == "launch_server.py: error: …"
    )
    event = Event("words", text="KeyError: 'x'", place="srt/canary.py:7 in f", marked=True, before=(WORDS,))
    assert (public(event).text, event.place, event.before) == ("KeyError", "", ())


@given(
    text=st.sampled_from(TEXTS),
    values=st.lists(st.sampled_from(VALUES), min_size=9, max_size=9),
    kind=st.sampled_from(["", "ValueError: ", "torch.OutOfMemoryError: ", f"{WORDS}: ", "sglang: error: "]),
    marked=st.booleans(),
)
def test_no_word_in_place_of_a_value_is_ever_shown(text: str, values: list[str], kind: str, *, marked: bool) -> None:
    filled = iter(values * 20)
    error = kind + re.sub(r"\{n?(?:=[^}]*)?\}", lambda _: next(filled), text) + values[0]
    said = messages.quoted(error, marked=marked)
    assert WORDS not in said
    assert messages.quoted(said, marked=marked) == said


@given(st.text(max_size=400))
def test_any_text_gives_a_quotation_that_stays_the_same(text: str) -> None:
    said = messages.quoted(text)
    assert messages.quoted(said) == said
    assert not {*said} & {"\n", "\u202e"}


def crashed(sidecar: Sidecar, log: Path, last: str) -> None:
    """Let the server serve, and end with an exception whose last line is this one."""
    assert sidecar.log is not None
    frames = f'Traceback (most recent call last):\n  File "/x/sglang/srt/a.py", line 9, in run\n    b()\n{last}\n'
    with log.open("a") as file:
        file.write("".join(at(second, BATCH) for second in range(9)))
        file.write(at(9, f"Scheduler hit an exception: {frames}"))
        file.write(at(9, "SIGQUIT received. signum=None, frame=None. It usually means one child failed."))
    sidecar.log.poll()


def following(tmp_path: Path) -> tuple[Sidecar, Path, Path]:
    log, state = tmp_path / "server.log", tmp_path / "state.json"
    log.touch()
    sidecar = Sidecar(resolve({"log_file": (str(log),), "state_file": str(state)}, {}))
    assert sidecar.log is not None
    sidecar.log.poll()
    return sidecar, log, state


def test_no_word_of_a_request_reaches_metrics_page_api_or_state_file(tmp_path: Path) -> None:
    sidecar, log, state = following(tmp_path)
    crashed(sidecar, log, f"ValueError: Unknown role: <!channel> {WORDS}")
    series = text_format(list(collect(sidecar)))
    assert 'sglang_tuning_end_info{class="unsupported",words="ValueError, raised at srt/a.py:9 in run"} 1' in series
    answer = pages.as_json(sidecar).decode()
    for text in (series, answer, pages.render(sidecar), state.read_text()):
        assert WORDS not in text
    [said] = [each["explained_by"] for each in json.loads(answer)["findings"] if each["explained_by"]][:1]
    assert (said["text"], said["raised_at"]) == ("ValueError", "srt/a.py:9 in run")


def test_the_number_of_different_words_of_ends_is_bounded(tmp_path: Path) -> None:
    sidecar, log, _ = following(tmp_path)
    crashed(sidecar, log, OUT_OF_MEMORY)
    watch = sidecar.watch
    assert watch.server.end_explanation is not None
    seen = set()
    for number in range(2 * MOST_END_WORDS):
        watch.server.end_explanation.text = f"CUDA out of memory. Tried to allocate {number} GiB."
        seen |= set(re.findall(r"end_info\{[^}]*\}", text_format(list(collect(sidecar)))))
    assert len(seen) == MOST_END_WORDS + 1
    assert any('words="memory does not fit"' in each for each in seen)
