"""The board of all servers: one row each, the worst first, and the way to each server's own board."""

from __future__ import annotations

from sglang_tuning_exporter.generate import layout
from sglang_tuning_exporter.generate.boards.common import (
    DOCUMENTS,
    FLEET,
    GUIDE,
    NO_EXPORTER,
    SERVER,
    SMALL,
    TITLES,
    marks,
    variables,
    ways,
)
from sglang_tuning_exporter.generate.boards.words import changes, verdicts
from sglang_tuning_exporter.generate.layout import Chapter, Shelf
from sglang_tuning_exporter.generate.panels import (
    BAD,
    GOOD,
    NEUTRAL,
    NO_TRAFFIC,
    NOT_TOLD,
    QUIET,
    WATCH,
    Json,
    Query,
    Style,
    painted,
    stat,
    state_timeline,
    steps,
    table,
    texts,
    timeseries,
)
from sglang_tuning_exporter.generate.queries import (
    PLACE,
    advice,
    by_server,
    native,
    own,
    ranked,
    rate,
    ratio,
    retractions,
    urgency,
    verdict,
)

ON = ", ".join(PLACE)
OPEN = (
    f"/d/{SERVER}?var-instance=${{__data.fields.instance}}"
    "&${datasource:queryparam}&${job:queryparam}&${__url_time_range}"
)
# urgency -> words and colour, as `urgency` gives it
LEVELS: dict[str, tuple[str, str | None]] = {
    "0": ("nothing to change", GOOD),
    "1": ("could be better", NEUTRAL),
    "2": ("limited", WATCH),
    "3": ("critical", BAD),
    "4": ("exporter gone", "dark-red"),
}


def board() -> Json:
    """Build the board of the whole fleet."""
    return layout.board(
        FLEET,
        TITLES[FLEET],
        description="Every SGLang server: what limits it, which flag to change, the figures of SGLang's tuning guide.",
        chapters=(
            Chapter("How the fleet is doing", (_summary(), Shelf(9, (_servers(),)))),
            Chapter("Since when", (Shelf(7, (_since(),)),)),
            Chapter("Server by server", (_load(), _strain())),
        ),
        variables=variables(fleet=True),
        annotations=marks(),
        ways=ways(FLEET),
        documents=DOCUMENTS,
    )


# --- how the fleet is doing ------------------------------------------------------------------------------------------


def _counted(title: str, severities: tuple[str, ...], colour: str, says: str, *, gone: bool = False) -> Json:
    matcher = f'severity=~"{"|".join(severities)}"'
    found = f"count(max by ({ON}) ({own('sglang_tuning_verdict', matcher)} == 1))"
    if gone:
        found = f"count(max by ({ON}) (({own('sglang_tuning_verdict', matcher)} == 1) or ({own('up')} == 0)))"
    return stat(
        title,
        Query(f"{found} or on () (0 * count({own('up')}))", title),
        text="value",
        unit="none",
        decimals=0,
        sizes=SMALL,
        no_value=NO_EXPORTER,
        mappings=texts({"0": ("none", QUIET)}),
        names={title: painted(colour)},
        metric="sglang_tuning_verdict",
        description=says,
    )


def _summary() -> Shelf:
    return Shelf(
        3,
        (
            _counted(
                "Critical",
                ("critical",),
                BAD,
                "Servers that are down, stuck or out of memory, or whose exporter does not answer. The guide has an"
                " answer to the memory failures; the rest needs a look.",
                gone=True,
            ),
            _counted(
                "Limited",
                ("warning",),
                WATCH,
                "Servers that something limits now, by the guide's figures. The table says what and which flag to turn.",
            ),
            _counted(
                "Could be better",
                ("info",),
                NEUTRAL,
                "Servers that work well and could do more with another setting, by the guide's smaller advice.",
            ),
            _counted(
                "As it should be",
                ("none",),
                GOOD,
                "Servers that the guide would leave as they are; idle ones and those not seen long enough count here.",
            ),
            stat(
                "Requests waiting",
                Query(f"sum({ranked('sglang_tuning_queued_requests')})", "waiting"),
                text="value",
                unit="locale",
                decimals=0,
                sizes=SMALL,
                no_value=NOT_TOLD,
                metric="sglang_tuning_queued_requests",
                description="Requests in all queues. What the guide calls healthy depends on the server, so that it is"
                " judged by server and not here.",
            ),
            stat(
                "Generated tokens",
                Query(f"sum({generated('5m')})", "generated"),
                text="value",
                unit="suffix: tok/s",
                decimals=0,
                sizes=SMALL,
                no_value=NO_TRAFFIC,
                metric="sglang_tuning_generation_tokens_per_second",
                description="Tokens that all servers together generate in a second, over the last 5 minutes. The guide"
                " tunes for this figure.",
            ),
        ),
    )


