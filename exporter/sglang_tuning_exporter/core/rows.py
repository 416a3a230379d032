"""The table of diagnoses: what is measured, against which limit, in which words, and what to change. Pure; causes first.

What a row measures is a function above its part of the table: None where the log does not show it. The row says beside which limit its
figure is bad, and whether it needs load: what is measured has enough of it, unless the row is for any. `judge` reads the table from top to
bottom: a row can be a consequence only of rows above it. Guide: SGLang's hyperparameter tuning guide.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, inf
from typing import Literal, TypeAlias

from sglang_tuning_exporter.config import profiles
from sglang_tuning_exporter.config.values import UsageError, suggestion
from sglang_tuning_exporter.core.findings import Change, Severity, Unit, Value, amount, capitalised
from sglang_tuning_exporter.core.server import USUAL_CAPTURED
from sglang_tuning_exporter.core.view import BURN_RATES, MOSTLY_PREFILL, SHARING, SHORTEST_TIMEOUT, View, counted
from sglang_tuning_exporter.sglang import flags
from sglang_tuning_exporter.sglang.metrics import Histogram

Measure: TypeAlias = Callable[[View], float | None]
Side: TypeAlias = Literal["above", "below"]
ONLINE = ("online", "long_context", "multi_turn")


@dataclass(frozen=True, slots=True)
class When:
    """The condition of a row: a figure on a side of a limit, which is a number, a threshold's name, or a function of what is seen.

    kind: a `share` of the serving time, a `rate` per minute of it, an `event` in the stretch, or another `fact`. counts: the sums that it is
    about. name: of the figure, in words.
    """

    kind: Literal["share", "rate", "event", "fact"]
    measure: Measure = lambda _: None  # what no exporter sees
    counts: tuple[str, ...] = ()
    side: Side = "above"
    limit: float | str | Callable[[View], float] = 0.0
    name: str = ""
    unit: Unit = "count"
    needs: str = "load"

    def bound(self, view: View) -> float | None:
        """Return the limit in force; None where the profile has none."""
        limit = self.limit
        if callable(limit):
            return limit(view)
        found: float | None = getattr(view.profile, limit) if isinstance(limit, str) else limit
        return found


@dataclass(frozen=True, slots=True)
class Row:
    """One diagnosis. Its texts are templates over the thresholds and figures in force."""

    id: str
    when: When
    summary: str
    guide: str
    remedy: Change  # without an argument advice to people; its words stand where no value can be computed
    seen: str = ""  # what was seen; `{value}` is the figure with its unit. Without it by the figure's name
    sign: str = ""  # the same where there is no figure to compare, or where it would say less
    says: Callable[[View], str] = lambda _: ""  # the figure, where more than that is known
    remark: Callable[[View], str] = lambda _: ""  # what speaks against it, or was assumed
    severity: Severity = "info"
    title: str = ""  # of a notification, a few words; without it there is no alert
    alert: str = ""  # its name; by the id where it is not given
    past: str = ""  # the summary of what is over, with `{until}` and `{times}`; without a time only of an alert
    unless: tuple[str, ...] = ()  # rows that explain the same evidence better
    causes: tuple[str, ...] = ()  # rows that this one can follow from
    borrows: bool = False  # it takes the advice of its causes
    needs_advice: bool = False  # without a change that is left it is no finding
    protects: str = ""  # what no other finding's change may take while this one holds: `memory`, `requests`
    profiles: tuple[str, ...] = ()
    after: float = 300.0  # seconds of the alert clock, as `until`
    until: float = 300.0
    chance: bool = False  # an opportunity
    limits: Callable[[View], bool] | None = None  # when it can be the verdict; without it, unless it is a chance
    any_load: bool = False  # said of a start or an event, without load
    at_once: bool = False  # it heads what is said of too little load

    def is_limit(self, view: View) -> bool:
        """Whether it can be the verdict where it holds."""
        return not self.chance if self.limits is None else self.limits(view)

    def over(self, until: str = "", times: str = "") -> str:
        """Return what had happened, in words: until when and how often, where that is given."""
        words = self.past if times else self.past.replace(" {times}", "").replace(", the last time at {until}", "")
        words = words if until else _UNTIL.sub("", words)
        return capitalised(words.replace("{until}", until).replace("{times}", times))


_UNTIL = re.compile(r"^Until \{until\} |,? until \{until\}")
_OFTEN = "frequent_share"
_QUEUES = ("queue/in_range", "queue/above_range", "queue/below_range")
OFTEN_DOWN = 0.1  # of two hours
MANY_FAILED, MOSTLY_REFUSED = 0.05, 0.5  # of the requests; from the latter on nothing is well
NO_SHARING = 0.02  # of the prompt tokens
LARGE_WEIGHTS, SMALL_BATCH = 0.3, 32.0  # of a GPU's memory; the default of --torch-compile-max-bs
CEILING = 1.43  # min(0.7 x conservativeness, 1): above it the flag has no effect
USUAL_WATCHDOG_SECONDS = 300.0  # --watchdog-timeout
HEALTH_CHECK_SECONDS = 20.0  # SGLANG_HEALTH_CHECK_TIMEOUT
MANY_OUTAGES = 3  # of two hours
RARE_WAIT = 0.1  # of the time, on the least busy DP rank
TRANSFERS_A_MINUTE, RARELY_FAILED = 0.5, 0.01  # failed ones; of the requests
LEAST_DRAFTED, DRAFT_COST, USUAL_DRAFTS = 0.99, 0.014, 3.0  # tokens a step; of a pass for each draft step; draft steps
FEW = 5  # requests that failed for other reasons are no finding
SMALL_MODEL_GB = 20.0  # of all weights
SEVERAL_EACH = 1.5  # requests of the scheduler for each over HTTP
LONG_PREFILL = 512.0  # prompt tokens for each late gap, from which on prefill makes it
LATE_TIMES, SLOW_BURN_TIMES = 10.0, 6.0  # error budgets above which first tokens, and gaps between tokens, are late
MANY_GIVEN_UP = 0.333  # of the requests that ended
LARGE_BATCH, RARELY = 32.0, 0.25  # requests; of the time
ROOM_FOR_POOL, USUAL_FRACTION = 0.3, 0.88  # of a GPU's memory
DP_ATTENTION_GPUS = 8
FULL_BATCHES = 0.25  # of the prefill batches, at least, for a larger chunk to matter
TINY_CHUNK, SMALL_CHUNK = 512.0, 4096  # a chunk takes about as long as one of 1,024 tokens; what to set in its place
_MOE = re.compile(r"moe|mixtral|deepseek-?_?(?:v[23]|r1)|-a\d+(?:\.\d+)?b\b|kimi-k2|gpt-oss|grok|dbrx", re.IGNORECASE)
_LATENT = re.compile(r"deepseek-?_?(?:v[23]|r1)|kimi-k2", re.IGNORECASE)
_QUANTIZED = re.compile(
    r"fp8|fp4|awq|gptq|int[48]|w[48]a\d|bnb|gguf|marlin|quant|deepseek-?_?(?:v3|r1)|kimi-k2|gpt-oss", re.IGNORECASE
)
_look = partial(Change, "", "look")
_fact = partial(When, "fact")


def _share(signal: str, *states: str, name: str, needs: str = "load") -> When:
    counts = tuple(f"{signal}/{state}" for state in states)
    return When("share", lambda view: view.share(signal, *states), counts, "above", _OFTEN, name, "share", needs)


def _waits(reason: str, name: str, needs: str = "load") -> When:
    """Return the condition of a reason for which requests wait: less is enough where only several together make most of the time."""
    return replace(_share("admission", reason, name=name, needs=needs), limit=lambda view: view.reason_limit)


def _waits_often(view: View) -> bool:
    return view.waited_share > view.profile.frequent_share


def _mostly(view: View, signal: str, state: str) -> bool:
    return (view.share(signal, state) or 0.0) > view.profile.frequent_share


def _retracts(where: Callable[[View], bool] = lambda _: True, needs: str = "load") -> When:
    """Return the condition of many retractions, `where` they are those of this row."""
    return _fact(
        lambda view: view.retractions_a_minute if where(view) else None, limit=lambda view: view.retractions_tolerated,
        counts=("retractions",), name="retractions per minute of serving time", unit="per_minute", needs=needs,
    )  # fmt: skip


def _start(limit: str, side: Side = "above") -> When:
    """Return the condition of the memory that is free once a server has started."""
    return _fact(
        lambda view: view.facts.reserve_gb, side=side, limit=limit, name="available_gpu_mem at start-up", unit="GB", needs="the start",
    )  # fmt: skip


def _event(*counts: str, name: str) -> When:
    return When("event", lambda view: sum(view.totals[each] for each in counts), counts, name=name, needs="a log")


_failure = partial(Row, severity="critical", after=0.0, until=600.0, any_load=True, protects="memory")
_limit = partial(Row, severity="warning")
_hint = partial(Row, chance=True)
_chance = partial(_hint, needs_advice=True)
OUT_OF_MEMORY = (
    "no_kv_cache",
    "out_of_memory_prefill",
    "out_of_memory_decode",
    "graph_memory_short",
    "out_of_memory_any",
)
KILLS = ("scheduler_stuck", *OUT_OF_MEMORY)
RETRACTING = ("conservativeness_ineffective", "retracting_too_often")
WHY_REQUESTS_WAIT = (
    *RETRACTING, "hybrid_pool_full", "dp_imbalanced", "running_at_limit", "grammar_queue", "pd_queue",
    "admission_standing_still", "prefill_bound", "admission_too_conservative", "running_far_below_limit",
)  # fmt: skip
_CONSERVATIVENESS, _LIMIT, _FRACTION = "schedule_conservativeness", "max_running_requests", "mem_fraction_static"
_NOT_IN_GUIDE = "not in SGLang's guide: "
_FEWER = Change(
    "", "slow down", "send fewer requests at once, or add a replica",
    "Requests arrive faster than SGLang finishes them. Slow the clients down, or add a replica behind the router.",
    "another finding of this server names a flag: change it first",
)  # fmt: skip


def _rows(*rows: Row) -> tuple[Row, ...]:
    """Return rows with what follows from others of their fields: the alert's name, the unit of a share, and how the figure is said, the flag's name."""
    return tuple(map(_complete, rows))


def _complete(row: Row) -> Row:
    when, words = row.when, (_CAPITALS.get(word, word.capitalize()) for word in row.id.split("_"))
    is_share = when.unit == "count" and when.name.startswith(("share of", "serving time"))
    return replace(
        row,
        alert=row.alert or (f"SGLang{''.join(words)}" if row.title else ""),
        seen=row.seen or f"{{value}} of the {when.name}",
        sign=row.sign or (row.seen if row.seen and "{value}" not in row.seen else ""),
        remedy=replace(row.remedy, flag=f"--{row.remedy.arg.replace('_', '-')}" if row.remedy.arg else ""),
        when=replace(when, unit="share") if is_share else when,
    )


_CAPITALS = {"kv": "KV", "dp": "DP"}

# Failures


def _graph_memory(view: View) -> float | None:
    """GB that are missing after graph capture: all of it where the capture failed."""
    least, reserve = view.profile.reserve_least_gb, view.facts.reserve_gb
    if view.totals["out_of_memory.graph_capture"]:
        return least
    return 0.0 if reserve is None or view.facts.without_graph else max(least - reserve, 0.0)


def _hang(view: View) -> float | None:
    """Seconds in which requests were there and nothing moved: each line of a watchdog or a health check stands for those that it waited."""
    if view.stuck is not None:
        return view.stuck.seconds
    totals = view.totals
    longest = max((hang.seconds for hang in view.hangs), default=0.0) if totals["hangs"] else 0.0
    if totals["watchdogs"] and not longest:
        each = view.facts.size("watchdog_timeout") or USUAL_WATCHDOG_SECONDS
        return (HEALTH_CHECK_SECONDS if totals["health_failures"] else each) * totals["watchdogs"]
    return max(longest, view.silent_seconds if totals["health_failures"] else 0.0)


def _without_room(view: View) -> str:
    """Say what SGLang computes for the KV cache, and what leaves it no room."""
    facts, weights, left = view.facts, view.facts.weights_gb, view.facts.beside_weights_gb
    if facts.no_pool is None:
        return ""
    beside = f", which leaves {left:.4g} GB" if left is not None else ""
    held = f": the weights take {weights:.5g} GB of each GPU{beside}" if weights is not None else ""
    return f"SGLang computes a KV cache of {facts.no_pool:,.0f} tokens{held}"


def _failed_transfers(view: View) -> str:
    """Say how many requests failed, on which side, and what SGLang printed of one."""
    failed, line = view.failed_transfers, view.transfer
    why = f", with: {line.short.rstrip('.')}" if line is not None and line.text else ""
    side = f" on this {line.word} server" if line is not None and line.word else ""
    return f"{failed:,.0f} request{'' if failed == 1 else 's'} failed{side}{why}; {amount(view.per_minute(failed), 'per_minute')}"


def _transfers(view: View) -> float | None:
    """Requests that failed between the two servers of a pair, by the minute."""
    totals, failed = view.totals, view.failed_transfers
    if not failed and not view.facts.role:
        return None
    requests = max(totals["finished_requests"], totals["started"], failed)
    value = view.per_minute(failed)
    return value if failed > RARELY_FAILED * requests else min(value, TRANSFERS_A_MINUTE)


def _requests_failed(view: View) -> float | None:
    """The share of the requests that ended in an exception."""
    posts, failed = view.totals["generation_posts"], view.totals["server_errors"]
    return failed / (posts or view.totals["sequences"] + failed) if failed >= FEW else None


def _requests_refused(view: View) -> float | None:
    """The share of the requests that SGLang ended before their first token, by its log or by the page; not by a client, nor for their length."""
    totals = view.totals
    others = totals["aborted_requests"] + totals["too_long"] + totals["beyond_context"]
    found = (
        (totals["refused"], totals["sequences"]),
        (totals["tokenless_requests"] - others, totals["finished_requests"]),
    )
    return max((refused / max(all_, refused) for refused, all_ in found if refused >= FEW), default=None)


def _trouble(name: str) -> Measure:
    """Give whether a source is in trouble."""
    return lambda view: float(name in view.troubles)


def _out_of_memory(phase: str, guide: str, remedy: Change) -> Row:
    """Return the row of out-of-memory failures under load, in one phase."""
    failed = f"SGLang ran out of memory during {phase}."
    return _failure(
        id=f"out_of_memory_{phase}", title=f"out of memory in {phase}", past=failed, summary=failed, guide=guide, remedy=remedy,
        when=_event(f"out_of_memory.{phase}", name=f"out-of-memory failures in {phase}"),
        seen=f"{{value}} out-of-memory failure{{s}} in {phase}",
    )  # fmt: skip


FAILURES = _rows(
    _failure(
        id="no_kv_cache",
        title="no room for the KV cache",
        past="The weights left no room for the KV cache.",
        when=_event("no_pool", name="starts whose memory has no room for a KV cache"),
        summary="The weights leave no room for the KV cache.",
        seen="{value}",
        sign="its log shows a start whose memory has no room for a KV cache",
        says=_without_room,
        guide='"Tune --mem-fraction-static": weights and KV cache share this part of the memory',
        remedy=Change(
            "",
            "make room",
            "use more GPUs (--tp-size), or smaller weights (--quantization fp8, a quantized model)",
            "The KV cache gets what --mem-fraction-static leaves beside the weights, and that is nothing. Without a KV cache no request can run.",
            "another process holds the memory: check nvidia-smi",
        ),
    ),
    _out_of_memory(
        "prefill",
        guide='"Avoid out-of-memory errors": on OOM in prefill lower --chunked-prefill-size to 4096, then 2048',
        remedy=Change(
            "chunked_prefill_size",
            "lower",
            "4096, then 2048",
            "SGLang prefills prompts in chunks of this many tokens. A larger chunk needs more memory.",
            "the value is already 2048: then lower --mem-fraction-static",
            "Time to first token of long prompts rises.",
        ),
    ),
    _out_of_memory(
        "decode",
        guide='"Avoid out-of-memory errors": on OOM in decode lower --max-running-requests',
        remedy=Change(
            _LIMIT,
            "lower",
            "about three quarters of the last batch",
            "Fewer requests at once need less memory for activations.",
            "a single request does not fit: then lower --mem-fraction-static or --context-length",
            "Fewer requests run at once.",
        ),
    ),
    _failure(
        id="graph_memory_short",
        title="CUDA graphs leave no GPU memory",
        past="CUDA graphs left too little GPU memory free, or did not fit.",
        when=_fact(
            _graph_memory,
            counts=("out_of_memory.graph_capture",),
            name="GPU memory missing after graph capture, all of it where the capture failed",
            unit="GB",
            needs="a log",
        ),
        summary="CUDA graphs leave too little GPU memory free, or do not fit.",
        seen="graph capture ran out of memory, or left less than {reserve_least_gb} GB free",
        sign="graph capture ran out of memory, or left too little of the GPU's memory free",
        guide='"Avoid out-of-memory errors": lower --mem-fraction-static, or capture fewer or smaller CUDA graphs',
        remedy=Change(
            _FRACTION,
            "lower",
            "0.05 less, or lower --cuda-graph-max-bs",
            "SGLang captures CUDA graphs after it has allocated weights and KV cache; the graphs need memory of their own.",
            "the captured batch sizes never run: then lower --cuda-graph-max-bs instead",
            "The KV cache gets smaller.",
        ),
    ),
    _failure(
        id="out_of_memory_any",
        unless=("no_kv_cache",),
        title="out of GPU memory",
        past="SGLang ran out of GPU memory.",
        alert="SGLangOutOfMemory",
        when=_event("out_of_memory.startup", "out_of_memory.unknown", name="out-of-memory failures"),
        summary="SGLang ran out of GPU memory.",
        seen="{value} out-of-memory failure{s}",
        guide='"Avoid out-of-memory errors": lower --mem-fraction-static to 0.8 or 0.7; capture fewer CUDA graphs; use an FP8 KV cache or'
        " FP8 weights",
        remedy=Change(
            _FRACTION,
            "lower",
            "0.8, then 0.7",
            "Weights and KV cache take this share of GPU memory; the rest must hold CUDA graphs and activations.",
            "the weights alone do not fit: then use more GPUs (--tp-size) or --quantization fp8; or a request has too many images: then send"
            " fewer at once",
            "The KV cache gets smaller.",
        ),
    ),
    _failure(
        id="restart_loop",
        protects="",
        title="restarts again and again, {value} times in 30 min",
        past="SGLang kept restarting.",
        when=_fact(
            lambda view: view.totals["starts_recently"], limit=2.0, counts=("starts",), name="starts in 30 minutes"
        ),
        summary="SGLang keeps restarting.",
        seen="{value} starts in 30 minutes",
        guide=_NOT_IN_GUIDE + "the server must stay up before it can be tuned",
        remedy=_look(
            "read the last log lines before each start",
            "The server ends soon after each start. Most often it runs out of memory, or the supervisor's health check times out before the"
            " model is loaded.",
            "the restarts are planned, such as a rolling update of several servers behind one name",
        ),
        causes=OUT_OF_MEMORY,
    ),
    Row(
        id="scheduler_stuck",
        title="stuck: requests wait, nothing moves",
        severity="critical",
        after=60.0,
        any_load=True,
        when=_fact(
            _hang,
            counts=("hangs", "watchdogs", "health_failures"),
            name="time in which requests were there and nothing moved",
            unit="seconds",
            needs="a log",
        ),
        summary="SGLang hangs: it has requests but makes no progress.",
        past="SGLang hung until {until}: it had requests and made no progress.",
        seen="{value} in which nothing moved while requests were there",
        sign="requests are there and nothing moves, or a watchdog or health check of SGLang says so",
        guide=_NOT_IN_GUIDE + "save the evidence and restart the server",
        remedy=Change(
            "",
            "restart",
            "save the log and a stack dump (py-spy dump --pid of the process that hangs), then restart the server",
            "A process that hangs does not recover. The scheduler's watchdog ends the server after --watchdog-timeout seconds (default 300);"
            " no watchdog ends it when the tokenizer or the detokenizer hangs.",
            "the server was paused (/pause_generation); or the other server of a disaggregated pair is down: restart that one",
        ),
    ),
    _failure(
        id="crashed",
        title="crashed",
        severity="warning",
        protects="",
        when=_event("ends", name="ends that nobody asked for"),
        summary="SGLang has crashed.",
        past="SGLang crashed {times}, the last time at {until}.",
        seen="its log shows {value}",
        sign="its log shows a scheduler exception, a dead process or a failed start",
        says=lambda view: (
            view.ended if ": " in view.ended else f"that {view.ended or 'it ended'}"
        ),  # an error in its own words
        guide=_NOT_IN_GUIDE + "after a crash the server is down until its model is loaded again",
        remedy=_look(
            "read the lines just before it in the log, and the traceback beside it",
            "All that ran is lost, and an automatic restart can hide the cause.",
            "the processes were ended on purpose",
        ),
        causes=KILLS,
    ),
    Row(
        id="server_down",
        title="server down",
        severity="critical",
        any_load=True,
        when=_fact(
            lambda view: float(bool(view.down)) if view.down or view.scraped else None,
            name="1 while it does not answer",
            needs="metrics",
        ),
        summary="SGLang does not answer.",
        past="SGLang did not answer until {until}.",
        seen="{value}",
        sign="the last scrapes of SGLang failed, or its log shows its end",
        says=lambda view: view.down,
        guide=_NOT_IN_GUIDE + "the server must run before it can be tuned",
        remedy=_look(
            "save the log, read its last lines, and restart the server",
            "The process has ended, hangs, or is unreachable from the exporter. The exporter's page and sglang_tuning_scrape_error_info show"
            " how the scrape failed.",
            "the address given to the exporter is wrong: check --sglang-url",
        ),
        causes=(*KILLS, "crashed", "restart_loop"),
    ),
    _limit(
        id="not_sglang",
        title="not an SGLang server",
        past="The address given to the exporter was not that of an SGLang server.",
        alert="SGLangWrongAddress",
        any_load=True,
        when=_fact(_trouble("not_sglang"), name="1 while something else answers at its address", needs="metrics"),
        summary="The address given to the exporter is not that of an SGLang server.",
        seen="{value}",
        sign="something answers at --sglang-url that is not SGLang",
        guide=_NOT_IN_GUIDE + "nothing is watched at a wrong address",
        remedy=_look(
            "check --sglang-url: host, port and path",
            "Something answers there, and it is not SGLang. Until the address is right, the exporter sees nothing of the server.",
            "SGLang is stopped and a proxy answers in its place: then start it",
        ),
    ),
    _limit(
        id="often_down",
        title="often down, {value} of the time",
        past="SGLang was down again and again.",
        after=0.0,
        any_load=True,
        when=_fact(
            lambda view: view.down_share if view.down_share is None or view.outages >= MANY_OUTAGES else 0.0,
            limit=OFTEN_DOWN,
            name="share of the last two hours in which it was down",
            needs="metrics",
        ),
        summary="SGLang is down again and again.",
        seen="it was down for {value} of the last two hours, in three outages or more",
        guide=_NOT_IN_GUIDE + "each outage is too short, or too rare, for the other alerts",
        remedy=_look(
            "read in the log how each run ended, and check the supervisor's health check",
            "Each outage ends before somebody is called.",
            "the restarts are planned, for example to try flags",
        ),
        causes=("restart_loop", *KILLS, "crashed"),
    ),
    _limit(
        id="kv_transfer_failing",
        title="KV transfers fail, {value}",
        any_load=True,
        when=_fact(
            _transfers,
            limit=TRANSFERS_A_MINUTE,
            counts=("failed_transfers",),
            name="requests per minute of serving time that failed between prefill and decode server",
            unit="per_minute",
            needs="a prefill or decode server",
        ),
        summary="Requests fail because their KV cache does not get from the prefill to the decode server.",
        past="Until {until} requests failed because their KV cache did not get from the prefill to the decode server.",
        seen="{value}",
        says=_failed_transfers,
        guide=_NOT_IN_GUIDE + "no transfer fails in a healthy pair",
        remedy=_look(
            "read the logs of both servers of the pair at the same time",
            "A request of a disaggregated pair fails when either side ends, hangs, or is not reached.",
            "the other server was stopped on purpose, or is still starting",
        ),
        causes=("scheduler_stuck",),
    ),
)


# Why requests wait


def _prefill(view: View) -> float | None:
    """Requests wait while prompts are computed. Where throughput counts, an empty queue beside them is no sign of slow clients."""
    value, waits = view.share("admission", "prefill_bound") or 0.0, _waits_often(view)
    if view.profile.queue_lower is not None or waits:
        value = max(value, view.full_steps)
        if not waits or view.facts.is_on("disable_radix_cache"):  # else what they wait for is known better
            value = max(value, view.prefill_share)
    return value


def _lacks_memory(view: View) -> bool:
    """Whether a full KV cache limits: not where its queue is what the profile calls good."""
    if any("running_far_below_limit" in causes for causes in proven(view).values()):
        return True
    if view.totals["elsewhere"] > view.profile.frequent_share * view.known["queue"]:  # of the other side of a pair
        return True
    if view.known["queue"] == 0:  # how long they wait is not in a log of decode lines alone
        return True
    return view.totals["retractions"] > 1 if view.profile.queue_lower is None else _mostly(view, "queue", "below_range")


def _imbalance(view: View) -> float | None:
    """The share of the time in which the busiest DP rank made requests wait, while another hardly ever did."""
    waited = view.waited()
    return max(waited.values()) if len(waited) > 1 and min(waited.values()) < RARE_WAIT else None


def _unexplained(view: View) -> float | None:
    """Requests wait most of the time, and longer than the profile allows; priorities let some wait by design."""
    if view.facts.is_on("enable_priority_scheduling"):
        return None
    healthy = ("empty", "in_range") if view.profile.queue_lower is None else ("empty", "in_range", "below_range")
    waited = 1.0 - (view.share("queue", *healthy) or 0.0)
    if view.profile.queue_lower is not None:  # the guide's range is about a full cache
        early = view.totals["early"] / (view.known["admission"] or inf)  # the reason of these is not known yet
        waited = max(waited, (view.share("admission", "held_back", "unknown") or 0.0) - early)
    return waited


def _beside_text(view: View) -> str:
    """Say how many retractions a client may have written."""
    number, marked = view.totals["retractions"], view.totals["marked.retractions"]
    return f"{number:.0f} retractions, {marked:.0f} of them beside text that clients can write." if marked else ""


def _in_full(view: View) -> str:
    """Say that a release may reserve in full what requests ask for."""
    if not view.facts.may_reserve_in_full:
        return ""
    which = ", which this release" if view.facts.release else " and the release"
    since = "reserves in full" if view.facts.release else "reserves those in full (0.5.22 on)"
    return f"It does nothing where requests set ignore_eos{which} {since}: then more memory is the cure."


def _assumed(view: View) -> str:
    """Say which graphs are taken for captured where the start is not known."""
    words = f"The start is not in this log: that SGLang captured up to {USUAL_CAPTURED}, as it does by itself, is an assumption."
    return words if view.facts.largest_captured is None else ""


def _shares(view: View) -> str:
    """Say which states were seen."""
    seen = ((view.share("admission", state) or 0.0, words) for state, words in STATE_WORDS.items())
    shares = [f"{100 * share:.0f} % {words}" for share, words in seen if share >= 0.1]
    return f"Seen: {', '.join(shares)}." if shares else "No reason was seen for most of the time."


# Latency


def _burning(latency: str, rate: str) -> Measure:
    """Give the share of the observations that missed the objective, in both windows of a burn rate."""

    def of(view: View) -> float | None:
        share = view.burning.get((latency, rate))
        return 0.0 if share is not None and view.hung else share

    return of


def _late(latency: str, times: float, name: str, because: Callable[[View, Histogram, float], bool]) -> When:
    """Return the condition of observations above their objective; at its limit at most where something else is the reason."""

    def measure(view: View) -> float | None:
        objective: float | None = getattr(view.profile, f"{latency}_seconds")
        seen = view.latency(latency)
        if objective is None or seen is None or view.hung or seen.observations < view.profile.enough_observations:
            return None
        share = view.late_share(latency, objective)
        return share if because(view, seen, objective) else min(share, view.profile.late_bound(times))

    named = f"share of {name} above the objective"
    return _fact(measure, limit=lambda view: view.profile.late_bound(times), name=named, needs="metrics")


def _by_queue(view: View, first_tokens: Histogram, _: float) -> bool:
    """Whether requests wait most of the time, or spend most of the time to their first token in the queue."""
    wait, mean, often = view.wait, first_tokens.mean_seconds, view.profile.frequent_share
    return _waits_often(view) or (wait is not None and mean is not None and wait > often * mean)


def _by_prompts(view: View, first_tokens: Histogram, objective: float) -> bool:
    """Whether first tokens are late without a queue, by long prompts."""
    tokens, late = view.totals["computed"], first_tokens.above(objective)
    # One batch may be late for another reason, as the first one after a start, while kernels are compiled.
    several = late > view.totals["most_running"]
    return several and not _by_queue(view, first_tokens, objective) and (not tokens or tokens >= LONG_PREFILL * late)


def _by_prefill(view: View, gaps: Histogram, objective: float) -> bool:
    """Whether gaps between tokens are late by the prompts computed in between."""
    late, steps = gaps.above(objective) / gaps.observations, view.steps
    is_long = bool(late and steps) and view.totals["computed"] / (late * steps) >= LONG_PREFILL
    return is_long and (gaps.quantile(0.25) or 0.0) <= objective


def _step_of_a_large_batch(view: View) -> float | None:
    """Seconds between two tokens, where decoding alone takes them: the batch is large and prompts take little of the time."""
    prefills = view.totals["prefilling"] > RARELY * view.known["queue"]
    return None if (view.batch(0.5) or 0.0) < LARGE_BATCH or prefills else view.step_seconds


def _many_given_up(view: View) -> float:
    """Return the share of requests that may be given up."""
    return view.profile.aborted_share if "aborted_share" in view.profile.overridden else MANY_GIVEN_UP


def _given_up(view: View) -> float | None:
    """The share of the ended requests that clients gave up."""
    share = view.given_up_share
    if share is None or view.totals["finished_requests"] < view.profile.enough_observations:
        return None
    return 0.0 if view.hung else share  # then clients have a reason


def _timeouts(view: View) -> float | None:
    """The same, where nearly all end at the age of a time-out."""
    share, ages = _given_up(view), view.given_up_ages
    is_timeout = ages is not None and ages[1] >= SHORTEST_TIMEOUT and not view.cancels
    return share if share is None or is_timeout else min(share, _many_given_up(view))


def _gives_up(measure: Measure) -> When:
    name = "share of the ended requests that were given up"
    return _fact(measure, limit=_many_given_up, name=name, needs="metrics")


def _burn_rate(
    rate: str, *, latency: str, title: str, of: str, seen: str, causes: tuple[str, ...], remedy: Change
) -> Row:
    """Return the row of a burn rate. Its alert has no `after`: the ledger's windows are the wait."""
    span, much = ("hour", "far too many") if rate == "fast" else ("six hours", "more")
    id_ = f"{title.lower().replace(' ', '_').replace('-', '_')}_burning_{rate}"
    short = {"time_to_first_token": "TTFT", "inter_token": "ITL"}[latency]
    return Row(
        id=id_,
        title=f"{short} too long for {{value}} of {of} ({'1 h' if rate == 'fast' else '6 h'})",
        past=f"{title} missed its objective for {much} {of}"
        + (" than the error budget allows." if rate == "slow" else "."),
        severity="critical" if rate == "fast" else "warning",
        profiles=ONLINE,
        after=0.0,
        any_load=True,
        chance=True,
        when=_fact(
            _burning(latency, rate),
            limit=lambda view: view.profile.late_bound(BURN_RATES[rate][0]),
            name=f"share of {of} that missed the objective",
            needs="hours of metrics",
        ),
        summary=f"{title} misses its objective for {much} {of}"
        + (" than the error budget allows." if rate == "slow" else "."),
        seen=f"{{value}} of the {seen} in the last {span}, and the short window shows that it goes on",
        guide=_NOT_IN_GUIDE + "the objective comes from the profile",
        remedy=remedy,
        causes=causes,
        borrows=True,
        unless=("scheduler_stuck",) if rate == "fast" else ("scheduler_stuck", id_.replace("slow", "fast")),
    )


