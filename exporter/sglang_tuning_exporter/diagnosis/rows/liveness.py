"""Rows about whether the server is up. None is in SGLang's guide: a server must run before it can be tuned."""

from __future__ import annotations

from sglang_tuning_exporter.diagnosis.conditions.liveness import Starts, Stuck, logged
from sglang_tuning_exporter.diagnosis.conditions.source import SourceTrouble
from sglang_tuning_exporter.diagnosis.promql import (
    ON,
    OUTAGE_LOOKBACK,
    SHORT_LOOKBACK,
    firing,
    largest_before,
    last_known,
)
from sglang_tuning_exporter.diagnosis.row import Diagnosis, Remedy, Title, look
from sglang_tuning_exporter.sglang.events import ENDS

_UP = "sglang_tuning_up"
_FIRED = firing("SGLangServerDown")
_WITHOUT_RESTART = f"max_over_time({_UP}[1h]) == 1 unless {ON} increase(sglang_tuning_server_starts_total[1h]) > 0"


def disabled(window: str) -> str:
    """Return PromQL: the server runs without metrics.

    Not if it had metrics within the hour and did not restart: then a proxy answers 404 in its place.
    """
    answers = last_known('sglang_tuning_scrape_error_info{reason="metrics_disabled"}', window)
    return f"({answers} unless {ON} ({_WITHOUT_RESTART}))"


_NOT_READY = last_known('sglang_tuning_scrape_error_info{reason="not_ready"}', SHORT_LOOKBACK)
# The exporter allows a model half an hour to load; a proxy may answer 503 for ever.
_LONGEST_START = "35m"
_DOWN = (
    f"{last_known(_UP)} == 0",
    # After a relabelling the old labels still show a server that was down.
    f"unless {ON} {last_known(_UP)} == 1",
    # The exception ends when the alert fired: then only an answer ends it.
    f"unless {ON} ({disabled(SHORT_LOOKBACK)} unless {ON} {_FIRED})",
    # A server that loads its model is not down. Counting starts would also hide a start that failed.
    f"unless {ON} (",
    f"  {_NOT_READY} unless {ON} ({_FIRED} or max_over_time({_UP}[{_LONGEST_START}]) == 0 and {ON} {largest_before(_UP, _LONGEST_START)} >= 0)",
    ")",
    # A start that was logged before the exporter's first scrape is no increase, so a new exporter waits as long.
    f"and {ON} (max_over_time({_UP}[15m]) == 1 or {largest_before(_UP, '15m')} >= 0 or {_FIRED})",
    # While the exporter is down, an alert that fired is not resolved.
    f"or last_over_time({_UP}[1h]) == 0 and {ON} {_FIRED} unless {ON} {last_known(_UP)}",
)
# Three outages or more: one is SGLangServerDown, two are somebody who tries a flag and reverts it.
_OFTEN_DOWN = f"1 - avg_over_time({_UP}[2h]) > 0.1\nand {ON} resets({_UP}[2h]) > 2.5\nand {ON} {largest_before(_UP, '1h', OUTAGE_LOOKBACK)} >= 0"

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
        guide="not in SGLang's guide: the server must run before it can be tuned",
        remedy=look(
            "save the log, read its last lines, and restart the server",
            "The process has ended, hangs, or is unreachable from the exporter. The exporter's page and sglang_tuning_scrape_error_info show how"
            " the scrape failed.",
            "the address given to the exporter is wrong: check --sglang-url",
        ),
        causes=(*WHAT_KILLS, "crashed", "restart_loop"),
        notified_as_well=True,
        inhibits="critical",
        kind="limit",
        scale_out="neither",
    ),
    Diagnosis(
        id="restart_loop",
        alert="SGLangRestartLoop",
        severity="critical",
        condition=Starts(3),
        summary="SGLang keeps restarting.",
        seen="{value} starts in 30 minutes",
        guide="not in SGLang's guide: the server must stay up before it can be tuned",
        title=Title("restarts again and again,", "times in 30 min"),
        remedy=look(
            "read the last log lines before each start",
            "The server ends soon after each start. Most often it runs out of memory, or the supervisor's health check times out before the"
            " model is loaded.",
            "the restarts are planned, such as a rolling update of several servers behind one name",
        ),
        hold="0m",
        keep_firing="10m",
        causes=WHAT_KILLS,
        notified_as_well=True,
        scale_out="neither",
    ),
    Diagnosis(
        id="scheduler_stuck",
        alert="SGLangSchedulerStuck",
        severity="critical",
        condition=Stuck(),
        summary="SGLang hangs: it has requests but makes no progress.",
        seen="{value}",
        guide="not in SGLang's guide: save the evidence and restart the server",
        title=Title("stuck: requests wait, nothing moves"),
        remedy=Remedy(
            "",
            "restart",
            "save the log and a stack dump (py-spy dump --pid of the process that hangs), then restart the server",
            "A process that hangs does not recover. The scheduler's watchdog ends the server after --watchdog-timeout seconds (default 300);"
            " no watchdog ends it when the tokenizer or the detokenizer hangs.",
            "the server is paused (/pause_generation): resume it; or the other server of a disaggregated pair is down: restart that one",
        ),
        hold="1m",
        keep_firing="5m",  # a restarted exporter needs a minute to see a hang
        scale_out="neither",
    ),
    Diagnosis(
        id="crashed",
        alert="SGLangCrashed",
        severity="warning",
        condition=SourceTrouble(
            "\n".join(logged(*ENDS)),
            words="its log shows a scheduler exception, a dead process or a failed start",
            events=ENDS,
        ),
        summary="SGLang has crashed.",
        seen="{value}",
        guide="not in SGLang's guide: after a crash the server is down until its model is loaded again",
        remedy=look(
            "read the traceback in the log, just before that line",
            "The running requests were lost, and an automatic restart can hide the cause.",
            "the processes were ended on purpose",
        ),
        hold="0m",
        causes=WHAT_KILLS,
    ),
    Diagnosis(
        id="often_down",
        alert="SGLangOftenDown",
        severity="warning",
        condition=SourceTrouble(
            _OFTEN_DOWN, words="it was down for more than a tenth of the last two hours, in three outages or more"
        ),
        summary="SGLang is down again and again.",
        seen="{value}",
        guide="not in SGLang's guide: each outage is too short, or too rare, for the other alerts",
        remedy=look(
            "read in the log how each run ended, and check the supervisor's health check",
            "Each outage ends before SGLangServerDown fires.",
            "the restarts are planned, for example to try flags",
        ),
        causes=("restart_loop", *WHAT_KILLS, "crashed"),
    ),
)
