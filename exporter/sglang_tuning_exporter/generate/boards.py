"""The Grafana boards: what each shows and why. `files` gives the exact text of every committed board."""

from __future__ import annotations

import json

from sglang_tuning_exporter.generate.panels import (
    BAD,
    GOOD,
    NEUTRAL,
    NOT_TOLD,
    QUIET,
    WATCH,
    Chapter,
    Json,
    Query,
    Shelf,
    Style,
    annotation,
    board,
    bound_line,
    choice,
    measured,
    named,
    native,
    own,
    painted,
    per_rank,
    ranked,
    stat,
    state_timeline,
    table,
    texts,
    threshold,
    timeseries,
    words,
)
from sglang_tuning_exporter.guide.diagnosis import Diagnosis, Severity
from sglang_tuning_exporter.guide.profiles import PROFILES
from sglang_tuning_exporter.guide.table import ALERTS
from sglang_tuning_exporter.signals import STATES, Signal

GUIDE_URL = "https://docs.sglang.io/docs/advanced_features/hyperparameter_tuning"
GUIDE = PROFILES["offline"]  # the profile the guide speaks of; its figures appear in descriptions, never in queries

SMALL = {"titleSize": 14, "valueSize": 30}
HEALTHY = "Nothing to change"
NO_EXPORTER = "No answer from the exporter"
NO_WORK = "No requests in this time"

SEVERITIES: dict[Severity, str] = {"critical": BAD, "warning": WATCH, "info": NEUTRAL}

# state -> words and colour, the same on every panel. A state's number on the timeline is its place in this table.
STATE_WORDS: dict[str, tuple[str, str]] = {
    "idle": ("idle", QUIET),
    "unknown": ("not known", "#3f434d"),
    "serving": ("serving", NEUTRAL),
    "stuck": ("stuck", BAD),
    "empty": ("nobody waits", "light-blue"),
    "below_range": ("below the range", NEUTRAL),
    "in_range": ("in range", GOOD),
    "above_range": ("too many wait", WATCH),
    "below_target": ("room in the pool", NEUTRAL),
    "at_target": ("pool well used", GOOD),
    "no_queue": ("nobody waits", "light-blue"),
    "held_back": ("held back", WATCH),
    "running_limit": ("at the running limit", "yellow"),
    "pool_full": ("pool full", GOOD),
    "recovering": ("recovering from retractions", WATCH),
    "hybrid_pool_full": ("second pool full", WATCH),
    "grammar_queue": ("waiting for grammars", "yellow"),
    "pd_queue": ("waiting for the other side", "yellow"),
    "prefill_bound": ("prompts fill the batches", "yellow"),
    "replayed": ("graph replayed", GOOD),
    "beyond_captured": ("batch beyond the graphs", WATCH),
    "eager": ("without graph", "yellow"),
    "disabled": ("graphs disabled", "light-blue"),
    "unsupported": ("no graphs on this device", "light-blue"),
}
SIGNAL_TITLES: dict[Signal, str] = {
    "activity": "server",
    "queue": "queue",
    "token_usage": "token usage",
    "admission": "admission",
    "cuda_graph": "CUDA graph",
}


def files() -> dict[str, str]:
    """Give the repo-relative path -> exact text of every board; the same bytes at every call."""
    return {
        f"dashboards/{made['uid']}.json": json.dumps(made, indent=2, ensure_ascii=False) + "\n" for made in (tuning(),)
    }