LIMITS = _rows(
    _limit(
        id="conservativeness_ineffective",
        title="retracting {value}/min",
        protects="requests",
        when=_retracts(
            lambda view: (view.facts.number(_CONSERVATIVENESS) or 0.0) > CEILING,
            needs="load, and --schedule-conservativeness above 1.43",
        ),
        summary="SGLang keeps retracting requests, and a higher --schedule-conservativeness has no further effect.",
        past="SGLang retracted running requests {times} until {until}; a higher --schedule-conservativeness has no further effect.",
        seen="{value} retractions/min with --schedule-conservativeness above 1.43",
        remark=_beside_text,
        guide=_NOT_IN_GUIDE
        + "the new-token ratio starts at min(0.7 x conservativeness, 1), so values above 1.43 change nothing",
        remedy=Change(
            _LIMIT,
            "lower",
            "four fifths of the running batch where prompts are long, else enlarge the KV cache",
            "The KV cache is too small for the running requests. Enlarge it (--max-total-tokens where it is set, --mem-fraction-static,"
            " --kv-cache-dtype fp8_e4m3), or run fewer requests at once where prompts are long and costly to prefill again.",
            "a single request is longer than the KV cache: then lower --context-length",
            "Fewer requests run at once.",
        ),
        causes=OUT_OF_MEMORY,
    ),
    _limit(
        id="retracting_too_often",
        title="retracting {value}/min",
        protects="requests",
        when=_retracts(),
        summary="SGLang keeps retracting running requests: the KV cache is full.",
        past="SGLang retracted running requests {times} until {until}: the KV cache was full.",
        seen="{value} retractions/min",
        remark=_beside_text,
        guide='"Achieve a high token usage": with frequent retraction warnings raise --schedule-conservativeness to about 1.3; about one a'
        " minute is fine. (The extended edition would lower --mem-fraction-static; a smaller KV cache retracts more, so the opposite is"
        " advised here.)",
        remedy=Change(
            _CONSERVATIVENESS,
            "raise",
            "1.3",
            "SGLang admits more requests than the KV cache can hold until they finish. It retracts some and computes them again. A higher"
            " value, or fewer requests at once, keeps more of the KV cache free for each. A first burst after the start ends by itself.",
            "the value is already above 1.43, where it has no further effect: then enlarge the KV cache (--mem-fraction-static) or lower"
            " --max-running-requests",
            "Above 1.0 SGLang admits fewer requests at once, and the queue may grow.",
        ),
        unless=("conservativeness_ineffective",),
        causes=OUT_OF_MEMORY,
    ),
    _limit(
        id="hybrid_pool_full",
        title="second KV cache full {value} of the time",
        when=_waits(
            "hybrid_pool_full",
            name="serving time with a full sliding-window or mamba cache and requests waiting",
        ),
        summary="Requests wait because the sliding-window or mamba cache is full while the main KV cache has free space.",
        past="Until {until} requests waited because the sliding-window or mamba cache was full while the main KV cache had free space.",
        guide=_NOT_IN_GUIDE + "the cache that fills up first is the limit; token usage is that of the fullest cache",
        remedy=Change(
            "swa_full_tokens_ratio",
            "raise",
            "a larger share for the cache that is full",
            "Hybrid models have two caches. The one that fills up first limits how many requests run.",
            "both caches are full: then GPU memory is the limit",
            "The main KV cache gets smaller by as much as the other gains.",
        ),
        causes=RETRACTING,
    ),
    _limit(
        id="dp_imbalanced",
        title="DP ranks imbalanced",
        when=_fact(
            _imbalance,
            limit=_OFTEN,
            counts=_QUEUES,
            name="time in which requests waited on the busiest DP rank",
            unit="share",
            needs="load on several DP ranks",
        ),
        summary="Requests wait on one DP rank while another has free capacity: the load is unbalanced.",
        past="Until {until} requests waited on one DP rank while another had free capacity.",
        seen="requests waited {value} of the time on the busiest DP rank, and almost never on the least busy one",
        guide=_NOT_IN_GUIDE + "the cause is routing, not capacity",
        remedy=Change(
            "load_balance_method",
            "set",
            "total_requests, or use a router that balances by load",
            "Round robin gives each rank the same number of requests, not the same amount of work.",
            "long prompts of one client must stay on the rank that has their prefix cached",
            "Requests with a common prefix may be spread over more ranks.",
        ),
        unless=("retracting_too_often",),
        causes=RETRACTING,
    ),
    _limit(
        id="running_at_limit",
        title="running limit reached {value} of the time",
        when=_waits("running_limit", name="serving time at the running limit with requests waiting"),
        summary="Requests wait because SGLang runs as many as --max-running-requests allows.",
        past="Until {until} requests waited because SGLang ran as many as --max-running-requests allows.",
        seen="{value} of the serving time at --max-running-requests with requests waiting",
        guide="under load #running-req should be close to --max-running-requests; a queue at that limit is caused by the limit",
        remedy=Change(
            _LIMIT,
            "raise",
            "as far as token usage stays below {token_usage_target}, at most eight times the present value",
            "The limit makes requests wait while the KV cache has free space.",
            "token usage is {token_usage_target} or more: then the KV cache is the limit",
            "Inter-token latency rises as more requests run together.",
        ),
        causes=(*RETRACTING, "dp_imbalanced"),
    ),
    _limit(
        id="grammar_queue",
        title="grammars hold requests up {value} of the time",
        when=_waits(
            "grammar_queue",
            name="serving time with more requests waiting for a grammar than in the queue",
            needs="metrics",
        ),
        summary="Requests wait for their grammar (JSON schema, regex, EBNF) to be compiled, not for the GPU.",
        past="Until {until} requests waited for their grammar (JSON schema, regex, EBNF) to be compiled.",
        guide=_NOT_IN_GUIDE + "requests wait in the grammar queue while token usage is low",
        remedy=Change(
            "grammar_backend",
            "try",
            "another backend (xgrammar, llguidance), or fewer distinct schemas",
            "SGLang compiles each new schema on the CPU before its request can run, and caches the result.",
            "the CPU is busy: then give the server more cores",
        ),
    ),
    _limit(
        id="pd_queue",
        title="the other side holds requests up {value} of the time",
        alert="SGLangDisaggregationQueue",
        when=_waits(
            "pd_queue",
            name="serving time with most requests in a bootstrap, prealloc, transfer or inflight queue",
        ),
        summary="Requests wait for the other server of a prefill/decode pair, or for the KV cache transfer between them.",
        past="Until {until} requests waited for the other server of a prefill/decode pair, or for the KV cache transfer between them.",
        guide=_NOT_IN_GUIDE + "with disaggregation the other server or the transfer is the limit",
        remedy=Change(
            "",
            "balance",
            "add servers on the slower side, or make the transfer faster",
            "The bootstrap and inflight queues of a prefill server wait for decode servers. The prealloc and transfer queues of a decode"
            " server wait for free memory or for the KV cache to arrive.",
            "one of the servers is down: then restart it",
        ),
        causes=("kv_transfer_failing",),
    ),
    _limit(
        id="admission_standing_still",
        title="no request starts though there is room {value} of the time",
        when=_waits(
            "standing_still",
            name="serving time in which the next requests fit and none of them started",
        ),
        summary="SGLang starts no waiting request although the next ones fit.",
        past="Until {until} SGLang started no waiting request although the next ones fit.",
        guide=_NOT_IN_GUIDE + "a scheduler that admits nothing is a fault, not a lack of memory",
        remedy=_look(
            "save a stack dump (py-spy dump --pid of the scheduler), look for known bugs of this release, then restart the server",
            "Places and memory are free, and still none of the waiting requests starts. A larger KV cache would not change that.",
            "generation is paused (/pause_generation), or weights are being updated",
        ),
    ),
    _limit(
        id="prefill_bound",
        title="prefill bound {value} of the time",
        when=_fact(_prefill, limit=_OFTEN, name="serving time in which prompts were computed"),
        summary="Requests wait while SGLang prefills long prompts: prefill is the limit.",
        past="Until {until} requests waited while SGLang prefilled long prompts.",
        seen="{value} of the serving time went into the prompts",
        guide="with long prompts raise --chunked-prefill-size if memory allows, use piecewise CUDA graphs for prefill, reuse more prefixes, or"
        " use prefill/decode disaggregation",
        remedy=Change(
            "chunked_prefill_size",
            "raise",
            "twice the present size, up to 16384",
            "With long prompts, small chunks use the GPU inefficiently.",
            "the GPU is already busy with prefill: then only prefix reuse, disaggregation or more replicas help",
            "Running requests pause longer for each chunk, and a chunk needs more memory.",
        ),
        causes=(*RETRACTING, "dp_imbalanced"),
    ),
    _limit(
        id="admission_too_conservative",
        title="requests wait beside free KV cache {value} of the time",
        when=_waits("held_back", name="serving time with requests waiting and free KV cache"),
        summary="Requests wait although the KV cache has free space: SGLang reserves too much for running requests.",
        past="Until {until} requests waited although the KV cache had free space.",
        seen="{value} of the serving time with requests waiting and token usage below {token_usage_target}",
        remark=_in_full,
        guide='"Achieve a high token usage": with low token usage and frequent #queue-req above 0, lower --schedule-conservativeness to about'
        " 0.3; the usual cause is a large max_new_tokens of requests that end early by EOS or stop strings",
        remedy=Change(
            _CONSERVATIVENESS,
            "lower",
            "0.3",
            "Requests set a large max_new_tokens and end early (EOS, stop strings), so SGLang reserves KV cache that they never use.",
            "requests run to their max_new_tokens, prompts are very long, or retractions appear: then raise it towards 1.0",
            "The slowest requests may take longer, and a few retractions may appear.",
        ),
        unless=(*RETRACTING, "scheduler_stuck", "dp_imbalanced"),
        causes=(*RETRACTING, "running_at_limit"),
    ),
    _limit(
        id="cuda_graph_not_covering",
        title="CUDA graph not covering {value} of the time",
        when=_share(
            "cuda_graph",
            "beyond_captured",
            name="serving time in decode batches larger than the largest captured CUDA graph",
        ),
        summary="Decode batches are larger than the largest captured CUDA graph, so they run without a graph.",
        past="Until {until} decode batches were larger than the largest captured CUDA graph.",
        seen="{value} of the serving time in decode batches larger than the largest captured size",
        remark=lambda view: "" if view.totals["replayed_most"] else _assumed(view),
        guide='"Tune --cuda-graph-max-bs": raise it to 512 or 768 for large batches, and lower --mem-fraction-static at the same time',
        remedy=Change(
            "cuda_graph_max_bs",
            "raise",
            "the next usual size that covers the running batch, at most {most_graph}",
            "For a batch larger than the captured sizes SGLang launches each kernel separately, which takes longer.",
            "CUDA graphs are disabled, or the attention backend cannot be captured",
            "Larger CUDA graphs take GPU memory.",
        ),
    ),
    _limit(
        id="cuda_graph_off",
        limits=lambda view: not view.may_exceed_small_graphs,  # else it is assumed
        title="CUDA graph off {value} of the time",
        when=_share("cuda_graph", "eager", "disabled", name="serving time in decode batches without a CUDA graph"),
        summary="SGLang decodes small batches without CUDA graphs.",
        past="Until {until} SGLang decoded small batches without CUDA graphs.",
        remark=_assumed,
        guide='"Tune --cuda-graph-max-bs": small batches should run with CUDA graphs; check --disable-cuda-graph and --attention-backend',
        remedy=Change(
            "disable_cuda_graph",
            "drop",
            "see in the log's start why: graphs switched off, no padding, LoRA, or a backend that cannot be captured",
            "At small batches launching the kernels one by one takes longer than running them.",
            "the attention backend, LoRA or speculative decoding cannot be captured",
            "CUDA graphs take GPU memory, about 1 GB at usual sizes.",
        ),
    ),
    _limit(
        id="memory_reserve_too_small",
        title="memory reserve too small",
        past="SGLang started with too little free GPU memory.",
        after=600.0,
        any_load=True,
        when=_start("reserve_lower_gb", "below"),
        summary="SGLang started with too little free GPU memory: it may run out of memory.",
        seen="{value} free on the GPU at start-up",
        guide='"Tune --mem-fraction-static": lower it where available_gpu_mem at start-up is below 5 GB; 5-8 GB is good',
        remedy=Change(
            _FRACTION,
            "lower",
            "0.01 less; repeat until {reserve_lower_gb} to {reserve_good_gb} GB stay free",
            "Activations of long prompts and large batches need this memory.",
            "another process holds the memory: check nvidia-smi",
            "The KV cache gets smaller.",
        ),
        unless=("graph_memory_short",),
        causes=OUT_OF_MEMORY,
        needs_advice=True,
    ),
    _limit(
        id="latency_batch_too_large",
        title="tokens slow, {value} apart",
        profiles=ONLINE,
        when=_fact(
            _step_of_a_large_batch,
            counts=("decode_lines",),
            limit="inter_token_seconds",
            name="seconds between two tokens of a request, by the decode lines",
            unit="seconds",
        ),
        summary="Inter-token latency is too high: decode batches are large.",
        past="Until {until} inter-token latency was too high: decode batches were large.",
        seen="{value} between two tokens of a request",
        guide="where requests are slow, lower --max-running-requests",
        remedy=Change(
            _LIMIT,
            "lower",
            "about half of the running batch",
            "A decode step takes longer with a larger batch, and every request in the batch waits for the whole step.",
            "the batch is already small: then the model is too slow for this GPU",
            "Throughput falls, and requests may queue.",
        ),
        unless=("prefill_bound",),
        protects="requests",
    ),
    Row(
        id="running_far_below_limit",
        limits=_lacks_memory,
        severity="info",
        when=_waits("pool_full", name="serving time with a full KV cache and requests waiting"),
        summary="The KV cache is full while requests wait: memory is the limit.",
        past="Until {until} the KV cache was full while requests waited: memory was the limit.",
        guide="under load #running-req should be close to --max-running-requests; find what limits it",
        remedy=Change(
            "kv_cache_dtype",
            "set",
            "fp8_e4m3, or more memory for the KV cache",
            "Each running request keeps its tokens in the KV cache. An FP8 KV cache holds twice as many in the same memory.",
            "answers must not lose any accuracy, or the GPU has no FP8",
            "A little accuracy.",
        ),
        unless=(*RETRACTING, "shared_prefixes_unused"),  # in another order the same cache holds more
        causes=(*RETRACTING, "dp_imbalanced"),
        needs_advice=True,
    ),
    _limit(
        id="requests_rejected",
        title="requests rejected, {value}/min",
        when=When(
            "rate",
            lambda view: view.per_minute(view.totals["rejected"]),
            ("rejected",),
            "above",
            "rejections_per_minute",
            "rejected requests/min",
            "per_minute",
        ),
        summary="SGLang rejects requests.",
        past="Until {until} SGLang rejected requests.",
        seen="{value} requests/min rejected",
        guide=_NOT_IN_GUIDE + "rejected requests mean too little capacity or too many requests",
        remedy=Change(
            "",
            "slow down",
            "send fewer requests at once, or add a replica",
            "SGLang answers 503 while its queue is full (--max-queued-requests), or after SGLANG_REQ_WAITING_TIMEOUT seconds of waiting.",
            "clients retry rejected requests without a pause",
        ),
        causes=("scheduler_stuck", *WHY_REQUESTS_WAIT, "cuda_graph_not_covering", "cuda_graph_off"),
        borrows=True,
    ),
    _limit(
        id="queue_too_long",
        title="queue too long {value} of the time",
        when=_share("queue", "above_range", name="serving time with {queue_limit}"),
        summary="More requests wait than SGLang can start in time.",
        past="Until {until} more requests waited than SGLang could start in time.",
        guide='"Adjust the request submission speed": a healthy #queue-req is {queue_range}; above it send fewer requests at once, because'
        " scheduling overhead grows, most under lpm",
        remedy=_FEWER,
        causes=WHY_REQUESTS_WAIT,
        borrows=True,
    ),
    _limit(
        id="clients_time_out",
        title="clients time out, {value} of requests",
        when=_gives_up(_timeouts),
        summary="Clients give up at one age: they have a time-out that this server does not meet.",
        past="Until {until} clients gave up by a time-out.",
        seen="{value} of the requests that ended were given up, {given_up_after}",
        guide=_NOT_IN_GUIDE + "a request that is given up was computed for nothing",
        remedy=Change(
            "",
            "slow down",
            "send fewer requests at once, add a replica, or raise the clients' time-out",
            "Nearly all requests end at the same age: that is a client's time-out, not people who stop an answer. Retries of them make the"
            " load larger still.",
            "another finding of this server names a flag: change it first",
        ),
        causes=(*WHY_REQUESTS_WAIT, "queue_too_long", "scheduler_stuck"),
        unless=("scheduler_stuck",),
        borrows=True,
    ),
    _limit(
        id="latency_queue",
        title="TTFT too long by the queue for {value} of requests",
        profiles=ONLINE,
        when=_late("time_to_first_token", LATE_TIMES, "first tokens", _by_queue),
        summary="Time to first token is too high: requests wait in the queue.",
        past="Until {until} time to first token was too high: requests waited in the queue.",
        seen="{value} of the first tokens came later than the objective",
        guide="where requests are slow, send fewer requests at once",
        remedy=Change(
            "",
            "slow down",
            "send fewer requests at once, or add a replica",
            "Time to first token includes the time in the queue.",
            "another finding names why requests wait: change its flag first",
        ),
        causes=(*WHY_REQUESTS_WAIT, "queue_too_long"),
        borrows=True,
    ),
    _limit(
        id="latency_prefill_between",
        title="prefill interrupts decoding, {value} of tokens late",
        profiles=ONLINE,
        when=_late("inter_token", SLOW_BURN_TIMES, "inter-token gaps", _by_prefill),
        summary="Inter-token latency is too high: prefill of long prompts interrupts decoding.",
        past="Until {until} inter-token latency was too high: prefill of long prompts interrupted decoding.",
        seen="{value} of the inter-token gaps are longer than the objective, the median is not, and long prompts are prefilled in between",
        guide="where requests are slow, change --chunked-prefill-size or use prefill/decode disaggregation",
        remedy=Change(
            "chunked_prefill_size",
            "lower",
            "half of the present size, together with --enable-mixed-chunk",
            "With mixed chunks a running request waits for one chunk at most, and a smaller chunk takes less time.",
            "chunks are not mixed: SGLang then prefills all waiting prompts before it decodes again, whatever the chunk size",
            "Time to first token of long prompts rises, and prefill throughput falls.",
        ),
        unless=("prefill_bound", "retracting_too_often"),
    ),
    _limit(
        id="latency_long_prompts",
        title="TTFT too long by long prompts for {value} of requests",
        profiles=ONLINE,
        when=_late("time_to_first_token", LATE_TIMES, "first tokens", _by_prompts),
        summary="Time to first token is too high with an empty queue: prefill of long prompts takes the time.",
        past="Until {until} time to first token was too high with an empty queue: prefill of long prompts took the time.",
        seen="{value} of the first tokens came later than the objective",
        guide="with long prompts raise --chunked-prefill-size or use piecewise CUDA graphs",
        remedy=Change(
            "chunked_prefill_size",
            "raise",
            "twice the present size, up to 16384",
            "SGLang prefills long prompts in chunks; fewer, larger chunks finish sooner.",
            "prompts already fit into one chunk",
            "Running requests pause longer for each chunk, and a chunk needs more memory.",
        ),
        causes=("prefill_bound",),
    ),
    Row(
        id="client_too_slow",
        title="client too slow {value} of the time",
        severity="info",
        profiles=("offline",),
        when=_share("queue", "empty", name="serving time with an empty queue"),
        summary="SGLang's queue is empty: the clients are the bottleneck, not the server.",
        past="Until {until} SGLang's queue was empty: the clients were the bottleneck, not the server.",
        guide='"Adjust the request submission speed": with #queue-req frequently 0 send requests faster; {queue_range} is healthy',
        remedy=Change(
            "",
            "speed up",
            "send more requests at once",
            "With an empty queue SGLang cannot form full batches. Send more requests in parallel; no server flag helps.",
            "latency matters more than throughput: then use --profile online, which expects an empty queue",
        ),
        unless=("requests_rejected", "scheduler_stuck", "retracting_too_often", "prefill_bound"),
    ),
    _limit(
        id="unexplained",
        title="requests wait for no known reason {value} of the time",
        after=600.0,
        when=_fact(
            _unexplained,
            limit=_OFTEN,
            counts=_QUEUES,
            name="serving time in which requests waited for no known reason",
        ),
        summary="Requests wait; the cause is not known.",
        past="Until {until} requests waited; the cause is not known.",
        seen="requests waited {value} of the serving time",
        remark=_shares,
        guide="the guide has no row for what this log shows",
        remedy=_look(
            "let the exporter read /metrics as well (--enable-metrics), and keep the log from the server's start",
            "The lines of this log fit none of the causes that the guide or SGLang's code names.",
            "the clients send in bursts on purpose, and nobody waits for the answers",
        ),
        unless=(
            *WHY_REQUESTS_WAIT,
            "queue_too_long",
            "requests_rejected",
            "scheduler_stuck",
            "client_too_slow",
            *OUT_OF_MEMORY,
        ),
    ),
    _limit(
        id="requests_failed",
        title="requests fail, {value} of them",
        past="Many requests ended in an exception of SGLang: HTTP 500, or a stream that broke off.",
        any_load=True,
        when=_fact(
            _requests_failed,
            limit=MANY_FAILED,
            counts=("server_errors",),
            name="share of the requests that ended in an exception",
        ),
        summary="Many requests end in an exception of SGLang: HTTP 500, or a stream that breaks off.",
        seen="{value} of the requests ended in an exception",
        guide=_NOT_IN_GUIDE + "no request to a healthy server ends in an exception",
        remedy=Change(
            "",
            "read",
            "read the traceback after Exception in ASGI application in the log",
            "No flag mends an exception. Its last line says what went wrong: often a client that asks for what this release cannot do, or a"
            " time limit of the web server.",
            "a proxy in front of SGLang answers 500 by itself: then SGLang's log has no such line",
        ),
    ),
)

