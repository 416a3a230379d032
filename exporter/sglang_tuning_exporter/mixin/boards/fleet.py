"""The board of all servers: one row each, the worst first, with a link to each server's own board."""

from __future__ import annotations

from itertools import pairwise

from sglang_tuning_exporter.mixin import board as layout
from sglang_tuning_exporter.mixin import panels as p
from sglang_tuning_exporter.mixin import queries as q
from sglang_tuning_exporter.mixin.board import Chapter, PanelRow
from sglang_tuning_exporter.mixin.boards.client_latency import BETWEEN, FIRST
from sglang_tuning_exporter.mixin.boards.common import (
    FLEET,
    GUIDE,
    NO_EXPORTER,
    SERVER,
    TITLES,
    links,
    marks,
    variables,
)
from sglang_tuning_exporter.mixin.boards.words import LEVELS, changes, verdicts
from sglang_tuning_exporter.state.profiles import ONE_MORE

OPEN = (
    f"/d/{SERVER}?var-instance=${{__data.fields.instance}}"
    "&${datasource:queryparam}&${job:queryparam}&${__url_time_range}"
)

LARGEST = 5  # more lines cannot be distinguished


def board() -> p.Json:
    """Build the board of the whole fleet."""
    return layout.board(
        FLEET,
        TITLES[FLEET],
        description="Every SGLang server: what limits it, which flag to change, the figures of SGLang's tuning guide.",
        chapters=(
            Chapter("", (_summary(), PanelRow(23, (_servers(),)), PanelRow(11, (_since(),)))),
            Chapter("The five largest of each", (_load(),)),
        ),
        variables=variables(fleet=True),
        annotations=marks(shown=False),
        links=links(FLEET),
    )


# --- how the fleet is doing ------------------------------------------------------------------------------------------


def _servers_by_level() -> p.Json:
    counted = f'count_values("level", topk by (instance) (1, {q.verdict(ended=True)}))'
    # a tile for every level, in this order, unless there was never an exporter
    seen = f"max_over_time({q.own('sglang_tuning_build_info')}[{q.LONGEST_LOOKBACK}])"
    tiles = " or ".join(f'label_replace(0 * group by (job) ({seen}), "level", "{level}", "", "")' for level in LEVELS)
    counted = f"sum by (level) ({tiles} or {counted})"
    return p.stat(
        "Servers",
        p.Query(counted, "{{level}}"),
        decimals=0,
        no_value=NO_EXPORTER,
        mappings=p.texts({"0": ("none", p.QUIET)}),
        names={level: p.named(said, colour) for level, (said, colour) in LEVELS.items()},
        metric="sglang_tuning_verdict",
        description="Critical: down, stuck, out of memory, far too slow for the objective, or the exporter does not answer."
        " Limited: by one of the guide's figures; the table says by which. Fine: healthy or idle. No verdict:"
        " starting, not ready, too little seen, or no clear bottleneck. An instance that two jobs scrape counts once, two"
        " exporters beside one server count twice.",
    )


def _summary() -> PanelRow:
    return PanelRow(
        3,
        (
            _servers_by_level(),
            p.stat(
                "Requests waiting",
                p.Query(q.once(q.by_server(q.shown(q.ranked("sglang_tuning_queued_requests")), "sum")), "waiting"),
                text="value",
                unit="locale",
                decimals=0,
                metric="sglang_tuning_queued_requests",
                description="Requests in all queues. What the guide calls healthy depends on the server, so that it is"
                " judged by server and not here.",
            ),
            p.stat(
                "Generated tokens",
                p.Query(q.once(q.generated_tokens("5m")), "generated"),
                text="value",
                unit="suffix: tok/s",
                decimals=0,
                metric="sglang_tuning_generation_tokens_per_second",
                description="Tokens that all servers together generate in a second, over the last 5 minutes. The guide"
                " tunes for this figure. Two exporters beside one server count it twice.",
            ),
        ),
        (16, 4, 4),
    )


def _worst() -> str:
    """Return each server's verdict and its change, a label `advice`. The value is the urgency plus the limited share of the time range.

    Without a flag, `advice` is the verdict; the column's mapping has its words.
    """
    found = q.verdict(ended=True)
    limited, seen = (
        f"sum by ({q.ON}) (count_over_time({series}[$__range]))"
        for series in (q.own(q.VERDICT, 'severity=~"critical|warning"'), q.own(q.VERDICT))
    )
    lost = f"clamp_max({limited} / ({seen} > 0), 0.99)"
    advised = f'label_replace({q.advice()}, "verdict", "$1", "diagnosis", "(.*)")'
    one = f"topk by ({q.ON}, verdict) (1, {advised})"
    in_words = f'label_replace({found}, "advice", "$1", "verdict", "(.*)")'
    rows = f"({found} * on ({q.ON}, verdict) group_left (advice) {one} or on ({q.ON}) {in_words})"
    return f"{rows} + on ({q.ON}) group_left () {lost} or on ({q.ON}) {rows}"