def tuning() -> Json:
    """Build the board of one server: what limits it, since when, what clients feel, whether to believe it."""
    return board(
        "sglang-tuning",
        "SGLang tuning",
        description="What limits this SGLang server now, and which flag to change: the figures of SGLang's tuning"
        " guide, read all the time.",
        chapters=(
            Chapter("What limits it now", (_answer(), _figures())),
            Chapter("What holds requests back", (*_queue_and_pool(), _shares(), _states())),
            Chapter("How it decodes", (_decoding(),)),
            Chapter("What clients feel", (_latency(), _traffic())),
            Chapter("Can this board be believed?", (_health(),)),
        ),
        variables=variables(),
        annotations=(
            annotation(
                "Server started", f"increase({own('sglang_tuning_server_starts_total')}[$__rate_interval]) > 0", NEUTRAL
            ),
            annotation(
                "Out of memory", f"increase({own('sglang_tuning_out_of_memory_total')}[$__rate_interval]) > 0", BAD
            ),
        ),
        links=(
            {
                "type": "link",
                "title": "The tuning guide",
                "url": GUIDE_URL,
                "icon": "doc",
                "targetBlank": True,
                "tooltip": "",
                "tags": [],
                "asDropdown": False,
                "includeVars": False,
                "keepTime": False,
            },
        ),
    )


def variables() -> tuple[Json, ...]:
    """Build what every board lets people choose: job, one exporter (and so one server), model, DP rank."""
    build = "sglang_tuning_build_info"
    return (
        choice(
            "job",
            "Job",
            f"label_values({build}, job)",
            "Prometheus job that scrapes the exporter",
            all_value=".+",
            multi=True,
        ),
        choice(
            "instance",
            "Instance",
            f'label_values({build}{{job=~"$job"}}, instance)',
            "One exporter, and so one SGLang server",
        ),
        choice(
            "model_name",
            "Model",
            f"label_values({own('sglang_tuning_server_info')}, model_name)",
            "For the latencies and token rates that SGLang counts by model",
            all_value=".*",
        ),
        choice(
            "dp_rank",
            "DP rank",
            f"label_values({own('sglang_tuning_queued_requests')}, dp_rank)",
            "Empty where the server has no data-parallel ranks",
            all_value=".*",
            multi=True,
        ),
    )


# --- what limits it now ----------------------------------------------------------------------------------------------


def _state(signal: Signal, state: str) -> str:
    return ranked("sglang_tuning_state", f'signal="{signal}"', f'state="{state}"')


def _headline(row: Diagnosis) -> str:
    said = row.id.removesuffix("_any").replace("_", " ").capitalize()
    return said.replace("Cuda", "CUDA")


def _named(expr: str, diagnosis: str) -> str:
    return f'label_replace({expr}, "diagnosis", "{diagnosis}", "", "")'


def _active() -> str:
    """Ask for what holds now: the exporter's findings, and the two of a server that gives it nothing to judge."""
    reason = own("sglang_tuning_scrape_error_info", 'reason="metrics_disabled"')
    expected = own("sglang_tuning_scrape_error_info", 'reason=~"metrics_disabled|not_ready"')
    down = f"max({own('sglang_tuning_up')}) == 0 unless on () max({expected}) == 1"
    found = f"max by (diagnosis) ({own('sglang_tuning_diagnosis_active')} == 1)"
    return f"({found} or {_named(down, 'server_down')} or {_named(f'max({reason}) == 1', 'metrics_disabled')})"


def _answer() -> Shelf:
    active = own("sglang_tuning_diagnosis_active")
    verdict = " or on () ".join(
        (
            _active(),
            _named(f"min({_state('activity', 'idle')}) == 1", "idle"),
            _named(f"min({_state('activity', 'unknown')}) == 1", "unknown"),
            _named(f"max({active}) == 0", "healthy"),
        )
    )
    looks: dict[str, Style] = {row.id: named(_headline(row), SEVERITIES[row.severity]) for row in ALERTS}
    looks |= {
        "healthy": named(HEALTHY, GOOD),
        "idle": named("Idle: nothing to judge", QUIET),
        "unknown": named("Nothing heard of the server", QUIET),
    }
    tile = stat(
        "What limits it now",
        Query(verdict, "{{diagnosis}}"),
        text="name",
        fill=True,
        unit="none",
        no_value=NO_EXPORTER,
        names=looks,
        sizes={"titleSize": 18, "valueSize": 18},
        metric="sglang_tuning_diagnosis_active",
        description="The diagnoses of the tuning guide that hold now. The guide acts on what happens frequently; here"
        " that is more than half of the last ten minutes of serving time. Green: nothing to change. Grey:"
        " the server is idle, or nothing was heard of it.",
    )
    return Shelf(6, (tile, _advice(), _server()), (5, 12, 7))