_FIRST_TOKENS, _NEXT_TOKENS = _look(
    "open the exporter's page: it shows what requests wait for",
    "Time to first token is the time in the queue plus the prefill time.",
    "prompts are too long for this objective on any server: then use --profile long_context",
), Change(
    _LIMIT, "lower", "about three quarters of the running batch",
    "A decode step takes longer with a larger batch, and every request in the batch waits for the whole step.",
    "the batch is small: then prefill between decode steps is the cause, or decoding without a CUDA graph",
    "Fewer requests run at once; the others wait in the queue.",
)  # fmt: skip
_first = partial(
    _burn_rate, latency="time_to_first_token", title="Time to first token", of="requests", seen="first tokens came later than the objective",
    causes=("latency_queue", "latency_long_prompts"), remedy=_FIRST_TOKENS,
)  # fmt: skip
_next = partial(
    _burn_rate, latency="inter_token", title="Inter-token latency", of="tokens", seen="gaps between tokens were longer than the objective",
    causes=("latency_batch_too_large", "latency_prefill_between"), remedy=_NEXT_TOKENS,
)  # fmt: skip
OBJECTIVES = _rows(_first("fast"), _first("slow"), _next("fast"), _next("slow"))


# Flags that figures show to be the cause

OFTEN = 0.25  # of the serving time: less than for a finding
EMPTY_PAGES, EMPTY_PAGES_ALLOWED, PAGE_SIZES = 0.25, 0.1, (64, 32, 16, 1)
PROMPTS_HELD = 0.25  # of the KV cache, above which prompts that share nothing fill it
SHORT_PROMPT = 64.0
FEW_PROMPTS = 4.0  # in one prefill batch
LARGEST_PREFILL = 16384.0  # tokens of a batch: SGLang's default
# Attention backends that need their own page size (srt/arg_groups/overrides.py).
PAGED_BACKENDS = (
    "flashmla", "cutlass_mla", "trtllm_mla", "trtllm_mha", "fa4", "ascend", "intel_amx", "dsa", "nsa", "aiter", "dsv4", "tokenspeed_mla",
)  # fmt: skip
# While one of these is set, no other flag helps.
INSTEAD = frozenset({"page_size", "max_prefill_tokens", "prefill_decode_interval"})
_WAITING = frozenset({"queue_too_long", "unexplained", "latency_queue"})
_POOL = _WAITING | {
    "running_far_below_limit", "conservativeness_ineffective", "admission_too_conservative", "retracting_too_often",
}  # fmt: skip
_PROMPTS = _WAITING | {"prefill_bound", "latency_long_prompts"}
_ADMITS = _WAITING | {"admission_too_conservative", "prefill_bound"}
_NOTHING = frozenset[str]()


