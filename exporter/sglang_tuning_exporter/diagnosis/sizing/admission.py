"""Values for admission: `--schedule-conservativeness`, `max_new_tokens`, and a capped KV cache. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil

from sglang_tuning_exporter.diagnosis.conditions.requests import CONSERVATIVENESS_CEILING
from sglang_tuning_exporter.diagnosis.demand import USED_LITTLE, demand, longest_answer, mean_prompt
from sglang_tuning_exporter.diagnosis.evidence import Past
from sglang_tuning_exporter.diagnosis.sizing.advised_value import AdvisedValue, SizingInput, in_words, set_to
from sglang_tuning_exporter.diagnosis.sizing.limits import LOWERED_LIMIT, run_fewer
from sglang_tuning_exporter.diagnosis.sizing.memory import larger_pool, larger_pool_flags
from sglang_tuning_exporter.sglang.events import OUT_OF_MEMORY_PHASES

# The guide's values, and the default.
RAISED_CONSERVATIVENESS, LOWERED_CONSERVATIVENESS, USUAL_CONSERVATIVENESS = 1.3, 0.3, 1.0
# Retractions for each started request; docs/decisions.md.
TOLERATED, OFTEN_RETRACTED = 0.05, 0.5
# Tokens; docs/decisions.md.
LONG_PROMPT = 1000.0
RECOVERS = (
    "for {:.0f} % of the time requests waited because of earlier retractions: expect more throughput and shorter waits, not"
    " fewer retractions"
)
SMALLER_REQUESTS = (
    "ask for {}: the flag is low enough; a new request waits until its whole max_new_tokens fits beside what SGLang reserves"
    " for running requests"
)
CAPPED = "or enlarge the KV cache: raise --max-total-tokens, now {:g}, to {:g}, or remove it"
FEWER_TOKENS = "fewer max_new_tokens"
TOKENS_ENOUGH = "at most {:,} max_new_tokens (now about {:,}{}; 99 % of the answers end within {:,.0f})"
TOKENS_STEP = 64
MOST_KEPT = 4096  # SGLang reserves no more for one request
# Share of what is asked for. If answers need more, a smaller limit would truncate them.
MOSTLY_NEEDED = 0.8
# With a longer queue `lpm` serves in order of arrival (WAITING_QUEUE_PREFIX_MATCH_MAX,
# srt/managers/schedule_policy.py, 0.4.1 on).
MOST_SORTED = 128


def _conservativeness(basis: SizingInput) -> tuple[float | None, float]:
    """Return the flag's own value and the factor by which SGLang multiplies it."""
    return basis.flag("schedule_conservativeness"), basis.factor("schedule_conservativeness")


def retracting(basis: SizingInput) -> list[AdvisedValue]:
    """Raise conservativeness to 1.3; above it, advise what still helps."""
    current, factor = _conservativeness(basis)
    # 4.33 x 0.3 is 1.299: that is 1.3 as advised.
    if current is None or current * factor < RAISED_CONSERVATIVENESS - 0.01:
        recovering = basis.recent.share("admission", "recovering") or 0.0
        gain = RECOVERS.format(100 * recovering) if recovering > basis.profile.frequent_share else ""
        raised = AdvisedValue(round(RAISED_CONSERVATIVENESS / factor, 2), current, gain)
        capped = larger_pool(basis)
        if capped is None or any(basis.past.event_counts.get(phase) for phase in OUT_OF_MEMORY_PHASES):
            return [raised]
        # In words, because one flag is changed at a time.
        return [raised, in_words(CAPPED.format(capped.current, capped.suggested), "capped_pool")]
    return ineffective(basis)


def _cheaper_than_fewer_requests(basis: SizingInput) -> str:
    """Return why fewer requests at once would cost more than they save; empty if they may help."""
    usage, share, prompt = basis.recent.mean("usage"), _retractions_per_request(basis), mean_prompt(basis.past)
    more = "more than the retractions"
    if usage is not None and usage < basis.profile.token_usage_target:
        # Fewer requests would prevent the peaks only, and wait for the limit instead.
        because = f"it is full at peaks only (token usage is {usage:.2f})"
    elif share is not None and share < OFTEN_RETRACTED:
        because = f"{100 * share:.0f} % of the requests are retracted"
    elif share is not None and prompt is not None and prompt < LONG_PROMPT:
        because = f"{share:.1f} retractions for each request, but of prompts of {prompt:.0f} tokens they cost little"
        more = "more"
    else:
        return ""
    return f"enlarge the KV cache ({larger_pool_flags(basis)}): {because}, and fewer requests at once would cost {more}"


def tolerated(basis: SizingInput) -> bool:
    """Return whether retractions are the price of a full KV cache: few requests are retracted, and the flag is as advised.

    Either it is high already, or it was lowered to 0.3 at the cost of a few retractions: raised again for them, it
    would be lowered again for the queue.
    """
    current, factor = _conservativeness(basis)
    share = _retractions_per_request(basis)
    if current is None or share is None or share >= TOLERATED:
        return False
    flag = current * factor + 0.01
    return flag >= RAISED_CONSERVATIVENESS or LOWERED_CONSERVATIVENESS <= flag < USUAL_CONSERVATIVENESS


