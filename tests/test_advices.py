"""What SGLang says about its own flags: a message in, the text that it is out.

The texts are those of its wheels (`release/advices.py`); lines are as real servers printed them.
"""

from __future__ import annotations

import ast
import re
import tarfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from release.advices import Row, Wheel, rows_by_text, texts_of
from sglang_tuning_exporter.sglang import advices
from sglang_tuning_exporter.sglang.advices import Advice, _number_of, _text_of, recognise, releases, table
from sglang_tuning_exporter.sglang.args.flags import argument_names

CAPTURES = sorted((Path(__file__).parent / "captures").glob("*.tar.xz"))
NO_CACHE = (
    "Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.88. Raise --mem-fraction-static above 0.912"
    " (minimum viable = 1 - available/pre = 0.9113). If using speculative decoding, draft weights are now counted."
)
SHORT_POOL = (
    "KV pool holds 1500 tokens, fewer than --context-length 8192. One full-length request cannot fit, so long requests will be refused or"
    " truncated at serving time. Lower --context-length, raise --mem-fraction-static, or free memory taken before the pool is sized."
)
CAPPED = (
    "max_running_requests is capped to 9 by the mamba state cache (max_mamba_cache_size=47, 5 state slots per request). To raise it: increase"
    " --mamba-full-memory-ratio or --max-mamba-cache-size, or halve the state size with --mamba-ssm-dtype bfloat16."
)
WAITING = (
    "Some requests fail to receive KV Cache transfer done signal after bootstrapping. If a greater mean TTFT is acceptable, you can"
    " 'export SGLANG_DISAGGREGATION_WAITING_TIMEOUT=600' (10 minutes) to relax the timeout condition. "
)
BATCH = "Decode batch. #running-req: 12, #token: 6144, token usage: 0.09, cuda graph: True, gen throughput (token/s): 512.10, #queue-req: 0"


def advice(text: str) -> Advice:
    found = recognise(text)
    assert found is not None, text
    return found


def test_an_error_that_names_the_flag_and_its_number_explains_the_end() -> None:
    found = advice(NO_CACHE)
    assert (found.role, found.flags, found.direction, found.number) == (
        "explains",
        ("--mem-fraction-static",),
        "increase",
        "0.912",
    )


def test_the_type_of_an_exception_before_its_message_changes_nothing() -> None:
    assert advice(f"ValueError: {NO_CACHE}") == advice(f"torch.SomeError: {NO_CACHE}") == advice(NO_CACHE)


def test_not_enough_memory_asks_for_a_greater_fraction() -> None:
    found = advice("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.")
    assert (found.role, found.flags, found.direction) == ("explains", ("--mem-fraction-static",), "increase")


def test_a_warning_may_advise_two_flags_in_two_directions() -> None:
    found = advice(SHORT_POOL)
    assert found.role == "recommends"
    assert dict(found.directions) == {"--context-length": "decrease", "--mem-fraction-static": "increase"}
    assert found.direction is None


def test_a_flag_that_a_text_only_speaks_of_is_not_advised() -> None:
    found = advice(CAPPED)
    assert found.role == "recommends"
    assert dict(found.directions) == {
        "--mamba-full-memory-ratio": "increase",
        "--max-mamba-cache-size": "increase",
        "--mamba-ssm-dtype": "set",
    }
    assert found.flags[-1] == "--max-running-requests"
    assert found.number is None


def test_a_variable_has_the_value_that_the_text_gives_it() -> None:
    found = advice(WAITING)
    assert (found.role, found.flags, found.variables) == ("recommends", (), ("SGLANG_DISAGGREGATION_WAITING_TIMEOUT",))
    assert (found.direction, found.number) == ("set", "600")


def test_a_limit_that_sglang_reduced_is_its_own_decision() -> None:
    found = advice(
        "max_running_requests was reduced from the requested 128 to 50 (per dp worker) due to the available KV cache capacity."
    )
    assert (found.role, found.flags, found.direction, found.number) == (
        "decision",
        ("--max-running-requests",),
        "decrease",
        "50",
    )