def _columns() -> dict[str, p.Style]:
    said = {name: words for name, (words, _) in verdicts().items()}
    return {
        "instance": {
            "displayName": "Server",
            "custom.width": 120,
            "links": [{"title": "What limits this server", "url": OPEN, "targetBlank": False}],
        },
        "Value #A": {
            "displayName": "State",
            "custom.width": 124,
            "mappings": p.ranges(LEVELS),
            "custom.cellOptions": {"type": "color-background", "mode": "basic"},
        },
        "verdict": {
            "displayName": "What limits it",
            "custom.width": 186,
            "mappings": p.texts(said),
        },
        "advice": {
            "displayName": "What to change",
            "mappings": p.texts(changes()),
            **p.WRAPPED,
        },
        "Value #B": {"displayName": "Waiting", "custom.width": 74, "unit": "locale", "decimals": 0},
        "Value #C": {"displayName": "Running", "custom.width": 74, "unit": "locale", "decimals": 0},
        "Value #D": {"displayName": "Usage", "custom.width": 74, "unit": "percentunit", "decimals": 0},
        "Value #E": {"displayName": "TTFT p95", "custom.width": 78, "unit": "suffix: s", "decimals": 2},
        "Value #H": {"displayName": "ITL p95", "custom.width": 74, "unit": "suffix: ms", "decimals": 0},
        "Value #F": {
            "displayName": "Retractions",
            "custom.width": 90,
            "unit": "suffix: /min",
            "decimals": 1,
            "custom.cellOptions": {"type": "color-text"},
            "thresholds": p.steps(p.QUIET, (0, p.GOOD), (GUIDE.retractions_per_minute + ONE_MORE + 0.001, p.WATCH)),
        },
        "Value #G": {"displayName": "Generated", "custom.width": 92, "unit": "suffix: tok/s", "decimals": 0},
    }


def _servers() -> p.Json:
    return p.table(
        "Servers, the worst first",
        p.Query(_worst()),
        p.Query(q.by_server(q.shown(q.ranked("sglang_tuning_queued_requests")), "sum")),
        p.Query(q.by_server(q.shown(q.ranked("sglang_tuning_running_requests")), "sum")),
        p.Query(q.by_server(q.shown(q.ranked("sglang_tuning_token_usage_ratio")))),
        p.Query(q.while_there(f"({q.quantiles('0.95', *FIRST, by=q.PLACE)})")),
        p.Query(q.while_there(f"({q.present_retractions(*q.PLACE)})")),
        p.Query(q.while_there(q.generated_tokens("5m"))),
        p.Query(q.while_there(f"1000 * ({q.quantiles('0.95', *BETWEEN, by=q.PLACE)})")),
        no_value="unknown",
        worst_first="Value #A",
        metric="sglang_tuning_verdict",
        description="What limits each server and the flag to change, by the tuning guide; the most severe first, and of those"
        " the one that was limited for the longest part of the time shown. Click on a server for its board. Usage is that of the fullest pool, latencies and"
        f" tokens those of the last 5 minutes, retractions those of the last 10 minutes (the guide tolerates {GUIDE.retractions_per_minute:.0f}"
        " a minute). What a server does not report is unknown.",
        columns=_columns(),
    )


# --- since when ------------------------------------------------------------------------------------------------------


def _since() -> p.Json:
    return p.state_timeline(
        "How each server was doing",
        p.Query(f"max by (instance) ({q.verdict()})", "{{instance}}"),
        metric="sglang_tuning_verdict",
        no_value=NO_EXPORTER,
        mappings=p.texts(LEVELS),
        description="One line for each server: red is down, stuck or out of memory, amber is limited by one of the"
        " guide's figures, blue could be better, green needs nothing, grey is without a verdict.",
    )


# --- server by server ------------------------------------------------------------------------------------------------


def _lines(
    title: str,
    expr: str,
    metric: str,
    says: str,
    *,
    unit: str = "short",
    no_value: str = p.NOT_REPORTED,
    ceiling: float | None = None,
) -> p.Json:
    """Draw the five servers with the largest mean in the time shown, the largest in the first colour."""
    mean = f"(avg by ({q.ON}) (avg_over_time(({expr})[$__range:{q.LOOK_STEP}] @ end())) > 0)"
    places = [f"topk({place}, {mean})" for place in range(1, LARGEST + 1)]
    one = [places[0], *(f"({many} unless {fewer})" for fewer, many in pairwise(places))]
    return p.timeseries(
        title,
        *(
            p.Query(f"max by ({q.ON}) ({expr}) and on ({q.ON}) {each}", "{{instance}}", p.painted(colour))
            for each, colour in zip(one, p.COLOURS, strict=False)
        ),
        unit=unit,
        ceiling=ceiling,
        metric=metric,
        description=says,
        no_value=no_value,
        fill=0,
    )


def _load() -> PanelRow:
    breaches = q.own("sglang_tuning_latency_breaches_total")
    seen = q.own("sglang_tuning_latency_observations_total")
    return PanelRow(
        8,
        (
            _lines(
                "Estimated wait in the queue",
                q.by_server(f"{q.ranked('sglang_tuning_queue_wait_seconds')} < Inf"),
                "sglang_tuning_queue_wait_seconds",
                "Requests waiting divided by requests admitted per second. The guide counts requests; a person waits"
                " seconds. One long queue beside empty ones is a matter of routing.",
                unit="suffix: s",
                no_value="No wait in this time",
            ),
            _lines(
                "Slower than the objective",
                q.by_server(q.ratio(q.rate(breaches), q.rate(seen), f" by ({q.ON}, latency)")),
                "sglang_tuning_latency_breaches_total",
                "Share of first tokens or of gaps between tokens, whichever is worse, that took longer than the objective"
                " of the profile. The guide trades this for throughput.",
                unit="percentunit",
                no_value="None in this time, or only logs are read",
            ),
            _lines(
                "Retractions per minute",
                q.retractions(*q.PLACE),
                "sglang_tuning_retraction_events_total",
                f"Times the KV cache was full and running requests went back, over 10 minutes. The guide tolerates about"
                f" {GUIDE.retractions_per_minute:.0f} a minute.",
                no_value="None in this time",
            ),
        ),
    )