def _advice() -> Json:
    # The values become labels, so that one query gives the whole table and there is no empty frame to join.
    tried = f'count_values by (diagnosis, arg) ("try", {own("sglang_tuning_recommended_arg")})'
    now = f'count_values by (arg) ("now", {own("sglang_tuning_server_arg")})'
    both = f"{tried} * on (arg) group_left (now) {now}"
    # Rows for which no number follows carry the diagnosis itself in `arg` and `try`;
    # the columns' mappings turn it into the words of the table of diagnoses.
    wordy = f"{_active()} unless on (diagnosis) {own('sglang_tuning_recommended_arg')}"
    for label in ("arg", "try"):
        wordy = f'label_replace({wordy}, "{label}", "$1", "diagnosis", "(.*)")'
    healthy = _named(f"max({own('sglang_tuning_diagnosis_active')}) == 0", "healthy")
    for label in ("arg", "try"):
        healthy = f'label_replace({healthy}, "{label}", "-", "", "")'
    # An empty table says "No data" in some versions of Grafana, so that a healthy server has a row too.
    rows = f"({both}) or ({tried} unless on (arg) {now}) or ({wordy}) or on () ({healthy})"
    # a label that no row carries would be no column
    expr = f'label_replace({rows}, "now", "-", "now", "")'
    because: dict[str, tuple[str, str | None]] = {row.id: (_headline(row), None) for row in ALERTS}
    because["healthy"] = (HEALTHY, None)
    change: dict[str, tuple[str, str | None]] = {
        row.id: (f"{row.turn.direction} {row.turn.arg}".strip(), None) for row in ALERTS
    }
    instead: dict[str, tuple[str, str | None]] = {row.id: (row.turn.fallback, None) for row in ALERTS}
    return table(
        "What to change",
        Query(expr),
        no_value=NO_EXPORTER,
        metric="sglang_tuning_recommended_arg",
        description="Each diagnosis that holds now, the server argument it turns, its value now and the value to try"
        " next. The guide moves one flag at a time, in small steps; where no number follows from what is"
        " known, it says in words what to do.",
        columns={
            "diagnosis": {"displayName": "Because", "mappings": texts(because), "custom.width": 185},
            "arg": {"displayName": "Change", "mappings": texts(change), "custom.width": 185},
            "now": {"displayName": "Now", "custom.width": 56},
            "try": {
                "displayName": "Try",
                "mappings": texts(instead),
                "color": {"mode": "fixed", "fixedColor": GOOD},
                "custom.cellOptions": {"type": "color-text", "wrapText": True},
                "custom.wrapText": True,
            },
        },
    )


def _server() -> Json:
    info = f"group by (version, model_name, profile) ({own('sglang_tuning_server_info')})"
    sources = f"group by (metrics, log) ({own('sglang_tuning_sources_info')})"
    labels: dict[str, tuple[str, str | None]] = {
        "version": ("SGLang", None),
        "model_name": ("Model", None),
        "profile": ("Judged as", None),
        "metrics": ("Metrics", None),
        "log": ("Log", None),
    }
    return table(
        "Server",
        Query(f"{info} * on () group_left (metrics, log) {sources} or on () {info}"),
        no_value="Not known yet",
        header=False,
        labels_as_rows=True,
        metric="sglang_tuning_server_info",
        description="What is running, what it is judged as, and what the exporter reads of it. The same figure means"
        " different things for different uses: the guide's queue of a hundred is good for a batch job and"
        " bad for a chat.",
        columns={"label": {"mappings": texts(labels), "custom.width": 84}, "value": {}},
    )


