"""Rows about whether the server serves at all. None is in the guide: a server that is away cannot be tuned."""

from __future__ import annotations

from sglang_tuning_exporter.guide.diagnosis import Diagnosis, Source, Starts, Stuck, Turn

WHAT_ENDS_A_SERVER = (
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
        condition=Source(
            'sglang_tuning_up == 0 unless on (job, instance) sglang_tuning_scrape_error_info{reason="metrics_disabled"}'
            # A model that is being loaded is not down, and the exporter says so as long as the log does; a count of starts
            # would also hide a start that failed and a server that died young. Once told, it is over when it answers again.
            ' unless on (job, instance) (sglang_tuning_scrape_error_info{reason="not_ready"}'
            ' unless on (job, instance) ALERTS{alertname="SGLangServerDown", alertstate="firing"})'
            # A start that was printed before the exporter's first scrape is no increase: a new exporter waits as long.
            " and on (job, instance) (max_over_time(sglang_tuning_up[15m]) == 1 or sglang_tuning_up offset 15m)",
            trouble="server_down",
            words="its /metrics could not be scraped",
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
        causes=WHAT_ENDS_A_SERVER,
        notified_beside=True,
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
        causes=WHAT_ENDS_A_SERVER,
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
    ),
)
