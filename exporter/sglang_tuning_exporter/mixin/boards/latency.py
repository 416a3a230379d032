"""The board of latencies: against their objectives, how fast the error budget burns, and SGLang's figures of requests."""

from __future__ import annotations

from sglang_tuning_exporter.diagnosis.conditions.latency import MOST_SHARE
from sglang_tuning_exporter.diagnosis.rows.objectives import FAST, SLOW
from sglang_tuning_exporter.mixin import board as layout
from sglang_tuning_exporter.mixin import panels as p
from sglang_tuning_exporter.mixin import queries as q
from sglang_tuning_exporter.mixin.board import Chapter, PanelRow
from sglang_tuning_exporter.mixin.boards import client_latency, details
from sglang_tuning_exporter.mixin.boards.common import LATENCY, TITLES, links, marks, variables

LATENCIES = {"time_to_first_token": "TTFT", "inter_token": "ITL"}


def board() -> p.Json:
    """Build the board of latencies and objectives."""
    return layout.board(
        LATENCY,
        TITLES[LATENCY],
        description="Whether clients get their tokens in time: latencies against the objectives of the profile, and"
        " how fast the error budget burns.",
        chapters=(
            Chapter("", (_tiles(),)),
            Chapter("Error budget", (_burning(),)),
            Chapter("Latencies", (_maps(), PanelRow(8, (client_latency.time_queued(),)))),
            details.requests(),
        ),
        variables=variables(),
        annotations=marks(),
        links=links(LATENCY),
    )


# --- in time? --------------------------------------------------------------------------------------------------------


def _against(title: str, metric: tuple[str, ...], objective: str, says: str) -> p.Json:
    value = q.quantile("0.99", *metric, window="5m")
    limit = q.threshold(objective, "upper")
    return p.stat(
        title,
        p.Query(
            q.words(
                value,
                (f"({value}) > {limit}", "too slow"),
                (f"({value}) <= {limit}", "in time"),
                otherwise="p99",
            ),
            "{{verdict}}",
        ),
        unit="s",
        decimals=2,
        no_value=p.NO_TRAFFIC,
        names={"too slow": p.painted(p.WATCH), "in time": p.painted(p.GOOD), "p99": p.painted(p.NEUTRAL)},
        metric=metric[0],
        description=f"{says} p99 of the last 5 minutes against the objective of the profile in force.",
    )


def _burn(latency: str, window: str) -> str:
    """Return the burn rate of the error budget over a window; no point without requests."""
    of = f'latency="{latency}"'
    breaches = q.rate(q.own("sglang_tuning_latency_breaches_total", of), window)
    seen = q.rate(q.own("sglang_tuning_latency_observations_total", of), window)
    return f"{q.ratio(breaches, seen)} / ((1 - {q.threshold('latency', 'objective')}) > 0)"


def _notified(times: float) -> str:
    """Return the burn rate at which the rule notifies; capped, because no rule asks for more missed requests than that."""
    return f"clamp_max({MOST_SHARE} / ((1 - {q.threshold('latency', 'objective')}) > 0), {times:g})"


def _budget() -> p.Json:
    worst = " or ".join(
        f'label_replace({_burn(latency, "1h")}, "latency", "{latency}", "", "")' for latency in LATENCIES
    )
    burn = q.while_there(f"max({worst})", "")
    return p.stat(
        "Burn rate",
        p.Query(
            q.words(
                burn,
                (f"{burn} > {_notified(FAST)}", "far too fast"),
                (f"{burn} > {_notified(SLOW)}", "too fast"),
                (f"{burn} > 1", "faster than allowed"),
                otherwise="within the budget",
            ),
            "{{verdict}}",
        ),
        unit="suffix:x",
        decimals=1,
        no_value=p.NO_TRAFFIC,
        names={
            "far too fast": p.painted(p.BAD),
            "too fast": p.painted(p.WATCH),
            "faster than allowed": p.painted("yellow"),
            "within the budget": p.painted(p.GOOD),
        },
        metric="sglang_tuning_latency_breaches_total",
        description="How many times faster than allowed the worse of the two objectives was missed in the last 1 hour."
        " 1 uses the budget up exactly; the guide has no such figure, operators do.",
    )


def _tiles() -> PanelRow:
    rejected, aborted = (
        f"sum(rate({q.own(counter)}[5m]))"
        for counter in ("sglang_tuning_rejected_requests_total", "sglang_tuning_aborted_requests_total")
    )
    # rejected requests come from the log, aborted ones from the metrics: either may be missing
    lost = f"(({rejected} or on () 0 * {aborted}) + ({aborted} or on () 0 * {rejected})) * 60"
    lost = q.while_there(lost, "")
    limit = q.threshold("rejections_per_minute", "upper")
    return PanelRow(
        4,
        (
            _against(
                "TTFT p99",
                client_latency.FIRST,
                client_latency.FIRST[0].removeprefix("sglang:"),
                "The guide looks at the queue when it is long.",
            ),
            _against(
                "ITL p99",
                client_latency.BETWEEN,
                client_latency.BETWEEN[0].removeprefix("sglang:"),
                "The guide lowers --max-running-requests when it is long.",
            ),
            _budget(),
            p.stat(
                "Lost requests",
                p.Query(
                    q.words(
                        lost,
                        (f"{lost} > {limit}", "too many"),
                        (f"{lost} == 0", "none"),
                        otherwise="a few",
                    ),
                    "{{verdict}}",
                ),
                unit="suffix: /min",
                decimals=1,
                names={"too many": p.painted(p.WATCH), "none": p.painted(p.GOOD), "a few": p.painted("yellow")},
                metric="sglang_tuning_rejected_requests_total",
                description="Requests turned away or aborted, a minute, over the last 5 minutes. The guide would have"
                " the clients slow down before it comes to that.",
            ),
        ),
    )


# --- error budget ----------------------------------------------------------------------------------------------------


def _burning() -> PanelRow:
    panels = []
    for latency, said in LATENCIES.items():
        panels.append(
            p.timeseries(
                f"Burn rate: {said}",
                p.Query(_notified(FAST), "notifies fast", p.bound_line(p.BAD)),
                p.Query(_notified(SLOW), "notifies slowly", p.bound_line(p.WATCH)),
                p.Query(_burn(latency, "5m"), "over 5 minutes", p.painted("light-blue", fillOpacity=0, lineWidth=1)),
                p.Query(_burn(latency, "1h"), "over 1 hour", p.painted(p.NEUTRAL)),
                p.Query(_burn(latency, "6h"), "over 6 hours", p.painted("purple", fillOpacity=0)),
                unit="suffix:x",
                no_value=p.NO_TRAFFIC,
                metric="sglang_tuning_latency_breaches_total",
                description="How many times faster than allowed the objective of the profile is missed: 1 uses the error"
                " budget up exactly. The guide has no such figure; its flags help when a line is crossed.",
            )
        )
    return PanelRow(8, tuple(panels))


# --- latencies -------------------------------------------------------------------------------------------------------


def _maps() -> PanelRow:
    return PanelRow(8, (client_latency.first_token_map(), client_latency.between_tokens_map()))
