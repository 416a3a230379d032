"""From a diagnosis to the exact flag: its present value, the value to try, and what that gains. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor
from typing import TYPE_CHECKING

from sglang_tuning_exporter.guide.table import BY_ID

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_tuning_exporter.guide.profiles import Profile
    from sglang_tuning_exporter.server import ServerFacts
    from sglang_tuning_exporter.window import Totals

RAISED_CONSERVATIVENESS, LOWERED_CONSERVATIVENESS = 1.3, 0.3  # the guide's values to try
# The admission ratio starts at min(0.7 x conservativeness, 1): above 1 / 0.7 the flag changes nothing (since 0.3.6,
# CENSUS §6).
CONSERVATIVENESS_CEILING = 1.43
# DP attention multiplies the flag by this and prints the product (srt/arg_groups/parallel_hook.py in 0.5.23; since
# 0.3.6).
DP_ATTENTION_FACTOR = 0.3
USUAL_GRAPH_SIZES = (
    *(8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256),
    *(320, 384, 448, 512, 640, 768),
)


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to turn.

    `flag` is as typed (`--mem-fraction-static`), empty when the advice is to people; values are flag values.
    """

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

    @property
    def changes(self) -> bool:
        """Whether the suggestion is anything but the present value."""
        return self.current is None or self.suggested != self.current


def advise(diagnosis_id: str, case: Case) -> list[Advice]:
    """Say what to turn for a diagnosis.

    Empty when the flag already has the value, or when turning it further would change nothing.
    """
    turn = BY_ID[diagnosis_id].turn
    compute = _COMPUTE.get(diagnosis_id)
    if compute is None:
        return [_advice(diagnosis_id, _Value(None, case.facts.arg(turn.arg) if turn.arg else None))]
    return [_advice(row, value) for row, value in compute(case) if value.suggested is None or value.changes]


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
    """Give the flag's own value and the factor that the server multiplies it by."""
    printed = case.facts.arg("schedule_conservativeness")
    factor = DP_ATTENTION_FACTOR if case.facts.arg("enable_dp_attention") else 1.0
    return (None if printed is None else round(printed / factor, 4)), factor


@dataclass(frozen=True, slots=True)
class _RunningLimit:
    """`--max-running-requests`: its value as a flag, and what of it is in force, both for all that share it."""

    flag: float | None
    in_force: float | None
    shared_by: float

    @property
    def is_cut_short(self) -> bool:
        """Whether the KV pool allows fewer than the flag asks for: then raising the flag changes nothing."""
        return self.flag is not None and self.in_force is not None and self.in_force + self.shared_by <= self.flag


def _running_limit(facts: ServerFacts) -> _RunningLimit:
    shared_by = facts.limit_shared_by
    flag = facts.arg("max_running_requests")
    told = max(facts.running_limits.values(), default=None)
    return _RunningLimit(flag, flag if told is None else told * shared_by, shared_by)


def _fewer(case: Case, quantile: float, share: float) -> _Value | None:
    """Run only `share` of the batch that ran; None where one request is all there is."""
    limit = _running_limit(case.facts)
    ran = case.recent.running_quantile(quantile)
    known = [figure for figure in (limit.in_force, ran * limit.shared_by if ran else None) if figure]
    current = limit.flag or limit.in_force
    if not known:
        return _Value(None, current)
    suggested = max(1.0, float(int(share * min(known))))
    return None if current is not None and suggested >= current else _Value(suggested, current)


def _retracting(case: Case) -> _Values:
    current, factor = _conservativeness(case)
    # 4.33 x 0.3 is 1.299: who followed the advice is there.
    if current is None or current * factor < RAISED_CONSERVATIVENESS - 0.01:
        return [("retracting_too_often", _Value(round(RAISED_CONSERVATIVENESS / factor, 2), current))]
    fewer = _fewer(case, 0.5, 0.8)
    if fewer is None:
        return []
    gain = f"above {CONSERVATIVENESS_CEILING} conservativeness changes nothing"
    return [("retracting_too_often", _Value(fewer.suggested, fewer.current, gain, "max_running_requests"))]


