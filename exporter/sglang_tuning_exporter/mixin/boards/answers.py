"""The top of a server's board: what limits it, what to change, and the guide's figures as tiles."""

from __future__ import annotations

from sglang_tuning_exporter.diagnosis.promql import one_of
from sglang_tuning_exporter.diagnosis.table import DIAGNOSES
from sglang_tuning_exporter.mixin import panels as p
from sglang_tuning_exporter.mixin import queries as q
from sglang_tuning_exporter.mixin.board import PanelRow
from sglang_tuning_exporter.mixin.boards.common import GUIDE, NO_EXPORTER
from sglang_tuning_exporter.mixin.boards.words import (
    LEVELS,
    SEVERITIES,
    STATE_WORDS,
    changes,
    verdict_sentences,
    verdicts,
)
from sglang_tuning_exporter.state.profiles import GIGABYTE, ONE_MORE
from sglang_tuning_exporter.state.signals import Signal


def verdict_strip() -> PanelRow:
    """Return the verdict as a sentence with its figure, and since when it holds."""
    sentence = p.stat(
        "What limits it now",
        p.Query(q.with_figure(q.verdict(ended=True)), "{{verdict}}"),
        text="name",
        fill=True,
        no_value=NO_EXPORTER,
        names=verdict_sentences(),
        mappings=p.texts(LEVELS),
        sizes={"titleSize": 24, "valueSize": 24},
        metric="sglang_tuning_verdict",
        description="The most urgent diagnosis of the tuning guide that holds now, or the most severe alert that fires."
        " The guide acts on what happens frequently; here that is more than half of the last ten minutes of serving time."
        " Red: act now. Amber: requests are held back. Blue: could be better. Green: nothing to change. Grey: idle, or too little was seen."
        " Where the data ended before the time shown does, it is the last verdict.",
    )
    time = p.stat(
        "Since",
        p.Query(q.since(), "{{verdict}}"),
        p.Query(q.until(), "until", {"unit": "time:[until] MMM D, HH:mm"}),
        text="value",
        unit="time:MMM D, HH:mm",
        no_value=NO_EXPORTER,
        sizes={"valueSize": 18},
        metric="sglang_tuning_verdict",
        description="Since when the verdict has been what it is; the begin of the time shown where it has not changed in it."
        " The guide waits until a state is frequent, so that a verdict begins minutes after its cause. Until: when the data ended.",
    )
    return PanelRow(3, (sentence, time), (20, 4))


def answer() -> PanelRow:
    """Return the changes to make, and the alerts that fire."""
    return PanelRow(5, (_advice(), _alerts()), (15, 9))


def _alerts() -> p.Json:
    return p.table(
        "Firing alerts",
        p.Query(q.alerts()),
        worst_first="Value",
        no_value="No alert fires, or the rules are not loaded",
        metric="ALERTS",
        description="Alerts of this server that fire now, the most severe first. The guide's figures can be good while an"
        " objective is missed: both are shown.",
        columns={
            "severity": {
                "displayName": "Severity",
                "mappings": p.texts({str(name): (str(name), colour) for name, colour in SEVERITIES.items()}),
                "custom.width": 90,
                "custom.cellOptions": {"type": "color-background", "mode": "basic"},
            },
            "alertname": {"displayName": "Alert"},
        },
    )


def _advice() -> p.Json:
    # the verdict comes before the other findings
    limits = f'label_replace({q.verdict(ended=True)} * 0 + 2, "diagnosis", "$1", "verdict", "(.*)")'
    holds = f"{q.shown(q.own('sglang_tuning_diagnosis_active'))} == 1"
    # a server that hangs or fails is mended first
    chances = q.own(
        "sglang_tuning_diagnosis_active", one_of("diagnosis", tuple(row.id for row in DIAGNOSES if row.is_chance))
    )
    urgent = q.own(q.VERDICT, one_of("verdict", tuple(row.id for row in DIAGNOSES if row.comes_first)))
    holds = f"({holds} unless on ({q.ON}, diagnosis) ({chances} and on ({q.ON}) {urgent}))"
    found = f"max by ({q.ON}, diagnosis) ({limits} or on ({q.ON}, diagnosis) ({holds}))"
    # Without a flag, `advice` is the diagnosis; the column's mapping has its words.
    in_words = f'label_replace({found}, "advice", "$1", "diagnosis", "(.*)")'
    because = {name: text for name, (text, _) in verdicts().items()}
    turned = f"{q.every_advice()} * on ({q.ON}, diagnosis) group_left () {found}"
    return p.table(
        "What to change",
        p.Query(f"topk by ({q.ON}, advice) (1, {turned} or on ({q.ON}, diagnosis) {in_words})"),
        worst_first="Value",
        no_value=NO_EXPORTER,
        metric="sglang_tuning_recommendation_timestamp_seconds",
        description="Each diagnosis that holds now and the server argument to change: its value now and the value to"
        " try next; a change that several of them ask for stands once, beside the most urgent. The guide moves one flag"
        " at a time, in small steps; where no figure follows from what is"
        " known, it says in words what to do.",
        columns={
            "diagnosis": {"displayName": "Because", "mappings": p.texts(because), "custom.width": 215},
            "advice": {"displayName": "Change", "mappings": p.texts(changes()), **p.WRAPPED},
        },
    )


