"""What clients ask and get: errors, refusals, time-outs, requests that are too long. Pure."""

from __future__ import annotations

from sglang_tuning_exporter.core.diagnoses.base import (
    NOT_IN_GUIDE,
    Beside,
    Group,
    Measure,
    When,
    chance,
    event,
    fact,
    hint,
    limit,
    look,
)
from sglang_tuning_exporter.core.diagnoses.life import SCHEDULER_STUCK
from sglang_tuning_exporter.core.diagnoses.steps import doubled, fewer_requests, larger_pool, pool_flags, say, set_flag
from sglang_tuning_exporter.core.diagnoses.waiting import QUEUE_TOO_LONG
from sglang_tuning_exporter.core.findings import Change
from sglang_tuning_exporter.core.view import SHORTEST_TIMEOUT, View

MANY_FAILED, MOSTLY_REFUSED = 0.05, 0.5  # of the requests; from the latter on nothing is well
FEW = 5  # requests that failed for other reasons are no finding
MANY_GIVEN_UP = 0.333  # of the requests that ended


def _requests_failed(view: View) -> float | None:
    """The share of the requests that ended in an exception."""
    posts, failed = view.totals["generation_posts"], view.totals["server_errors"]
    return failed / (posts or view.totals["sequences"] + failed) if failed >= FEW else None


def _requests_refused(view: View) -> float | None:
    """The share of the requests that SGLang ended before their first token, by its log or by the page.

    Requests that a client gave up, or that are too long, are not among them.
    """
    totals = view.totals
    others = totals["aborted_requests"] + totals["too_long"] + totals["beyond_context"]
    shares = (
        (totals["refused"], totals["sequences"]),
        (totals["tokenless_requests"] - others, totals["finished_requests"]),
    )
    return max((refused / max(all_, refused) for refused, all_ in shares if refused >= FEW), default=None)


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
    """The share of the ended requests that clients gave up, if nearly all ended at the age of a time-out."""
    share, ages = _given_up(view), view.given_up_ages
    is_timeout = ages is not None and ages[1] >= SHORTEST_TIMEOUT and not view.cancels
    return share if share is None or is_timeout else min(share, _many_given_up(view))


def _gives_up(measure: Measure) -> When:
    name = "share of the ended requests that were given up"
    return fact(measure=measure, limit=_many_given_up, name=name, needs="metrics", in_log=False)


def _longest_prompts(view: View, _: Beside) -> list[Change]:
    mean = view.totals["too_long_tokens"] / max(view.totals["too_long"], 1.0)
    words = (
        f"enlarge the KV cache ({pool_flags(view)}), or send shorter prompts: those refused have {mean:,.0f} tokens on"
        " average"
    )
    return larger_pool(view, mean) or [say(words=words)]


def _longest_requests(view: View, _: Beside) -> list[Change]:
    now = view.facts.size("context_length")
    mean = view.totals["beyond_context_tokens"] / max(view.totals["beyond_context"], 1.0)
    gain = f"those refused have {mean:,.0f} tokens on average"
    if now:
        return [set_flag(view, "context_length", doubled(2 * now, mean), gain)]
    known = f" of {view.facts.context:,.0f} tokens" if view.facts.context else ""
    words = f"send requests that fit the model's context{known}, prompt and answer together: {gain}"
    return [
        say(
            words=words,
            why="SGLang answers a longer request with an error, whatever room the KV cache has.",
            not_if="the model was made for a longer context: then set --context-length",
        )
    ]


def _refusals(view: View, _: Beside) -> list[Change]:
    if view.facts.word("grammar_backend") == "none" and view.totals["refused_for_grammar"] > view.totals["refused"] / 2:
        return [set_flag(view, "grammar_backend", "xgrammar")]
    if not view.totals["refused"]:
        return []  # by the page alone: the reason is in the log, which the guide's words name
    return [
        say(
            words="read the reason in the log, before self.rid= at the end of its lines",
            why="SGLang ends such a request at once and prints the reason.",
            not_if="a client sends such requests by mistake: then nothing needs to change",
        )
    ]


CLIENTS_TIME_OUT = limit(
    id="clients_time_out",
    title="clients time out, {value} of requests",
    when=_gives_up(_timeouts),
    summary="Clients give up at one age: they have a time-out that this server does not meet.",
    past="Until {until} clients gave up by a time-out.",
    seen="{value} of the requests that ended were given up, {given_up_after}",
    guide=NOT_IN_GUIDE + "a request that is given up was computed for nothing",
    remedy=Change(
        direction="slow down",
        words="send fewer requests at once, add a replica, or raise the clients' time-out",
        why=(
            "Nearly all requests end at the same age: that is a client's time-out, not people who stop an answer."
            " Retries of them make the load larger still."
        ),
        not_if="another finding of this server names a flag: change it first",
    ),
    causes=(Group.WAIT, QUEUE_TOO_LONG, SCHEDULER_STUCK),
    unless=(SCHEDULER_STUCK,),
    borrows="instead",
    advise=fewer_requests,
    replica="helps",
    shade=2,
)