def _too_conservative(case: Case) -> _Values:
    current, factor = _conservativeness(case)
    target = round(LOWERED_CONSERVATIVENESS / factor, 2)
    if current is not None and current <= target:
        return []
    return [("admission_too_conservative", _Value(target, current))]


def _at_limit(case: Case) -> _Values:
    limit = _running_limit(case.facts)
    current = limit.flag or limit.in_force
    usage = case.recent.mean("usage")
    if not current or usage is None:
        return [("running_at_limit", _Value(None, current))]
    # Usage grows with the requests that run; no more than eightfold at once: nobody has seen how they behave together.
    room = min(8.0, case.profile.token_usage_target / usage) if usage > 0 else 8.0
    suggested = float(_round_down(current * room))
    if limit.is_cut_short or suggested <= current:
        return []
    return [("running_at_limit", _Value(suggested, current, f"token usage is {usage:.2f} at this limit"))]


def _round_down(value: float) -> int:
    step = 1 if value < 32 else 8 if value < 256 else 64
    return max(int(value) // step * step, 1)


def _reserve(case: Case) -> _Values:
    facts, reserve = case.facts, case.facts.reserve_gb
    too_large = (reserve or 0) > case.profile.reserve_upper_gb
    row = "memory_reserve_too_large" if too_large else "memory_reserve_too_small"
    current = facts.arg("mem_fraction_static")
    if reserve is None or current is None:
        return [(row, _Value(None, current))]
    capacity = facts.memory_before_weights_gb
    spare = reserve - case.profile.reserve_aim_gb
    step = spare / capacity if capacity else (0.01 if spare > 0 else -0.01)
    # Round away from OOM, in the guide's steps of 0.01; the small term undoes what binary fractions lose.
    suggested = min(max(floor((current + step) * 100 + 1e-6) / 100, 0.1), 0.95)
    if (suggested <= current) if too_large else (suggested >= current):
        return []
    return [
        (row, _Value(suggested, current, _tokens_gained(facts, (suggested - current) * capacity if capacity else None)))
    ]


def _tokens_gained(facts: ServerFacts, gigabytes: float | None) -> str:
    tokens = sum(facts.kv_pool_tokens.values()) / max(len(facts.kv_pool_tokens), 1)
    if gigabytes is None or not facts.kv_pool_gb or not tokens:
        return ""
    gained = gigabytes / facts.kv_pool_gb * tokens
    return f"{gigabytes:+.1f} GB for the KV pool: {gained:+,.0f} tokens, {100 * gained / tokens:+.0f} %"


def _oom_prefill(case: Case) -> _Values:
    current = case.facts.arg("chunked_prefill_size")
    # -1 is no chunking at all.
    if current is None or current <= 0 or current > 4096:
        return [("out_of_memory_prefill", _Value(4096.0, current))]
    if current > 2048:
        return [("out_of_memory_prefill", _Value(2048.0, current))]
    return _oom_any(case)


def _oom_decode(case: Case) -> _Values:
    fewer = _fewer(case, 0.99, 0.75)
    return _oom_any(case) if fewer is None else [("out_of_memory_decode", fewer)]


def _oom_any(case: Case) -> _Values:
    current = case.facts.arg("mem_fraction_static")
    if current is None or current > 0.7:
        return [("out_of_memory_any", _Value(0.8 if current is None or current > 0.8 else 0.7, current))]
    suggested = round(current - 0.05, 2)
    return [("out_of_memory_any", _Value(suggested, current))] if suggested >= 0.1 else []


def _graphs(case: Case) -> _Values:
    arg = case.facts.graph_flag_arg
    current = case.facts.arg(arg) or (float(case.facts.largest_captured) if case.facts.largest_captured else None)
    batch = case.recent.running_quantile(0.99)
    if batch is None:
        return [("cuda_graph_not_covering", _Value(None, current, arg=arg))]
    # Useful to 512, with much tensor parallelism to 768 (E5).
    most = 768 if (case.facts.arg("tp_size") or 1) >= 8 else 512
    suggested = float(min(next((size for size in USUAL_GRAPH_SIZES if size >= batch), most), most))
    if current is not None and suggested <= current:
        return []
    gain = f"covers batches up to {suggested:g}; 99 % of the time they were at most {batch}"
    return [("cuda_graph_not_covering", _Value(suggested, current, gain, arg))]


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