def _figures() -> Shelf:
    queued = f"sum({ranked('sglang_tuning_queued_requests')})"
    usage = f"max({ranked('sglang_tuning_token_usage_ratio')})"
    covered = f"avg({ranked('sglang_tuning_cuda_graph_coverage_ratio')})"
    memory = f"min({ranked('sglang_tuning_available_gpu_memory_bytes')})"
    retractions = f"sum(rate({ranked('sglang_tuning_retraction_events_total')}[5m])) * 60"

    def is_state(signal: Signal, state: str) -> tuple[str, str]:
        return f"max({_state(signal, state)}) == 1", STATE_WORDS[state][0]

    colours = dict(STATE_WORDS.values()) | {
        "covered": GOOD,
        "not covered": WATCH,
        "too little": BAD,
        "more than needed": WATCH,
        "as it should be": GOOD,
        "too often": WATCH,
        "none": GOOD,
        "tolerated": GOOD,
    }

    def figure(title: str, expr: str, description: str, metric: str, *, unit: str, decimals: int) -> Json:
        looks = {text: painted(colour) for text, colour in colours.items() if f'"{text}"' in expr}
        return stat(
            title,
            Query(expr, "{{verdict}}"),
            description=description,
            metric=metric,
            unit=unit,
            no_value=NOT_TOLD,
            names=looks,
            decimals=decimals,
            sizes=SMALL,
        )

    # Not the state of this moment: that is idle when nothing runs.
    disabled = ranked("sglang_tuning_state_seconds_total", 'signal="cuda_graph"', 'state="disabled"')
    memory_low = threshold("available_gpu_memory_bytes", "lower")
    memory_high = threshold("available_gpu_memory_bytes", "upper")
    queue_tile = figure(
        "Queued requests",
        words(
            queued,
            *(is_state("queue", state) for state in ("above_range", "in_range", "below_range", "empty", "idle")),
            otherwise="waiting",
        ),
        f"Requests that wait to run. The guide wants {GUIDE.queue_lower:.0f} to {GUIDE.queue_upper:.0f} of"
        " them when throughput counts: fewer, and the client is too slow; more, and scheduling costs too"
        " much. An online server is judged by the wait it means.",
        "sglang_tuning_queued_requests",
        unit="locale",
        decimals=0,
    )
    usage_tile = figure(
        "Token usage",
        words(
            usage,
            is_state("token_usage", "at_target"),
            is_state("admission", "held_back"),
            is_state("token_usage", "below_target"),
            is_state("token_usage", "idle"),
            otherwise="used",
        ),
        f"Share of the KV cache in use, of the fullest pool. Above {GUIDE.token_usage_target} the pool is"
        " well used; the guide calls admission too cautious when it stays below while requests wait.",
        "sglang_tuning_token_usage_ratio",
        unit="percentunit",
        decimals=0,
    )
    graph_tile = figure(
        "CUDA graphs used",
        words(
            covered,
            (f"{covered} >= {threshold('cuda_graph', 'lower')}", "covered"),
            (f"sum(increase({disabled}[$__range])) > 0", STATE_WORDS["disabled"][0]),
            (f"{covered} < {threshold('cuda_graph', 'lower')}", "not covered"),
            otherwise="replayed",
        ),
        "Share of decode batches that replayed a captured graph. The guide wants nearly all; a batch"
        " larger than the largest captured one runs without and slower. Whether graphs are disabled is"
        " judged in the time shown.",
        "sglang_tuning_cuda_graph_coverage_ratio",
        unit="percentunit",
        decimals=0,
    )
    memory_tile = figure(
        "GPU memory left",
        words(
            memory,
            (f"{memory} < {memory_low}", "too little"),
            (f"{memory} > {memory_high}", "more than needed"),
            (f"{memory} >= {memory_low}", "as it should be"),
            otherwise="left",
        ),
        f"GPU memory free after start-up, of the rank with the least. Below {GUIDE.reserve_lower_gb:.0f}"
        f" GB the guide expects it to run out; above {GUIDE.reserve_upper_gb:.0f} GB it could have held"
        " more KV cache.",
        "sglang_tuning_available_gpu_memory_bytes",
        unit="bytes",
        decimals=1,
    )
    tolerated = threshold("retractions_per_minute", "upper")
    retraction_tile = figure(
        "Retractions",
        words(
            retractions,
            (f"{retractions} > {tolerated}", "too often"),
            (f"{retractions} == 0", "none"),
            (f"{retractions} <= {tolerated}", "tolerated"),
            otherwise="last 5 minutes",
        ),
        "How often running requests were thrown back into the queue because the KV cache was full, over"
        f" the last 5 minutes. The guide tolerates about {GUIDE.retractions_per_minute:.0f} a minute.",
        "sglang_tuning_retraction_events_total",
        unit="suffix: /min",
        decimals=1,
    )
    answers = stat(
        "Who answers",
        Query(f"min({own('sglang_tuning_up')})", "metrics"),
        Query(f"min({own('sglang_tuning_log_up')})", "log"),
        unit="none",
        no_value=NO_EXPORTER,
        mappings=texts({"1": ("answers", GOOD), "0": ("away", BAD)}),
        sizes={"titleSize": 14, "valueSize": 20},
        metric="sglang_tuning_up",
        description="Whether the last scrape of SGLang worked and its log can be read. Without them the other figures"
        " say nothing; the guide reads the log alone.",
    )
    return Shelf(4, (queue_tile, usage_tile, graph_tile, memory_tile, retraction_tile, answers))


