"""Parts of all boards: variables, links between the boards, annotations."""

from __future__ import annotations

from sglang_tuning_exporter.diagnosis.runbook import GUIDE_URL
from sglang_tuning_exporter.mixin import panels as p
from sglang_tuning_exporter.mixin import queries as q
from sglang_tuning_exporter.mixin.board import annotation, choice, link
from sglang_tuning_exporter.state.profiles import PROFILES

GUIDE = PROFILES["offline"]  # the guide's profile; its figures appear in descriptions, never in queries

NO_EXPORTER = "No answer from the exporter"
NO_WORK = "No requests in this time"

FLEET, SERVER = "sglang-tuning-fleet", "sglang-tuning-server"
SCHEDULING, LATENCY = "sglang-tuning-scheduling", "sglang-tuning-latency"
TITLES = {
    FLEET: "SGLang tuning / Fleet",
    SERVER: "SGLang tuning / Server",
    SCHEDULING: "SGLang tuning / KV cache and scheduling",
    LATENCY: "SGLang tuning / Latency and SLO",
}


def links(here: str) -> list[p.Json]:
    """Return the links to the other boards and to the guide. Between boards of one server, they keep the chosen one."""
    found = []
    for uid, title in TITLES.items():
        if uid != here:
            both_one = FLEET not in (uid, here)
            kept = ("datasource", "job", "instance", "model", "dp_rank") if both_one else ("datasource", "job")
            url = f"/d/{uid}?" + "&".join(f"${{{name}:queryparam}}" for name in kept)
            found.append(link(title.rpartition(" / ")[2], url, is_board=True))
    return [*found, link("The tuning guide", GUIDE_URL, is_board=False)]


def variables(*, fleet: bool = False) -> tuple[p.Json, ...]:
    """Return the variables of every board: job, exporter (and so server), model, DP rank."""
    build = "sglang_tuning_build_info"
    of_job = f'label_values({build}{{job=~"$job"}}, instance)'
    return (
        choice(
            "job",
            "Job",
            f"label_values({build}, job)",
            "Prometheus job that scrapes the exporters",
            all_value=".+",
            multi=True,
        ),
        choice("instance", "Instance", of_job, "Exporters, each beside one SGLang server", all_value=".+", multi=True)
        if fleet
        else choice("instance", "Instance", of_job, "One exporter, and so one SGLang server"),
        choice(
            "model",
            "Model",
            f"label_values({q.own('sglang_tuning_server_info')}, model_name)",
            "For the latencies and request rates that SGLang counts by model",
            all_value=".*",
        ),
        choice(
            "dp_rank",
            "DP rank",
            f"label_values({q.own('sglang_tuning_queued_requests')}, dp_rank)",
            "Empty where the server has no data-parallel ranks; latencies, requests and alerts are those of all ranks",
            all_value=".*",
            multi=True,
        ),
    )


def marks(*, shown: bool = True) -> tuple[p.Json, ...]:
    """Return the annotations: critical alerts, starts, changed arguments, memory failures; off by default unless `shown`."""
    firing = q.own("ALERTS", 'alertstate="firing"', 'severity="critical"', 'alertname=~"SGLang.+"')
    return (
        # The minute in which it began: an alert that fires for hours is a line, not an area over the graph.
        annotation(
            "Critical alerts",
            f"{firing} unless {firing} offset 1m",
            p.BAD,
            title="{{alertname}}",
            tags="severity,diagnosis",
            shown=shown,
        ),
        annotation(
            "Starts",
            f"increase({q.own('sglang_tuning_server_starts_total')}[$__rate_interval]) > 0",
            p.NEUTRAL,
            title="SGLang started on {{instance}}",
            shown=shown,
        ),
        annotation(
            "Changed arguments",
            f"changes({q.own('sglang_tuning_server_arg')}[$__rate_interval]) > 0",
            "purple",
            title="{{arg}} was changed",
            shown=shown,
        ),
        annotation(
            "Out of GPU memory",
            f"increase({q.own('sglang_tuning_out_of_memory_total')}[$__rate_interval]) > 0",
            p.BAD,
            title="Out of GPU memory in {{phase}}",
            shown=shown,
        ),
    )