def test_a_pool_that_is_smaller_than_asked_is_a_decision() -> None:
    found = advice("max_total_tokens=131072 is larger than the profiled value -561981. Use the profiled value instead.")
    assert (found.role, found.flags) == ("decision", ("--max-total-tokens",))


def test_slots_that_ran_out_ask_for_fewer_requests() -> None:
    found = advice(
        "RuntimeError: alloc_req_slots runs out of memory. Please set a smaller number for `--max-running-requests`."
        " self.req_to_token_pool.available_size()=1, num_reqs=2,"
    )
    assert (found.role, found.flags, found.direction) == ("explains", ("--max-running-requests",), "decrease")


def test_a_prompt_that_is_too_long_is_a_matter_of_its_request() -> None:
    found = advice(
        "Input length (3000 tokens) exceeds the maximum allowed length (2042 tokens). Use a shorter input or enable --allow-auto-truncate., "
        "self.rid='b5ac10e5d74640509d68e12a9b3a1c75'"
    )
    assert (found.role, found.flags) == ("request", ("--allow-auto-truncate",))


def test_possible_solutions_that_stand_below_every_failed_capture_advise_nothing() -> None:
    assert recognise("1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)") is None
    assert recognise("2. set --cuda-graph-max-bs to a smaller value (e.g., 16)") is None


def test_a_flag_that_is_going_away_is_no_recommendation() -> None:
    found = advice(
        "NOTE: --enable-ep-moe is deprecated. Please set `--ep-size` to the same value as `--tp-size` instead."
    )
    assert found.role == "decision"


def test_a_message_that_goes_on_behind_a_text_still_has_its_number() -> None:
    assert advice(f"{NO_CACHE} (rank 3)").number == "0.912"


def test_a_text_whose_end_another_release_words_differently_says_what_both_say() -> None:
    found = advice(
        SHORT_POOL.replace(
            ", raise --mem-fraction-static, or free memory taken before the pool is sized",
            " or raise --mem-fraction-static",
        )
    )
    assert found.pattern == advice(SHORT_POOL).pattern
    assert dict(found.directions) == {"--context-length": "decrease", "--mem-fraction-static": "increase"}
    turned = advice(SHORT_POOL.replace("raise --mem", "reconsider --mem"))
    assert dict(turned.directions) == {"--context-length": "decrease"}


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
    for words, _, _, known in table():
        found = recognise(_spoken(words))
        if found is None or (found.role, set(found.flags), set(found.variables)) != (
            known.role,
            set(known.flags),
            set(known.variables),
        ):
            unlike.append((words, found))
    assert len(unlike) <= len(table()) / 100, unlike  # two texts of which one fits into the hole of the other


def test_a_text_of_an_unknown_release_never_gets_another_direction() -> None:
    alike = 0
    for words, _, _, known in table()[::4]:
        message = " ".join(_spoken(words).split())
        others = [_text_of(*each) for each in _begun_alike(message, known.pattern)]
        reached = [advices._reached(message, each)[0] for each in others]
        for each, letters in zip(others, reached, strict=True):
            if letters >= max(advices._LEAST_ALIKE, advices._letters(each) * advices._SHARE_ALIKE) and letters == max(
                reached
            ):
                alike += 1
                said = advices._in_common(message, each)
                assert set(said.directions) <= set(known.directions), (words, each)
    assert alike > 20


def _begun_alike(message: str, pattern: str) -> list[tuple[str, Advice]]:
    return [(words, each) for words, _, _, each in table() if each.pattern != pattern and words[:8] == message[:8]]


def test_each_line_of_a_text_may_come_alone_or_with_the_others() -> None:
    assert advice(f"Something else\n{SHORT_POOL}\nand more").pattern == advice(SHORT_POOL).pattern


def test_every_text_names_a_flag_of_a_release_or_a_variable_and_each_has_a_name_of_its_own() -> None:
    known = {"--" + name.replace("_", "-") for name in argument_names()}
    names = Counter(each.pattern for *_, each in table())
    assert set(names.values()) == {1}
    flags = {flag for *_, each in table() for flag in each.flags}
    assert len(flags & known) > 300
    assert all(each.flags or each.variables for *_, each in table())
    assert {each.role for *_, each in table()} == {"explains", "recommends", "decision", "request"}