# --- what holds requests back ----------------------------------------------------------------------------------------


def _queue_and_pool() -> tuple[Shelf, Shelf]:
    ratio = ranked("sglang_tuning_new_token_ratio")
    conservativeness = own("sglang_tuning_server_arg", 'arg="schedule_conservativeness"')
    start = f"clamp_max(0.7 * max({conservativeness}), 1)"  # SGLang's init_new_token_ratio
    queue = timeseries(
        "Queued requests",
        Query(threshold("queue", "lower"), "healthy from", bound_line(GOOD)),
        Query(
            threshold("queue", "upper"),
            "healthy up to",
            bound_line(GOOD) | {"custom.fillBelowTo": "healthy from", "custom.fillOpacity": 12},
        ),
        Query(per_rank(ranked("sglang_tuning_queued_requests")), "queued{{rank}}", measured(fillOpacity=0)),
        unit="short",
        log_scale=True,
        metric="sglang_tuning_queued_requests",
        no_value=NOT_TOLD,
        description="Requests that wait, against the range of the profile in force (the guide's"
        f" {GUIDE.queue_lower:.0f} to {GUIDE.queue_upper:.0f} where throughput counts). Below the lower"
        " line the client is the bottleneck; above the upper one scheduling costs too much.",
    )
    usage = timeseries(
        "Token usage by pool",
        Query(threshold("token_usage", "target"), "well used from", bound_line(GOOD)),
        Query(per_rank(ranked("sglang_tuning_token_usage_ratio"), by=("pool",)), "{{pool}}{{rank}}", measured()),
        unit="percentunit",
        ceiling=1,
        metric="sglang_tuning_token_usage_ratio",
        no_value=NOT_TOLD,
        description=f"Share of each KV pool in use. The guide wants it above {GUIDE.token_usage_target} while requests"
        " wait; below it, look for what holds them back.",
    )
    running = timeseries(
        "Running requests and their limit",
        Query(per_rank(ranked("sglang_tuning_running_requests_limit")), "limit{{rank}}", bound_line(WATCH)),
        Query(per_rank(ranked("sglang_tuning_running_requests")), "running{{rank}}", measured()),
        unit="short",
        metric="sglang_tuning_running_requests",
        no_value=NOT_TOLD,
        description="Requests in the running batch against the most that may run. Where the guide sees usage below"
        " its target with a queue, a batch at this line means that the limit holds them back, not"
        " admission.",
    )
    wait = timeseries(
        "Estimated wait in the queue",
        Query(threshold("queue", "wait_seconds"), "too long from", bound_line(WATCH)),
        Query(per_rank(f"{ranked('sglang_tuning_queue_wait_seconds')} < Inf"), "wait{{rank}}", measured()),
        unit="s",
        metric="sglang_tuning_queue_wait_seconds",
        no_value=NOT_TOLD,
        description="Requests waiting divided by requests admitted per second. The guide counts requests; an online"
        " server is judged by this wait. A gap means that requests wait and none is admitted.",
    )
    retractions = timeseries(
        "Retractions per minute",
        Query(threshold("retractions_per_minute", "upper"), "tolerated", bound_line(WATCH, drawStyle="line")),
        Query(
            f"sum(rate({ranked('sglang_tuning_retraction_events_total')}[$__rate_interval])) * 60",
            "retractions",
            painted("red"),
        ),
        Query(
            f"sum(rate({ranked('sglang_tuning_retracted_requests_total')}[$__rate_interval])) * 60",
            "requests thrown back",
            painted("purple", drawStyle="line", lineWidth=1, fillOpacity=0),
        ),
        unit="short",
        bars=True,
        smallest_step="1m",
        metric="sglang_tuning_retraction_events_total",
        no_value=NOT_TOLD,
        description="Times the KV cache was full and running requests went back to the queue, and how many requests"
        f" that were. The guide tolerates about {GUIDE.retractions_per_minute:.0f} a minute; when more,"
        " admit more cautiously.",
    )
    estimate = timeseries(
        "New token ratio",
        Query(start, "starts at", bound_line(QUIET)),
        Query(per_rank(ratio), "ratio{{rank}}", measured()),
        unit="percentunit",
        ceiling=1,
        metric="sglang_tuning_new_token_ratio",
        no_value=NOT_TOLD,
        description="Share of its max_new_tokens for which each running request is budgeted: what the guide's"
        " conservativeness scales. It jumps after a retraction and decays slowly; high long after the"
        " last one, it holds requests back.",
    )
    return Shelf(7, (queue, usage, running)), Shelf(7, (wait, retractions, estimate))


