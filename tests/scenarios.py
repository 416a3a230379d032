"""Scenarios of 30 minutes, one server each, as log events and scrapes: the same input for Python's findings and Prometheus' alerts.

`ends` names the diagnoses that must be found, and must notify, at the end of the scenario; rows without an alert are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, TypeAlias, cast

from sglang_tuning_exporter.sglang.events import (
    NO_RANK,
    DecodeBatch,
    Event,
    Limits,
    Liveness,
    Memory,
    OutOfMemory,
    PrefillBatch,
    Rank,
    RankFigures,
    Rejection,
    Retraction,
    Scrape,
    ServerArgs,
)
from sglang_tuning_exporter.sglang.metrics.histograms import Histogram

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sglang_tuning_exporter.sglang.events import OutOfMemoryPhase

MINUTE = 60.0
LENGTH = 30 * MINUTE
NO_QUEUES: Mapping[str, int] = {}
# Arguments as a recent release prints them; their names alone decide which edition of the guide applies.
ARGS: dict[str, object] = {
    "device": "cuda",
    "schedule_conservativeness": 1.0,
    "mem_fraction_static": 0.85,
    "max_running_requests": 64,
    "chunked_prefill_size": 8192,
    "cuda_graph_max_bs": 160,
    "tp_size": 1,
    "dp_size": 1,
    "log_requests_level": 0,
}


@dataclass(frozen=True)
class Away:
    """A scrape that failed."""

    reason: str = "connection_refused"


@dataclass(frozen=True)
class ServerInfo:
    """The answer of /server_info: the release."""

    version: str


Happening: TypeAlias = Event | Scrape | Away | ServerInfo
Story: TypeAlias = list[tuple[float, Happening]]


@dataclass(frozen=True, eq=False)
class Scenario:
    """What happened when, in seconds from the exporter's first look."""

    name: str
    words: str
    story: Story
    ends: frozenset[str] = frozenset()
    profile: str = "online"

    @property
    def is_scraped(self) -> bool:
        """Whether the exporter is configured with SGLang's address."""
        return any(isinstance(what, (Scrape, Away)) for _, what in self.story)

    @property
    def has_log(self) -> bool:
        """Whether the exporter was given a log."""
        return not all(isinstance(what, (Scrape, Away)) for _, what in self.story)


def started(at: float = 0.0, reserve: float | None = 6.5, **args: object) -> Story:
    """Print a start; `reserve` GB are left after it."""
    events: list[Event] = [
        ServerArgs(None, NO_RANK, {**ARGS, **args}),
        Memory(None, NO_RANK, "weights_begin", available_gb=80.0),
        Limits(None, NO_RANK, max_total_num_tokens=400_000, available_gb=reserve, memory_device="gpu"),
        Liveness(None, NO_RANK, "ready"),
    ]
    return [(at, event) for event in events]


def decoding(
    begin: float = 0.0,
    end: float = LENGTH,
    *,
    running: int = 20,
    queued: int = 0,
    usage: float = 0.5,
    swa: float | None = None,
    graph: bool = True,
    dp: int | None = None,
    queues: Mapping[str, int] = NO_QUEUES,
    every: float = 10.0,
) -> Story:
    """Print a decode line every so many seconds."""
    line = DecodeBatch(
        None, Rank(dp=dp), running, queued, None, usage, swa, graph=graph, graph_device="cuda", queues=queues
    )
    return [(begin + every * step, line) for step in range(1, int((end - begin) / every) + 1)]


def prefilling(begin: float = 0.0, end: float = LENGTH, *, tokens: int = 8192, queued: int = 10) -> Story:
    """Print a prefill line every ten seconds."""
    line = PrefillBatch(None, NO_RANK, 1, tokens, 0, 4, queued, 50_000, 0.3)
    return [(begin + 10.0 * step, line) for step in range(1, int((end - begin) / 10.0) + 1)]


def probed(begin: float = 0.0, end: float = LENGTH) -> Story:
    """Nothing but health probes."""
    line = PrefillBatch(None, NO_RANK, 1, 1, 0, 0, 0, 0, 0.0)
    return [(begin + 15.0 * step, line) for step in range(1, int((end - begin) / 15.0) + 1)]


def repeated(event: Event, every: float, begin: float = 0.0, end: float = LENGTH) -> Story:
    """The same event again and again."""
    return [(begin + every * step, event) for step in range(1, int((end - begin) / every) + 1)]