@dataclass(frozen=True, slots=True)
class Suspect:
    """A flag with a suspicious side, a switch that is on or numbers strictly between `least` and `most`, and its proof.

    The proof has the view, what is wrong with the load, and the flag's value. It gives the rows that the flag causes, none where nothing shows
    it, the value to set, and what is gained.
    """

    change: Change
    proof: Callable[[View, frozenset[str], float], tuple[frozenset[str], Value, str]]
    least: float = inf
    most: float = inf
    forced_by: tuple[str, ...] = ()  # arguments, or `argument=value`, for which SGLang sets the flag by itself

    def is_suspicious(self, value: object) -> bool:
        """Whether a typed value is on the suspicious side."""
        if isinstance(value, bool):
            return value and self.least == inf
        return isinstance(value, (int, float)) and self.least < value < self.most

    def is_forced(self, view: View) -> bool:
        """Whether SGLang sets this by itself, so that removing the flag has no effect."""
        conditions = (each.partition("=") for each in self.forced_by)
        return any(view.facts.word(arg) == value if value else view.facts.is_on(arg) for arg, _, value in conditions)


def troubles(view: View) -> frozenset[str]:
    """Return what is wrong with the load: pool_full, prefill_bound, held_back, waiting, starts, limit, retracting, rejected."""
    if not view.has_enough_load:
        return _NOTHING
    often = view.profile.frequent_share
    bound = min(OFTEN, often)
    seen = {
        state
        for state in ("pool_full", "prefill_bound", "held_back")
        if (view.share("admission", state) or 0.0) > bound
    }
    seen |= {"prefill_bound"} if view.prefill_share > bound else _NOTHING
    healthy = ("empty", "in_range") if view.profile.queue_lower is None else ("empty", "in_range", "below_range")
    at_limit = (view.share("admission", "running_limit") or 0.0) > bound
    signs = {
        "starts": 1.0 - (view.share("queue", "empty") or 0.0) > often and view.facts.starts_slowly,
        "waiting": not seen and not at_limit and 1.0 - (view.share("queue", *healthy) or 0.0) > bound,
        "limit": at_limit,
        "retracting": view.retractions_a_minute > view.retractions_tolerated,
        "rejected": view.per_minute(view.totals["rejected"]) > view.profile.rejections_per_minute,
    }
    return frozenset(seen | {trouble for trouble, is_seen in signs.items() if is_seen})


