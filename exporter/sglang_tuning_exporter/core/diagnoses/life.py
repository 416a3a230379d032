"""Whether the server lives: hangs, crashes, restarts, and no answer. Pure."""

from __future__ import annotations

import re
from math import inf

from sglang_tuning_exporter.core.diagnoses.base import (
    NOT_IN_GUIDE,
    Beside,
    Diagnosis,
    Group,
    event,
    fact,
    failure,
    limit,
    look,
)
from sglang_tuning_exporter.core.diagnoses.native import Native, by_server, series, total
from sglang_tuning_exporter.core.diagnoses.own_words import FLAG, named_flags, refused_flag
from sglang_tuning_exporter.core.diagnoses.steps import fewer_decoding, say, smaller_chunk
from sglang_tuning_exporter.core.events import ENDINGS, Event
from sglang_tuning_exporter.core.findings import Change
from sglang_tuning_exporter.core.server import Server
from sglang_tuning_exporter.core.sums import BUCKET_SECONDS
from sglang_tuning_exporter.core.view import View

DOWN_OFTEN = 0.1  # of two hours
USUAL_WATCHDOG_SECONDS = 300.0  # --watchdog-timeout
HEALTH_CHECK_SECONDS = 20.0  # SGLANG_HEALTH_CHECK_TIMEOUT
MANY_OUTAGES = 3  # of two hours
_IN_START = re.compile(r" in (?:__init__|initialize|_?init_\w+|load_\w+|_?launch_\w+|_wait_for_\w+|main)$")  # a frame
_UNRECOGNIZED = re.compile(r"unrecognized arguments: ([^\n]+)")


def _hang(view: View) -> float | None:
    """Return the seconds without progress; a watchdog or health-check line stands for the seconds it had waited."""
    if view.stuck is not None:
        return view.stuck.seconds
    totals = view.totals
    longest = max((hang.seconds for hang in view.hangs), default=0.0) if totals["hangs"] else 0.0
    if totals["watchdogs"] and not longest:
        waited = view.facts.size("watchdog_timeout") or USUAL_WATCHDOG_SECONDS
        return (HEALTH_CHECK_SECONDS if totals["health_failures"] else waited) * totals["watchdogs"]
    return max(longest, view.silent_seconds if totals["health_failures"] else 0.0)


def _by_explanation(view: View, beside: Beside) -> list[Change]:
    """Change the flags that SGLang's own error names; then give the general advice for this class of crash."""
    line = view.explanation
    if line is not None and any(diagnosis.ends_as == line.word for diagnosis in beside):
        return []  # the failure beside it has the advice
    ending = ENDINGS[line.word if line is not None else "unknown"]
    why = (_not_started(view) and ending.why_of_start) or ending.why
    do = say(words=ending.do, why=why, not_if=ending.not_if)
    if line is None:
        return [*named_flags(view, view.ended), do]
    if refused := _UNRECOGNIZED.search(line.text):
        return [*map(refused_flag, FLAG.findall(refused[1])), do]
    named = [] if line.marked else named_flags(view, line.text)
    return [*named, *(_for_memory(view) if line.word == "memory" else []), do]


def _for_memory(view: View) -> list[Change]:
    """Return the changes for the phase in which memory ran out last; for both where that is not known."""
    phases = {name: at for name, at in view.last.items() if name.startswith("out_of_memory.")}
    phase = max(phases, key=phases.__getitem__, default="").partition(".")[2]
    if phase == "decode":
        return fewer_decoding(view)
    return smaller_chunk(view) + ([] if phase == "prefill" else fewer_decoding(view))


def _after_its_end(view: View, beside: Beside) -> list[Change]:
    """Advise by the line that explains why the server is down, or by the flags that its last error names."""
    is_last = view.last.get("ends", -inf) >= view.last.get("server_starts", -inf)  # it has not started again since
    if view.explains_now is not None:
        return _by_explanation(view, beside)
    return [*named_flags(view, view.ended if is_last else ""), say()]


def _not_started(view: View) -> str:
    """Return the headline of a server that ended while it started; empty of one that served."""
    served = view.facts.ready or view.scraped or view.down or "work" in view.last or view.totals["retraction_events"]
    line = view.explanation
    of_start = line is not None and (line.is_of_a_start or _IN_START.search(line.place))
    is_start = not served and (view.starting or view.facts.memory or of_start)
    return "SGLang did not start." if is_start else ""


