"""The one table of diagnoses: what is seen, how often it must be seen, what to turn, and when that will not help.

Alerts, recording rules, live findings, notifications and the README's table come from it. `guide` names the sentence in SGLang's hyperparameter
tuning guide (editions E1 oldest to E5 newest; C the Chinese one) in our own words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from sglang_tuning_exporter.sglang.events import OutOfMemoryPhase
from sglang_tuning_exporter.signals import Signal

Severity: TypeAlias = Literal["critical", "warning", "info"]


@dataclass(frozen=True, slots=True)
class Share:
    """More than the profile's frequent share of the window's serving time was spent in this state."""

    signal: Signal
    state: str


@dataclass(frozen=True, slots=True)
class RetractionRate:
    """Retractions came more often than the profile tolerates."""


@dataclass(frozen=True, slots=True)
class Reserve:
    """GPU memory left at start-up lies on this side of the profile's range."""

    side: Literal["above", "below"]


@dataclass(frozen=True, slots=True)
class Failures:
    """The server ran out of memory in one of these phases within the window."""

    phases: tuple[OutOfMemoryPhase, ...]


@dataclass(frozen=True, slots=True)
class RuleOnly:
    """Told by Prometheus alone (it needs the absence of the server or of the exporter): the expression."""

    expression: str


Condition: TypeAlias = Share | RetractionRate | Reserve | Failures | RuleOnly


@dataclass(frozen=True, slots=True)
class Turn:
    """What to turn. `arg` is the SGLang argument (empty: the advice is to people); `fallback` is said where no figure can be computed."""

    arg: str
    direction: str
    fallback: str
    why: str
    will_not_help_if: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One row. `hold` is the rule's `for`; `profiles` empty means all; `unless` are diagnoses that explain the same evidence better."""

    id: str
    alert: str
    severity: Severity
    condition: Condition
    summary: str
    seen: str  # one sentence with the figures, as a template over the evidence value
    guide: str
    turn: Turn
    hold: str = "5m"
    keep_firing: str = ""
    profiles: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()  # consequences of these: not notified while one of them is


_CONSERVATIVENESS = "schedule_conservativeness"
_MEM_FRACTION = "mem_fraction_static"

