"""From a diagnosis to the exact flag: its present value, the value to try, and what that gains. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang_tuning_exporter.guide.profiles import Profile
from sglang_tuning_exporter.guide.table import BY_ID
from sglang_tuning_exporter.server import ServerFacts
from sglang_tuning_exporter.window import Totals

# The admission ratio starts at min(0.7 x conservativeness, 1): above 1 / 0.7 the flag changes nothing (CENSUS §6, since 0.3.6).
CONSERVATIVENESS_CEILING = 1.43
# DP attention multiplies the flag by this and prints the product (srt/arg_groups/parallel_hook.py in 0.5.23; since 0.3.6).
DP_ATTENTION_FACTOR = 0.3
USUAL_GRAPH_SIZES = (8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768)


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to turn. `flag` is as typed (`--mem-fraction-static`), empty when the advice is to people; values are flag values."""

    flag: str
    arg: str
    current: float | None
    suggested: float | None
    suggestion: str
    why: str
    will_not_help_if: str
    gain: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """What advice may look at."""

    facts: ServerFacts
    recent: Totals
    profile: Profile


@dataclass(frozen=True, slots=True)
class _Value:
    suggested: float | None
    current: float | None = None
    gain: str = ""
    arg: str | None = None


def advise(diagnosis_id: str, case: Case) -> list[Advice]:
    """What to turn for a diagnosis; empty when the flag already has the value and turning it further would change nothing."""
    turn = BY_ID[diagnosis_id].turn
    compute = _COMPUTE.get(diagnosis_id)
    if compute is None:
        return [_advice(diagnosis_id, _Value(None, case.facts.arg(turn.arg) if turn.arg else None))]
    return [_advice(value_id, value) for value_id, value in compute(case)]


def _advice(diagnosis_id: str, value: _Value) -> Advice:
    turn = BY_ID[diagnosis_id].turn
    arg = value.arg or turn.arg
    return Advice(
        flag="--" + arg.replace("_", "-") if arg else "",
        arg=arg,
        current=value.current,
        suggested=value.suggested,
        suggestion=f"{value.suggested:g}" if value.suggested is not None else turn.fallback,
        why=turn.why,
        will_not_help_if=turn.will_not_help_if,
        gain=value.gain,
    )


_Values = list[tuple[str, _Value]]


def _conservativeness(case: Case) -> tuple[float | None, float]:
    """The flag's own value and the factor that the server multiplies it by."""
    printed = case.facts.arg("schedule_conservativeness")
    factor = DP_ATTENTION_FACTOR if case.facts.arg("enable_dp_attention") else 1.0
    return (None if printed is None else round(printed / factor, 4)), factor


def _retracting(case: Case) -> _Values:
    current, factor = _conservativeness(case)
    effective = None if current is None else current * factor
    if effective is not None and effective >= 1.3:
        limit = case.facts.arg("max_running_requests") or case.facts.running_limit(None)
        ran = case.recent.running_quantile(0.5)
        fewer = float(max(1, int(0.8 * min(ran or limit or 1, limit or ran or 1)))) if (ran or limit) else None
        return [
            (
                "retracting_too_often",
                _Value(fewer, limit, f"above {CONSERVATIVENESS_CEILING} conservativeness changes nothing", "max_running_requests"),
            )
        ]
    return [("retracting_too_often", _Value(round(1.3 / factor, 2), current))]


def _too_conservative(case: Case) -> _Values:
    current, factor = _conservativeness(case)
    target = round(0.3 / factor, 2)
    if current is not None and current <= target:
        return []
    return [("admission_too_conservative", _Value(target, current))]


def _at_limit(case: Case) -> _Values:
    limits = [value for value in case.facts.running_limits.values() if value]
    limit = max(limits) if limits else case.facts.arg("max_running_requests")
    if not limit:
        return [("running_at_limit", _Value(None))]
    usage = case.recent.mean("usage") or 0.0
    # Usage grows with the requests that run; no more than eightfold at once, because nobody has seen how they behave together.
    room = min(8.0, 0.9 / usage) if usage > 0 else 8.0
    if room <= 1.1:
        return []
    flag_value = limit * (case.facts.arg("dp_size") or 1 if case.facts.arg("max_running_requests") else 1)
    return [("running_at_limit", _Value(float(_round_down(flag_value * room)), flag_value, f"token usage is {usage:.2f} at this limit"))]