def test_the_releases_are_spread_over_the_range_and_each_has_texts() -> None:
    assert len(releases()) >= 7
    assert (releases()[0], releases()[-1]) == ("0.3.0", "0.5.23")
    at = {release: number for number, release in enumerate(releases())}
    counts = [sum(at[first] <= number <= at[last] for _, first, last, _ in table()) for number in range(len(at))]
    assert min(counts) > 10
    assert counts[-1] > 1000


@given(st.text(max_size=3000))
def test_any_text_has_an_answer(text: str) -> None:
    assert recognise(text) is None


@given(
    st.sampled_from(table()),
    st.lists(st.text(alphabet=st.characters(codec="utf-8"), max_size=60), min_size=1, max_size=4),
    st.data(),
)
def test_what_varies_in_a_text_may_be_anything(
    row: tuple[str, str, str, Advice], fillings: list[str], data: st.DataObject
) -> None:
    text = re.sub(r"\{n?\}", lambda _: data.draw(st.sampled_from(fillings)), _constant(row[0]))
    found = recognise(text)
    assert found is None or (found.number is None or re.fullmatch(r"-?\d+(\.\d+)?([eE][+-]?\d+)?", found.number))


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
        text = _text_of(words, advice(NO_CACHE))
        message = Message(text.pieces[0] + " ".join(text.pieces[1:-1]) * 200)
        counted[0] = 0
        _number_of(message, text)
        assert counted[0] <= len(message) * 2


# The arguments; and what SGLang prints in colour of any option that it renames: the flag is typed, no part of a text, and still obeyed.
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


def rows(source: str, path: str = "srt/managers/tp_worker.py") -> list[Row]:
    """What the extraction makes of a file of Python."""
    texts = list(texts_of(ast.parse(source), path, {"HINT": "Please increase --page-size."}))
    return list(rows_by_text(Wheel(texts, frozenset({"SOME_NAME"}))).values())


def test_what_varies_in_a_text_is_a_hole_and_the_number_of_its_flag_has_its_own() -> None:
    (row,) = rows("raise ValueError(f'only {free:.2f} GB: raise --mem-fraction-static above {least:.3f} here')")
    assert row == Row(
        "only {} GB: raise --mem-fraction-static above {n} here", "raise", "explains", ("--mem-fraction-static+",)
    )
    (row,) = rows("logger.warning('%d waiting, consider setting SGLANG_SOME_LIMIT=%s', waiting, limit)")
    assert (row.words, row.role) == ("{} waiting, consider setting SGLANG_SOME_LIMIT={n}", "recommends")


def test_a_text_in_a_variable_or_a_constant_is_read_where_it_is_given() -> None:
    (row,) = rows("def f():\n    words = 'the page size is too small. ' + HINT\n    logger.error(words)")
    assert row.words == "the page size is too small. Please increase --page-size."


def test_a_text_that_names_no_flag_or_prints_nothing_is_left_out() -> None:
    assert rows("logger.warning('nothing to see here, please increase something')") == []
    assert rows("'please increase --page-size for this model'") == []
    assert rows("logger.debug('please increase --page-size for this model')") == []


def test_the_same_words_are_of_a_request_where_a_request_is_checked() -> None:
    source = "def validate_request(self, obj):\n    raise ValueError('Please launch the server with --is-embedding for this.')"
    assert rows(source, "srt/managers/tokenizer_manager.py")[0].role == "request"
    assert rows(source.replace("validate_request", "init_model"))[0].role == "explains"


def test_a_flag_between_two_others_keeps_the_direction_of_its_own_verb() -> None:
    (row,) = rows(
        "logger.error('The pool is full. Lower --max-running-requests, drop --enable-mixed-chunk or raise --mem-fraction-static.')"
    )
    assert set(row.names) == {"--max-running-requests-", "--enable-mixed-chunk!", "--mem-fraction-static+"}


def test_a_comparison_is_no_advice() -> None:
    (row,) = rows("raise ValueError('context_length is greater than max_total_tokens of this machine')")
    assert set(row.names) == {"--context-length", "--max-total-tokens"}


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