def _share(signal: Signal) -> Query:
    seconds = ranked("sglang_tuning_state_seconds_total", f'signal="{signal}"', 'state!~"idle|unknown"')
    spent = f"increase({seconds}[$__rate_interval])"
    return Query(f"sum by (state) ({spent}) / on () group_left () (sum({spent}) > 0)", "{{state}}")


def _state_looks(signal: Signal) -> dict[str, Style]:
    return {state: named(*STATE_WORDS[state]) for state in STATES[signal] if state not in ("idle", "unknown")}


def _shares() -> Shelf:
    queue = timeseries(
        "Serving time by length of the queue",
        _share("queue"),
        stacked=True,
        ceiling=1,
        unit="percentunit",
        smallest_step="1m",
        no_value=NO_WORK,
        names=_state_looks("queue"),
        metric="sglang_tuning_state_seconds_total",
        description="How the serving time was divided; idle time does not count. The guide acts on what happens"
        " frequently: more than half of it.",
    )
    admission = timeseries(
        "Serving time by what admission waited for",
        _share("admission"),
        stacked=True,
        ceiling=1,
        unit="percentunit",
        smallest_step="1m",
        no_value=NO_WORK,
        names=_state_looks("admission"),
        metric="sglang_tuning_state_seconds_total",
        description="Why waiting requests did not run: the pool was full (good: the guide wants that), the running"
        " limit was reached, prompts filled every batch, or none of these (held back: admission is too cautious).",
    )
    return Shelf(7, (queue, admission))


