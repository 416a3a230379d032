"""Advice followed from several wrong flags until none is left, compared with the best point of a small grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from statistics import median
from typing import Any

from closed_loop import chain
from closed_loop.advice import advised
from closed_loop.load import Load
from closed_loop.loops import CLIPPED, SECONDS
from closed_loop.series import Bench

MOST_RESTARTS = 5
DONE = frozenset({"healthy", "no_limit_in_log"})
LONG_SECONDS = 120.0  # until enough of the longest answers have ended to advise a max_new_tokens
BEST, REPEATED = 2, 3  # the best points of a grid are run again


@dataclass(frozen=True, slots=True)
class Start:
    """Where a convergence starts: flags as wrong as people set them, a load, and the values that a grid tries for the same flags.

    `fixed`: flags that stand for hardware, such as a GPU's memory, and are kept against any advice. `right`: flags with good values.
    An empty value of the grid leaves its flag out.
    """

    name: str
    what: str
    fixed: str
    wrong: str
    load: Load
    grid: Mapping[str, tuple[str, ...]]
    profile: str = "offline"
    env: Mapping[str, str] = field(default_factory=dict)
    right: str = ""
    reason: str = ""  # why the advice ends further than a tenth below the grid's best, where it does

    @property
    def points(self) -> tuple[str, ...]:
        """The flags of each point of the grid."""
        values = product(*self.grid.values())
        return tuple(
            " ".join(f"{flag} {value}" for flag, value in zip(self.grid, point, strict=True) if value)
            for point in values
        )


STARTS: tuple[Start, ...] = (
    Start(
        name="everything-small",
        what="two requests at once, conservativeness 0.1, chunks of 128; a fifth of the prompts is long",
        fixed="--max-total-tokens 16384",
        wrong="--max-running-requests 2 --schedule-conservativeness 0.1 --chunked-prefill-size 128",
        load=Load(clients=40, seconds=SECONDS, prompt_tokens=(24, 24, 24, 24, 1200), most_new_tokens=600),
        grid={
            "--max-running-requests": ("12", ""),
            "--schedule-conservativeness": ("0.3", "1.0"),
            "--chunked-prefill-size": ("512", "4096"),
        },
    ),
    Start(
        name="over-careful",
        what="conservativeness 3 although clients ask for 4,000 tokens and end after some 500",
        fixed="--max-total-tokens 16384",
        wrong="--schedule-conservativeness 3",
        load=Load(clients=48, seconds=LONG_SECONDS, most_new_tokens=4000),
        grid={
            "--schedule-conservativeness": ("0.1", "0.3", "1.0"),
            "--max-running-requests": ("16", ""),
        },
    ),
    Start(
        name="prefixes-in-small-chunks",
        what="chunks of 128 and first come, first served, with long prefixes that take turns in a small pool",
        fixed="--max-total-tokens 8192",
        right="--max-running-requests 16",
        wrong="--chunked-prefill-size 128 --schedule-policy fcfs",
        load=Load(
            clients=32, seconds=SECONDS, prompt_tokens=(16,), most_new_tokens=32, families=10, prefix_tokens=1500
        ),
        grid={"--chunked-prefill-size": ("1024", "4096", "8192"), "--schedule-policy": ("fcfs", "lpm")},
    ),
    Start(
        name="under-careful",
        what="conservativeness 0.1, and clients that ask for 4,000 tokens of which the server keeps 256 free at most",
        fixed="--max-total-tokens 8192",
        wrong="--schedule-conservativeness 0.1",
        load=Load(clients=48, seconds=SECONDS, most_new_tokens=4000),
        grid={"--schedule-conservativeness": ("0.3", "1.0", "1.3"), "--max-running-requests": ("12", "")},
        env=CLIPPED,
    ),
    Start(
        name="three-at-once-in-large-pages",
        what="three requests at once, in chunks and pages of 256; a fifth of the prompts is long",
        fixed="--max-total-tokens 16384",
        wrong="--max-running-requests 3 --chunked-prefill-size 256 --page-size 256",
        load=Load(clients=40, seconds=SECONDS, prompt_tokens=(24, 24, 24, 24, 1200), most_new_tokens=200),
        grid={
            "--max-running-requests": ("12", "24", ""),
            "--chunked-prefill-size": ("8192",),
            "--page-size": ("",),
        },
    ),
    Start(
        name="order-by-prefix-without-a-cache",
        what="no cache beside the policy that orders by what is cached, and conservativeness 3; six prefixes are shared",
        fixed="--max-total-tokens 12288",
        wrong="--disable-radix-cache --schedule-policy lpm --schedule-conservativeness 3",
        load=Load(clients=32, seconds=SECONDS, prompt_tokens=(24,), most_new_tokens=48, families=6, prefix_tokens=1200),
        grid={
            "--disable-radix-cache": ("",),
            "--schedule-policy": ("fcfs", "lpm", "dfs-weight"),
            "--schedule-conservativeness": ("1.0",),
        },
    ),
    Start(
        name="mixed-chunks-without-chunks",
        what="chunks are mixed with decoding and switched off, and a prefill batch ends at 512 tokens",
        fixed="--max-total-tokens 32768",
        wrong="--enable-mixed-chunk --chunked-prefill-size -1 --max-prefill-tokens 512",
        load=Load(clients=64, seconds=SECONDS, prompt_tokens=(120, 120, 120, 900), most_new_tokens=8),
        grid={
            "--enable-mixed-chunk": ("",),
            "--chunked-prefill-size": ("1024", "4096", "8192"),
            "--max-prefill-tokens": ("",),
        },
        reason=(
            "These runs cannot separate the flags: each figure follows the share of a core that other programs left to the scheduler"
            " (0.22, 0.45, 0.53 and 0.64 for 492, 767, 853 and 957). On the path more clients, as advised for throughput, cost 9 %: 1,126 with"
            " 64 and 1,029 with 161, each run once."
        ),
    ),
    Start(
        name="pages-of-air",
        what="pages of 512 tokens for requests of 100, the longest output first, and conservativeness 0.1",
        fixed="--max-total-tokens 16384",
        wrong="--page-size 512 --schedule-policy lof --schedule-conservativeness 0.1",
        load=Load(clients=96, seconds=SECONDS, prompt_tokens=(24, 60), most_new_tokens=100),
        grid={
            "--page-size": ("",),
            "--schedule-policy": ("fcfs",),
            "--schedule-conservativeness": ("0.3", "1.0", "1.3"),
        },
    ),
    Start(
        name="hundreds-in-a-pool-of-five",
        what="256 requests may run in a KV cache of 2,500 tokens, in random order, with conservativeness 0.05",
        fixed="",
        wrong="--max-total-tokens 2500 --max-running-requests 256 --schedule-policy random --schedule-conservativeness 0.05",
        load=Load(clients=40, seconds=SECONDS),
        grid={
            "--max-total-tokens": ("8000", "16000", "32000"),
            "--max-running-requests": ("256",),
            "--schedule-policy": ("fcfs",),
            "--schedule-conservativeness": ("1.0",),
        },
        reason=(
            "The five restarts that a path has were used up: each doubles `--max-total-tokens`, and 40,000, which is advised at last,"
            " was not tried."
        ),
    ),
    Start(
        name="priorities-of-nobody",
        what="priority scheduling for requests without priorities, four at once, six may wait; a batch with ignore_eos",
        fixed="--max-total-tokens 16384",
        wrong="--enable-priority-scheduling --schedule-policy lof --max-running-requests 4 --max-queued-requests 6",
        load=Load(
            clients=32, seconds=SECONDS, prompt_tokens=(40, 100), most_new_tokens=160, ignore_eos=True, streamed=0.0
        ),
        grid={
            "--enable-priority-scheduling": ("",),
            "--schedule-policy": ("",),
            "--max-running-requests": ("16", "24", ""),
            "--max-queued-requests": ("",),
        },
    ),
    Start(
        name="one-start-in-seventeen-steps",
        what="one request a prefill batch, sixteen decode steps before the next, and a chunk of 64 for short prompts; people wait",
        fixed="--max-total-tokens 16384",
        wrong="--prefill-max-requests 1 --prefill-decode-interval 16 --chunked-prefill-size 64",
        load=Load(clients=32, seconds=SECONDS, prompt_tokens=(24, 60), most_new_tokens=60),
        grid={
            "--prefill-max-requests": ("",),
            "--prefill-decode-interval": ("",),
            "--chunked-prefill-size": ("1024", "4096", "8192"),
        },
        reason=(
            "First tokens come within 0.1 s and nothing waits, which is what the profile `online` asks for, so nothing is advised for throughput."
            " The grid's points with 4096 and 8192 are the same server for these prompts and lie as close to the end as to each other; each ran"
            " once, beside other programs."
        ),
        profile="online",
    ),
    Start(
        name="prefixes-without-a-cache",
        what="no cache beside six shared prefixes, and a prefill batch ends at 512 tokens",
        fixed="--max-total-tokens 12288",
        wrong="--disable-radix-cache --max-prefill-tokens 512",
        load=Load(clients=32, seconds=SECONDS, prompt_tokens=(20,), most_new_tokens=40, families=6, prefix_tokens=1200),
        grid={"--disable-radix-cache": ("",), "--max-prefill-tokens": ("", "8192", "32768")},
    ),
    Start(
        name="small-chunks-and-over-careful",
        what="chunks of 256 for prompts of up to 1,500 tokens, conservativeness 1.5, and twelve at once in a KV cache of 6,000",
        fixed="--max-total-tokens 6000",
        wrong="--chunked-prefill-size 256 --schedule-conservativeness 1.5 --max-running-requests 12",
        load=Load(clients=32, seconds=SECONDS, prompt_tokens=(100, 400, 1500), new_tokens=(100, 200)),
        grid={
            "--chunked-prefill-size": ("1024", ""),
            "--schedule-conservativeness": ("1.0",),
            "--max-running-requests": ("12", ""),
        },
    ),
)
BY_NAME: dict[str, Start] = {start.name: start for start in STARTS}


def converge(bench: Bench, start: Start, number: int, restarts: int = MOST_RESTARTS) -> list[Any]:
    """Follow the advice from the start until there is none; return each step, the start first."""
    args = bench.arguments(f"{start.fixed} {start.right} {start.wrong}")
    load, steps = start.load, []
    for restart in range(restarts + 1):
        name = f"{start.name}.{number}.step{restart}"
        step = bench.kept(name)
        if step is None:
            bench.say(name)
            side, step = bench.side(args, start.profile, dict(start.env), load, name=name)
            advice = advised(side.document, args, load, start.fixed.split()[::2])
            step["advice"] = advice.as_json()
            step["next"] = chain.shown(advice.args, bench.installation, bench.lane)
            step["next_load"] = advice.load.as_json()
            bench.keep(name, step)
        steps.append(step)
        changes = step["advice"]["changes"]
        data = "; ".join(f"{c['what']} {c['old']} -> {c['new']}" for c in changes) or "nothing to change"
        bench.say(f"{name}: {_speed(step)}, {step['verdict']}: {data}")
        if step["verdict"] in DONE and not changes:
            break
        if not changes:
            break
        args = chain.typed(step["next"], bench.installation, bench.lane)
        load = Load.of_json(step["next_load"])
    return steps


def search(bench: Bench, start: Start, repeated: int = REPEATED) -> None:
    """Run each point of the grid once and the best ones `repeated` times, in turn with the advised setting.

    The machine's speed drifts within minutes, so only runs of the same minutes and of the same length are compared.
    """
    end = converge(bench, start, 1)[-1]
    sent, adapted = replace(start.load, seconds=SECONDS), replace(Load.of_json(end["load"]), seconds=SECONDS)
    reached = chain.typed(end["args"], bench.installation, bench.lane)
    points = [bench.arguments(f"{start.fixed} {start.right} {point}") for point in start.points]
    speeds: dict[int, float] = {}
    for number in range(1, repeated + 1):
        places = sorted(speeds, key=lambda place: -speeds[place])[:BEST] or list(range(len(points)))
        for turn, place in enumerate(places):
            if turn == len(places) // 2:
                _run(bench, start, f"{start.name}.final.{number}", reached, adapted)
            found = _run(bench, start, f"{start.name}.grid{place}.{number}", points[place], sent)
            if number == 1:
                speeds[place] = found["measures"]["tokens_per_cpu_second"] or 0.0


def _run(bench: Bench, start: Start, name: str, args: Sequence[str], load: Load) -> Any:
    known = bench.kept(name)
    if known is None:
        bench.say(name)
        _, known = bench.side(args, start.profile, dict(start.env), load)
        bench.keep(name, known)
    bench.say(f"{name}: {_speed(known)}, {known['verdict']}")
    return known


def _speed(side: Any) -> str:
    figures = side["measures"]
    return f"{figures['tokens_per_second']:.0f} tok/s ({figures['tokens_per_cpu_second'] or 0:.0f} per CPU second)"


def middle(runs: list[Any], measure: str) -> float:
    """Return the median of a figure over runs."""
    return median(run["measures"][measure] or 0.0 for run in runs)