def retraction(ratio: float | None = None, tp: int | None = None) -> Retraction:
    return Retraction(None, Rank(tp=tp), 2, ratio_after=ratio)


def failed(phase: str) -> OutOfMemory:
    return OutOfMemory(None, NO_RANK, cast("OutOfMemoryPhase", phase), "torch.OutOfMemoryError")


def scraped(
    begin: float = 0.0,
    end: float = LENGTH,
    *,
    figures: RankFigures | None = None,
    moves: bool = True,
    aborts: float = 0.0,
    answers: float = 10.0,
    late: float = 0.0,
) -> Story:
    """Scrape every 15 s; `answers` and `aborts` are requests per scrape, and so large a share of first tokens comes after 0.5 to 4 s."""
    shown = figures or RankFigures(running=8, queued=0, grammar_queued=0, full_usage=0.3)
    story: Story = []
    for step in range(int((end - begin) / 15.0)):
        at = begin + 15.0 * step
        done = answers * at / 15.0
        story.append(
            (
                at,
                Scrape(
                    [shown],
                    progress=at * 100 if moves else begin * 100,
                    aborted_requests=aborts * at / 15.0,
                    started_requests=done,
                    time_to_first_token=Histogram((0.5, 4.0, inf), (done * (1 - late), done, done), 0.2 * done),
                ),
            )
        )
    return story


def _two_ranks(queued: tuple[int, int]) -> Story:
    story = started(dp_size=2, load_balance_method="round_robin")
    for dp, waiting in enumerate(queued):
        story += decoding(queued=waiting, dp=dp)
    return story


def _restart(*at: float) -> Story:
    """Serve, be started again at these moments, and serve on a minute and a half later."""
    story = started() + decoding(0.0, at[0])
    for begin, end in zip(at, (*at[1:], LENGTH), strict=True):
        story += started(begin) + decoding(begin + 90.0, end)
    return story


GRAMMAR = RankFigures(running=4, queued=1, grammar_queued=20, full_usage=0.2, generation_throughput=50.0)
HANGING = RankFigures(running=8, queued=3, grammar_queued=0, full_usage=0.3, generation_throughput=900.0)
_FULL = decoding(running=50, queued=700, usage=0.95)