def _advised() -> str:
    """One change for each server: the one its verdict turns; where no figure is known, a row of the verdict alone."""
    said = f'label_replace({verdict()}, "diagnosis", "$1", "verdict", "(.*)")'
    of_verdict = f"{advice()} and on ({ON}, diagnosis) ({said})"
    chosen = f"max by ({ON}, advice) (topk by ({ON}) (1, {of_verdict}))"
    # What stands in the verdict is turned into words by the column's mapping.
    in_words = f'label_replace({verdict()}, "advice", "$1", "verdict", "(.*)")'
    return f"{chosen} or on ({ON}) max by ({ON}, advice) ({in_words})"


def _servers() -> Json:
    said: dict[str, tuple[str, str | None]] = {**verdicts()}
    fields: dict[str, Style] = {
        "instance": {
            "displayName": "Server",
            "custom.width": 170,
            "links": [{"title": "What limits this server", "url": OPEN, "targetBlank": False}],
        },
        "verdict": {
            "displayName": "What limits it",
            "custom.width": 215,
            "mappings": texts(said),
            "custom.cellOptions": {"type": "color-background", "mode": "basic"},
        },
        "advice": {
            "displayName": "What to change",
            "mappings": texts(changes()),
            "custom.cellOptions": {"type": "auto", "wrapText": True},
        },
        "Value #C": {"displayName": "Waiting", "custom.width": 78, "unit": "locale", "decimals": 0},
        "Value #D": {"displayName": "Running", "custom.width": 78, "unit": "locale", "decimals": 0},
        "Value #E": {
            "displayName": "Usage",
            "custom.width": 110,
            "unit": "percentunit",
            "min": 0,
            "max": 1,
            "decimals": 0,
            "custom.cellOptions": {"type": "gauge", "mode": "basic", "valueDisplayMode": "text"},
            "color": {"mode": "fixed", "fixedColor": NEUTRAL},
        },
        "Value #F": {
            "displayName": "Graphs",
            "custom.width": 80,
            "unit": "percentunit",
            "decimals": 0,
            "custom.cellOptions": {"type": "color-text"},
            "thresholds": steps(QUIET, (0, WATCH), (1 - GUIDE.frequent_share, GOOD)),
        },
        "Value #G": {
            "displayName": "Retractions",
            "custom.width": 100,
            "unit": "suffix: /min",
            "decimals": 1,
            "custom.cellOptions": {"type": "color-text"},
            "thresholds": steps(QUIET, (0, GOOD), (GUIDE.retractions_per_minute * 1.001, WATCH)),
        },
        "Value #H": {"displayName": "Generated", "custom.width": 105, "unit": "suffix: tok/s", "decimals": 0},
    }
    return table(
        "Servers, the worst first",
        Query(verdict()),
        Query(_advised()),
        Query(by_server(ranked("sglang_tuning_queued_requests"), "sum")),
        Query(by_server(ranked("sglang_tuning_running_requests"), "sum")),
        Query(by_server(ranked("sglang_tuning_token_usage_ratio"))),
        Query(by_server(ranked("sglang_tuning_cuda_graph_coverage_ratio"), "min")),
        Query(retractions("5m", ON)),
        Query(generated("5m")),
        Query(urgency()),
        no_value="not told",
        worst_first="Value #I",
        metric="sglang_tuning_verdict",
        description="What limits each server and the flag to turn, as the tuning guide would say it; click on a"
        " server for the whole story. Usage is that of the fullest pool, graphs the share of decode batches that"
        f" replayed one, retractions and tokens those of the last 5 minutes (the guide tolerates {GUIDE.retractions_per_minute:.0f}"
        " a minute). What a version does not tell says so.",
        columns=fields,
    )