def proven(view: View) -> dict[Change, frozenset[str]]:
    """Return the change of every flag that figures show to cause the trouble, with the rows that it causes."""
    facts, seen, found = view.facts, troubles(view), dict[Change, frozenset[str]]()
    typed = (facts.typed_arguments or {}) if seen else {}
    for suspect in SUSPECTS:
        arg = suspect.change.arg
        value = typed.get(arg)
        if suspect.is_suspicious(value) and facts.flag(arg) and not suspect.is_forced(view):
            causes, to, gain = suspect.proof(view, seen, flags.number(value) or 0.0)
            if causes:
                found[replace(suspect.change, to=to, gain=gain)] = causes
    return found


def beside(view: View) -> dict[Change, frozenset[str]]:
    """Return every proven flag; none where all that is wrong is a cache that is full for a part of the time."""
    return {} if troubles(view) <= {"pool_full"} else proven(view)


def explained_by_flag(view: View) -> View:
    """Return the view with waits explained by a flag: while each prefill batch ends at --max-prefill-tokens, requests wait for prefill."""
    if view.totals["admission/held_back"] and any(change.arg == "max_prefill_tokens" for change in proven(view)):
        return replace(view, totals=counted(view.totals, "held_back", "prefill_bound"))
    return view


# Proofs


def _radix_cache(view: View, seen: frozenset[str], _: float) -> tuple[frozenset[str], Value, str]:
    """Each request computes and holds its whole prompt, shared or not."""
    prompt, running, usage, pool = view.prompt or 0.0, view.mean("running"), view.mean("usage"), view.facts.pool()
    share = prompt * running / usage / pool if usage and pool and running else None  # of what a request holds
    rows, gain = _NOTHING, ""
    if "prefill_bound" in seen:
        rows, gain = _PROMPTS, f"a mean prompt has {prompt:,.0f} tokens, all computed"
    if "pool_full" in seen and (share is None or share >= PROMPTS_HELD):
        rows |= _POOL
        if share is not None and share < 1:
            gain = f"prompts take about {100 * share:.0f} % of the KV cache, each request its own copy"
    return rows if prompt >= SHORT_PROMPT else _NOTHING, False, gain