SCENARIOS: tuple[Scenario, ...] = (
    Scenario("busy", "An online server, busy, with an empty queue.", started() + decoding()),
    Scenario("idle_night", "Health probes and nothing else, offline.", started() + probed(), profile="offline"),
    Scenario(
        "one_burst",
        "Ninety seconds of load that is held back in an idle half hour.",
        started() + probed(0, 600) + decoding(600, 690, queued=20) + probed(690),
    ),
    Scenario(
        "warm_up",
        "Four minutes of full prefill batches and a queue, then none.",
        started() + prefilling(0, 240) + decoding(240),
    ),
    Scenario("restart", "One restart of a minute and a half.", _restart(900.0)),
    Scenario("two_restarts", "A flag is tried and taken back.", _restart(600.0, 1000.0)),
    Scenario(
        "client_too_slow",
        "An offline server whose queue is empty.",
        started() + decoding(),
        frozenset({"client_too_slow"}),
        "offline",
    ),
    Scenario(
        "queue_in_range",
        "An offline server with seven hundred waiting, its pool full.",
        started() + _FULL,
        profile="offline",
    ),
    Scenario(
        "queue_first_edition",
        "The same queue on a release of the guide's first edition, which calls 500 the most.",
        [(0.0, ServerInfo("0.4.1")), *_FULL],
        frozenset({"queue_too_long"}),
        "offline",
    ),
    Scenario(
        "queue_too_long",
        "Three thousand wait and the pool is full.",
        started() + decoding(running=50, queued=3000, usage=0.95),
        frozenset({"queue_too_long"}),
        "offline",
    ),
    Scenario(
        "held_back",
        "Requests wait, half of the pool is free, nothing else explains it.",
        started() + decoding(queued=20),
        frozenset({"admission_too_conservative"}),
    ),
    Scenario(
        "held_back_at_0_3",
        "The same with the guide's conservativeness: no flag to change, but requests wait although the KV cache has room.",
        started(schedule_conservativeness=0.3) + decoding(queued=20),
        frozenset({"admission_too_conservative"}),
    ),
    Scenario(
        "held_back_a_third",
        "Held back for a third of the time in waves of half a minute: not frequent.",
        started()
        + sorted(
            [
                each
                for n in range(20)
                for each in decoding(90.0 * n, 90.0 * n + 30, queued=20) + decoding(90.0 * n + 30, 90.0 * n + 90)
            ],
            key=lambda pair: pair[0],
        ),
    ),
    Scenario(
        "held_back_two_thirds",
        "Held back for two thirds of the time in the same waves: frequent.",
        started()
        + sorted(
            [
                each
                for n in range(20)
                for each in decoding(90.0 * n, 90.0 * n + 60, queued=20) + decoding(90.0 * n + 60, 90.0 * n + 90)
            ],
            key=lambda pair: pair[0],
        ),
        frozenset({"admission_too_conservative"}),
    ),
    Scenario(
        "at_limit",
        "As many run as may, the pool has room.",
        started() + decoding(running=64, queued=20, usage=0.3),
        frozenset({"running_at_limit"}),
    ),
    Scenario(
        "at_limit_without_room",
        "As many run as may, and the pool has hardly any room: nothing to turn.",
        started() + decoding(running=64, queued=20, usage=0.88),
    ),
    Scenario(
        "retracting",
        "Four retractions a minute.",
        started() + decoding(queued=5, usage=0.95) + repeated(retraction(), 15.0),
        frozenset({"retracting_too_often"}),
    ),
    Scenario(
        "retracting_at_the_cap",
        "Four retractions a minute with conservativeness above 1.43.",
        started(schedule_conservativeness=1.5) + decoding(queued=5, usage=0.95) + repeated(retraction(), 15.0),
        frozenset({"conservativeness_ineffective"}),
    ),
    Scenario(
        "one_retraction_a_minute",
        "Eight TP ranks print one retraction a minute.",
        started(tp_size=8)
        + decoding(usage=0.95)
        + [pair for tp in range(8) for pair in repeated(retraction(tp=tp), 60.0, begin=-23.0)],
    ),
    Scenario(
        "retraction_burst",
        "Twelve retractions within seconds, and then none.",
        started() + decoding(usage=0.8) + [(300.0 + n, retraction()) for n in range(12)],
    ),
    Scenario(
        "retracting_and_held_back",
        "Each retraction leaves the pool half empty: never lower the flag for that.",
        started(schedule_conservativeness=0.3) + decoding(queued=20) + repeated(retraction(), 20.0),
        frozenset({"retracting_too_often"}),
    ),
    Scenario(
        "hybrid_pool",
        "The sliding-window pool is full, the main one is not.",
        started(swa_full_tokens_ratio=0.5) + decoding(queued=20, usage=0.4, swa=0.95),
        frozenset({"hybrid_pool_full"}),
    ),
    Scenario(
        "grammar_queue",
        "Most requests wait for a grammar; only the metrics show it.",
        scraped(figures=GRAMMAR),
        frozenset({"grammar_queue"}),
    ),
    Scenario(
        "pd_queue",
        "A decode server's requests wait for their transfer.",
        started() + decoding(queued=2, queues={"transfer": 30}),
        frozenset({"pd_queue"}),
    ),
    Scenario(
        "dp_imbalanced",
        "One DP rank queues, the other never.",
        _two_ranks((20, 0)),
        frozenset({"dp_imbalanced"}),
    ),
    Scenario(
        "dp_both_queue",
        "Both DP ranks queue with room: that is no imbalance.",
        _two_ranks((20, 20)),
        frozenset({"admission_too_conservative"}),
    ),
    Scenario(
        "recovering",
        "One retraction at 0.1 leaves the new-token ratio high for long.",
        started(schedule_conservativeness=0.1) + decoding(queued=20, every=15.0) + [(61.0, retraction(ratio=0.9))],
        frozenset({"admission_recovering"}),
    ),
    Scenario(
        "prefill_bound",
        "Long prompts fill every batch, offline.",
        started() + prefilling(queued=200),
        frozenset({"prefill_bound"}),
        "offline",
    ),
    Scenario(
        "prefill_bound_at_most",
        "The same with the largest chunk in the guide: the advice names no flag, and the finding stays.",
        started(chunked_prefill_size=16384) + prefilling(tokens=16384, queued=200),
        frozenset({"prefill_bound"}),
        "offline",
    ),
    *(
        Scenario(
            f"out_of_memory_{phase}",
            f"Out of memory ({phase}) five minutes before the end.",
            started() + decoding(0, 1500) + [(1500.0, failed(phase))],
            frozenset({row}),
        )
        for phase, row in (
            ("prefill", "out_of_memory_prefill"),
            ("decode", "out_of_memory_decode"),
            ("startup", "out_of_memory_any"),
            ("unknown", "out_of_memory_any"),
            ("graph_capture", "graph_memory_short"),
        )
    ),
    Scenario(
        "out_of_memory_long_ago",
        "Out of memory in the fifth minute, and never again.",
        started() + decoding(0, 300) + [(300.0, failed("prefill"))] + started(360) + decoding(400),
    ),
    *(
        Scenario(
            f"reserve_{reserve:g}",
            f"{reserve:g} GB are left at the start.",
            started(reserve=reserve) + decoding(),
            frozenset(rows),
        )
        for reserve, rows in (
            (0.6, {"graph_memory_short"}),
            (3.0, {"memory_reserve_too_small"}),
            (9.0, ()),
            (14.0, {"memory_reserve_too_large"}),
        )
    ),
    Scenario(
        "beyond_captured",
        "Batches of three hundred, graphs up to 160.",
        started(max_running_requests=512) + decoding(running=300, graph=False),
        frozenset({"cuda_graph_not_covering"}),
    ),
    Scenario(
        "graphs_disabled",
        "Graphs are switched off.",
        started(disable_cuda_graph=True) + decoding(graph=False),
        frozenset({"cuda_graph_off"}),
    ),
    Scenario(
        "graphs_missing",
        "Small batches run without a graph, and no argument switches graphs off.",
        started() + decoding(graph=False),
        frozenset({"cuda_graph_off"}),
    ),
    Scenario(
        "cpu", "A server on CPUs, which has no graphs.", started(device="cpu", reserve=3.0) + decoding(graph=False)
    ),
    Scenario(
        "restart_loop",
        "Started again every four minutes.",
        _restart(*(600.0 + 240.0 * n for n in range(5))),
        frozenset({"restart_loop"}),
    ),
    Scenario(
        "stuck",
        "From the twentieth minute on /metrics answers, eight requests run, and nothing moves.",
        scraped(0, 1200, figures=HANGING) + scraped(1200, LENGTH, figures=HANGING, moves=False),
        frozenset({"scheduler_stuck"}),
    ),
    Scenario(
        "watchdog",
        "The watchdog ends a scheduler five minutes before the end.",
        started() + decoding(0, 1500) + [(1500.0, Liveness(None, NO_RANK, "watchdog_timeout"))],
        frozenset({"scheduler_stuck"}),
    ),
    Scenario(
        "rejected",
        "Four answers of 503 a minute.",
        started() + decoding() + repeated(Rejection(None, NO_RANK), 15.0),
        frozenset({"requests_rejected"}),
    ),
    Scenario(
        "rejected_once_a_minute",
        "One answer of 503 a minute.",
        started() + decoding() + repeated(Rejection(None, NO_RANK), 60.0),
    ),
    Scenario(
        "given_up",
        "Eight of forty requests a minute are given up, and one first token in nine comes late.",
        scraped(aborts=2.0, late=0.2),
        frozenset({"requests_rejected"}),
    ),
    Scenario(
        "given_up_by_readers",
        "A healthy chat: one answer in six is stopped by its reader, nothing waits, first tokens come at once.",
        scraped(aborts=2.0),
    ),
    Scenario(
        "given_up_by_all",
        "Requests wait, none is answered, and all clients cancel.",
        scraped(
            aborts=2.0,
            answers=0.0,
            figures=RankFigures(running=64, queued=3000, grammar_queued=0, full_usage=0.95),
        ),
        frozenset({"requests_rejected", "queue_too_long"}),
    ),
    Scenario("given_up_few", "Two in a hundred are given up.", scraped(aborts=2.0, answers=100.0, late=0.2)),
    Scenario(
        "server_down",
        "The server ends in the tenth minute and does not come back.",
        scraped(0, 600) + [(600.0 + 15.0 * n, Away()) for n in range(80)],
        frozenset({"server_down"}),
    ),
)