def server() -> p.Json:
    """Return version, model and profile of the server, and its data sources."""
    info = f"group by (version, model_name, profile) ({q.latest(q.own('sglang_tuning_server_info'))})"
    sources = f"group by (metrics, log) ({q.latest(q.own('sglang_tuning_sources_info'))})"
    labels = {
        "version": "SGLang",
        "model_name": "Model",
        "profile": "Profile",
        "metrics": "Metrics",
        "log": "Log",
    }
    return p.table(
        "Server",
        p.Query(f"{info} * on () group_left (metrics, log) {sources} or on () {info}"),
        no_value="Not known yet",
        header=False,
        labels_as_rows=True,
        metric="sglang_tuning_server_info",
        description="What runs, its profile, and its data sources. The same figure means"
        " different things for different uses: the guide's queue of a hundred is good for a batch job and"
        " bad for a chat.",
        columns={"label": {"mappings": p.texts(labels), "custom.width": 84}, "value": {}},
    )


# --- the figures as tiles --------------------------------------------------------------------------------------------

_COLOURS = dict(STATE_WORDS.values()) | {
    "covered": p.GOOD,
    "not covered": p.WATCH,
    "too little": p.BAD,
    "more than needed": p.WATCH,
    "as it should be": p.GOOD,
    "too often": p.WATCH,
    "none": p.GOOD,
    "tolerated": p.GOOD,
}


def _is(signal: Signal, state: str) -> tuple[str, str]:
    held = q.last_known(q.ranked("sglang_tuning_state", f'signal="{signal}"', f'state="{state}"'))
    return f"max({held}) == 1", STATE_WORDS[state][0]


def _figure(
    title: str, expr: str, description: str, metric: str, *, unit: str, decimals: int, no_value: str = p.NOT_REPORTED
) -> p.Json:
    looks = {text: p.painted(colour) for text, colour in _COLOURS.items() if f'"{text}"' in expr}
    return p.stat(
        title,
        p.Query(expr, "{{verdict}}"),
        description=description,
        metric=metric,
        unit=unit,
        no_value=no_value,
        names=looks,
        decimals=decimals,
    )


def figures() -> PanelRow:
    """Return the guide's five present figures with their judgement, and the data sources."""
    return PanelRow(4, (_queue(), _usage(), _retractions(), _graphs(), _memory(), _answers()))


def _queue() -> p.Json:
    states = ("above_range", "in_range", "below_range", "empty", "idle")
    empty, _ = _is("queue", "empty")
    return _figure(
        "Queued requests",
        q.words(
            f"sum({q.shown(q.ranked('sglang_tuning_queued_requests'))})",
            (f"{empty} and on () {q.threshold('queue', 'lower')}", STATE_WORDS["below_range"][0]),
            *(_is("queue", state) for state in states),
            otherwise="waiting",
        ),
        f"Requests that wait to run. The guide wants {GUIDE.queue_lower:.0f} to {GUIDE.queue_upper:.0f} of"
        " them when throughput counts: fewer, and the client is too slow; more, and scheduling costs too"
        " much. An online server is judged by the wait it means.",
        "sglang_tuning_queued_requests",
        unit="locale",
        decimals=0,
    )