DIAGNOSES: tuple[Diagnosis, ...] = (
    Diagnosis(
        id="out_of_memory_prefill",
        alert="SGLangOutOfMemoryPrefill",
        severity="critical",
        condition=Failures(("prefill",)),
        summary="SGLang ran out of GPU memory while it was computing prompts.",
        seen="{value} out-of-memory failure(s) in prefill",
        guide="OOM in prefill: lower --chunked-prefill-size to 4096, then 2048 (all editions)",
        turn=Turn(
            "chunked_prefill_size",
            "lower",
            "4096, then 2048",
            "Prompts are computed in chunks of this many tokens, and the memory of one chunk grows with its size. Long prompts take longer to start.",
            "it is already 2048: then lower --mem-fraction-static",
        ),
        hold="0m",
    ),
    Diagnosis(
        id="out_of_memory_decode",
        alert="SGLangOutOfMemoryDecode",
        severity="critical",
        condition=Failures(("decode",)),
        summary="SGLang ran out of GPU memory while it was generating.",
        seen="{value} out-of-memory failure(s) in decode",
        guide="OOM in decode: lower --max-running-requests (all editions)",
        turn=Turn(
            "max_running_requests",
            "lower",
            "about three quarters of the batch that ran",
            "Fewer requests at once need less memory for activations and slots. Concurrency falls with it.",
            "one request alone does not fit: then lower --mem-fraction-static or --context-length",
        ),
        hold="0m",
    ),
    Diagnosis(
        id="out_of_memory_any",
        alert="SGLangOutOfMemory",
        severity="critical",
        condition=Failures(("graph_capture", "startup", "unknown")),
        summary="SGLang ran out of GPU memory.",
        seen="{value} out-of-memory failure(s)",
        guide="any OOM: lower --mem-fraction-static to 0.8 or 0.7 (all editions); fewer or smaller graphs, an FP8 KV cache or FP8 weights (E5)",
        turn=Turn(
            _MEM_FRACTION,
            "lower",
            "0.8, then 0.7",
            "Weights and KV pool take this share of the GPU; what they leave must hold graphs and activations. The KV pool shrinks with it.",
            "the weights alone do not fit: then use more GPUs (--tp-size) or --quantization fp8",
        ),
        hold="0m",
    ),
    Diagnosis(
        id="retracting_too_often",
        alert="SGLangRetractingTooOften",
        severity="warning",
        condition=RetractionRate(),
        summary="SGLang keeps taking running requests out again because its KV pool is full.",
        seen="{value} retractions a minute",
        guide="usage very high and retraction warnings frequent: raise --schedule-conservativeness to about 1.3; about one a minute is fine (E5, C)",
        turn=Turn(
            _CONSERVATIVENESS,
            "raise",
            "1.3",
            "The server admits more requests than the KV pool can finish, takes some back and computes them again. More conservativeness, or"
            " fewer at once, keeps more room free for each. A first burst after the start fades by itself.",
            "it is already above 1.43: the admission ratio is capped there, so enlarge the pool (--mem-fraction-static) or lower --max-running-requests",
        ),
        hold="5m",
        keep_firing="5m",
        causes=("out_of_memory_prefill", "out_of_memory_decode", "out_of_memory_any"),
    ),
    Diagnosis(
        id="running_at_limit",
        alert="SGLangRunningAtLimit",
        severity="warning",
        condition=Share("admission", "running_limit"),
        summary="Requests wait because SGLang already runs as many as it is allowed to.",
        seen="{value} of the serving time at --max-running-requests with requests waiting",
        guide="#running-req should sit close to --max-running-requests under load (E5); a queue at that limit is the limit's, not conservativeness'",
        turn=Turn(
            "max_running_requests",
            "raise",
            "twice the present limit while token usage stays below 0.9",
            "The limit holds requests back while the KV pool has room.",
            "token usage is at 0.9 or more: then the pool is the limit",
        ),
        keep_firing="5m",
        causes=("retracting_too_often",),
    ),
    Diagnosis(
        id="admission_too_conservative",
        alert="SGLangAdmissionTooConservative",
        severity="warning",
        condition=Share("admission", "held_back"),
        summary="Requests wait although the KV pool has room: SGLang reserves too much for those that run.",
        seen="{value} of the serving time with requests waiting and token usage below 0.9",
        guide="token usage below 0.9 and #queue-req above 0 frequently: lower --schedule-conservativeness to about 0.3 (all editions)",
        turn=Turn(
            _CONSERVATIVENESS,
            "lower",
            "0.3",
            "Requests ask for a large max_new_tokens and end early; the server keeps room for what never comes. Latency of the slowest requests may rise.",
            "requests run to their max_new_tokens, prompts are very long, or retractions appear: then go back towards 1.0",
        ),
        keep_firing="5m",
        unless=("retracting_too_often",),
        causes=("retracting_too_often", "running_at_limit"),
    ),
    Diagnosis(
        id="queue_too_long",
        alert="SGLangQueueTooLong",
        severity="warning",
        condition=Share("queue", "above_range"),
        summary="More requests wait at SGLang than it can start in time.",
        seen="{value} of the serving time with the queue above its range",
        guide="healthy #queue-req is 100-2000 (E1: 50-500); above it submit more slowly: scheduling overhead grows, most of all under lpm",
        turn=Turn(
            "",
            "slow down",
            "fewer requests at once, or another replica",
            "Requests come faster than they are finished. Slow the clients down, or add a replica behind the router.",
            "another alert of this server is firing: turn its flag first",
        ),
        keep_firing="5m",
        causes=("retracting_too_often", "running_at_limit", "admission_too_conservative"),
    ),
    Diagnosis(
        id="cuda_graph_not_covering",
        alert="SGLangCudaGraphNotCovering",
        severity="warning",
        condition=Share("cuda_graph", "beyond_captured"),
        summary="Decode batches are larger than the largest captured CUDA graph, so they run without one.",
        seen="{value} of the serving time in decode batches beyond the largest captured size",
        guide="cuda graph: False with a large batch: raise --cuda-graph-max-bs (useful to 512 or 768) and lower --mem-fraction-static with it (E3-E5, C)",
        turn=Turn(
            "cuda_graph_max_bs",
            "raise",
            "the next usual size above the running batch, 512 at most",
            "A batch beyond the captured sizes is launched kernel by kernel. Larger graphs take GPU memory: lower --mem-fraction-static by about 0.01 with it.",
            "graphs are switched off, or the attention backend cannot capture",
        ),
        keep_firing="5m",
    ),
    Diagnosis(
        id="memory_reserve_too_small",
        alert="SGLangMemoryReserveTooSmall",
        severity="warning",
        condition=Reserve("below"),
        summary="SGLang started with so little GPU memory left that it may run out of it.",
        seen="{value} left on the GPU at start-up",
        guide="available_gpu_mem below 5 GB at start-up: lower --mem-fraction-static (E3-E5, C)",
        turn=Turn(
            _MEM_FRACTION,
            "lower",
            "0.01 less, again until 5 to 8 GB are left",
            "Activations of long prompts and of large batches need this memory.",
            "another process holds the memory: look at nvidia-smi",
        ),
        hold="10m",
        causes=("out_of_memory_prefill", "out_of_memory_decode", "out_of_memory_any"),
    ),
    Diagnosis(
        id="memory_reserve_too_large",
        alert="SGLangMemoryReserveTooLarge",
        severity="info",
        condition=Reserve("above"),
        summary="SGLang leaves GPU memory unused that its KV pool could have.",
        seen="{value} left on the GPU at start-up",
        guide="available_gpu_mem of 10-20 GB at start-up is too much, 5-8 GB good: raise --mem-fraction-static in steps of 0.01 (E3-E5, C)",
        turn=Turn(
            _MEM_FRACTION,
            "raise",
            "0.01 more, again until 5 to 8 GB are left",
            "A larger KV pool holds more requests and more cached prefixes.",
            "other processes share the GPU, or prompts are so long that their activations need the room",
        ),
        hold="10m",
    ),
    Diagnosis(
        id="client_too_slow",
        alert="SGLangClientTooSlow",
        severity="info",
        condition=Share("queue", "empty"),
        summary="SGLang has nothing waiting: the clients are the bottleneck, not the server.",
        seen="{value} of the serving time with an empty queue",
        guide="#queue-req is 0 frequently: submit faster; healthy is 100-2000 (E1: 50-500)",
        turn=Turn(
            "",
            "speed up",
            "more requests at once",
            "A server with an empty queue cannot form full batches. Submit more requests in parallel; flags of the server will not help.",
            "latency matters more than throughput: then use --profile online, where an empty queue is good",
        ),
        keep_firing="5m",
        profiles=("offline",),
    ),
    Diagnosis(
        id="server_down",
        alert="SGLangServerDown",
        severity="critical",
        condition=RuleOnly(
            'sglang_tuning_up == 0 unless on (job, instance) sglang_tuning_scrape_error_info{reason=~"metrics_disabled|not_ready"}'
            # One or two starts in a quarter of an hour are a model being loaded; a third is a server that cannot stay.
            " unless on (job, instance) (increase(sglang_tuning_server_starts_total[15m]) > 0 < 2.5)"
            # A start that was printed before the exporter's first scrape is no increase: a new exporter waits as long.
            " and on (job, instance) (max_over_time(sglang_tuning_up[15m]) == 1 or sglang_tuning_up offset 15m)"
        ),
        summary="SGLang does not answer.",
        seen="its /metrics could not be scraped",
        guide="not in the guide: a server that is away serves nobody",
        turn=Turn(
            "",
            "look",
            "the end of its log",
            "The process has ended, hangs, or cannot be reached from the exporter. The exporter's page and sglang_tuning_scrape_error_info say how it failed.",
            "the address given to the exporter is wrong: check --sglang-url",
        ),
    ),
    Diagnosis(
        id="metrics_disabled",
        alert="SGLangMetricsDisabled",
        severity="info",
        condition=RuleOnly('sglang_tuning_scrape_error_info{reason="metrics_disabled"} == 1'),
        summary="SGLang runs without metrics: only its log can be read.",
        seen="/metrics answers 404",
        guide="start with --enable-metrics --enable-cache-report (E5)",
        turn=Turn(
            "enable_metrics",
            "add",
            "add --enable-metrics --enable-cache-report",
            "Latency, cache and abort figures exist only in the metrics.",
            "the server is older than 0.3.5, which has no metrics at all",
        ),
        hold="10m",
    ),
    Diagnosis(
        id="log_silent",
        alert="SGLangLogSilent",
        severity="warning",
        condition=RuleOnly(
            # Lines counted, not time() against the last line's: a log that never had one has no such time, and clocks of two machines differ.
            "sglang_tuning_log_up == 0 or (sum without (kind) (increase(sglang_tuning_log_lines_total[5m])) == 0"
            ' and on (job, instance) max by (job, instance) (sglang_tuning_state{signal="activity", state="serving"}) == 1'
            " and on (job, instance) sglang_tuning_up == 1)"
        ),
        summary="SGLang's log cannot be read or has gone silent while the server works.",
        seen="no line has come from the log",
        guide="not in the guide: retractions and out-of-memory failures are told by the log",
        turn=Turn(
            "",
            "look",
            "whether the file still grows and may be read",
            "Without the log, out-of-memory failures go unseen and retractions cannot be counted as events.",
            "the server runs with --log-level warning: it prints no batch lines then",
        ),
    ),
    Diagnosis(
        id="sources_disagree",
        alert="SGLangSourcesDisagree",
        severity="warning",
        condition=RuleOnly("max without (fact) (sglang_tuning_sources_disagree) == 1"),
        summary="SGLang's log and its metrics tell different things.",
        seen="pool size or retractions differ between the log and the metrics",
        guide="not in the guide: figures of two servers, or half of a log, lead to wrong advice",
        turn=Turn(
            "",
            "look",
            "whether --log-file is the log of the server at --sglang-url, and whole",
            "The exporter was given another server's log, or retraction lines do not reach the file.",
            "several servers write into one log: give each its own",
        ),
    ),
    Diagnosis(
        id="format_drift",
        alert="SGLangFormatDrift",
        severity="info",
        condition=RuleOnly(
            "sum without (kind) (increase(sglang_tuning_log_unrecognised_total[1h])) > 0 or sglang_tuning_metrics_unrecognised_families > 0"
        ),
        summary="SGLang prints or exposes something that this exporter does not know.",
        seen="lines, keys or metric names that no known release has",
        guide="not in the guide: a newer SGLang may tell a figure in another way",
        turn=Turn(
            "",
            "update",
            "to the newest exporter, and tell us which SGLang you run",
            "What is known goes on being read; a renamed figure would be absent.",
            "a plug-in of your own prints such lines",
        ),
        hold="10m",
    ),
    Diagnosis(
        id="exporter_down",
        alert="SGLangTuningExporterDown",
        severity="warning",
        condition=RuleOnly("up == 0 and on (job, instance) max_over_time(sglang_tuning_build_info[24h])"),
        summary="The exporter beside SGLang does not answer Prometheus.",
        seen="the exporter's /metrics could not be scraped",
        guide="not in the guide: without the exporter nothing of the above is seen",
        turn=Turn(
            "",
            "look",
            "its log and whether it runs",
            "No diagnosis is made while it is away.",
            "the server was taken out of service with it",
        ),
    ),
)
BY_ID: dict[str, Diagnosis] = {row.id: row for row in DIAGNOSES}