def _states() -> Shelf:
    numbers = {state: index for index, state in enumerate(STATE_WORDS)}

    def row(signal: Signal) -> Query:
        cases = (f"({_state(signal, state)} == 1) * {numbers[state]}" for state in STATES[signal])
        return Query(per_rank(" or ".join(cases)), SIGNAL_TITLES[signal] + "{{rank}}")

    timeline = state_timeline(
        "What it was doing",
        *(row(signal) for signal in STATES),
        no_value=NO_EXPORTER,
        metric="sglang_tuning_state",
        mappings=texts({str(number): STATE_WORDS[state] for state, number in numbers.items()}),
        description="One line for each thing the guide looks at. Green is what the guide wants, orange what it would"
        " change, blue is neither, grey is idle.",
    )
    return Shelf(7, (timeline,))


# --- how it decodes --------------------------------------------------------------------------------------------------


def _decoding() -> Shelf:
    batches = "sglang_tuning_decode_batches_total"
    graph = ranked(batches, 'graph="replayed"')
    replayed = f"sum(rate({graph}[$__rate_interval]))"
    coverage = timeseries(
        "CUDA graph coverage",
        Query(threshold("cuda_graph", "lower"), "covered from", bound_line(GOOD)),
        Query(f"{replayed} / (sum(rate({ranked(batches)}[$__rate_interval])) > 0)", "replayed", measured()),
        unit="percentunit",
        ceiling=1,
        metric=batches,
        no_value=NOT_TOLD,
        description="Share of decode batches that replayed a captured graph. The guide raises the largest captured"
        " batch when batches outgrow it, and lowers the static memory share with it.",
    )
    throughput = timeseries(
        "Generation throughput, as the server says it",
        Query(per_rank(ranked("sglang_tuning_generation_tokens_per_second")), "generated{{rank}}", measured()),
        unit="short",
        metric="sglang_tuning_generation_tokens_per_second",
        no_value=NOT_TOLD,
        description="Tokens generated per second, from the decode lines the guide reads. It stands still when the"
        " server is idle; the token rates below are counted and do not.",
    )
    return Shelf(7, (coverage, throughput))


# --- what clients feel -----------------------------------------------------------------------------------------------

QUANTILES = ((0.5, "p50", GOOD), (0.9, "p90", "yellow"), (0.99, "p99", "purple"))


def _quantiles(title: str, metric: str, description: str, *, no_value: str, by_rank: bool = False) -> Json:
    buckets = native(f"{metric}_bucket", *(('dp_rank=~"$dp_rank"',) if by_rank else ()))
    rates = f"sum by (le) (rate({buckets}[$__rate_interval]))"
    # `>= 0` drops the NaN of a time without requests
    queries = [
        Query(f"histogram_quantile({share}, {rates}) >= 0", name, painted(colour, fillOpacity=0))
        for share, name, colour in QUANTILES
    ]
    return timeseries(title, *queries, unit="s", metric=metric, description=description, no_value=no_value)


def _latency() -> Shelf:
    return Shelf(
        7,
        (
            _quantiles(
                "Time to first token",
                "sglang:time_to_first_token_seconds",
                "Wait until the first token, queue included. When it is long the guide"
                " looks at the queue first, then at long prompts.",
                no_value="No traffic",
            ),
            _quantiles(
                "Time between tokens",
                "sglang:inter_token_latency_seconds",
                "Time from one token to the next. It grows with the running batch: the guide"
                " lowers the running limit when it is too long.",
                no_value="No traffic",
            ),
            _quantiles(
                "Whole request",
                "sglang:e2e_request_latency_seconds",
                "From arrival to the last token. The guide trades this for throughput: more"
                " running requests finish more, each one later.",
                no_value="No traffic",
            ),
        ),
    )