def _usage() -> p.Json:
    return _figure(
        "Token usage",
        q.words(
            f"max({q.shown(q.ranked('sglang_tuning_token_usage_ratio'))})",
            *(_is("admission", state) for state in ("pool_full", "held_back")),
            *(_is("token_usage", state) for state in ("at_target", "below_target", "idle")),
            otherwise="used",
        ),
        f"Share of the KV cache in use, of the fullest pool. Above {GUIDE.token_usage_target} the pool is"
        " well used; the guide calls admission too cautious when it stays below while requests wait.",
        "sglang_tuning_token_usage_ratio",
        unit="percentunit",
        decimals=0,
    )


def _graphs() -> p.Json:
    ratio = q.ranked("sglang_tuning_cuda_graph_coverage_ratio")
    covered = f"avg({q.last_known(ratio)})"
    lower = q.threshold("cuda_graph", "lower")

    def was(states: str) -> str:
        """Look at the whole time range: at this moment the server may be idle."""
        seconds = q.ranked("sglang_tuning_state_seconds_total", 'signal="cuda_graph"', f'state=~"{states}"')
        return f"(sum(increase({seconds}[$__range])) > 0)"

    decoded = was("replayed|beyond_captured|eager")  # not the tokens of health checks on an idle server
    return _figure(
        "CUDA graphs used",
        q.words(
            f"avg({q.shown(ratio)})",
            (f"{covered} >= {lower} and on () {decoded}", "covered"),
            *((was(state), STATE_WORDS[state][0]) for state in ("disabled", "unsupported")),
            (f"{covered} < {lower} and on () {decoded}", "not covered"),
            otherwise="replayed",
        ),
        "Share of decode batches that replayed a captured graph. The guide wants nearly all; a batch"
        " larger than the largest captured one runs without and slower. An idle server is not judged; whether graphs are"
        " disabled is looked up in the time shown.",
        "sglang_tuning_cuda_graph_coverage_ratio",
        unit="percentunit",
        decimals=0,
        no_value="No decode batches",
    )


def _memory() -> p.Json:
    available = q.ranked("sglang_tuning_available_gpu_memory_bytes")
    memory = f"min({q.last_known(available)})"
    low, high = (q.threshold("available_gpu_memory_bytes", bound) for bound in ("lower", "upper"))
    return _figure(
        "GPU memory left",
        q.words(
            f"min({q.shown(available)}) / {GIGABYTE}",
            (f"{memory} < {low}", "too little"),
            (f"{memory} > {high}", "more than needed"),
            (f"{memory} >= {low}", "as it should be"),
            otherwise="left",
        ),
        f"GPU memory free after start-up, of the rank with the least. Below {GUIDE.reserve_lower_gb:.0f}"
        f" GB the guide expects it to run out; above {GUIDE.reserve_upper_gb:.0f} GB it could have held"
        " more KV cache. Reported at a start that the exporter saw, on a GPU.",
        "sglang_tuning_available_gpu_memory_bytes",
        unit="suffix: GB",
        decimals=1,
    )


def _retractions() -> p.Json:
    per_minute = q.while_there(f"({q.present_retractions()})", "")
    # `increase` stretches ten events in ten minutes to more than one a minute: the rule allows for one event
    tolerated = f"{q.threshold('retractions_per_minute', 'upper')} + {ONE_MORE}"
    return _figure(
        "Retractions",
        q.words(
            per_minute,
            (f"{per_minute} > {tolerated}", "too often"),
            (f"{per_minute} == 0", "none"),
            (f"{per_minute} <= {tolerated}", "tolerated"),
            otherwise="last 10 minutes",
        ),
        "How often running requests were put back into the queue because the KV cache was full, over"
        f" the last 10 minutes and all DP ranks; without a log, the requests. The guide tolerates about"
        f" {GUIDE.retractions_per_minute:.0f} a minute.",
        "sglang_tuning_retraction_events_total",
        unit="suffix: /min",
        decimals=1,
    )


def _answers() -> p.Json:
    return p.stat(
        "Data sources",
        p.Query(f"min({q.last_known(q.own('sglang_tuning_up'))})", "metrics"),
        p.Query(f"min({q.last_known(q.own('sglang_tuning_log_up'))})", "log"),
        no_value=NO_EXPORTER,
        mappings=p.texts({"1": ("up", p.NEUTRAL), "0": ("down", p.BAD)}),
        sizes={"titleSize": 14, "valueSize": 20},
        metric="sglang_tuning_up",
        description="Whether the last scrape of SGLang worked and its log can be read. Without them there are no other"
        " figures; the guide uses the log alone.",
    )