def _pages(view: View, seen: frozenset[str], page: float) -> tuple[frozenset[str], Value, str]:
    """Requests leave much of their last pages empty."""
    request = (view.prompt or 0.0) + (view.answer or 0.0) / 2
    wasted = max(1.0 - request / (ceil(request / page) * page), page / 2 / (request + page / 2)) if request else 0.0
    fitting = (size for size in PAGE_SIZES if size < page and size / 2 / (request + size / 2) <= EMPTY_PAGES_ALLOWED)
    gain = (
        f"about {100 * wasted:.0f} % of the KV cache is empty space in pages: a request has some {request:,.0f} tokens"
    )
    is_short = not seen.isdisjoint({"pool_full", "held_back", "retracting", "waiting"})
    return _POOL if view.prompt and is_short and wasted >= EMPTY_PAGES else _NOTHING, float(next(fitting, 1)), gain


def _prefill_tokens(view: View, seen: frozenset[str], most: float) -> tuple[frozenset[str], Value, str]:
    """A prefill batch ends at this many tokens, beside a larger chunk."""
    chunk = view.facts.size("chunked_prefill_size")
    wanted = chunk or LARGEST_PREFILL
    few = not seen.isdisjoint({"held_back", "waiting"}) and most <= FEW_PROMPTS * max(view.prompt or 1024.0, 1.0)
    rows = _ADMITS if most < wanted and ("prefill_bound" in seen or few) else _NOTHING
    beside = f"a chunk has {wanted:,.0f}" if chunk else f"by SGLang's default at {wanted:,.0f}"
    return rows, max(wanted, LARGEST_PREFILL), f"a prefill batch ends at {most:,.0f} tokens, {beside}"


def _decode_interval(view: View, seen: frozenset[str], steps: float) -> tuple[frozenset[str], Value, str]:
    """Between prefill batches requests wait for decode steps; not while gaps between tokens are late, which a smaller interval lengthens."""
    late = view.late_share("inter_token", view.profile.inter_token_seconds) > view.profile.late_bound(SLOW_BURN_TIMES)
    waits = not late and not seen.isdisjoint({"held_back", "starts", "waiting"})
    return _ADMITS if waits else _NOTHING, 0.0, f"after each prefill batch no request starts for {steps:g} decode steps"


def _queue_limit(_: View, seen: frozenset[str], most: float) -> tuple[frozenset[str], Value, str]:
    """Only bursts are rejected: nothing else keeps requests waiting."""
    return frozenset({"requests_rejected"} if seen == {"rejected"} else ()), 4 * max(most, 1.0), ""


SUSPECTS: tuple[Suspect, ...] = (
    Suspect(
        Change(
            "disable_radix_cache", "", "",
            "Without the radix cache each request computes and holds its whole prompt. If prompts share prefixes, the cache computes and holds each"
            " prefix once.",
            "prompts share no prefixes, or the model cannot use the cache: then SGLang switches it off again",
            "A little scheduling time; cached prefixes fill the KV cache and are evicted when room is needed.",
        ),
        _radix_cache,
        forced_by=(
            "disaggregation_mode=decode", "is_embedding", "enable_mis", "enable_deterministic_inference", "prefill_only_disable_kv_cache",
        ),
    ),
    Suspect(
        Change(
            "page_size", "", "",
            "The KV cache is given out in whole pages, and a request leaves its last page partly empty. Shared prefixes are reused in whole pages only.",
            "the attention backend needs this page size: then SGLang sets it again",
            "Larger pages make transfers to host memory or to a decode server faster.",
        ),
        _pages,
        least=16,
        forced_by=tuple(f"attention_backend={name}" for name in PAGED_BACKENDS),
    ),
    Suspect(
        Change(
            "max_prefill_tokens", "", "",
            "A prefill batch takes no further prompt after this many tokens, so prompts are computed one after another although several could be at once.",
            "prompts are computed one at a time anyway, because few requests come at once",
            "Larger prefill batches take more GPU memory, and running requests pause longer.",
        ),
        _prefill_tokens,
        least=0,
        most=LARGEST_PREFILL,
    ),
    Suspect(
        Change(
            "prefill_decode_interval", "", "",
            "Requests that wait cannot start until this many decode steps have passed.",
            "running requests would pause too often without it",
            "Running requests pause more often.",
        ),
        _decode_interval,
        least=0,
    ),
    Suspect(
        Change(
            "max_queued_requests", "", "",
            "SGLang answers 503 to each request that finds the queue full. A longer queue takes bursts.",
            "requests always come faster than they are served: then they wait instead, and more of them give up",
            "Requests wait longer instead of being rejected.",
        ),
        _queue_limit,
        least=0,
        most=1e9,
    ),
)  # fmt: skip


# What can be better


def _speculation(view: View) -> float | None:
    """Tokens of a verified step; below 0.99 it is another figure than the mean with the token that needs no draft.

    Even the smallest draft takes a part of a pass for each draft step: what is left of a token after that is at or below 1 where it does
    not pay.
    """
    lines = view.totals["accepted:n"]
    length = view.totals["accepted"] / lines if lines >= view.profile.enough_observations else 0.0
    return None if length < LEAST_DRAFTED else length


def _accepted(view: View) -> str:
    """Say how many draft tokens are accepted."""
    drafts = view.facts.size("speculative_num_draft_tokens") or view.facts.size("speculative_num_steps")
    of = f" of {drafts:g} draft tokens" if drafts else ""
    length = view.totals["accepted"] / view.totals["accepted:n"]
    return f"accept length {length:.2f}{of}; a step without speculation gives 1"


def _least_accepted(view: View) -> float:
    """Return the tokens that a verified step must give to pay for its drafts."""
    return 1.0 + DRAFT_COST * (view.facts.size("speculative_num_steps") or USUAL_DRAFTS)


def _hicache(view: View) -> float | None:
    """Lines about what HiCache could not do."""
    if view.hicache is None:
        return None
    stays = view.hicache.word == "kernel"  # it was printed once, and holds until the next start
    return view.totals["hicache"] or float(stays)


def costly_settings(view: View) -> dict[str, tuple[Value, str]]:
    """Return the settings of a start that slow every load down, by argument: a better value, and what it does in words."""
    off = [arg for arg in ("disable_cuda_graph", "disable_decode_cuda_graph") if view.facts.is_on(arg)]
    found: dict[str, tuple[Value, str]] = {}
    if not view.facts.role:
        found.update(dict.fromkeys(off, (False, "CUDA graphs are switched off")))
    chunk = view.facts.typed("chunked_prefill_size")
    if chunk is not None and 0 < chunk <= TINY_CHUNK:
        words = f"prompts are computed in chunks of {chunk:g} tokens, and a chunk takes about as long as one of 1,024"
        found["chunked_prefill_size"] = (float(SMALL_CHUNK), words)
    return found


def _slowed_at_once(view: View) -> float | None:
    """Count the costly settings. Under load graphs have a row of their own, and chunks count where prompts fill them."""
    if view.has_enough_load:
        fills = view.totals["full_lines"] >= FULL_BATCHES * view.totals["prefill_lines"] > 0
        return float(fills and "chunked_prefill_size" in costly_settings(view))
    return None if not view.facts.arguments or view.facts.is_cpu else float(len(costly_settings(view)))


def _sharing(view: View) -> float | None:
    """Return the cached share of prompt tokens, without what retracted requests and further answers find of their own."""
    totals, cached, posts = view.totals, view.cached_share, view.totals["generation_posts"]
    # Preempted requests find their own prompts, and nothing counts them; several answers to one prompt find it cached.
    preempts = view.facts.is_on("enable_priority_scheduling")
    several = posts and totals["started"] > SEVERAL_EACH * posts
    if not _waits_often(view) or cached is None or preempts or several:
        return None
    own = totals["repeated"] / totals["cached"] if totals["cached"] else 0.0
    came_back = totals["retracted"] * (view.prompt or 0.0) / max(totals["computed"] + totals["cached"], 1.0)
    return max(cached * (1.0 - (1.0 if own > 0.5 else own)) - came_back, 0.0)


def _recomputes(view: View) -> bool:
    """Whether prefixes are computed again and again because the cache loses them."""
    return _waits_often(view) and not _mostly(view, "queue", "in_range") and _mostly(view, "admission", "pool_full")


def _shared_prefixes(view: View) -> float | None:
    """The share of the prompt tokens that were cached under fcfs."""
    cannot_gain = (view.cached_share or 0.0) >= SHARING[1]
    return None if view.facts.arguments.get("schedule_policy") != "fcfs" or cannot_gain else _sharing(view)


def _no_prefixes(view: View) -> float | None:
    """The share of the prompt tokens that were cached under a policy that sorts by prefixes."""
    sorts = view.facts.arguments.get("schedule_policy") in ("lpm", "dfs-weight")
    return view.cached_share if sorts and _sharing(view) is not None else None


def _fits_one_gpu(view: View) -> float | None:
    """GB of the weights of the whole model, where tensor parallelism alone splits them and the load would fit as well."""
    facts, weights, usage = view.facts, view.facts.weights_gb, view.mean("usage")
    other = ("dp_size", "ep_size", "moe_dense_tp_size", "enable_ep_moe", "pp_size")
    spread = facts.attention_ranks > 1 or any((facts.number(each) or 0.0) > (each != "enable_ep_moe") for each in other)
    if (facts.number("tp_size") or 1.0) <= 1 or spread or facts.is_cpu or not weights or not facts.capacity_gb:
        return None
    model = weights * facts.shards
    left = 1.0 - (model - weights) / facts.pools_gb if facts.pools_gb else 1.0  # of a KV cache
    return None if usage is not None and usage > view.profile.token_usage_target * left else model


def _replicas(view: View) -> float | None:
    """Replicas that one server runs by itself."""
    facts = view.facts
    is_other = facts.is_cpu or facts.is_on("enable_dp_attention") or facts.attention_ranks > 1
    return None if is_other else facts.number("dp_size")


def _small_batches(view: View) -> float | None:
    """The batch of a small model without torch.compile."""
    facts, weights = view.facts, view.facts.weights_gb
    if facts.is_cpu or facts.without_graph or facts.number("enable_torch_compile") != 0:
        return None
    is_quantized = facts.is_first_edition and facts.word("quantization")
    return None if weights is None or weights * facts.shards >= SMALL_MODEL_GB or is_quantized else view.batch()


def _large_weights(view: View) -> float | None:
    """The share of a GPU's memory that unquantized weights take, where the KV cache is short of it."""
    facts, weights, capacity = view.facts, view.facts.weights_gb, view.facts.capacity_gb
    if facts.is_cpu or facts.arguments.get("quantization", "?") is not None or _QUANTIZED.search(facts.model):
        return None
    is_short = _mostly(view, "admission", "pool_full") or view.retractions_a_minute > view.retractions_tolerated
    return weights / capacity if weights is not None and capacity and is_short else None


def _experts(view: View) -> float | None:
    """GPUs that share every expert of a mixture of experts."""
    facts = view.facts
    if facts.is_cpu or not _MOE.search(facts.model) or "tp_size" not in facts.arguments:
        return None
    if (facts.number("ep_size") or 1.0) > 1 or facts.is_on("enable_ep_moe") or facts.is_on("enable_deepep_moe"):
        return None
    return facts.number("tp_size") or 1.0


def _latent_pool_full(view: View) -> float | None:
    """The share of the time with a full KV cache that every GPU stores."""
    facts = view.facts
    if facts.is_cpu or not _LATENT.search(facts.model) or (facts.number("tp_size") or 1.0) < DP_ATTENTION_GPUS:
        return None
    split = facts.is_on("enable_dp_attention") or facts.attention_ranks > 1
    return None if split else view.share("admission", "pool_full")


