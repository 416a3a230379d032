"""The same events counted in four independent ways: by the clients, the log, the server's counters, the exporter. Pure.

The log is read with patterns of this module.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from prometheus_client.parser import text_string_to_metric_families

Manner = Literal["stays", "leaves", "asks to abort"]
Outcome = Literal[
    "finished", "aborted running", "aborted waiting", "aborted by the server", "rejected", "left", "failed"
]
OUTCOMES: tuple[Outcome, ...] = (
    "finished", "aborted running", "aborted waiting", "aborted by the server", "rejected", "left", "failed",
)  # fmt: skip

_PREFIX = r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]]*\] "
_DECODE = re.compile(_PREFIX + "Decode batch")
_PREFILL = re.compile(_PREFIX + r"Prefill batch.*?#new-seq: (\d+), #new-token: (\d+), #cached-token: (\d+)")
_RETRACTED = re.compile(_PREFIX + r"KV cache pool is full\. Retract requests\. #retracted_reqs: (\d+)")
_START = re.compile(_PREFIX + "server_args=")
_ANSWER = re.compile(r'"POST /generate HTTP/1\.1" (\d+)')


@dataclass(slots=True)
class Asked:
    """One request as its client saw it. `tokens` and `retractions` come from the last chunk of the answer."""

    number: int
    manner: Manner
    prompt_tokens: int
    stream: bool
    outcome: Outcome = "failed"
    tokens: int = 0
    retractions: int = 0
    words: str = ""  # why it failed

    def end(self, status: int, meta: Mapping[str, Any]) -> None:
        """Set the outcome from the answer's status and finish reason."""
        reason = meta.get("finish_reason") or {}
        self.tokens = int(meta.get("completion_tokens") or self.tokens)
        self.retractions = int(meta.get("num_retractions") or 0)
        self.outcome, self.words = _outcome(self, status, reason if isinstance(reason, dict) else {})


def _outcome(asked: Asked, status: int, reason: Mapping[str, Any]) -> tuple[Outcome, str]:
    message = str(reason.get("message", ""))
    if status == 503 or reason.get("status_code") == 503 or "queue is full" in message:
        return "rejected", ""
    if reason.get("type") in {"stop", "length"}:
        return "finished", ""
    if reason.get("type") == "abort":
        if "waiting queue" in message:
            return "aborted waiting", ""
        return ("aborted running" if asked.manner == "asks to abort" else "aborted by the server"), message[:100]
    return "failed", f"status {status}, {message[:80]}"


def of_log(lines: Iterable[str]) -> dict[str, int]:
    """Count the events in the log."""
    found: Counter[str] = Counter()
    for line in lines:
        if _DECODE.match(line):
            found["decode"] += 1
        elif data := _PREFILL.match(line):
            found["prefill"] += 1
            found["admitted"] += int(data[1])
            found["computed"] += int(data[2])
            found["cached"] += int(data[3])
        elif data := _RETRACTED.match(line):
            found["retractions"] += 1
            found["retracted"] += int(data[1])
        elif _START.match(line):
            found["starts"] += 1
        elif data := _ANSWER.search(line):
            found["answers"] += 1
            found["answers 503"] += data[1] == "503"
    return dict(found)