def _end_in_words(_: View, line: Event | None) -> str:
    """Say how the server ended, where a line explains it."""
    if line is None or line.word == "unknown":
        return ""
    return f"{line.ending.what}{f' ({line.where})' if line.where else ''}"


def _hang_span(server: Server, begin: float, end: float) -> tuple[float, float] | None:
    """Return when a stretch shows hangs: by their lines, and by times without progress."""
    buckets = [bucket for bucket in server.buckets if begin - BUCKET_SECONDS <= bucket[0] <= end]
    signs = [at for at, totals in buckets if totals["watchdogs"] or totals["health_failures"]]
    spans = [(max(at, begin), min(at + BUCKET_SECONDS, end)) for at in signs]
    spans += [(hang.begin, hang.until) for hang in server.hangs if hang.until >= begin]
    if not spans:
        return None
    # A hang that lines name lasts until the server works again.
    worked = not signs or any(totals["lines"] for at, totals in buckets if at > signs[-1])
    return min(spans)[0], max(until for _, until in spans) if worked else end


def _hang_began(server: Server, now: float) -> float:
    """Return when the last hang began, as far as it is known at `now`."""
    if not server.hangs:
        return now
    return max(server.hangs[-1].begin, server.last.get("hangs", now) - SCHEDULER_STUCK.after)


def _increase(name: str) -> str:
    return f"increase({series(name)}[5m])"


RESTART_LOOP = failure(
    id="restart_loop",
    title="restarts again and again, {value} times in 30 min",
    severity="warning",
    past="SGLang kept restarting.",
    when=fact(
        measure=lambda view: view.totals["starts_recently"],
        limit=2.0,
        counts=("server_starts",),
        name="starts in 30 minutes with the same arguments",
    ),
    summary="SGLang keeps restarting.",
    seen="{value} starts in 30 minutes with the same arguments",
    guide=NOT_IN_GUIDE + "the server must stay up before it can be tuned",
    remedy=look(
        words="read the last log lines before each start",
        why=(
            "The server ends soon after each start. Most often it runs out of memory, or the supervisor's health check"
            " times out before the model is loaded."
        ),
        not_if="somebody restarted it each time, or a rolling update of several servers behind one name did",
    ),
    causes=(Group.OUT_OF_MEMORY,),
    death="repeated",
    notified_beside_causes=True,
    fleet=1,
    shade=1,
)


SCHEDULER_STUCK = Diagnosis(
    id="scheduler_stuck",
    title="stuck: requests wait, nothing moves",
    severity="critical",
    after=60.0,
    any_load=True,
    when=fact(
        measure=_hang,
        counts=("hangs", "watchdogs", "health_failures"),
        name="time in which requests were there and nothing moved",
        unit="seconds",
        needs="a log",
    ),
    summary="SGLang hangs: it has requests but makes no progress.",
    past="SGLang hung until {until}: it had requests and made no progress.",
    seen="{value} in which nothing moved while requests were there",
    sign="requests are there and nothing moves, or a watchdog or health check of SGLang says so",
    guide=NOT_IN_GUIDE + "save the evidence and restart the server",
    remedy=Change(
        direction="restart",
        words="save the log and a stack dump (py-spy dump --pid of the process that hangs), then restart the server",
        why=(
            "A process that hangs does not recover. The scheduler's watchdog ends the server after --watchdog-timeout"
            " seconds (default 300); no watchdog ends it when the tokenizer or the detokenizer hangs."
        ),
        not_if=(
            "the server was paused (/pause_generation); or the other server of a disaggregated pair is down: restart"
            " that one"
        ),
    ),
    groups=frozenset({Group.FAILURE}),
    ends_as="hang",
    sentence=lambda view, _: "" if view.stuck is None else view.stuck.sentence,
    span=_hang_span,
    began=_hang_began,
    since=lambda view: None if view.stuck is None else view.stuck.begin,
    goes_on=lambda view: view.stuck is not None,
    replica="unknown",
    fleet=3,
    native=Native(
        alert="SGLangStalled",
        expr=(
            f"min_over_time({total(series('num_(running|queue)_reqs'))}[5m:30s]) > 0\n"
            f"and {total(series('num_(running|queue)_reqs') + ' offset 5m')} > 0\n"
            f"and {by_server('sum', _increase('time_to_first_token_seconds_count'))} == 0\n"
            f"unless {by_server('sum', _increase('inter_token_latency_seconds_count'))} > 0\n"
            f"unless {by_server('sum', _increase('realtime_tokens_total'))} > 0"
        ),
        seen="requests run or wait, and no token has come for 5 minutes",
    ),
)