def differing(view: View) -> list[profiles.Setting]:
    """Return the guide's settings for the profile's workload that this server has not, where nothing that was seen speaks against them."""
    facts, found = view.facts, []
    for setting in view.profile.settings if facts.knows_arguments else ():
        arg = facts.graph_arg if setting.arg == "cuda_graph_max_bs" else setting.arg
        now: object = facts.typed(arg) if isinstance(setting.value, float) else facts.arguments.get(arg)
        if setting.is_switch:
            now = float(facts.is_on(arg))
        elif arg == facts.graph_arg:
            now = facts.largest_captured
        elif arg == "max_running_requests":
            now = facts.least_limit if now is None else now
        is_other = now is not None and now != setting.value and (setting.needed or not facts.is_cpu)
        if is_other and facts.flag(arg) and _fits_evidence(setting, view):
            found.append(replace(setting, arg=arg))
    return found


def _fits_evidence(setting: profiles.Setting, view: View) -> bool:
    """Whether what was seen does not speak against the guide's setting; where a row of its own decides, it is left to that."""
    online, batch = view.profile.queue_lower is None, view.batch() or 0.0
    tests: dict[str, bool] = {
        "mem_fraction_static": view.facts.reserve_gb is None and online,
        "max_running_requests": isinstance(setting.value, float) and online and batch > setting.value,
        "schedule_conservativeness": online and _mostly(view, "admission", "no_queue"),
        "chunked_prefill_size": view.prefill_share > MOSTLY_PREFILL / 2,
        "schedule_policy": (view.cached_share or 0.0) >= SHARING[0],
        # SGLang captures no size above the running limit.
        "cuda_graph_max_bs": (view.facts.largest_captured or 0.0) < (view.facts.least_limit or inf),
        "page_size": view.facts.word("attention_backend") not in PAGED_BACKENDS,
    }
    return tests.get(setting.arg, True)


CHANCES = _rows(
    _hint(
        id="speculation_rejected",
        when=_fact(
            _speculation,
            limit=_least_accepted,
            counts=("decode_lines",),
            side="below",
            name="tokens a verified step gives; 1 without speculation",
            unit="ratio",
        ),
        summary="Speculative decoding costs more than it gains: hardly any draft token is accepted.",
        seen="{value}",
        says=_accepted,
        guide=_NOT_IN_GUIDE + "drafts cost time whether they are accepted or not",
        remedy=Change(
            "",
            "drop",
            "run without --speculative-algorithm, or with a draft model that was trained for this model",
            "Each step drafts tokens and verifies them. Where nearly none is accepted, a step gives one token, as without speculation, and takes longer.",
            "the requests of this time were unusual: accept length depends on the text",
            "None, while so few tokens are accepted.",
        ),
    ),
    _chance(
        id="sglang_recommends",
        any_load=True,
        when=_fact(
            lambda view: float(len(view.facts.recommended())),
            name="recommendations of SGLang's own at its start",
            needs="the start",
        ),
        summary="SGLang itself recommends other settings in the lines of its start.",
        at_once=True,
        seen="{value} recommendation{s} in the lines of its start",
        guide=_NOT_IN_GUIDE + "SGLang's own words",
        remedy=_look(
            "read these lines of the start",
            "Its lines are about this model, this GPU and its own limits.",
            "the load needs nothing of it",
        ),
    ),
    _hint(
        id="requests_given_up",
        when=_gives_up(_given_up),
        summary="Clients give up many requests.",
        past="Until {until} clients gave up many requests.",
        seen="{value} of the requests that ended were given up",
        guide=_NOT_IN_GUIDE + "what is given up was computed for nothing",
        remedy=_look(
            "find out who gives up: people who stop an answer, or programs",
            "They are no time-out by their ages, and nothing of the server explains it.",
            "people stop answers that they have read, or an editor cancels completions while its user types",
        ),
        unless=("clients_time_out", "scheduler_stuck"),
    ),
    _hint(
        id="metrics_disabled",
        title="metrics disabled",
        past="SGLang ran without metrics: only its log was available.",
        after=600.0,
        any_load=True,
        when=_fact(_trouble("metrics_disabled"), name="1 while it answers without metrics", needs="a sidecar"),
        summary="SGLang runs without metrics: only its log is available.",
        seen="/metrics answers 404",
        guide="start with --enable-metrics --enable-cache-report",
        remedy=Change(
            "enable_metrics",
            "add",
            "add --enable-metrics --enable-cache-report",
            "Latency, prefix cache hits and aborted requests are only in the metrics.",
            "the release is older than 0.3.5: it has no metrics",
        ),
    ),
    _hint(
        id="log_silent",
        title="log silent",
        past="SGLang's log was unreadable or had no new lines while the server worked.",
        severity="warning",
        after=120.0,
        any_load=True,
        when=_fact(_trouble("log_silent"), name="1 while tokens are generated and no line comes", needs="a sidecar"),
        summary="SGLang's log is unreadable or has no new lines while the server works.",
        seen="{value}",
        sign="the log cannot be read, or has no new line while the server works",
        guide=_NOT_IN_GUIDE + "retractions and out-of-memory failures are only in the log",
        remedy=_look(
            "check that the file grows, that the exporter may read it, and that --log-level is info",
            "Without the log the exporter misses out-of-memory failures and cannot count retractions.",
            "the server runs with --log-level warning on purpose: then it logs retractions and failures, but no batch lines",
        ),
    ),
    _hint(
        id="sources_disagree",
        title="sources disagree",
        past="SGLang's log and its metrics disagreed.",
        severity="warning",
        any_load=True,
        when=_fact(_trouble("sources_disagree"), name="1 while log and metrics differ", needs="a sidecar"),
        summary="SGLang's log and its metrics disagree.",
        seen="KV cache size or retractions differ between log and metrics",
        guide=_NOT_IN_GUIDE + "figures of two servers, or an incomplete log, lead to wrong advice",
        remedy=_look(
            "check that --log-file is the complete log of the server at --sglang-url",
            "--log-file is another server's log, or retraction lines do not reach the file.",
            "several servers write into one log: give each its own",
        ),
    ),
    _hint(
        id="memory_reserve_too_large",
        title="memory reserve too large",
        past="GPU memory stayed unused that the KV cache could have used.",
        after=600.0,
        any_load=True,
        when=_start("reserve_upper_gb"),
        summary="GPU memory stays unused that the KV cache could use.",
        seen="{value} free on the GPU at start-up",
        guide='"Tune --mem-fraction-static": 5-8 GB of available_gpu_mem at start-up is good; with 10-20 GB raise it in steps of 0.01',
        remedy=Change(
            _FRACTION,
            "raise",
            "0.01 more; repeat until {reserve_lower_gb} to {reserve_good_gb} GB stay free",
            "A larger KV cache holds more requests and more cached prefixes.",
            "token usage stays low and prompts share no prefixes, other processes share the GPU, the CPU shares its memory (DGX Spark,"
            " Jetson), or the activations of long prompts or images need it",
            "Less GPU memory stays free for peaks: watch for out-of-memory failures afterwards.",
        ),
    ),
    _hint(
        id="hicache_degraded",
        any_load=True,
        at_once=True,
        when=_fact(_hicache, counts=("hicache",), name="lines about what HiCache could not do", needs="a log"),
        summary="HiCache does not work as it should: SGLang says so.",
        seen="SGLang printed: {value}",
        says=lambda view: view.hicache.short.rstrip(".") if view.hicache is not None else "",
        guide=_NOT_IN_GUIDE
        + "a cache in host memory is worth it while a hit is faster than computing the prefix again",
        remedy=_look(
            "compare the time to first token of a request with a cached prefix and of one without",
            "SGLang's own line says what the cache in host memory or in the storage could not do.",
            "prefixes are not reused: then run without --enable-hierarchical-cache",
        ),
    ),
    _chance(
        id="costly_settings",
        any_load=True,
        at_once=True,
        when=_fact(_slowed_at_once, name="settings of the start that slow every request down", needs="the start"),
        summary="A setting of this start slows every request down.",
        seen="{value}",
        says=lambda view: " and ".join(words for _, words in costly_settings(view).values()),
        guide='"Tune --cuda-graph-max-bs" and "chunked prefill": decoding with CUDA graphs, and prompts in chunks of thousands of tokens',
        remedy=Change(
            "",
            "drop",
            "start without these flags",
            "Each decode step without a CUDA graph, and each small chunk of a prompt, costs a full pass of kernel launches.",
            "the flag is there to find a fault, or the memory has room for nothing more",
        ),
        unless=("cuda_graph_off", "flags_away_from_defaults", "prefill_bound"),
    ),
    _chance(
        id="shared_prefixes_unused",
        limits=_recomputes,
        when=_fact(_shared_prefixes, limit=SHARING[0], name="share of prompt tokens from the prefix cache"),
        summary="Waiting requests share prefixes, but --schedule-policy fcfs does not group them.",
        seen="{value} of the prompt tokens came from the prefix cache under fcfs",
        guide="with many shared prefixes set --schedule-policy lpm (the default of early releases)",
        remedy=Change(
            "schedule_policy",
            "set",
            "lpm",
            "Longest prefix match (lpm) runs requests with the same prefix together while the prefix is cached.",
            "requests of one prefix come together anyway, which is not in a log; or the KV cache already holds all prefixes",
            "Scheduling overhead grows with the queue; requests without a common prefix wait longer.",
        ),
    ),
    _chance(
        id="prefix_policy_wasted",
        when=_fact(_no_prefixes, side="below", limit=NO_SHARING, name="share of prompt tokens from the prefix cache"),
        summary="--schedule-policy lpm orders requests by shared prefixes, but they share none.",
        seen="{value} of the prompt tokens came from the prefix cache under lpm",
        guide="first edition: without shared prefixes fcfs costs less than lpm",
        remedy=Change(
            "schedule_policy",
            "set",
            "fcfs",
            "Searching the longest common prefix costs time for every waiting request.",
            "prefixes will be shared later in the day",
            to="fcfs",
        ),
    ),
    _chance(
        id="flags_away_from_defaults",
        limits=lambda view: _waits_often(view) and bool(proven(view)),  # figures show that they are the cause
        when=_fact(
            lambda view: float(len(beside(view))), name="flags that differ from SGLang's defaults and can cause this"
        ),
        summary="Flags that differ from SGLang's defaults can delay requests.",
        seen="{value} flag{s} with a value other than the default that can cause this",
        guide=_NOT_IN_GUIDE + "without another explanation, check the flags that differ from the defaults first",
        remedy=Change(
            "",
            "try",
            "restart without these flags, one flag at a time",
            "SGLang's defaults suit most loads. A flag that was set for another load or another release may limit this one.",
            "the flag is needed for what this server does",
        ),
    ),
    _hint(
        id="data_parallel_would_fit",
        any_load=True,
        when=_fact(
            _fits_one_gpu,
            limit=lambda view: (
                (USUAL_FRACTION - ROOM_FOR_POOL) * (view.facts.capacity_gb or 0.0)
            ),  # room for a KV cache
            side="below",
            name="weights of the whole model",
            unit="GB",
            needs="the start",
        ),
        summary="The weights fit on one GPU, but tensor parallelism splits them over several.",
        seen="the weights of the whole model take {value}",
        guide='"Tune --dp-size and --tp-size": prefer data parallelism where memory allows, by the router (model gateway) rather than by --dp-size',
        remedy=Change(
            "",
            "lower",
            "run one server with --tp-size 1 on each GPU, behind a router",
            "Each replica then runs without exchanging the results of every layer, and throughput adds up.",
            "latency of a single request matters most, or a prompt is longer than the KV cache of one GPU",
            "Each GPU holds all weights, so each KV cache is smaller; single requests are slower.",
        ),
    ),
    _chance(
        id="prompts_beyond_kv_cache",
        any_load=True,
        when=_event("too_long", name="prompts refused or truncated"),
        summary="Prompts are longer than the whole KV cache: SGLang refuses or truncates them.",
        seen="{value} prompts were longer than the KV cache",
        guide=_NOT_IN_GUIDE + "a prompt must fit into the KV cache, less 6 tokens, even if it is the only one",
        remedy=Change(
            "max_total_tokens",
            "raise",
            "larger than the longest prompt with its answer",
            "SGLang answers such a prompt with an error (status 400) at once, or cuts it off with --allow-auto-truncate. No other flag helps.",
            "the clients send such prompts by mistake: then nothing needs to change",
            "Less GPU memory stays free for peaks.",
        ),
    ),
    _chance(
        id="prompts_beyond_context",
        any_load=True,
        when=_event("beyond_context", name="requests refused or truncated"),
        summary="Requests are longer than --context-length allows: SGLang refuses or truncates them.",
        seen="{value} requests were longer than --context-length allows",
        guide=_NOT_IN_GUIDE
        + "--context-length limits prompt and answer together; without it, the model's own context does",
        remedy=Change(
            "context_length",
            "raise",
            "longer than the longest request, prompt and answer together",
            "SGLang answers such a request with an error, which a stream carries in an answer with status 200, or cuts it off with"
            " --allow-auto-truncate.",
            "the model's own context is not longer: SGLang then refuses to start; or the clients send such prompts by mistake",
            "Long requests hold more of the KV cache, so fewer run together.",
        ),
    ),
    _chance(
        id="requests_refused",
        limits=lambda view: (
            (_requests_refused(view) or 0.0) > MOSTLY_REFUSED
        ),  # clients of a healthy server get their answers
        any_load=True,
        when=_fact(
            _requests_refused,
            limit=MANY_FAILED,
            counts=("refused",),
            name="share of the requests that were refused",
        ),
        summary="SGLang answers many requests with an error, because it cannot do what they ask for.",
        seen="{value} of the requests were refused",
        guide=_NOT_IN_GUIDE
        + "the scheduler ends such a request at once and prints why, with self.rid= at the end of the line",
        remedy=Change(
            "grammar_backend",
            "set",
            "xgrammar",
            "The clients ask for structured output (a JSON schema, regex or EBNF), and without a grammar backend SGLang refuses that.",
            "the package of the grammar backend is not installed",
            "Each new schema is compiled before its request can run.",
        ),
    ),
    _hint(
        id="router_candidate",
        any_load=True,
        when=_fact(_replicas, limit=1.0, name="replicas in one server", needs="the start"),
        summary="One server runs several replicas by --dp-size; SGLang's guide prefers a router in front of single servers.",
        seen="{value} replicas in one server",
        guide='"Tune --dp-size and --tp-size": use the router (model gateway) for data parallelism rather than --dp-size',
        remedy=Change(
            "",
            "split",
            "start one server for each replica, each on its own GPUs, and put SGLang's router (model gateway) in front",
            "A router sends each request to a replica with its prefix cached and with free KV cache. One replica can fail or restart alone.",
            "the replicas are meant for DP attention, or nobody can run a router",
            "One more process to run, and a port for each server.",
        ),
    ),
    _chance(
        id="profile_settings",
        when=_fact(
            lambda view: float(len(differing(view))) if view.facts.knows_arguments else None,
            name="settings other than the guide's for this workload",
        ),
        summary="SGLang's guide recommends other settings for this profile.",
        seen="{value} setting{s} other than what the guide recommends for this profile",
        guide="newest edition: settings for online, offline, long-context and multi-turn servers",
        remedy=Change(
            "",
            "set",
            "what the guide recommends for this workload",
            "SGLang's guide recommends this for the workload of the exporter's --profile.",
            "the profile does not match the workload of this server: then use another --profile",
        ),
    ),
    _chance(
        id="torch_compile_candidate",
        when=_fact(
            _small_batches,
            limit=SMALL_BATCH + 1,
            side="below",
            name="requests running together, 99 % of the time",
        ),
        summary="A small model runs in small batches: torch.compile may speed it up.",
        seen="at most {value} requests ran together 99 % of the time",
        guide='"Try other options": --enable-torch-compile speeds up small models at small batches; keep its cache under'
        " TORCHINDUCTOR_CACHE_DIR, since /tmp may be cleared; with it machines of one kind can share it",
        remedy=Change(
            "enable_torch_compile",
            "add",
            "add it",
            "At small batches the GPU waits for kernel launches; compiled kernels need fewer.",
            "batches grow beyond --torch-compile-max-bs (default 32)",
            "Each start takes minutes longer until the cache is filled. Set TORCHINDUCTOR_CACHE_DIR to a persistent folder (/tmp may be"
            " cleared): servers with the same GPU and model can share it.",
            to=True,
        ),
    ),
    _chance(
        id="quantization_candidate",
        when=_fact(
            _large_weights,
            limit=LARGE_WEIGHTS,
            name="share of a GPU's memory taken by its part of the weights",
        ),
        summary="The KV cache is short of memory, and the weights are not quantized.",
        seen="the weights take {value} of each GPU's memory",
        guide='"Try other options": where memory is short, use --quantization fp8',
        remedy=Change(
            "quantization",
            "set",
            "fp8",
            "8-bit weights take half the memory; the KV cache gets the other half.",
            "the GPU has no FP8 (Ada, Hopper and newer have it), or answers must not lose any accuracy",
            "A little accuracy.",
            to="fp8",
        ),
    ),
    _chance(
        id="expert_parallel_candidate",
        any_load=True,
        when=_fact(_experts, limit=1.0, name="GPUs that share every expert", needs="the start"),
        summary="Tensor parallelism splits every expert of this mixture-of-experts model over all GPUs.",
        seen="{value} GPUs share every expert",
        guide='"Try other options": use expert parallelism for mixture-of-experts models',
        remedy=Change(
            "ep_size",
            "raise",
            "the value of --tp-size",
            "With whole experts on each GPU the matrix multiplications are fewer and larger.",
            "batches are small, or some experts are used far more than others",
            "Requests wait for the GPU whose experts are used most.",
        ),
    ),
    _chance(
        id="dp_attention_candidate",
        when=_fact(_latent_pool_full, limit=_OFTEN, name="serving time with a full KV cache"),
        summary="A DeepSeek model stores the same KV cache on every GPU, and the KV cache fills up.",
        seen="the KV cache was full for {value} of the serving time",
        guide='"Try other options": for DeepSeek models use DP attention (--enable-dp-attention --dp-size 8)',
        remedy=Change(
            "enable_dp_attention",
            "add",
            "add it, with --dp-size set to the value of --tp-size",
            "The model's compressed KV cache cannot be split over GPUs: tensor parallelism stores it on each GPU, DP attention once.",
            "few requests run at once: then latency gets worse",
            "SGLang then multiplies --schedule-conservativeness by 0.3: divide the value you want by 0.3.",
        ),
    ),
    _hint(
        id="format_drift",
        title="format drift",
        past="SGLang logged something that this exporter did not support.",
        after=600.0,
        any_load=True,
        when=_event("unreadable", name="lines that this version cannot read"),
        summary="SGLang logs something that this exporter does not support.",
        seen="{value} unknown log lines or keys",
        sign="its log or its metrics have lines or keys that this version cannot read",
        guide=_NOT_IN_GUIDE + "a newer SGLang may log a figure differently",
        remedy=Change(
            "",
            "update",
            "update the exporter; if that does not help, report your SGLang version",
            "All other figures stay available; a renamed one is absent.",
            "a plug-in of yours logs such lines",
        ),
    ),
)
# What only Prometheus sees: alerts about the exporter itself. Their PromQL is in the rules' template.
PROMETHEUS = _rows(
    Row(
        id="exporter_down",
        title="exporter down",
        past="Prometheus could not scrape the SGLang exporter.",
        alert="SGLangTuningExporterDown",
        severity="critical",
        when=_fact(name="failed scrapes", needs="Prometheus"),
        summary="Prometheus cannot scrape the SGLang exporter.",
        seen="every scrape of the exporter's /metrics failed for 5 minutes, or for 10 where few were made",
        guide=_NOT_IN_GUIDE + "the exporter must be scraped before it can say anything",
        remedy=_look(
            "check whether the exporter runs and whether Prometheus reaches it; then whether SGLang answers",
            "Alerts that fired hold for 15 minutes by the exporter's last word; no new one can fire.",
            "the server was taken out of service together with its exporter: remove both from the targets",
        ),
    ),
    Row(
        id="exporter_gone",
        title="exporter gone",
        past="Prometheus had no SGLang exporter left to scrape in this job.",
        alert="SGLangTuningExporterGone",
        severity="critical",
        when=_fact(name="targets", needs="Prometheus"),
        summary="Prometheus has no SGLang exporter left to scrape in this job.",
        seen="the last target left while its server had requests",
        guide=_NOT_IN_GUIDE + "without a target no scrape fails and no alert can fire",
        remedy=_look(
            "check whether the servers run, and what service discovery finds",
            "A target that is gone has no series, so no other alert of these servers can fire.",
            "the servers were taken out of service under load, on purpose: silence it, it ends after a day",
        ),
    ),
    Row(
        id="scraped_too_seldom",
        title="scraped too seldom",
        past="Prometheus scraped the exporter too rarely.",
        when=_fact(name="scrapes in half an hour", needs="Prometheus"),
        summary="Prometheus scrapes the exporter too rarely.",
        seen="fewer than 14 scrapes in 30 minutes",
        guide=_NOT_IN_GUIDE + "with more than two minutes between scrapes alerts come late, and rates have gaps",
        remedy=_look(
            "set scrape_interval of this job to 15s, at most 2m",
            "Prometheus learns late of what the exporter decided, and takes its target for gone.",
            "the interval was just changed: the alert resolves within half an hour",
        ),
    ),
    _limit(
        id="many_servers",
        past="Many servers of one model had the same trouble.",
        alert="SGLangManyServers",
        when=_fact(name="servers whose alert of one diagnosis fires", needs="Prometheus"),
        summary="Many servers of one model have the same trouble.",
        seen="an alert of one diagnosis fires for a third of a model's servers, and for at least three",
        guide=_NOT_IN_GUIDE + "what many servers have in common is their load, their flags or their release",
        remedy=_look(
            "look for what they share: a change of flags, of release or of load",
            "One message stands for all of them: their own are held back while it fires.",
            "they were taken out of service on purpose",
        ),
    ),
)
# Whose server another replica relieves: in any case, or once no flag is left to set.
REPLICA_HELPS = frozenset(
    {"latency_batch_too_large", "requests_rejected", "queue_too_long", "clients_time_out", "latency_queue"}
)
REPLICA_HELPS_AFTER_A_FLAG = frozenset({
    "conservativeness_ineffective", "retracting_too_often", "hybrid_pool_full", "running_at_limit", "prefill_bound",
    "admission_too_conservative", "cuda_graph_not_covering", "cuda_graph_off", "running_far_below_limit", "latency_prefill_between",
    "latency_long_prompts", "shared_prefixes_unused", "flags_away_from_defaults",
})  # fmt: skip
ROWS: tuple[Row, ...] = (*FAILURES, *LIMITS, *OBJECTIVES, *CHANCES)
BY_ID: dict[str, Row] = {row.id: row for row in ROWS}


