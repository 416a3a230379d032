"""The conditions of the table as PromQL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_tuning_exporter.guide.diagnosis import (
    SERVING_SECONDS,
    Beside,
    BurnRate,
    Condition,
    Diagnosis,
    Failures,
    GraphMemory,
    Rejections,
    Reserve,
    RetractionRate,
    Share,
    Source,
    Spread,
    Starts,
    Stuck,
)
from sglang_tuning_exporter.guide.measurement import CONSERVATIVENESS_CEILING
from sglang_tuning_exporter.guide.objectives import ENOUGH_REQUESTS, MOST_SHARE
from sglang_tuning_exporter.guide.profiles import ONE_MORE
from sglang_tuning_exporter.guide.promql import ON, WHILE, above, argument, before, known, one_of, risen, threshold
from sglang_tuning_exporter.guide.table import BY_ID

if TYPE_CHECKING:
    from collections.abc import Iterator

_CAPPED = f"{argument('schedule_conservativeness')} > {CONSERVATIVENESS_CEILING}"
_OFTEN = threshold("share", "upper")
_BUSY = "instance:sglang_tuning_serving_seconds:increase10m"
_SHARE, _LATELY = "instance:sglang_tuning_state:share10m", "instance:sglang_tuning_state:share2m"
_RETRACTIONS = "instance:sglang_tuning_retractions:rate"
_REJECTIONS = "instance:sglang_tuning_rejections:rate"
_MEMORY = known("sglang_tuning_available_gpu_memory_bytes")
_HANGS = f"max without (stage) ({known('sglang_tuning_stuck_stage')}) == 1"


def expression(row: Diagnosis, time_scale: float) -> list[str]:
    """Write what must hold for a row's alert, as lines; durations are not scaled yet, counts of seconds are."""
    busy = f"{SERVING_SECONDS / time_scale:g}"
    lines = _lines(row.condition, busy)
    if row.profiles:
        served = known(f"sglang_tuning_server_info{{{one_of('profile', row.profiles)}}}")
        lines.append(f"and {ON} {served}")
    if row.needs_advice:
        # Where the flag stands at its best value already, or a more urgent finding turns it, there is nothing to notify of.
        active = f'max_over_time(sglang_tuning_diagnosis_active{{diagnosis="{row.id}"}}[10m])'
        lines.append(f"unless {ON} {active} == 0")
    excuses = dict.fromkeys(tuple(_excuse(BY_ID[other].condition, row, busy)) for other in row.unless)
    return lines + [line for excuse in excuses for line in (f"unless {ON} (", *("  " + each for each in excuse), ")")]


def _excuse(other: Condition, row: Diagnosis, busy: str) -> list[str]:
    """Write that another row explains the same better."""
    if isinstance(other, RetractionRate) and isinstance(row.condition, RetractionRate):
        return [_CAPPED]
    if isinstance(other, RetractionRate):
        return [f"{_RETRACTIONS}10m {above(threshold('retractions_per_minute', 'upper'))}"]
    return _lines(other, busy)


def _lines(condition: Condition, busy: str) -> list[str]:  # noqa: C901, PLR0911 - one case for each kind
    if isinstance(condition, Share):
        return _share(condition, busy)
    if isinstance(condition, RetractionRate):
        limit = f"({threshold('retractions_per_minute', 'upper')} + {ONE_MORE:g})"
        return [
            f"{_RETRACTIONS}10m {above(limit)}",
            # Still going on, and not one burst alone. Not "> limit": at one and a half a minute every other two minutes hold two,
            # and `for` would never end.
            f"and {ON} {_RETRACTIONS}2m > 0",
            f"and {ON} {before(_RETRACTIONS + '5m', '5m')} > 0",
            *([f"and {ON} {_CAPPED}"] if condition.capped else []),
        ]
    if isinstance(condition, Rejections):
        return list(_rejections(condition))
    if isinstance(condition, Reserve):
        side, bound, least = (">", "upper", "max") if condition.side == "above" else ("<", "lower", "min")
        limit = threshold("available_gpu_memory_bytes", bound)
        return [f"{least} without (dp_rank) ({_MEMORY})", f"{side} {ON} group_left () {limit}"]
    if isinstance(condition, GraphMemory):
        return [
            *_out_of_memory("graph_capture"),
            f"or min without (dp_rank) ({_MEMORY})",
            f"  < {ON} group_left () {threshold('available_gpu_memory_bytes', 'least')}",
            # Without graphs they cannot be what took it.
            f"  unless {ON} {argument('disable_cuda_graph')} == 1",
        ]
    if isinstance(condition, Failures):
        return _out_of_memory(*condition.phases)
    if isinstance(condition, Stuck):
        spoken = risen(
            'sglang_tuning_liveness_events_total{event="watchdog_timeout"}',
            "sglang_tuning_liveness_event_age_seconds",
            "event",
        )
        return [_HANGS, "or " + spoken[0], *spoken[1:]]
    if isinstance(condition, Starts):
        return _starts("sglang_tuning_server_starts_total[30m]", f"> {condition.at_least - 0.5:g}")
    if isinstance(condition, Spread):
        waited, lately = "rank:sglang_tuning_waiting:share10m", "rank:sglang_tuning_waiting:share2m"
        return [
            f"max by (job, instance) ({waited}) > {ON} {_OFTEN}",
            f"and {ON} min by (job, instance) ({waited}) < {condition.hardly:g}",
            f"and {ON} max by (job, instance) ({lately}) > {ON} {_OFTEN}",
            f'and {ON} {_BUSY}{{signal="queue"}} > {busy}',
        ]
    if isinstance(condition, BurnRate):
        return _burn_rate(condition)
    assert isinstance(condition, Source)
    return condition.expression.splitlines()