def _traffic() -> Shelf:
    prompts, cached = native("sglang:prompt_tokens_total"), native("sglang:cached_tokens_total")
    generated = native("sglang:generation_tokens_total")
    cache = timeseries(
        "Prompt tokens found in the prefix cache",
        Query(
            f"sum(rate({cached}[$__rate_interval])) / (sum(rate({prompts}[$__rate_interval])) > 0)",
            "cached",
            measured(),
        ),
        unit="percentunit",
        ceiling=1,
        metric="sglang:cached_tokens_total",
        description="Share of prompt tokens that need no prefill. Where many requests share a prefix and this is low,"
        " the guide tries --schedule-policy lpm.",
    )
    tokens = timeseries(
        "Tokens per second",
        Query(f"sum(rate({prompts}[$__rate_interval]))", "prompt", painted(NEUTRAL)),
        Query(f"sum(rate({generated}[$__rate_interval]))", "generated", painted(GOOD)),
        unit="short",
        metric="sglang:generation_tokens_total",
        description="Tokens read and written, counted: what every change of a flag should be judged by. The guide"
        " tunes for throughput, and this is it.",
    )
    queue = _quantiles(
        "Time in the queue",
        "sglang:queue_time_seconds",
        "Measured wait of the requests that left the queue; those still waiting do not count."
        " The guide's healthy queue is one that this wait allows.",
        no_value="No traffic, or the server does not tell",
        by_rank=True,
    )
    return Shelf(7, (queue, cache, tokens))


# --- can this board be believed? -------------------------------------------------------------------------------------


def _health() -> Shelf:
    scrape = timeseries(
        "Scrape of SGLang",
        Query(f"max({own('sglang_tuning_scrape_duration_seconds')})", "duration", measured()),
        unit="s",
        no_value="SGLang is not scraped",
        metric="sglang_tuning_scrape_duration_seconds",
        description="How long SGLang took to answer the exporter. The guide needs no scrape; a slow one means a busy"
        " or stuck HTTP server.",
    )
    lines = timeseries(
        "Log lines per second",
        Query(f"sum by (kind) (rate({own('sglang_tuning_log_lines_total')}[$__rate_interval]))", "{{kind}}"),
        Query(
            f"sum(rate({own('sglang_tuning_log_unrecognised_total')}[$__rate_interval]))",
            "not recognised",
            painted(BAD),
        ),
        unit="short",
        no_value="No log is read",
        metric="sglang_tuning_log_lines_total",
        description="Lines read, by kind. The guide's figures are in the decode and prefill lines; lines that look"
        " like them and are not recognised mean a newer SGLang than this exporter knows.",
    )
    age = stat(
        "Last log line",
        Query(f"time() - max({own('sglang_tuning_log_last_line_timestamp_seconds')})", "ago"),
        unit="s",
        text="value",
        sizes=SMALL,
        no_value="No log is read",
        decimals=0,
        metric="sglang_tuning_log_last_line_timestamp_seconds",
        description="Time since the last line. The guide reads the log as it grows: silent for minutes under load,"
        " and the file is the wrong one or the server is stuck.",
    )
    failed = f"sum by (phase) (increase({own('sglang_tuning_out_of_memory_total')}[$__range]))"
    never = f'label_replace(sum({failed}) == 0, "verdict", "in this time", "", "")'
    memory = stat(
        "Out of memory",
        Query(f'label_replace({failed} > 0, "verdict", "in $1", "phase", "(.*)") or on () {never}', "{{verdict}}"),
        unit="none",
        sizes=SMALL,
        decimals=0,
        no_value="No log is read",
        mappings=texts({"0": ("never", GOOD)}),
        metric="sglang_tuning_out_of_memory_total",
        names={f"in {phase}": painted(BAD) for phase in ("prefill", "decode", "graph_capture", "startup", "unknown")},
        description="Times the server ran out of GPU memory in the time shown. The guide answers prefill with smaller"
        " chunks, decode with fewer running requests.",
    )
    starts = stat(
        "Starts of the server",
        Query(f"sum(increase({own('sglang_tuning_server_starts_total')}[$__range]))", "starts"),
        unit="none",
        decimals=0,
        text="value",
        sizes=SMALL,
        no_value="No log is read",
        mappings=texts({"0": ("none", None)}),
        metric="sglang_tuning_server_starts_total",
        description="Starts seen in the time shown, after the first. Every change the guide advises needs one; one"
        " that nobody made is a crash.",
    )
    return Shelf(6, (scrape, lines, age, memory, starts), (6, 6, 4, 4, 4))