def _round_down(value: float) -> int:
    step = 1 if value < 32 else 8 if value < 256 else 64
    return max(int(value) // step * step, 1)


def _reserve(case: Case) -> _Values:
    facts, reserve = case.facts, case.facts.reserve_gb
    row = "memory_reserve_too_large" if (reserve or 0) > case.profile.reserve_upper_gb else "memory_reserve_too_small"
    current = facts.arg("mem_fraction_static")
    if reserve is None or current is None:
        return [(row, _Value(None, current))]
    capacity = facts.memory_before_weights_gb
    spare = reserve - case.profile.reserve_aim_gb
    step = spare / capacity if capacity else (0.01 if spare > 0 else -0.01)
    # Round away from OOM, in the guide's steps of 0.01.
    suggested = round(int((current + step) * 100) / 100, 2)
    if suggested == round(current, 2):
        return []
    suggested = min(max(suggested, 0.1), 0.95)
    return [(row, _Value(suggested, current, _tokens_gained(facts, (suggested - current) * capacity if capacity else None)))]


def _tokens_gained(facts: ServerFacts, gigabytes: float | None) -> str:
    tokens = sum(facts.kv_pool_tokens.values()) / max(len(facts.kv_pool_tokens), 1)
    if gigabytes is None or not facts.kv_pool_gb or not tokens:
        return ""
    gained = gigabytes / facts.kv_pool_gb * tokens
    return f"{gigabytes:+.1f} GB for the KV pool: {gained:+,.0f} tokens, {100 * gained / tokens:+.0f} %"


def _oom_prefill(case: Case) -> _Values:
    current = case.facts.arg("chunked_prefill_size")
    if current is None or current > 4096:
        return [("out_of_memory_prefill", _Value(4096.0, current))]
    if current > 2048:
        return [("out_of_memory_prefill", _Value(2048.0, current))]
    return [("out_of_memory_any", value) for _, value in _oom_any(case)]


def _oom_decode(case: Case) -> _Values:
    limit = case.facts.arg("max_running_requests") or case.facts.running_limit(None)
    ran = case.recent.running_quantile(0.99)
    base = min(value for value in (limit, ran) if value) if (limit or ran) else None
    return [("out_of_memory_decode", _Value(None if base is None else float(max(1, int(0.75 * base))), limit))]


def _oom_any(case: Case) -> _Values:
    current = case.facts.arg("mem_fraction_static")
    if current is None or current > 0.8:
        suggested = 0.8
    else:
        suggested = 0.7 if current > 0.7 else round(max(current - 0.05, 0.1), 2)
    return [("out_of_memory_any", _Value(suggested, current))]


def _graphs(case: Case) -> _Values:
    arg = case.facts.graph_flag_arg
    current = case.facts.arg(arg) or (float(case.facts.largest_captured) if case.facts.largest_captured else None)
    batch = case.recent.running_quantile(0.99)
    if batch is None:
        return [("cuda_graph_not_covering", _Value(None, current, arg=arg))]
    most = 768 if (case.facts.arg("tp_size") or 1) >= 8 else 512
    suggested = float(min(next((size for size in USUAL_GRAPH_SIZES if size >= batch), most), most))
    if current is not None and suggested <= current:
        return []
    return [("cuda_graph_not_covering", _Value(suggested, current, f"covers batches up to {suggested:g}; 99 % were at most {batch}", arg))]


_COMPUTE: dict[str, Callable[[Case], _Values]] = {
    "retracting_too_often": _retracting,
    "admission_too_conservative": _too_conservative,
    "running_at_limit": _at_limit,
    "memory_reserve_too_large": _reserve,
    "memory_reserve_too_small": _reserve,
    "out_of_memory_prefill": _oom_prefill,
    "out_of_memory_decode": _oom_decode,
    "out_of_memory_any": _oom_any,
    "cuda_graph_not_covering": _graphs,
}