def of_page(text: str, *families: str, **labels: str) -> float:
    """Add up all samples of these names on a page of metrics that have these labels."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name in families and all(sample.labels.get(k) == v for k, v in labels.items())
    )


def grown(before: str, after: str, *families: str, **labels: str) -> int:
    """Return by how much the sum of `of_page` grew."""
    return round(of_page(after, *families, **labels) - of_page(before, *families, **labels))


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of event with its count from each source. `why` explains a difference that is not the exporter's fault."""

    what: str
    counts: Mapping[str, int]
    why: str = ""
    differs: bool = False  # as `why` says it must

    @property
    def agrees(self) -> bool:
        """Whether all counts are equal."""
        return len(set(self.counts.values())) == 1

    def as_json(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        return {**asdict(self), "counts": dict(self.counts), "agrees": self.agrees}


@dataclass(slots=True)
class Pages:
    """Pages of metrics before the load and after it: the server's own and the exporter's."""

    server: tuple[str, str]
    exporter: tuple[str, str]


def clients_say(asked: Sequence[Asked]) -> dict[str, int]:
    """Count requests by their end."""
    ends = Counter(each.outcome for each in asked)
    return {outcome: ends[outcome] for outcome in OUTCOMES}


def compare(
    asked: Sequence[Asked], during: Mapping[str, int], whole: Mapping[str, int], pages: Pages, report: Mapping[str, Any]
) -> list[Row]:
    """Return each kind of event with all its counts. `during`: the log under load; `whole`: the whole log; `report`: the exporter's report on it."""
    ends = clients_say(asked)

    def server(*names: str, **labels: str) -> int:
        return grown(*pages.server, *names, **labels)

    def exporter(*names: str, **labels: str) -> int:
        return grown(*pages.exporter, *names, **labels)

    def log(name: str) -> int:
        return during.get(name, 0)

    kept = [each for each in asked if each.outcome in {"finished", "aborted running", "aborted by the server"}]
    left = [each for each in asked if each.outcome == "left"]
    served = server("sglang:num_requests_total")
    unseen = served - len(kept)  # of those whose clients did not stay to see the end
    tokens = server("sglang:generation_tokens_total") - sum(each.tokens for each in kept)
    counts = report["counts"]
    return [
        Row(
            "retraction events",
            {"log": log("retractions"), "exporter": exporter("sglang_tuning_retraction_events_total")},
        ),
        Row(
            "retracted requests",
            {
                "log": log("retracted"),
                "server": server("sglang:num_retracted_requests_total"),
                "exporter": exporter("sglang_tuning_retracted_requests_total"),
            },
        ),
        Row(
            # Each request is admitted once, and once more after each retraction, unless it is aborted before.
            "admissions",
            {"log": log("admitted"), "server": served + server("sglang:num_retracted_requests_total")},
        ),
        Row(
            "decode lines", {"log": log("decode"), "exporter": exporter("sglang_tuning_log_lines_total", kind="decode")}
        ),
        Row(
            "prefill batches",
            {
                "log": log("prefill"),
                "server": _prefills(*pages.server),
                "exporter": exporter("sglang_tuning_log_lines_total", kind="prefill"),
            },
        ),
        Row(
            "prompt tokens computed",
            {"log": log("computed"), "server": server("sglang:realtime_tokens_total", mode="prefill_compute")},
        ),
        Row(
            "prompt tokens from the cache",
            {"log": log("cached"), "server": server("sglang:realtime_tokens_total", mode="prefill_cache")},
        ),
        Row(
            "requests aborted",
            {
                "clients": len(left) + ends["aborted running"] + ends["aborted waiting"],
                "server": server("sglang:num_aborted_requests_total"),
                "exporter": exporter("sglang_tuning_aborted_requests_total"),
            },
        ),
        Row(
            "rejected, answered in one piece",
            {
                "clients": sum(each.outcome == "rejected" and not each.stream for each in asked),
                "log": log("answers 503"),
                "exporter": exporter("sglang_tuning_rejected_requests_total"),
            },
        ),
        Row(
            "rejected, streamed",
            {"clients": sum(each.outcome == "rejected" and each.stream for each in asked), "log": 0, "exporter": 0},
            "SGLang begins a stream with 200 and rejects in its first piece: neither a line nor a counter shows it"
            " (entrypoints/http_server.py, stream_results)",
            differs=True,
        ),
        Row("requests asked", {"clients": len(asked), "log": log("answers")}),
        Row(
            "requests served to their end",
            {"clients": len(kept) + len(left), "server": served},
            "a request that is aborted while it waits, after a retraction too, is not counted (managers/tokenizer_manager.py,"
            f" _handle_abort_req): {len(left) - unseen} of {len(left)} that were left",
            differs=True,
        ),
        Row(
            "prompt tokens of these",
            {
                "clients": sum(each.prompt_tokens for each in kept) + _alike(left) * unseen,
                "server": server("sglang:prompt_tokens_total"),
            },
        ),
        Row(
            "tokens generated for these",
            {"clients": sum(each.tokens for each in kept), "server": sum(each.tokens for each in kept) + tokens},
            f"{tokens} tokens belong to the {unseen} requests whose clients had left",
            differs=True,
        ),
        Row("decode lines, whole log", {"log": whole.get("decode", 0), "report": counts["decode_batches"]}),
        Row("prefill lines, whole log", {"log": whole.get("prefill", 0), "report": counts["prefill_batches"]}),
        Row(
            "retraction events, whole log", {"log": whole.get("retractions", 0), "report": counts["retraction_events"]}
        ),
        Row(
            "retracted requests, whole log", {"log": whole.get("retracted", 0), "report": counts["retracted_requests"]}
        ),
        Row("starts, whole log", {"log": whole.get("starts", 0), "report": counts["server_starts"]}),
    ]


def _alike(left: Sequence[Asked]) -> int:
    """Return the prompt length of all clients that left; 0 if it differs or there are none."""
    return left[0].prompt_tokens if left else 0


def _prefills(before: str, after: str) -> int:
    """Return the server's prefill passes, with and without a graph."""
    names = {
        sample.labels["mode"]
        for family in text_string_to_metric_families(after)
        for sample in family.samples
        if sample.name == "sglang:cuda_graph_passes_total" and sample.labels["mode"].startswith("prefill")
    }
    return sum(grown(before, after, "sglang:cuda_graph_passes_total", mode=name) for name in names)


def problems(rows: Sequence[Row], asked: Sequence[Asked]) -> list[str]:
    """Return every difference without a known reason."""
    found = [f"{row.what}: {dict(row.counts)}" for row in rows if not row.agrees and not row.differs]
    failed = [each.words for each in asked if each.outcome == "failed"]
    if failed:
        found.append(f"{len(failed)} requests failed: {failed[0]}")
    return found
