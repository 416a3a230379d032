"""Prompts longer than the whole KV cache, which SGLang refuses or truncates: from its log to the advice."""

from __future__ import annotations

import pytest

from scenarios import Story, decoding, repeated
from sglang_tuning_exporter.diagnosis.findings import judge
from sglang_tuning_exporter.sglang.events import NO_RANK, Rank, TooLong
from sglang_tuning_exporter.sglang.log.reader import LogReader
from test_chances import END, flags, found, lived

STAMP = b"[2026-11-23 04:11:21] "
REFUSED = (
    b"Input length (5000 tokens) exceeds the maximum allowed length (4194 tokens). Use a shorter input or enable"
    b" --allow-auto-truncate., self.rid='d1d313b6b00141e388e2b06708790451'\n"
)  # as 0.5.23 printed it with --max-total-tokens 4200
TRUNCATED = (
    b"Request length is longer than the KV cache pool size or the max context length. Truncated."
    b" len(req.origin_input_ids)=5000, max_req_input_len=4194.\n"
)  # from validate_input_length, srt/managers/utils.py in 0.5.23
# As 0.5.23 printed it with --context-length 512.
BEYOND_CONTEXT = b"[http_server] Error: The input (900 tokens) is longer than the model's context length (512 tokens).\n"  # fmt: skip
ANSWER_BEYOND_CONTEXT = (
    b"[http_server] Error: Requested token count exceeds the model's maximum context length of 512 tokens. You requested a total of 700"
    b" tokens: 100 tokens from the input messages and 600 tokens for the completion. Please reduce the number of tokens in the input"
    b" messages or the completion to fit within the limit.\n"
)  # from _validate_one_request, srt/managers/tokenizer_manager.py in 0.5.23
ROW, CONTEXT_ROW = "prompts_beyond_kv_cache", "prompts_beyond_context"
POOL = 400_000  # of `scenarios.started`


def too_long(tokens: int = 2 * POOL, most: int = POOL - 6, rank: Rank = NO_RANK, *, suspect: bool = False) -> Story:
    return repeated(TooLong(None, rank, tokens, most, suspect), 20.0, end=END)


HEALTHY = decoding(0.0, END, running=20)


@pytest.mark.parametrize("words", [REFUSED, TRUNCATED])
def test_such_a_prompt_is_read_with_its_length(words: bytes) -> None:
    [event] = LogReader().feed(STAMP + words)
    assert isinstance(event, TooLong)
    assert (event.tokens, event.most, event.suspect) == (5000, 4194, False)


@pytest.mark.parametrize(("words", "tokens"), [(BEYOND_CONTEXT, 900), (ANSWER_BEYOND_CONTEXT, 700)])
def test_a_request_beyond_the_context_is_read_with_its_length(words: bytes, tokens: int) -> None:
    [event] = LogReader().feed(STAMP + words)
    assert isinstance(event, TooLong)
    assert (event.tokens, event.most, event.suspect) == (tokens, 512, False)


def test_the_limit_of_the_context_is_raised_beyond_such_requests_and_the_server_stays_healthy() -> None:
    past = lived(HEALTHY + too_long(tokens=5000, most=1024), context_length=1024)
    assert flags(past, CONTEXT_ROW) == {"--context-length": 8192.0}
    assert found(past, ROW) is None
    judgement = judge(past)
    assert (judgement.verdict, judgement.changes) == ("healthy", {})
    finding = found(past, CONTEXT_ROW)
    assert finding is not None
    assert finding.sentence == "10 requests were longer than --context-length allows"


@pytest.mark.parametrize("words", [REFUSED, TRUNCATED, BEYOND_CONTEXT, ANSWER_BEYOND_CONTEXT])
def test_such_lines_do_not_make_each_other_suspect(words: bytes) -> None:
    served = b"Prefill batch, #new-seq: 1, #new-token: 9, #cached-token: 0, token usage: 0.00, #running-req: 0, #queue-req: 0, \n"
    events = LogReader().feed(STAMP + served + 3 * (STAMP + words))
    assert [event.suspect for event in events if isinstance(event, TooLong)] == [False, False, False]


def test_where_the_models_own_context_is_too_short_there_is_no_finding() -> None:
    assert found(lived(HEALTHY + too_long(tokens=5000, most=1024)), CONTEXT_ROW) is None


def test_the_same_words_inside_another_line_are_no_event() -> None:
    assert LogReader().feed(STAMP + b"user said: " + REFUSED) == []


def test_the_cap_on_the_kv_cache_is_raised_beyond_such_prompts_and_the_server_stays_healthy() -> None:
    past = lived(HEALTHY + too_long(tokens=3 * POOL), max_total_tokens=POOL)
    assert flags(past, ROW) == {"--max-total-tokens": 4.0 * POOL}
    judgement = judge(past)
    assert (judgement.verdict, judgement.changes) == ("healthy", {})
    finding = found(past, ROW)
    assert finding is not None
    assert finding.sentence == "10 prompts were longer than the KV cache"


def test_where_memory_is_the_limit_the_advice_is_words_with_the_length_of_the_prompts() -> None:
    finding = found(lived(HEALTHY + too_long()), ROW)
    assert finding is not None
    [advice] = finding.advice
    assert advice.flag == ""
    assert "--mem-fraction-static" in advice.suggestion
    assert "800,000 tokens on average" in advice.suggestion


@pytest.mark.parametrize(
    "story",
    [
        [],
        too_long(most=8192),  # the model's context is shorter than the KV cache
        too_long(suspect=True),
        too_long(rank=Rank(tp=1)),  # each TP rank logs a prompt that is truncated
    ],
)
def test_without_such_prompts_there_is_no_finding(story: Story) -> None:
    assert found(lived(HEALTHY + story, max_total_tokens=POOL), ROW) is None
