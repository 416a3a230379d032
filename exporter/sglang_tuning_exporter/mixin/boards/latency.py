"""The board of what clients feel: latencies against their objectives, how fast the error budget burns, and what another objective would mean."""

from __future__ import annotations

from sglang_tuning_exporter.diagnosis.conditions.latency import MOST_SHARE
from sglang_tuning_exporter.diagnosis.rows.objectives import FAST, SLOW
from sglang_tuning_exporter.mixin import board as layout
from sglang_tuning_exporter.mixin.board import Chapter, Shelf
from sglang_tuning_exporter.mixin.boards import client_latency
from sglang_tuning_exporter.mixin.boards.common import DOCUMENTS, LATENCY, SMALL, TITLES, marks, variables, ways
from sglang_tuning_exporter.mixin.panels import (
    BAD,
    GOOD,
    NEUTRAL,
    NO_TRAFFIC,
    NOT_TOLD,
    WATCH,
    Json,
    Query,
    bound_line,
    measured,
    painted,
    stat,
    timeseries,
)
from sglang_tuning_exporter.mixin.queries import native, own, quantile, rate, ratio, threshold, words

LATENCIES = {"time_to_first_token": "TTFT", "inter_token": "ITL"}


def board() -> Json:
    """Build the board of latencies and objectives."""
    return layout.board(
        LATENCY,
        TITLES[LATENCY],
        description="Whether clients get their tokens in time: latencies against the objectives of the profile, and"
        " how fast the error budget burns.",
        chapters=(
            Chapter("Latency against the objective", (_tiles(),)),
            Chapter("Error budget", (_burning(),)),
            Chapter("Latencies", (*_lines(), _maps())),
            Chapter("Another objective", (_supposed(),), closed=True),
        ),
        variables=(*variables(), *_pickers()),
        annotations=marks(),
        ways=ways(LATENCY),
        documents=DOCUMENTS,
    )


def _pickers() -> tuple[Json, ...]:
    def bounds(metric: str) -> str:
        return f"label_values({native(metric + '_bucket')}, le)"

    return (
        layout.choice(
            "first_token",
            "TTFT within (s)",
            bounds(client_latency.FIRST[0]),
            "An objective to try, of those that the server's histogram can tell",
            numeric=True,
            first="2.0",
        ),
        layout.choice(
            "between_tokens",
            "ITL within (s)",
            bounds(client_latency.BETWEEN[0]),
            "An objective to try, of those that the server's histogram can tell",
            numeric=True,
            first="0.1",
        ),
        layout.picker(
            "objective",
            "For this share",
            ("0.9", "0.95", "0.99", "0.999"),
            "0.99",
            "How many of the requests must keep the two objectives to the left",
        ),
    )


# --- in time? --------------------------------------------------------------------------------------------------------


def _against(title: str, metric: tuple[str, ...], objective: str, says: str) -> Json:
    value = quantile("0.99", *metric, window="5m")
    limit = threshold(objective, "upper")
    return stat(
        title,
        Query(
            words(
                value,
                (f"({value}) > {limit}", "too slow"),
                (f"({value}) <= {limit}", "in time"),
                otherwise="p99",
            ),
            "{{verdict}}",
        ),
        unit="s",
        decimals=2,
        sizes=SMALL,
        no_value=NO_TRAFFIC,
        names={"too slow": painted(WATCH), "in time": painted(GOOD), "p99": painted(NEUTRAL)},
        metric=metric[0],
        description=f"{says} p99 of the last 5 minutes against the objective of the profile in force.",
    )


def _burn(latency: str, window: str) -> str:
    """How many times faster than allowed the error budget is used, over a window; no point without requests."""
    of = f'latency="{latency}"'
    breaches = rate(own("sglang_tuning_latency_breaches_total", of), window)
    seen = rate(own("sglang_tuning_latency_observations_total", of), window)
    return f"{ratio(breaches, seen)} / ((1 - {threshold('latency', 'objective')}) > 0)"


def _notified(times: float) -> str:
    """How fast the budget burns when the rule notifies: so many times, or when as much is missed as any rule asks for."""
    return f"clamp_max({MOST_SHARE} / ((1 - {threshold('latency', 'objective')}) > 0), {times:g})"


