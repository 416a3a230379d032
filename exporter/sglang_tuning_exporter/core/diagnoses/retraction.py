"""Retractions: the KV cache is too small for the requests that run. Pure."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from sglang_tuning_exporter.config.profiles import DEFAULT
from sglang_tuning_exporter.core.diagnoses.base import (
    CONSERVATIVENESS,
    LIMIT,
    NOT_IN_GUIDE,
    Beside,
    Group,
    Offer,
    figures,
    limit,
    retracts,
    usage_figures,
)
from sglang_tuning_exporter.core.diagnoses.native import Native, series, total
from sglang_tuning_exporter.core.diagnoses.steps import (
    CAPPED,
    LOWERED_LIMIT,
    in_words,
    larger_pool,
    pool_flags,
    run_fewer,
    say,
    set_flag,
)
from sglang_tuning_exporter.core.findings import Change, Figure
from sglang_tuning_exporter.core.view import View

CEILING = 1.43  # min(0.7 x conservativeness, 1): above it the flag has no effect
# The guide's values.
_RETRACTED = f"increase({series('num_retracted_requests_total')}[10m])"
RAISED = 1.3
FULL_LENGTH = 0.8  # new-token ratio after retractions, above which answers use most of their max_new_tokens


def _retraction_figures(view: View) -> list[Figure]:
    """Return how full the KV cache was just before retractions, or on average where that is not known."""
    known, target = view.totals["usage_before:n"], view.profile.token_usage_target
    if not known:
        return usage_figures(view)
    name = f"token usage just before retractions, mean of {known:.0f} of {view.totals['retraction_events']:.0f}"
    return figures((name, view.totals["usage_before"] / known, "ratio", target))


def _beside_text(view: View) -> str:
    """Say how many retractions a client may have written."""
    number, marked = view.totals["retraction_events"], view.totals["marked.retraction_events"]
    return f"{number:.0f} retractions, {marked:.0f} of them beside text that clients can write." if marked else ""


def _retracting(view: View, beside: Beside) -> list[Offer]:
    facts, totals = view.facts, view.totals
    now, factor = facts.typed(CONSERVATIVENESS), facts.factor(CONSERVATIVENESS)
    if now is not None and now * factor >= RAISED - 0.01:
        return _ineffective(view, beside)
    raised = set_flag(view, CONSERVATIVENESS, round(RAISED / factor, 2))
    larger = (
        larger_pool(view) if not any(Group.OUT_OF_MEMORY in diagnosis.groups for diagnosis in beside) else []
    )  # else memory is short
    share = totals["ratio_after"] / totals["ratio_after:n"] if totals["ratio_after:n"] else 0.0
    if share >= FULL_LENGTH:
        gain = (
            f"answers use about {100 * min(share, 1.0):.0f} % of their max_new_tokens: a higher conservativeness alone"
            " retracts on"
        )
        return [*(replace(change, gain=gain) for change in larger or _fitting_requests(view)), raised]
    # one flag is changed at a time
    words = "or enlarge the KV cache: raise --max-total-tokens, now {now:g}, to {to:g}, or remove it"
    return [raised, *(in_words(CAPPED, words.format(now=change.now, to=change.to)) for change in larger)]


def _fitting_requests(view: View) -> list[Change]:
    """Run as many requests as the KV cache holds to their end."""
    pool, prompt, answer, batch = view.facts.pool(), view.prompt, view.answer, view.batch(0.5)
    if not pool or not prompt or not answer or not batch:
        return []
    fits, limit = max(int(pool / (prompt + answer)), 1), view.facts.least_limit
    return [] if fits >= min(batch, limit or inf) else [set_flag(view, LIMIT, float(fits * view.facts.shared_by))]


def _ineffective(view: View, _: Beside) -> list[Offer]:
    if larger := larger_pool(view):
        return [*larger]
    gain = f"above {CEILING} conservativeness changes nothing"
    return [
        *(replace(change, gain=gain) for change in run_fewer(view, view.batch(0.5), LOWERED_LIMIT)),
        say(
            words=f"enlarge the KV cache ({pool_flags(view)})",
            why=(
                "The KV cache is too small for the running requests; a larger one removes the cause of the retractions."
            ),
            not_if="no GPU memory is free",
            cost="An 8-bit KV cache costs a little accuracy; a larger one leaves less memory for peaks.",
        ),
    ]


CONSERVATIVENESS_INEFFECTIVE = limit(
    id="conservativeness_ineffective",
    title="retracting {value}/min",
    protects="requests",
    when=retracts(
        lambda view: (view.facts.number(CONSERVATIVENESS) or 0.0) > CEILING,
        needs="load, and --schedule-conservativeness above 1.43",
    ),
    summary="SGLang keeps retracting requests, and a higher --schedule-conservativeness has no further effect.",
    past=(
        "SGLang retracted running requests {times} until {until}; a higher --schedule-conservativeness has no further"
        " effect."
    ),
    seen="{value} retractions/min with --schedule-conservativeness above 1.43",
    remark=_beside_text,
    guide=NOT_IN_GUIDE
    + "the new-token ratio starts at min(0.7 x conservativeness, 1), so values above 1.43 change nothing",
    remedy=Change(
        arg=LIMIT,
        direction="lower",
        words="four fifths of the running batch where prompts are long, else enlarge the KV cache",
        why=(
            "The KV cache is too small for the running requests. Enlarge it (--max-total-tokens where it is set,"
            " --mem-fraction-static, --kv-cache-dtype fp8_e4m3), or run fewer requests at once where prompts are long"
            " and costly to prefill again."
        ),
        not_if="a single request is longer than the KV cache: then lower --context-length",
        cost="Fewer requests run at once.",
    ),
    causes=(Group.OUT_OF_MEMORY,),
    advise=_ineffective,
    groups=frozenset({Group.RETRACTION, Group.WAIT, Group.FILLS}),
    supporting=_retraction_figures,
    replica="after a flag",
    shade=1,
)


RETRACTING_TOO_OFTEN = limit(
    id="retracting_too_often",
    title="retracting {value}/min",
    protects="requests",
    when=retracts(),
    summary="SGLang keeps retracting running requests: the KV cache is full.",
    past="SGLang retracted running requests {times} until {until}: the KV cache was full.",
    seen="{value} retractions/min",
    remark=_beside_text,
    guide=(
        '"Achieve a high token usage": with frequent retraction warnings raise --schedule-conservativeness to about'
        " 1.3; about one a minute is fine. (The extended edition would lower --mem-fraction-static; a smaller KV cache"
        " retracts more, so the opposite is advised here.)"
    ),
    remedy=Change(
        arg=CONSERVATIVENESS,
        direction="raise",
        words="1.3",
        why=(
            "SGLang admits more requests than the KV cache can hold until they finish. It retracts some and computes"
            " them again. A higher value, or fewer requests at once, keeps more of the KV cache free for each. A first"
            " burst after the start ends by itself."
        ),
        not_if=(
            "the value is already above 1.43, where it has no further effect: then enlarge the KV cache"
            " (--mem-fraction-static) or lower --max-running-requests"
        ),
        cost="Above 1.0 SGLang admits fewer requests at once, and the queue may grow.",
    ),
    unless=(CONSERVATIVENESS_INEFFECTIVE,),
    causes=(Group.OUT_OF_MEMORY,),
    advise=_retracting,
    groups=frozenset({Group.RETRACTION, Group.WAIT, Group.FILLS}),
    supporting=_retraction_figures,
    replica="after a flag",
    shade=2,
    native=Native(
        alert="SGLangRetracting",
        expr=f"{total(_RETRACTED)} / 10",
        limit=f"> {DEFAULT.retractions_per_minute:g}",
        seen=f"{{value}} requests/min are retracted, more than {DEFAULT.retractions_per_minute:g}",
        form='printf "%.1f"',
    ),
)