CRASHED = failure(
    id="crashed",
    title="crashed",
    severity_over="warning",
    when=event("ends", name="ends that nobody asked for"),
    summary="SGLang has crashed.",
    past="SGLang crashed {times}, the last time at {until}.",
    seen="its log shows {value}",
    sign="its log shows a scheduler exception, a dead process or a failed start",
    says=lambda view: (
        view.ended if ": " in view.ended else f"that {view.ended or 'it ended'}"
    ),  # an error in its own words
    guide=NOT_IN_GUIDE + "after a crash the server is down until its model is loaded again",
    remedy=look(
        words="read the lines just before it in the log, and the traceback beside it",
        why="All that ran is lost, and an automatic restart can hide the cause.",
        not_if="the processes were ended on purpose",
    ),
    causes=(SCHEDULER_STUCK, Group.OUT_OF_MEMORY),
    advise=_by_explanation,
    death="crash",
    worked="work_before_the_end",
    headline=_not_started,
    sentence=_end_in_words,
    goes_on=lambda view: view.has_ended,
    fleet=1,
)


SERVER_DOWN = Diagnosis(
    id="server_down",
    title="server down",
    severity="critical",
    until=60.0,
    any_load=True,
    when=fact(
        measure=lambda view: float(bool(view.down)) if view.down or view.scraped else None,
        name="1 while it does not answer",
        needs="metrics",
        in_log=False,
    ),
    summary="SGLang does not answer.",
    past="SGLang did not answer until {until}.",
    seen="{value}",
    sign="the last scrapes of SGLang failed, or its log shows its end",
    says=lambda view: view.down,
    guide=NOT_IN_GUIDE + "the server must run before it can be tuned",
    remedy=look(
        words="save the log, read its last lines, and restart the server",
        why=(
            "The process has ended, hangs, or is unreachable from the exporter. The exporter's page and"
            " sglang_tuning_scrape_error_info show how the scrape failed."
        ),
        not_if="the address given to the exporter is wrong: check --sglang-url",
    ),
    causes=(SCHEDULER_STUCK, Group.OUT_OF_MEMORY, CRASHED, RESTART_LOOP),
    advise=_after_its_end,
    death="down",
    worked="work",
    borrows="as well",
    replica="unknown",
    goes_on=lambda _: True,
    fleet=4,
    shade=1,
    native=Native(
        alert="SGLangDown",
        expr=(
            "up == 0 and max_over_time(up[7m]) == 0 and last_over_time(up[5m] offset 4m) == 0\n"
            f"and on (job, instance) last_over_time({series('num_running_reqs')}[1h])"
        ),
        seen="no scrape of its /metrics has succeeded for 7 minutes",
    ),
)


OFTEN_DOWN = limit(
    id="often_down",
    title="often down, {value} of the time",
    past="SGLang was down again and again.",
    after=0.0,
    any_load=True,
    when=fact(
        measure=lambda view: view.down_share if view.down_share is None or view.outages >= MANY_OUTAGES else 0.0,
        limit=DOWN_OFTEN,
        name="share of the last two hours in which it was down",
        needs="metrics",
        in_log=False,
    ),
    summary="SGLang is down again and again.",
    seen="it was down for {value} of the last two hours, in three outages or more",
    guide=NOT_IN_GUIDE + "each outage is too short, or too rare, for the other alerts",
    remedy=look(
        words="read in the log how each run ended, and check the supervisor's health check",
        why="Each outage ends before somebody is called.",
        not_if="the restarts are planned, for example to try flags",
    ),
    causes=(RESTART_LOOP, SCHEDULER_STUCK, Group.OUT_OF_MEMORY, CRASHED),
    death="repeated",
    fleet=1,
    held_back_by=(RESTART_LOOP, SERVER_DOWN, Group.FAILURE),
    shade=2,
)