def _budget() -> Json:
    worst = " or ".join(
        f'label_replace({_burn(latency, "1h")}, "latency", "{latency}", "", "")' for latency in LATENCIES
    )
    burn = f"max({worst})"
    return stat(
        "Burn rate",
        Query(
            words(
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
        sizes=SMALL,
        no_value=NO_TRAFFIC,
        names={
            "far too fast": painted(BAD),
            "too fast": painted(WATCH),
            "faster than allowed": painted("yellow"),
            "within the budget": painted(GOOD),
        },
        metric="sglang_tuning_latency_breaches_total",
        description="How many times faster than allowed the worse of the two objectives was missed in the last 1 hour."
        " 1 uses the budget up exactly; the guide has no such figure, operators do.",
    )


def _tiles() -> Shelf:
    rejected, aborted = (
        f"sum(rate({own(counter)}[5m]))"
        for counter in ("sglang_tuning_rejected_requests_total", "sglang_tuning_aborted_requests_total")
    )
    # either may be untold: the log tells the one, the metrics the other
    lost = f"(({rejected} or on () 0 * {aborted}) + ({aborted} or on () 0 * {rejected})) * 60"
    limit = threshold("rejections_per_minute", "upper")
    return Shelf(
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
            stat(
                "Lost requests",
                Query(
                    words(
                        f"({lost})",
                        (f"({lost}) > {limit}", "too many"),
                        (f"({lost}) == 0", "none"),
                        otherwise="a few",
                    ),
                    "{{verdict}}",
                ),
                unit="suffix: /min",
                decimals=1,
                sizes=SMALL,
                no_value=NOT_TOLD,
                names={"too many": painted(WATCH), "none": painted(GOOD), "a few": painted("yellow")},
                metric="sglang_tuning_rejected_requests_total",
                description="Requests turned away or aborted, a minute, over the last 5 minutes. The guide would have"
                " the clients slow down before it comes to that.",
            ),
        ),
    )


# --- error budget ----------------------------------------------------------------------------------------------------


def _burning() -> Shelf:
    panels = []
    for latency, said in LATENCIES.items():
        panels.append(
            timeseries(
                f"Burn rate: {said}",
                Query(_notified(FAST), "notifies fast", bound_line(BAD)),
                Query(_notified(SLOW), "notifies slowly", bound_line(WATCH)),
                Query(_burn(latency, "5m"), "over 5 minutes", painted("light-blue", fillOpacity=0, lineWidth=1)),
                Query(_burn(latency, "1h"), "over 1 hour", painted(NEUTRAL)),
                Query(_burn(latency, "6h"), "over 6 hours", painted("purple", fillOpacity=0)),
                unit="suffix:x",
                metric="sglang_tuning_latency_breaches_total",
                description="How many times faster than allowed the objective of the profile is missed: 1 uses the error"
                " budget up exactly. The guide has no such figure; it says what to turn when a line is crossed.",
            )
        )
    of = "{{latency}}"
    by = " by (latency)"
    breaches = rate(own("sglang_tuning_latency_breaches_total"))
    seen = rate(own("sglang_tuning_latency_observations_total"))
    panels.append(
        timeseries(
            "Kept the objective",
            Query(threshold("latency", "objective"), "objective", bound_line(WATCH)),
            Query(f"1 - sum{by} ({breaches}) / (sum{by} ({seen}) > 0)", of, measured(fillOpacity=0)),
            unit="percentunit",
            ceiling=1,
            names={
                "time_to_first_token": {"displayName": "TTFT"} | painted(NEUTRAL),
                "inter_token": {"displayName": "ITL"} | painted("purple"),
            },
            metric="sglang_tuning_latency_observations_total",
            description="Share of first tokens and of gaps between tokens within the objective of the profile in"
            " force. The guide tunes for throughput; this is what it must not cost.",
        )
    )
    return Shelf(8, tuple(panels))


# --- latencies -------------------------------------------------------------------------------------------------------


def _lines() -> tuple[Shelf, ...]:
    return (
        Shelf(8, (client_latency.first_token(), client_latency.between_tokens())),
        Shelf(8, (client_latency.whole_request(), client_latency.time_queued())),
    )


def _maps() -> Shelf:
    return Shelf(8, (client_latency.first_token_map(), client_latency.between_tokens_map()))


# --- what if ---------------------------------------------------------------------------------------------------------


def _kept(metric: str, bound: str) -> str:
    within = rate(native(f"{metric}_bucket", f'le="{bound}"'))
    converted = f"histogram_fraction(0, {bound}, sum({rate(native(metric))})) >= 0"  # without `_bucket`
    return f"({ratio(within, rate(native(f'{metric}_count')))} or on () {converted})"


def _supposed() -> Shelf:
    kept = timeseries(
        "Would be kept",
        Query("vector($objective)", "for this share", bound_line(WATCH)),
        Query(_kept(client_latency.FIRST[0], "$first_token"), "TTFT within $first_token s", painted(NEUTRAL)),
        Query(
            _kept(client_latency.BETWEEN[0], "$between_tokens"),
            "ITL within $between_tokens s",
            painted("purple"),
        ),
        unit="percentunit",
        ceiling=1,
        metric="sglang:time_to_first_token_seconds_count",
        description="Share of requests that would keep the objectives chosen above. The guide gives no objective: choose"
        " one that clients notice, and tune until it is kept.",
    )
    missed = [
        Query(
            f"(1 - {_kept(metric, bound)}) / (1 - $objective)",
            said,
            painted(colour),
        )
        for metric, bound, said, colour in (
            (client_latency.FIRST[0], "$first_token", "TTFT", NEUTRAL),
            (client_latency.BETWEEN[0], "$between_tokens", "ITL", "purple"),
        )
    ]
    burn = timeseries(
        "Burn rate, supposed",
        Query(f"clamp_max(vector({MOST_SHARE}) / (1 - $objective), {FAST})", "would notify fast", bound_line(BAD)),
        *missed,
        unit="suffix:x",
        metric="sglang:inter_token_latency_seconds_count",
        description="How many times faster than allowed the budget of the objectives chosen above would be used. The"
        " guide's flags trade one of the two lines for the other.",
    )
    return Shelf(7, (kept, burn))
