"""Requests that SGLang's scheduler answers with an error at once: from its log to the advice."""

from __future__ import annotations

import pytest

from scenarios import Story, decoding, repeated
from sglang_tuning_exporter.diagnosis.findings import judge
from sglang_tuning_exporter.sglang.events import NO_RANK, PrefillBatch, Refusal
from sglang_tuning_exporter.sglang.log.reader import LogReader
from test_chances import END, flags, found, lived

STAMP = b"[2026-11-23 10:26:28] "
GRAMMAR = (
    b"Grammar-based generation (json_schema, regex, ebnf, structural_tag) is not supported when the server is launched with"
    b" --grammar-backend none, self.rid='052051f94f384461bae2bb150c88d365'\n"
)  # as 0.5.23 printed it
OTHER = b"Multimodal prompt is too long after expanding multimodal tokens, self.rid='49b39663b861472894ff971f002e1b98'\n"  # likewise in form
ROW = "requests_refused"
HEALTHY = decoding(0.0, END, running=20)


ADMITTED = repeated(PrefillBatch(None, NO_RANK, new_sequences=10, new_tokens=100, cached_tokens=0), 2.0, end=END)


def refusals(every: float = 2.0, *, grammar: bool = True, suspect: bool = False) -> Story:
    return repeated(Refusal(None, NO_RANK, grammar, suspect), every, end=END)


@pytest.mark.parametrize(("words", "grammar"), [(GRAMMAR, True), (OTHER, False)])
def test_each_is_read_and_makes_no_other_line_suspect(words: bytes, grammar: bool) -> None:  # noqa: FBT001 - a case
    events = LogReader().feed(3 * (STAMP + words))
    assert events == [Refusal(1_795_429_588.0, NO_RANK, grammar)] * 3


@pytest.mark.parametrize(
    "words", [b"Aborted by AbortReq., self.rid='49b39663'\n", b"user said: it failed, self.rid='a b'\n"]
)
def test_aborts_by_clients_and_other_texts_do_not_count(words: bytes) -> None:
    assert LogReader().feed(STAMP + words) == []


def test_where_structured_output_is_refused_a_grammar_backend_is_advised() -> None:
    past = lived(HEALTHY + refusals(), grammar_backend="none")
    assert flags(past, ROW) == {"--grammar-backend": "xgrammar"}
    assert judge(past).verdict == "healthy"


@pytest.mark.parametrize("grammar", [True, False])
def test_for_any_other_reason_the_log_has_it(grammar: bool) -> None:  # noqa: FBT001 - a case
    finding = found(lived(HEALTHY + refusals(grammar=grammar), grammar_backend="xgrammar"), ROW)
    assert finding is not None
    [advice] = finding.advice
    assert (advice.flag, advice.suggestion) == (
        "",
        "read the reason in the log, before self.rid= at the end of its lines",
    )


@pytest.mark.parametrize("story", [[], refusals(suspect=True), refusals(every=60.0) + ADMITTED])
def test_with_few_or_no_such_requests_there_is_no_finding(story: Story) -> None:
    assert found(lived(HEALTHY + story, grammar_backend="none"), ROW) is None
