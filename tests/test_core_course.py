"""A log judged as its time passes: states, events counted once, rows and their counterexamples, alerts, the whole.

Lines of SGLang in, `Judgement` out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from typing import Any

import pytest

from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core import judge
from sglang_tuning_exporter.core.course import Course
from sglang_tuning_exporter.core.findings import Finding, Judgement
from sglang_tuning_exporter.core.lines import Reader

BEGIN = 1_763_632_800.0  # 2025-11-20 10:00:00
ARGUMENTS = {
    "model_path": "meta-llama/Llama-3.1-8B-Instruct", "device": "cuda", "tp_size": 1, "dp_size": 1,
    "chunked_prefill_size": 8192,
    "max_prefill_tokens": 16384, "schedule_policy": "fcfs", "schedule_conservativeness": 1.0,
    "mem_fraction_static": 0.88, "page_size": 1,
    "max_running_requests": None, "disable_radix_cache": False, "disable_cuda_graph": False, "cuda_graph_max_bs": 256,
    "max_total_tokens": None,
    "kv_cache_dtype": "auto", "quantization": None, "attention_backend": "fa3", "enable_dp_attention": False,
    "speculative_algorithm": None,
}  # fmt: skip


def stamp(at: float, ranks: str = "") -> str:
    moment = datetime.fromtimestamp(BEGIN + at, timezone.utc)
    return f"[{moment:%Y-%m-%d %H:%M:%S}{ranks and ' '}{ranks}] "


def start(at: float = 0.0, limit: int = 4096, pool: int = 200_000, left: float = 7.0, **arguments: object) -> list[str]:
    """A start; `arguments` replace the usual ones."""
    given_arguments = {**ARGUMENTS, **arguments}
    listed = ", ".join(f"{name}={value!r}" for name, value in given_arguments.items())
    return [
        f"{stamp(at)}server_args=ServerArgs({listed})",
        (
            f"{stamp(at + 5)}Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=62.00 GB, mem"
            " usage=16.46 GB."
        ),
        (
            f"{stamp(at + 9)}max_total_num_tokens={pool}, max_running_requests={limit}, context_len=131072,"
            f" available_gpu_mem={left:.2f} GB"
        ),
        f"{stamp(at + 10)}The server is fired up and ready to roll!",
    ]


def decode(
    at: float,
    running: int = 60,
    queue: int = 0,
    usage: float = 0.5,
    *,
    graph: bool = True,
    ranks: str = "",
    throughput: float = 1200.0,
) -> str:
    return (
        f"{stamp(at, ranks)}Decode batch, #running-req: {running}, #token: {round(usage * 200_000)}, token usage:"
        f" {usage:.2f}, cuda graph: {graph}, gen throughput (token/s): {throughput:.2f}, #queue-req: {queue}"
    )


def prefill(
    at: float,
    tokens: int = 300,
    sequences: int = 1,
    *,
    running: int = 60,
    queue: int = 0,
    usage: float = 0.5,
    ranks: str = "",
) -> str:
    return (
        f"{stamp(at, ranks)}Prefill batch, #new-seq: {sequences}, #new-token: {tokens}, #cached-token: 0, token usage:"
        f" {usage:.2f}, #running-req: {running}, #queue-req: {queue}, #pending-token:"
        f" {queue * tokens // max(sequences, 1)}"
    )


def retraction(at: float, requests: int = 1, ranks: str = "", ratio: float = 0.6) -> str:
    return (
        f"{stamp(at, ranks)}KV cache pool is full. Retract requests. #retracted_reqs: {requests}, #new_token_ratio:"
        f" 0.5000 -> {ratio:.4f}"
    )


def load(begin: float, seconds: float, every: float = 2.0, **figures: Any) -> list[str]:
    """Decode lines of these figures, and a prefill line before each."""
    lines = []
    for step in range(int(seconds / every)):
        at = begin + step * every
        shared = {name: value for name, value in figures.items() if name in {"running", "queue", "usage", "ranks"}}
        lines += [prefill(at, **shared), decode(at, **figures)]
    return lines


def judged(lines: Iterable[str], profile: str = "online") -> Judgement:
    reader, course = Reader(), Course(PROFILES[profile])
    for line in lines:
        for event in reader.read(line.encode()):
            course.take_line(event)
    return course.end()


def verdict(lines: Iterable[str], profile: str = "online") -> str:
    return judged(lines, profile).verdict


def finding(answer: Judgement, diagnosis: str) -> Finding:
    return next(each for each in answer.findings if each.diagnosis == diagnosis)


def found(answer: Judgement) -> set[str]:
    return {each.diagnosis for each in answer.findings}


CUDA = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 56.00 MiB. GPU 0 has a total capacity of 79.18 GiB"
    " of which 11.81 MiB is free. "
)
OWN, OTHER = (
    "Including non-PyTorch memory, this process has 69.22 GiB memory in use. ",
    "Process 1609 has 9.93 GiB memory in use. ",
)


@pytest.mark.parametrize(
    ("words", "noted"),
    [
        (CUDA + OWN + OTHER, True),
        (CUDA + OWN, False),
        (CUDA + "Process 4711 has 79.10 GiB memory in use. ", False),  # itself, in a container
        (CUDA + OWN + "Process 1609 has 310.00 MiB memory in use. ", False),
    ],
)
def test_another_process_that_holds_memory_comes_before_any_flag(words: str, noted: bool) -> None:  # noqa: FBT001 - a case
    failed = finding(judged([*start(), *load(20, 60), stamp(82) + words]), "out_of_memory_any")
    assert ("9.9 GB of this GPU's memory" in failed.changes[0].words) is noted
    assert [each.flag for each in failed.changes if each.flag] == ["--mem-fraction-static"]


# Rows, and the load each is for


def test_two_retractions_in_half_a_minute_of_load_are_no_rate() -> None:
    short = sorted([*start(), *load(20, 25, usage=0.95), retraction(30), retraction(38)])
    assert "retracting_too_often" not in found(judged(short))


def test_nothing_starts_for_a_minute_although_nearly_all_is_free() -> None:
    lines = [decode(20 + step, running=3, queue=1, usage=0.06) for step in range(0, 200, 2)]
    assert verdict([*start(limit=4), *lines]) == "admission_standing_still"


def test_decode_lines_far_apart_are_one_load_and_pauses_between_bursts_are_no_wait() -> None:
    far = judged(decode(24.0 * number, running=8, usage=0.1, throughput=13.3) for number in range(10))
    assert far.serving_seconds > 0.8 * 9 * 24
    times = [120.0 * burst + second for burst in range(5) for second in range(30)]
    bursts = judged(
        line
        for at in times
        for line in (
            prefill(at, 1000, 10, running=40, queue=20, usage=0.3),
            decode(at, running=40, queue=20, usage=0.3, throughput=900.0),
        )
    )
    assert bursts.shares["queue"].get("above_range", 0.0) < 0.05


# Silence


def silent(gap: float, after: int = 24) -> list[str]:
    return [*start(), *load(20, 60, running=24, usage=0.4), *load(80 + gap, 60, running=after, usage=0.4)]


def test_a_silence_after_which_little_runs_is_a_pause_of_the_clients_and_noted() -> None:
    answer = judged(silent(140, after=2))
    assert answer.verdict == "no_limit_in_log"
    assert any("Nothing was logged" in note for note in answer.notes)


@pytest.mark.parametrize(
    ("tokens", "verdict_"), [(3_000, "no_limit_in_log"), (9_600, "scheduler_stuck"), (9_000, "no_limit_in_log")]
)
def test_a_hang_of_a_pairs_decode_server_has_the_same_requests_throughout(tokens: int, verdict_: str) -> None:
    def line(at: float, held: int) -> str:
        return decode(at, 1).replace("100000", str(held)).replace(", gen", ", #prealloc-req: 0, #transfer-req: 0, gen")

    lines = [line(20 + 2 * step, 5_000 + 40 * step) for step in range(115)]
    assert verdict([*lines, *(line(368 + 2 * step, tokens + 40 * step) for step in range(60))]) == verdict_


def test_what_took_most_of_the_time_leaves_out_the_part_with_the_verdict() -> None:
    calm, part = load(20, 90, running=6, usage=0.1), load(110, 75, running=8, queue=40, usage=0.1)
    answer = judged([*start(limit=8), *calm, *part])
    assert answer.verdict == "running_at_limit"
    assert answer.mostly is not None
    assert answer.mostly[1] == pytest.approx(102 / 162)


@pytest.mark.parametrize(("queue", "what"), [(15, "silent"), (0, "idle")])
def test_a_pause_with_requests_waiting_is_silence_and_no_idle_time(queue: int, what: str) -> None:
    lines = [prefill(0, 64, running=0, queue=queue), prefill(60, 64, running=0), decode(61, 1)]
    assert [each.what for each in judged(lines).course] == ["serving", what, "serving"]


@pytest.mark.parametrize(("graph", "share"), [(True, "replayed"), (False, "unsupported")])
def test_a_batch_that_replays_has_graphs_whatever_device_its_line_names(graph: bool, share: str) -> None:  # noqa: FBT001 - a case
    lines = [decode(at, graph=graph).replace("cuda graph", "cpu graph") for at in range(0, 60, 2)]
    assert judged(lines).shares["cuda_graph"] == {share: 1.0}


@pytest.mark.parametrize(("now", "to"), [(0.2, 0.91), (0.84, 0.91), (0.94, None)])
def test_where_the_start_asks_for_a_larger_share_it_is_raised_to_what_the_gpu_holds(
    now: float, to: float | None
) -> None:
    begin = start(mem_fraction_static=now)
    frame = '  File "/sgl/python/sglang/srt/model_executor/model_runner.py", line 700, in init_memory_pool'
    failed = f"{stamp(6)}Scheduler hit an exception: Traceback (most recent call last):"
    lines = [
        begin[0],
        f"{stamp(4)}Load weight begin. avail mem=78.46 GB",
        begin[1],
        failed,
        frame,
        "    raise RuntimeError(",
    ]
    answer = judged([*lines, "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", ""])
    change = answer.findings[0].changes[0]
    assert (answer.verdict, change.arg, change.to) == ("out_of_memory_any", "mem_fraction_static", to)


LOADS = {
    "within a second": ([decode(0, 6, 5, 0.94)],
        "The load of less than 1 s was too short for a verdict: queue up to 5, the KV cache up to 94 % full."),
    "that retracted": (
        [*load(0, 8, running=2, usage=1.0), retraction(9)],
        ("The load of 8 s was too short for a verdict: the KV cache up to 100 % full, and SGLang retracted running"
        " requests once."),
    ),
    "that is long enough": (
        [*load(0, 200, running=2, usage=0.6), retraction(201)],
        f"{judge.SENTENCES[judge.NO_LIMIT]} SGLang retracted running requests once.",
    ),
    "without times": ([decode(0)[22:], decode(2)[22:]], "Its batches have no time, so their load cannot be judged."),
    "none at all": (start(), "There is no batch line in this log, though the server is ready."),
}  # fmt: skip


@pytest.mark.parametrize(("lines", "sentence"), LOADS.values(), ids=LOADS.keys())
def test_a_load_without_a_limit_says_what_it_showed(lines: list[str], sentence: str) -> None:
    assert judged(lines).sentence == sentence


def test_a_log_that_is_silent_again_and_again_shows_its_rhythm() -> None:
    lines = [line for round_ in range(8) for line in load(20 + 600 * round_, 6, running=24)]
    assert "scheduler_stuck" not in found(judged([*start(), *lines]))


def test_seventy_seconds_without_a_line_are_no_hang_of_a_slow_log() -> None:
    slow = [decode(at, 8, usage=0.1, throughput=10.7) for at in (*range(20, 380, 30), *range(420, 620, 30))]
    assert "scheduler_stuck" not in found(judged([*start(), *slow]))


def test_a_pause_that_was_asked_for_is_no_hang() -> None:
    lines = silent(140)
    asked = f'{stamp(79)}INFO:     127.0.0.1:5000 - "POST /pause_generation HTTP/1.1" 200 OK'
    assert "scheduler_stuck" not in found(judged(sorted([*lines, asked])))


WAITS: Mapping[str, Any] = {"running": 60, "queue": 30, "usage": 0.5}


def test_after_a_start_with_other_settings_the_trouble_before_it_is_over() -> None:
    before = [*start(), *load(20, 200, **WAITS)]
    after = [*start(300, schedule_conservativeness=0.3), *load(320, 200, running=100, queue=0, usage=0.7)]
    assert verdict([*before, *after]) == "no_limit_in_log"


def test_after_a_start_with_the_same_settings_it_is_not() -> None:
    again = [*start(300), *load(320, 200, running=100, queue=0, usage=0.7)]
    assert "admission_too_conservative" in found(judged([*start(), *load(20, 200, **WAITS), *again]))


def test_equal_retractions_of_one_rank_are_as_many_events() -> None:
    lines = [
        *start(),
        *load(20, 60),
        retraction(40, ranks="TP0"),
        retraction(40, ranks="TP0"),
        retraction(40, ranks="TP1"),
    ]
    assert judged(lines).counts["retraction_events"] == 2


def test_two_causes_in_turn_are_both_named() -> None:
    first = [prefill(20 + step, tokens=8192, running=8, queue=20, usage=0.3) for step in range(120)]
    second = load(145, 120, running=60, queue=40, usage=0.5)
    assert {"prefill_bound", "running_at_limit"} <= found(
        judged([*start(limit=60, max_running_requests=60), *first, *second])
    )


def test_what_held_for_a_minute_of_four_is_not_named() -> None:
    lines = [*load(20, 150, running=30, usage=0.4), *load(170, 75, running=60, queue=40, usage=0.4)]
    assert "running_at_limit" not in found(judged([*start(limit=60), *lines]))


def test_batches_without_a_graph_before_the_first_with_one_are_explained_by_it() -> None:
    lines = [
        decode(20 + step, running=46 if step < 60 or step % 4 else 28, graph=step >= 60 and not step % 4)
        for step in range(0, 160, 2)
    ]
    names = found(judged(lines))
    assert "cuda_graph_not_covering" in names
    assert "cuda_graph_off" not in names
    assert "cuda_graph_off" in found(judged([decode(20 + step, running=4, graph=False) for step in range(0, 160, 2)]))


# What several ranks print of one event

FAILED = "Decode out of memory. Try to lower your batch size."


def count(name: str, *lines: str) -> float:
    return judged([*start(tp_size=8), *load(20, 60), *lines]).counts[name]


def test_the_same_figures_a_minute_later_are_another_event() -> None:
    assert count("retraction_events", *(retraction(at, ranks="TP0") for at in (30, 59))) == 2


def test_a_failure_that_eight_ranks_print_is_one() -> None:
    assert count("out_of_memory.decode", *(f"{stamp(50, f'TP{rank}')}{FAILED}" for rank in range(8))) == 1


def test_a_failure_that_is_logged_with_its_phase_and_raised_without_is_one() -> None:
    lines = [f"{stamp(50, 'TP0')}{FAILED}", f"{stamp(51, 'TP0')}{CUDA}"]
    assert (count("out_of_memory.decode", *lines), count("out_of_memory.unknown", *lines)) == (1, 0)


def test_two_phases_are_two_failures() -> None:
    lines = [f"{stamp(50, 'TP0')}{FAILED}", f"{stamp(51, 'TP0')}{FAILED.replace('Decode', 'Prefill')}"]
    assert count("out_of_memory.prefill", *lines) == count("out_of_memory.decode", *lines) == 1


def test_a_rank_whose_lines_come_after_those_of_another_is_credited_all_its_time() -> None:
    busy = [decode(25 + 10 * step, queue=3000, usage=0.97, ranks="DP1 TP0") for step in range(90)]
    idle = [decode(20 + 10 * step, running=0, usage=0.0, ranks="DP0 TP0") for step in range(90)]
    lines = [line for pair in zip(idle, busy, strict=True) for line in pair]
    answer = judged([*start(dp_size=2, enable_dp_attention=True), *lines])
    assert finding(answer, answer.verdict).seconds == pytest.approx(answer.serving_seconds, rel=0.05)


def test_a_start_whose_lines_have_no_time_is_that_of_the_lines_after_it() -> None:
    without_time = [line.partition("] ")[2] for line in start()]
    answer = judged([*without_time, *load(20, 300)])
    assert [(each.time, len(each.arguments) > 0, each.figures["serving_seconds"]) for each in answer.starts] == [
        (BEGIN + 20, True, 298.0)
    ]
    assert [each.what for each in answer.course] == ["starting", "serving"]


# The size of a chunk, without the start


WAITING: Mapping[str, Any] = {"running": 10, "queue": 300, "usage": 0.3}


def chunks(
    size: int = 2048, sequences: int = 1, ranks: Iterable[str] = ("",), seconds: int = 780, joining: int = 0
) -> list[str]:
    """Full prefill batches of each rank, one a second, after each of which so many more run; with requests waiting."""
    figures = [(at, {**WAITING, "running": 10 + joining * at}) for at in range(seconds)]
    return [prefill(at, size, sequences, ranks=rank, **shown) for at, shown in figures for rank in ranks]


def test_without_the_start_full_batches_show_the_size_of_a_chunk() -> None:
    change = finding(judged(chunks(), "offline"), "prefill_bound").changes[0]
    assert (change.flag, change.now, change.to) == ("--chunked-prefill-size", 2048, 4096)
    assert change.gain == "prefill batches end at 2,048 tokens"


@pytest.mark.parametrize(
    "lines",
    [
        chunks(2000),
        [*chunks(seconds=400), prefill(400, 2500, **WAITING), *chunks()[401:]],
        [line for at, batch in enumerate(chunks()) for line in (batch, decode(at, 10, 300, 0.3))],
        chunks(joining=1),
        chunks(15360, 6),
        chunks(ranks=("DP0 TP0", "DP1 TP1")),
    ],
    ids=[
        "a size that no chunk has",
        "a larger one",
        "steps of decoding between two of them",
        "prompts that end with each",
        "six prompts of one length",
        "several DP ranks",
    ],
)
def test_batches_that_may_end_otherwise_show_no_size_of_a_chunk(lines: list[str]) -> None:
    changes = [change for each in judged(lines, "offline").findings for change in each.changes]
    assert [change for change in changes if "prefill batches end" in change.gain] == []