def adapted(
    profile: str,
    thresholds: Mapping[str, float] | None = None,
    accepted: Mapping[str, str] | None = None,
    waits: Mapping[str, float] | None = None,
) -> profiles.Profile:
    """Return a profile with the thresholds, mutes and waits of the user's choice. Raise `UsageError` for what is no row."""
    accepted, waits = accepted or {}, waits or {}
    for key, names, known in (
        ("accept", accepted, list(BY_ID)),
        ("wait", waits, [row.id for row in ROWS if row.alert]),
    ):
        for name in names:
            if name not in known:
                raise UsageError(f"{key}={name}: give a diagnosis of docs/diagnoses.md{suggestion(name, known)}")
    return profiles.PROFILES[profile].with_thresholds(thresholds or {}).adapted(accepted, waits)


# The states in words, for people.
STATE_WORDS: dict[str, str] = {
    "above_range": "the queue longer than its limit", "in_range": "the queue in its range", "below_range": "the queue shorter than its range",
    "empty": "an empty queue", "no_queue": "no request waiting", "held_back": "requests waiting and free KV cache",
    "running_limit": "--max-running-requests reached and requests waiting",
    "pool_full": "a full KV cache and requests waiting", "hybrid_pool_full": "a full sliding-window or mamba cache and requests waiting",
    "prefill_bound": "full prefill batches and requests waiting", "grammar_queue": "requests waiting for a grammar",
    "pd_queue": "requests waiting for the other server of a prefill/decode pair",
    "standing_still": "requests waiting, the next ones fit, and none started", "beyond_captured": "decode batches larger than the largest captured CUDA graph",
    "eager": "decode batches without a CUDA graph", "disabled": "CUDA graphs disabled", "replayed": "decode batches that replay a CUDA graph",
    "unsupported": "no CUDA graphs by device or role", "at_target": "token usage at its target", "below_target": "token usage below its target",
}  # fmt: skip