def _starts(counted: str, often: str) -> list[str]:
    """Write that a counter rose this often.

    `increase` extrapolates: where scrapes are missed it makes three of two. So the plain difference must say so as well,
    except where the counter began anew: there it means nothing.
    """
    rose = f"max_over_time({counted}) - min_over_time({counted})"
    return [f"increase({counted}) {often}", f"and ({rose} {often} or resets({counted}) > 0)"]


def _share(condition: Share, busy: str) -> list[str]:
    selector = f'{{signal="{condition.signal}", {one_of("state", condition.states)}}}'
    long, lately = _SHARE + selector, _LATELY + selector
    if len(condition.states) > 1:
        long, lately = (f"sum without (state) ({share})" for share in (long, lately))
    return [
        f"{long} {above(_OFTEN)}",
        f'and {ON} {_BUSY}{{signal="{condition.signal}"}} > {busy}',
        f"and {ON} ({lately} {above(_OFTEN)})",
        *(f"unless {ON} ({_beside(other)})" for other in condition.unless),
    ]


def _beside(other: Beside) -> str:
    selector = f'{{signal="{other.signal}", {one_of("state", other.states)}}}'
    return f"sum by (job, instance) ({_SHARE}{selector}) > {other.above:g}"


def _rejections(condition: Rejections) -> Iterator[str]:
    limit = f"({threshold('rejections_per_minute', 'upper')} + {ONE_MORE:g})"
    late = 'instance:sglang_tuning_latency_breaches:ratio10m{latency="time_to_first_token"}'
    budget = f"({condition.times:g} * (1 - {threshold('latency', 'objective')}))"
    yield f'({_REJECTIONS}10m{{kind="rejected"}} {above(limit)}'
    yield f'or {_REJECTIONS}10m{{kind="given_up"}} {above(limit)}'
    yield f"  and {ON} (instance:sglang_tuning_given_up:ratio10m {above(threshold('aborted_share', 'upper'))})"
    # Why clients would give up: they waited (any wait, where the profile has no longest one), or first tokens came late.
    yield f"  and {ON} ("
    yield f'    {_SHARE}{{signal="queue", state="above_range"}} {above(_OFTEN)}'
    empty = f'{_SHARE}{{signal="queue", state="empty"}}'
    yield f"    or ((1 - {empty}) {above(_OFTEN)} unless {ON} {threshold('queue', 'wait_seconds')})"
    yield f"    or {late} {above(_OFTEN)}"
    yield f"    or {late} {above(budget)}"
    yield "  )"
    # Those who gave up on a server that hung had no other reason.
    yield f"  unless {ON} max by (job, instance) (max_over_time(sglang_tuning_stuck_stage[10m])) == 1)"
    # Still going on, as with retractions.
    yield f"and {_REJECTIONS}2m > 0"


def _out_of_memory(*phases: str) -> list[str]:
    counter = f"sglang_tuning_out_of_memory_total{{{one_of('phase', phases)}}}"
    return risen(counter, "sglang_tuning_out_of_memory_age_seconds", "phase")


def _burn_rate(condition: BurnRate) -> list[str]:
    of = f'{{latency="{condition.latency}"}}'
    missed = "instance:sglang_tuning_latency_breaches:ratio"
    budget = f"clamp_max({condition.times:g} * (1 - {threshold('latency', 'objective')}), {MOST_SHARE:g})"
    asked = f"instance:sglang_tuning_latency_observations:increase{condition.long}"
    return [
        f"{missed}{condition.long}{of} {above(budget)}",
        f"and {ON} ({missed}{condition.short}{of} {above(budget)})",
        f'and {ON} {asked}{{latency="time_to_first_token"}} >= {ENOUGH_REQUESTS}',
        f"and {ON} {before('sglang_tuning_latency_observations_total' + of, condition.settled, WHILE)}",
        f"unless {ON} increase(sglang_tuning_server_starts_total[{condition.settled}]) > 0",
    ]