REQUESTS_GIVEN_UP = hint(
    id="requests_given_up",
    when=_gives_up(_given_up),
    summary="Clients give up many requests.",
    past="Until {until} clients gave up many requests.",
    seen="{value} of the requests that ended were given up",
    guide=NOT_IN_GUIDE + "what is given up was computed for nothing",
    remedy=look(
        words="find out who gives up: people who stop an answer, or programs",
        why="They are no time-out by their ages, and nothing of the server explains it.",
        not_if="people stop answers that they have read, or an editor cancels completions while its user types",
    ),
    unless=(CLIENTS_TIME_OUT, SCHEDULER_STUCK),
    shade=1,
)


REQUESTS_FAILED = limit(
    id="requests_failed",
    title="requests fail, {value} of them",
    past="Many requests ended in an exception of SGLang: HTTP 500, or a stream that broke off.",
    any_load=True,
    when=fact(
        measure=_requests_failed,
        limit=MANY_FAILED,
        counts=("server_errors",),
        name="share of the requests that ended in an exception",
    ),
    summary="Many requests end in an exception of SGLang: HTTP 500, or a stream that breaks off.",
    seen="{value} of the requests ended in an exception",
    guide=NOT_IN_GUIDE + "no request to a healthy server ends in an exception",
    remedy=Change(
        direction="read",
        words="read the traceback after Exception in ASGI application in the log",
        why=(
            "No flag mends an exception. Its last line says what went wrong: often a client that asks for what this"
            " release cannot do, or a time limit of the web server."
        ),
        not_if="a proxy in front of SGLang answers 500 by itself: then SGLang's log has no such line",
    ),
    shade=1,
)


REQUESTS_REFUSED = chance(
    id="requests_refused",
    limits=lambda view: (
        (_requests_refused(view) or 0.0) > MOSTLY_REFUSED
    ),  # clients of a healthy server get their answers
    any_load=True,
    when=fact(
        measure=_requests_refused,
        limit=MANY_FAILED,
        counts=("refused",),
        name="share of the requests that were refused",
    ),
    summary="SGLang answers many requests with an error, because it cannot do what they ask for.",
    seen="{value} of the requests were refused",
    guide=NOT_IN_GUIDE
    + "the scheduler ends such a request at once and prints why, with self.rid= at the end of the line",
    remedy=Change(
        arg="grammar_backend",
        direction="set",
        words="xgrammar",
        why=(
            "The clients ask for structured output (a JSON schema, regex or EBNF), and without a grammar backend SGLang"
            " refuses that."
        ),
        not_if="the package of the grammar backend is not installed",
        cost="Each new schema is compiled before its request can run.",
    ),
    advise=_refusals,
)


PROMPTS_BEYOND_KV_CACHE = chance(
    id="prompts_beyond_kv_cache",
    any_load=True,
    when=event("too_long", name="prompts refused or truncated"),
    summary="Prompts are longer than the whole KV cache: SGLang refuses or truncates them.",
    seen="{value} prompts were longer than the KV cache",
    guide=NOT_IN_GUIDE + "a prompt must fit into the KV cache, less 6 tokens, even if it is the only one",
    remedy=Change(
        arg="max_total_tokens",
        direction="raise",
        words="larger than the longest prompt with its answer",
        why=(
            "SGLang answers such a prompt with an error (status 400) at once, or cuts it off with"
            " --allow-auto-truncate. No other flag helps."
        ),
        not_if="the clients send such prompts by mistake: then nothing needs to change",
        cost="Less GPU memory stays free for peaks.",
    ),
    advise=_longest_prompts,
    shade=1,
)


PROMPTS_BEYOND_CONTEXT = chance(
    id="prompts_beyond_context",
    any_load=True,
    when=event("beyond_context", name="requests refused or truncated"),
    summary="Requests are longer than the context length: SGLang refuses or truncates them.",
    seen="{value} requests were longer than the context length",
    guide=NOT_IN_GUIDE + "--context-length limits prompt and answer together; without it, the model's own context does",
    remedy=Change(
        arg="context_length",
        direction="raise",
        words="longer than the longest request, prompt and answer together",
        why=(
            "SGLang answers such a request with an error, which a stream carries in an answer with status 200, or cuts"
            " it off with --allow-auto-truncate."
        ),
        not_if=(
            "the model's own context is not longer: SGLang then refuses to start; or the clients send such prompts by"
            " mistake"
        ),
        cost="Long requests hold more of the KV cache, so fewer run together.",
    ),
    advise=_longest_requests,
    shade=2,
)