def generated(window: str = "$__rate_interval") -> str:
    """Tokens generated per second by server: counted where the metrics tell them, else what the log last said."""
    counted = by_server(f"rate({native('sglang:generation_tokens_total')}[{window}])", "sum")
    return f"{counted} or on ({ON}) {by_server(ranked('sglang_tuning_generation_tokens_per_second'), 'sum')}"


# --- since when ------------------------------------------------------------------------------------------------------


def _since() -> Json:
    return state_timeline(
        "How each server was doing",
        Query(urgency(), "{{instance}}"),
        metric="sglang_tuning_verdict",
        no_value=NO_EXPORTER,
        mappings=texts(LEVELS),
        description="One line for each server: red is down, stuck or out of memory, orange is limited by one of the"
        " guide's figures, blue could be better, green needs nothing.",
    )


# --- server by server ------------------------------------------------------------------------------------------------


def _lines(
    title: str, expr: str, metric: str, says: str, *, unit: str, no_value: str = NOT_TOLD, ceiling: float | None = None
) -> Json:
    return timeseries(
        title,
        Query(expr, "{{instance}}"),
        unit=unit,
        ceiling=ceiling,
        metric=metric,
        description=says,
        no_value=no_value,
        fill=0,
        colour_by_name=True,
    )


def _load() -> Shelf:
    return Shelf(
        7,
        (
            _lines(
                "Requests waiting",
                by_server(ranked("sglang_tuning_queued_requests"), "sum"),
                "sglang_tuning_queued_requests",
                "One long queue beside empty ones is a matter of routing, not of the guide's flags.",
                unit="short",
            ),
            _lines(
                "Estimated wait in the queue",
                by_server(f"{ranked('sglang_tuning_queue_wait_seconds')} < Inf"),
                "sglang_tuning_queue_wait_seconds",
                "Requests waiting divided by requests admitted per second. The guide counts requests; a person waits"
                " seconds.",
                unit="s",
            ),
            _lines(
                "Generated tokens per second",
                generated(),
                "sglang_tuning_generation_tokens_per_second",
                "What the guide tunes for. Servers of one model under one load should lie close together.",
                unit="short",
                no_value=NO_TRAFFIC,
            ),
        ),
    )


def _strain() -> Shelf:
    breaches = ranked("sglang_tuning_latency_breaches_total")
    seen = ranked("sglang_tuning_latency_observations_total")
    by = f" by ({ON}, latency)"
    return Shelf(
        7,
        (
            _lines(
                "Token usage of the fullest pool",
                by_server(ranked("sglang_tuning_token_usage_ratio")),
                "sglang_tuning_token_usage_ratio",
                f"Above {GUIDE.token_usage_target} a pool is well used, says the guide; far below it while requests"
                " wait, something else holds them back.",
                unit="percentunit",
                ceiling=1,
            ),
            _lines(
                "Retractions per minute",
                retractions(by=ON),
                "sglang_tuning_retraction_events_total",
                f"Times the KV cache was full and running requests went back. The guide tolerates about"
                f" {GUIDE.retractions_per_minute:.0f} a minute.",
                unit="short",
            ),
            _lines(
                "Slower than the objective",
                by_server(ratio(rate(breaches), rate(seen), by)),
                "sglang_tuning_latency_breaches_total",
                "Share of first tokens or of gaps between tokens, whichever is worse, that took longer than the objective"
                " of the profile. The guide trades this for throughput.",
                unit="percentunit",
                no_value=NO_TRAFFIC,
            ),
        ),
    )
