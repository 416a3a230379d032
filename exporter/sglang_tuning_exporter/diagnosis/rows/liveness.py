"""Rows about whether the server serves at all. None is in the guide: a server that is away cannot be tuned."""

from __future__ import annotations

from sglang_tuning_exporter.diagnosis.conditions import SourceTrouble, Starts, Stuck
from sglang_tuning_exporter.diagnosis.conditions.failures import told
from sglang_tuning_exporter.diagnosis.promql import EXCUSED, ON, WHILE, before, firing, known
from sglang_tuning_exporter.diagnosis.row import Diagnosis, Turn
from sglang_tuning_exporter.sglang.events import ENDS

_UP = "sglang_tuning_up"
_TOLD = firing("SGLangServerDown")
_SINCE_START = f"max_over_time({_UP}[1h]) == 1 unless {ON} increase(sglang_tuning_server_starts_total[1h]) > 0"


def disabled(window: str) -> str:
    """Write that a server runs without metrics.

    Not where it had them within the hour and was not started since: a proxy answers 404 in its place.
    """
    answers = known('sglang_tuning_scrape_error_info{reason="metrics_disabled"}', window)
    return f"({answers} unless {ON} ({_SINCE_START}))"


_NOT_READY = known('sglang_tuning_scrape_error_info{reason="not_ready"}', EXCUSED)
# A model is loaded within half an hour, as the exporter has it; a proxy answers 503 for ever.
_LONGEST_START = "35m"
_DOWN = (
    f"{known(_UP)} == 0",
    # A target whose labels have changed was down under its old ones.
    f"unless {ON} {known(_UP)} == 1",
    # Each excuse ends when the alert was told: it is over when the server answers again.
    f"unless {ON} ({disabled(EXCUSED)} unless {ON} {_TOLD})",
    # Being started: a model that is loaded is not down. A count of starts would also hide a start that failed.
    f"unless {ON} (",
    f"  {_NOT_READY} unless {ON} ({_TOLD} or max_over_time({_UP}[{_LONGEST_START}]) == 0 and {ON} {before(_UP, _LONGEST_START)} >= 0)",
    ")",
    # A start that was printed before the exporter's first scrape is no increase: a new exporter waits as long.
    f"and {ON} (max_over_time({_UP}[15m]) == 1 or {before(_UP, '15m')} >= 0 or {_TOLD})",
    # Nothing is known of it, for the exporter is away: what was told is not taken back.
    f"or last_over_time({_UP}[1h]) == 0 and {ON} {_TOLD} unless {ON} {known(_UP)}",
)
# In three pieces or more: one is told as a server that is down, two are somebody who tries a flag and takes it back.
_OFTEN_DOWN = (
    f"1 - avg_over_time({_UP}[2h]) > 0.1\nand {ON} resets({_UP}[2h]) > 2.5\nand {ON} {before(_UP, '1h', WHILE)} >= 0"
)

WHAT_KILLS = (
    "scheduler_stuck",
    "out_of_memory_prefill",
    "out_of_memory_decode",
    "graph_memory_short",
    "out_of_memory_any",
)

LIVENESS_DIAGNOSES: tuple[Diagnosis, ...] = (
    Diagnosis(
        id="server_down",
        alert="SGLangServerDown",
        severity="critical",
        condition=SourceTrouble(
            "\n".join(_DOWN), trouble="server_down", words="its /metrics could not be scraped", is_end=True
        ),
        summary="SGLang does not answer.",
        seen="{value}",
        guide="not in the guide: a server that is away serves nobody",
        turn=Turn(
            "",
            "look",
            "look at the end of its log",
            "The process has ended, hangs, or cannot be reached from the exporter. The exporter's page and sglang_tuning_scrape_error_info say how it failed.",
            "the address given to the exporter is wrong: check --sglang-url",
        ),
        causes=(*WHAT_KILLS, "crashed", "restart_loop"),
        notified_beside=True,
        hides="critical",
        kind="limit",
    ),
    Diagnosis(
        id="restart_loop",
        alert="SGLangRestartLoop",
        severity="critical",
        condition=Starts(3),
        summary="SGLang starts again and again.",
        seen="{value} starts in half an hour",
        guide="not in the guide: a server that cannot stay up serves nobody",
        turn=Turn(
            "",
            "look",
            "look at the last lines before each start in its log",
            "Something ends the server soon after it starts: most often it runs out of memory, or its supervisor's health check is less patient than the"
            " loading of the model takes.",
            "somebody restarts it on purpose, such as a rolling update of several servers behind one name",
        ),
        hold="0m",
        keep_firing="10m",
        causes=WHAT_KILLS,
        notified_beside=True,
    ),
    Diagnosis(
        id="scheduler_stuck",
        alert="SGLangSchedulerStuck",
        severity="critical",
        condition=Stuck(),
        summary="SGLang hangs: requests are there, and none goes on.",
        seen="{value}",
        guide="not in the guide: restart it and keep the evidence; such a server is not idle",
        turn=Turn(
            "",
            "restart",
            "keep the log and a stack dump (py-spy dump --pid of the stage that hangs), then restart it",
            "A stage that hangs does not come back by itself. The scheduler's watchdog ends the server, --watchdog-timeout seconds later (300 unless set);"
            " nothing ends it for a tokenizer or a detokenizer that hangs.",
            "somebody paused it (/pause_generation), or the other half of a disaggregated pair is away: then let it go on",
        ),
        hold="1m",
        keep_firing="5m",  # an exporter that has just started cannot know it for a minute
    ),
    Diagnosis(
        id="crashed",
        alert="SGLangCrashed",
        severity="warning",
        condition=SourceTrouble(
            "\n".join(told(*ENDS)),
            words="its log tells of an exception in its scheduler, a dead process or a start that failed",
            events=ENDS,
        ),
        summary="SGLang has crashed.",
        seen="{value}",
        guide="not in the guide: a server that dies and is started again is away for as long as its model loads",
        turn=Turn(
            "",
            "look",
            "look at the traceback in its log, just before that line",
            "The requests that ran were lost, and a supervisor that starts it again hides why it died.",
            "somebody ended its processes on purpose",
        ),
        hold="0m",
        causes=WHAT_KILLS,
    ),
    Diagnosis(
        id="often_down",
        alert="SGLangOftenDown",
        severity="warning",
        condition=SourceTrouble(
            _OFTEN_DOWN, words="it did not answer for more than a tenth of the last two hours, in three pieces or more"
        ),
        summary="SGLang is away again and again.",
        seen="{value}",
        guide="not in the guide: each time it is away is too short, or too rare, for the other alerts",
        turn=Turn(
            "",
            "look",
            "look at how it ended each time in its log, and at what its supervisor's health check asks",
            "A crash and the loading of the model are over before a server counts as down.",
            "somebody restarts it on purpose, such as to try flags",
        ),
        causes=("restart_loop", *WHAT_KILLS, "crashed"),
    ),
)