def _retractions_per_request(basis: SizingInput) -> float | None:
    """Return retractions for each started request; None if not known."""
    started = basis.past.started_requests
    return basis.past.retractions_per_minute / basis.past.per_minute(started) if started else None


def ineffective(basis: SizingInput) -> list[AdvisedValue]:
    """Advise what helps if a higher conservativeness has no effect: a larger KV cache, or fewer requests at once."""
    if tolerated(basis):
        return []
    larger = larger_pool(basis)
    if larger is not None:
        return [larger]
    words = _cheaper_than_fewer_requests(basis)
    if words:
        return [in_words(words, "larger_pool")]
    fewer = run_fewer(basis, 0.5, LOWERED_LIMIT)
    if fewer is None:
        return []
    gain = f"above {CONSERVATIVENESS_CEILING} conservativeness changes nothing"
    return [replace(fewer, gain=gain)]


def too_conservative(basis: SizingInput) -> list[AdvisedValue]:
    """Lower conservativeness to 0.3; at or below it, smaller max_new_tokens."""
    current, factor = _conservativeness(basis)
    target = round(LOWERED_CONSERVATIVENESS / factor, 2)
    if current is not None and current <= target:
        # With any flag a request is admitted only if its whole max_new_tokens fits, 4096 at most
        # (PrefillAdder.add_one_req, srt/managers/schedule_policy.py, 0.4.9 to 0.5.23).
        return _smaller_requests(basis)
    asking = demand(basis.past)
    if current is not None and asking is not None and asking.share > USED_LITTLE:
        # They do not end early, so a lower flag would not help. Above the ceiling the flag has no effect.
        above = current * factor > CONSERVATIVENESS_CEILING
        usual = AdvisedValue(round(USUAL_CONSERVATIVENESS / factor, 2), current, variant="above_the_ceiling")
        return [usual] if above else []
    return [AdvisedValue(target, current)]


def _smaller_requests(basis: SizingInput) -> list[AdvisedValue]:
    """Return how many max_new_tokens are enough; nothing if clients ask for little more than they use."""
    asking, longest = demand(basis.past), longest_answer(basis.past)
    if longest is None or asking is None or not asking.is_precise:
        return [in_words(SMALLER_REQUESTS.format(FEWER_TOKENS), "smaller_requests")]
    enough = TOKENS_STEP * ceil(longest / TOKENS_STEP)
    if enough > MOSTLY_NEEDED * asking.asked:
        return []
    asked = min(TOKENS_STEP * round(asking.asked / TOKENS_STEP), MOST_KEPT)
    fewer = TOKENS_ENOUGH.format(enough, asked, " or more" if asked >= MOST_KEPT else "", longest)
    return [in_words(SMALLER_REQUESTS.format(fewer), "smaller_requests")]


def recovering(basis: SizingInput) -> list[AdvisedValue]:
    """Go back to 1.0; above it, wait."""
    current, factor = _conservativeness(basis)
    if current is not None and current * factor >= USUAL_CONSERVATIVENESS - 0.01:
        return [in_words("wait: the new-token ratio falls within minutes", "wait")]
    return [AdvisedValue(round(USUAL_CONSERVATIVENESS / factor, 2), current)]


def to_clients(words: Callable[[Past], str]) -> Callable[[SizingInput], list[AdvisedValue]]:
    """Advise clients, with a figure if there is one."""
    return lambda basis: [in_words(words(basis.past))]


def by_prefix(basis: SizingInput) -> list[AdvisedValue]:
    """Order by prefixes; nothing if so many wait that SGLang does not sort them."""
    queued = basis.recent.mean("queued")
    return [] if queued is not None and queued > MOST_SORTED else set_to("schedule_policy", "lpm")(basis)


def refusals(basis: SizingInput) -> list[AdvisedValue]:
    """Choose a grammar backend where requests need one and there is none, else say where the reason stands."""
    counts, current = basis.recent.counts, basis.present("grammar_backend")
    if current == "none" and counts["refused_for_grammar"] > counts["refused_requests"] / 2:
        return [AdvisedValue("xgrammar", current)]
    return [in_words("read the reason in the log, before self.rid= at the end of its lines", "refused")]


def grammar(basis: SizingInput) -> list[AdvisedValue]:
    """Name the other grammar backends of this server's release."""
    current, choices = basis.present("grammar_backend"), basis.choices("grammar_backend")
    if choices is None:
        return [AdvisedValue(None, current)]
    others = ", ".join(str(each) for each in choices if each not in (current, "none"))
    return [AdvisedValue(None, current, words=f"another backend ({others}), or fewer distinct schemas")]
