"""What one line of a log says: an `Event`.

Times are unix seconds as printed; memory is in GB as SGLang prints it (1 GB = 2**30 bytes); usages are 0 to 1. A figure that the line does not
have is absent, never zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sglang_tuning_exporter.sglang.metrics.page_figures import MOST_RANKS


class Rank(NamedTuple):
    """The ranks in a line's prefix, None where it has none."""

    dp: int | None = None
    tp: int | None = None
    pp: int | None = None

    @property
    def words(self) -> str:
        """The known ones, such as `DP0 TP1`."""
        return " ".join(f"{name.upper()}{rank}" for name, rank in self._asdict().items() if rank is not None)


NO_RANK = Rank()
OUT_OF_MEMORY_PHASES = ("prefill", "decode", "graph_capture", "startup", "unknown")


@dataclass(slots=True)
class Event:
    """One thing that a line says.

    | kind | figures | word, text, others |
    |---|---|---|
    | `decode` | running queued tokens usage swa_usage mamba_usage graph (1 replayed, 0 not) throughput accept_length, other queues | word: cuda cpu npu musa |
    | `prefill` | sequences tokens cached running queued pending usage swa_usage mamba_usage, other queues | |
    | `retraction` | requests aborted ratio_before ratio_after gained; testing 1 for SGLANG_TEST_RETRACT; usage while it waits | |
    | `out_of_memory` | held_elsewhere_gb | word: prefill decode graph_capture startup unknown; text: the line |
    | `arguments` | cut 1 where the line was cut | arguments |
    | `pool` | tokens gigabytes; resized 1 (after the graphs were captured) | |
    | `memory` | available used states; prefill 1 (graphs of prefill batches) | word: the stage, `weights_begin` to `graph`; sizes: captured batches |
    | `limits` | max_total_num_tokens max_running_requests chunked_prefill_size available_gb max_prefill_tokens | word: gpu cpu … |
    | `ready` | | "fired up and ready to roll" |
    | `hang` | seconds | word: scheduler tokenizer detokenizer; a watchdog that timed out |
    | `health` | silent: seconds without output, where the times in its text agree with its own | a health check that failed |
    | `end` | | word: process_died scheduler_exception launch_failed aborted; text: which process, how |
    | `words` | line chain; unsure 1: it may have ended nothing | word: a class of `endings`; text: a line that may explain an end; place, before |
    | `advice` | line | word: a text of `sglang.advices`; text: a line before the first request about a flag: an advice, or a decision |
    | `draining` | | SIGTERM received |
    | `rejected` | | answered with 503 |
    | `server_error` | | answered with 500, or a stream broken by an exception |
    | `pause`, `resume` | | POST /pause_generation, /continue_generation |
    | `too_long` | tokens most | a prompt that cannot fit |
    | `refused` | grammar 1 | answered with an error at once |
    | `transfer` | room (of the request), attempt 1 where none has failed yet | a failed bootstrap or KV transfer; word: decode prefill; text: why |
    | `hicache` | | word: kernel host storage, which fails; text: the line |
    | `no_pool` | tokens, not above 0 | no KV cache fits beside the weights; text: the line |

    Other queues: prealloc transfer retracted bootstrap inflight unbootstrapped transferring host_receive.
    Stages: weights_begin weights state_cache pool graph_begin graph.
    """

    kind: str
    time: float | None = None
    rank: Rank = NO_RANK
    figures: dict[str, float] = field(default_factory=dict)
    word: str = ""
    text: str = ""
    sizes: tuple[int, ...] = ()
    arguments: dict[str, object] = field(default_factory=dict)
    marked: bool = False  # text of a client or a model was printed close before: it may be no line of SGLang's
    place: str = ""  # the frame inside SGLang that raised an exception
    file: str = ""  # in which the line stands, where that is known
    before: tuple[str, ...] = ()  # recognised lines just before it


# As plain JSON, for a state file

_TEXTS = ("word", "text", "place", "file")


def to_json(event: Event) -> dict[str, object]:
    """Return an event as plain JSON, without arguments and sizes: a start is not saved."""
    kept = {name: getattr(event, name) for name in ("time", "figures", "marked", *_TEXTS)}
    kept["before"] = list(event.before)
    return {"kind": event.kind, "rank": list(event.rank), **{name: value for name, value in kept.items() if value}}


def from_json(saved: object) -> Event | None:
    """Return the event that `to_json` returned; None where it cannot be one."""
    match saved:
        case {"kind": str() as kind, "rank": [dp, tp, pp], **rest} if kind and all(map(_is_rank, (dp, tp, pp))):
            figures: Any = rest.get("figures", {})
            time: Any = rest.get("time")
            before: Any = rest.get("before", [])
            texts: dict[str, Any] = {name: rest.get(name, "") for name in _TEXTS}
            if (
                isinstance(figures, dict)
                and all(map(is_count, figures.values()))
                and (time is None or is_count(time))
                and isinstance(before, list)
                and all(isinstance(text, str) for text in (*texts.values(), *before))
            ):
                known = {str(name): float(value) for name, value in figures.items()}
                marked = rest.get("marked") is True
                return Event(kind, time, Rank(dp, tp, pp), known, marked=marked, before=tuple(before), **texts)
    return None


def lists(value: object) -> list[list[Any]]:
    """Return the lists in a list of a state file, which may be damaged."""
    return [each for each in value if isinstance(each, list)] if isinstance(value, list) else []


def is_count(value: object) -> bool:
    """Whether a value of a state file is a number that a count or an age may be."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e15


def _is_rank(value: object) -> bool:
    return value is None or (is_count(value) and isinstance(value, int) and value < MOST_RANKS)
