"""Situations that an adviser must read rightly, on a real server: what is started, what is sent, and the truth. Pure data.

`verdicts` are the headlines that are right when the load ends (or at `asked_at`); any other headline at any time, beside
`NEUTRAL`, is a false one. `cures` are changes of which one must be advised, where there are any, and `never` changes that
must not be: `--flag up`, `--flag down`, `--flag drop`, or `--flag` for any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from closed_loop.load import Load

Process: TypeAlias = Literal["main", "scheduler", "detokenizer"]
STAGES: tuple[Process, ...] = ("detokenizer", "scheduler", "main")

NEUTRAL = frozenset({"not_enough_data", "starting", "idle", "healthy", "no_clear_bottleneck"})
HEALTHY = ("healthy", "idle", "not_enough_data")
POOL = ("running_far_below_limit", "queue_too_long", "latency_queue", "no_clear_bottleneck")  # memory is what is short
WAITING = ("prefill_bound", "queue_too_long", "latency_queue", "latency_long_prompts", "no_clear_bottleneck")
MORE_MEMORY = ("--max-total-tokens up", "--max-total-tokens drop", "--kv-cache-dtype", "--mem-fraction-static up")
CONSERVATIVENESS = "--schedule-conservativeness"
_GRACE = 20.0


@dataclass(frozen=True, slots=True)
class Act:
    """A signal to one of the server's processes, so many seconds after the load began."""

    at: float
    signal: Literal["STOP", "CONT", "TERM"]
    process: Process


Step = tuple[Load, ...]  # sent side by side


@dataclass(frozen=True, slots=True)
class Situation:
    """One server and one load. `steps` follow each other."""

    name: str
    what: str
    flags: str
    steps: tuple[Step, ...]
    truth: str
    right: str
    verdicts: tuple[str, ...]
    cures: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    acts: tuple[Act, ...] = ()
    asked_at: float | None = None  # seconds after the first step began; None: when the last load ends
    profile: str = "online"
    probes: bool = True
    env: tuple[tuple[str, str], ...] = ()
    version: str = "0.5.23"
    from_start: bool = False  # what is said while it starts is judged as well
    silent_sources: tuple[str, ...] = ()  # ways of seeing in which nothing shows it

    def words_of_load(self) -> str:
        """Say what is sent, in one line."""
        return "; then ".join(" beside ".join(_words(load) for load in step) for step in self.steps)


def _words(load: Load) -> str:
    if not load.clients:
        return f"{load.seconds:g} s of nothing"
    prompts = "/".join(f"{load.prefix_tokens + tokens:g}" for tokens in load.prompt_tokens)
    return (
        f"{load.clients} clients for {load.seconds:g} s, prompts of {prompts}, up to {load.most_new_tokens} new tokens"
    )


def _send(clients: int, seconds: float, prompts: tuple[int, ...] | int, new: int, **more: object) -> Step:
    lengths = prompts if isinstance(prompts, tuple) else (prompts,)
    result = {"grace_seconds": _GRACE, **more}
    return (Load(clients, seconds, prompt_tokens=lengths, most_new_tokens=new, **result),)  # type: ignore[arg-type]  # fields by name


def _nothing(seconds: float) -> Step:
    return (Load(0, seconds),)


def _stage(process: Process, version: str = "0.5.23") -> Situation:
    prefix = "" if version == "0.5.23" else f"v{version}-"
    stage = "main process" if process == "main" else process
    headline = ("scheduler_stuck", "server_down") if process == "main" else ("scheduler_stuck",)
    # A stopped main process prints nothing, as one that nobody asks; 0.4.9 prints nothing of a detokenizer.
    silent = process == "main" or version == "0.4.9.post6"
    return Situation(
        name=f"{prefix}stop-{process}",
        what=f"SIGSTOP of the {stage} for 140 s under the load of 24 clients",
        flags="--max-total-tokens 16384",
        steps=(_send(24, 190, (24, 60), 120, timeout_seconds=30.0),),
        acts=(Act(30, "STOP", process), Act(170, "CONT", process)),
        asked_at=165,
        truth=f"The {stage} does nothing for 140 s: no request is answered. It serves before and after.",
        right=f"The server is stuck, and the {stage} is what does not go on. No flag, and not fewer requests.",
        verdicts=headline,
        never=("--max-running-requests", CONSERVATIVENESS, "requests at once"),
        version=version,
        silent_sources=("log", "report") if silent else (),
    )


_SCHEMA = '{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name", "age"]}'
_PREFIXES = {"families": 6, "prefix_tokens": 1200}

_ONE_LIMIT = "--max-running-requests up. No change of conservativeness."
_LATE = "Twelve answers are under way; each prompt of 3,000 tokens stops all of them while it is computed."

# Loads that nothing was tuned for when they were first sent.
UNTUNED: tuple[Situation, ...] = (
    *(
        Situation(
            name=f"late-by-prefill{name}",
            what=f"twelve long answers beside eight clients with prompts of 3,000 tokens{words}",
            flags=f"--max-total-tokens 65536{flags}",
            steps=((*_send(12, 60, 24, 400), *_send(8, 60, 3000, 8)),),
            truth=_LATE,
            right=right,
            verdicts=("healthy", "latency_prefill_between", *WAITING),
            cures=cures,
            never=(CONSERVATIVENESS, "--max-running-requests down"),
        )
        for name, words, flags, right, cures in (
            (
                "",
                "",
                "",
                "Let decode steps come between the prompts' chunks.",
                ("--enable-mixed-chunk add", "--prefill-decode-interval"),
            ),
            ("-chunk-512", " in chunks of 512", " --chunked-prefill-size 512", "The same.", ()),
            ("-mixed", " and mixed chunks", " --enable-mixed-chunk", "A smaller chunk.", ()),
            (
                "-mixed-512",
                " and mixed chunks of 512",
                " --enable-mixed-chunk --chunked-prefill-size 512",
                "Little is left.",
                (),
            ),
            (
                "-interval-10",
                " and ten decode steps after each prefill",
                " --prefill-decode-interval 10",
                "Little is left.",
                (),
            ),
            (
                "-interval-17",
                " and seventeen decode steps after each prefill, as was advised",
                " --prefill-decode-interval 17",
                "Nothing more for the tokens; the chunk, for the prompts.",
                (),
            ),
            (
                "-interval-1-2048",
                " in chunks of 2,048 and a decode step after each",
                " --prefill-decode-interval 1 --chunked-prefill-size 2048",
                "Nothing is left.",
                (),
            ),
        )
    ),
    Situation(
        name="long-answers-tiny-pool",
        what="a pool of 1,500 tokens, prompts of 16 and answers of up to 600",
        flags="--max-total-tokens 1500",
        steps=(_send(16, 60, 16, 600),),
        truth="Some three answers of 500 tokens fit; what waits, waits for memory.",
        right="A larger pool; never a lower conservativeness.",
        verdicts=(*POOL, "retracting_too_often", "conservativeness_ineffective"),
        cures=(*MORE_MEMORY, f"{CONSERVATIVENESS} up"),
        never=(f"{CONSERVATIVENESS} down", "--max-running-requests up"),
    ),
    Situation(
        name="giants-among-small",
        what="one prompt of 6,000 tokens to nine of 40",
        flags="--max-total-tokens 16384",
        steps=(_send(24, 60, (*[40] * 9, 6000), 60),),
        truth="A giant takes more than a third of the pool and two chunks; two at once leave room for one more.",
        right="A larger pool, or nothing. No change of conservativeness, no smaller batch.",
        verdicts=(*POOL, *WAITING, "healthy"),
        never=(CONSERVATIVENESS, "--max-running-requests"),
    ),
    Situation(
        name="eight-samples",
        what="six clients that ask for eight answers to each prompt, and --max-running-requests 12",
        flags="--max-total-tokens 32768 --max-running-requests 12",
        steps=(_send(6, 60, 40, 120, samples=8),),
        truth="48 answers are asked for at once and twelve run: the running limit beside an empty pool.",
        right=_ONE_LIMIT,
        verdicts=("running_at_limit",),
        cures=("--max-running-requests up",),
        never=(CONSERVATIVENESS, "--max-total-tokens"),
    ),
    Situation(
        name="one-at-a-time",
        what="--max-running-requests 1 and six clients",
        flags="--max-total-tokens 16384 --max-running-requests 1",
        steps=(_send(6, 60, 40, 120),),
        truth="One request runs and five wait, beside an empty pool.",
        right=_ONE_LIMIT,
        verdicts=("running_at_limit",),
        cures=("--max-running-requests up",),
        never=(CONSERVATIVENESS, "--max-total-tokens"),
    ),
    Situation(
        name="policy-lof",
        what="--schedule-policy lof beside --max-running-requests 8",
        flags="--max-total-tokens 16384 --max-running-requests 8 --schedule-policy lof",
        steps=(_send(32, 60, (24, 60), 200),),
        truth="Eight run and 24 wait, beside a pool that is nearly empty; longest answers first.",
        right=_ONE_LIMIT,
        verdicts=("running_at_limit",),
        cures=("--max-running-requests up",),
        never=(CONSERVATIVENESS, "--max-total-tokens"),
    ),
    Situation(
        name="stream-interval-50",
        what="twelve chats whose tokens come fifty at a time (--stream-interval 50)",
        flags="--max-total-tokens 16384 --stream-interval 50",
        steps=(_send(12, 60, (24, 60), 200, pause_seconds=(0.2, 1.0)),),
        truth="Healthy: nothing waits, and tokens come in bundles because the flag says so.",
        right="Nothing, or the flag.",
        verdicts=HEALTHY,
        never=(CONSERVATIVENESS, "--max-running-requests down", "replica"),
    ),
    Situation(
        name="impatient-clients",
        what="24 clients that give a request up after four seconds, and --max-running-requests 4",
        flags="--max-total-tokens 16384 --max-running-requests 4",
        steps=(_send(24, 60, 40, 200, timeout_seconds=4.0),),
        truth="Most requests are given up while they wait for the running limit, beside an empty pool.",
        right="--max-running-requests up, before anybody is asked to send less.",
        verdicts=("running_at_limit", "requests_rejected"),
        cures=("--max-running-requests up",),
        never=(CONSERVATIVENESS, "--max-total-tokens"),
    ),
    Situation(
        name="dp2-even",
        what="two DP ranks with an even load, and --max-running-requests 8",
        flags="--dp-size 2 --max-total-tokens 8192 --max-running-requests 8 --sleep-on-idle",
        steps=(_send(40, 60, 40, 200),),
        truth="Both ranks are at their part of the running limit, and requests wait for both.",
        right=_ONE_LIMIT,
        verdicts=("running_at_limit",),
        cures=("--max-running-requests up",),
        never=(CONSERVATIVENESS, "--load-balance-method"),
        env=(("SGLANG_CPU_OMP_THREADS_BIND", "0|0"),),
    ),
    Situation(
        name="prompts-beyond-the-pool",
        what="one prompt of 5,000 tokens to three of 40, and a pool of 4,200",
        flags="--max-total-tokens 4200",
        steps=(_send(6, 60, (40, 40, 40, 5000), 60, pause_seconds=(0.2,)),),
        truth="A prompt longer than the pool is answered with an error at once; all others are served well.",
        right="Nothing, or a larger pool. Nobody sends too many.",
        verdicts=HEALTHY,
        never=(CONSERVATIVENESS, "requests at once", "replica"),
    ),
    Situation(
        name="answers-by-schema",
        what="twelve clients whose answers are held to a JSON schema",
        flags="--max-total-tokens 16384 --grammar-backend xgrammar",
        steps=(_send(12, 60, 40, 100, schema=_SCHEMA),),
        truth="Healthy: the grammar is compiled once, and nothing waits for long.",
        right="Nothing.",
        verdicts=HEALTHY,
        never=(CONSERVATIVENESS, "--max-running-requests down", "replica"),
    ),
    Situation(
        name="cache-off-nothing-shared",
        what="eight chats beside --disable-radix-cache, and no prompt begins like another",
        flags="--max-total-tokens 16384 --disable-radix-cache",
        steps=(_send(8, 60, (60, 200), 120, pause_seconds=(0.2, 1.0)),),
        truth="Healthy: no prompt could be found in a cache.",
        right="Nothing.",
        verdicts=HEALTHY,
        never=("--disable-radix-cache", CONSERVATIVENESS, "--max-running-requests down", "replica"),
    ),
    Situation(
        name="bursts-short-queue",
        what="bursts of 40 requests at once beside --max-queued-requests 4",
        flags="--max-total-tokens 16384 --max-queued-requests 4",
        steps=tuple(step for _ in range(6) for step in (_send(40, 4, 40, 60), _nothing(6))),
        truth="Healthy: requests are taken from the queue faster than they come, so none of 1,322 was refused.",
        right="Nothing.",
        verdicts=HEALTHY,
        never=(CONSERVATIVENESS, "--max-total-tokens", "--max-running-requests down"),
    ),
    Situation(
        name="prompts-then-answers",
        what="40 s of prompts of 2,000 tokens in chunks of 256, then 50 s of short prompts at --max-running-requests 6",
        flags="--max-total-tokens 32768 --chunked-prefill-size 256 --max-running-requests 6",
        steps=(_send(16, 40, 2000, 8), _send(32, 50, 24, 200)),
        truth="First the chunks of 256 tokens limit, then the running limit of 6.",
        right="--max-running-requests up; the chunk may be named.",
        verdicts=("running_at_limit", "latency_prefill_between", *WAITING),
        cures=("--max-running-requests up",),
        never=(CONSERVATIVENESS, "--max-total-tokens", "--chunked-prefill-size down"),
    ),
    Situation(
        name="limit-without-overlap",
        what="30 clients at --max-running-requests 6 beside --disable-overlap-schedule",
        flags="--max-total-tokens 16384 --max-running-requests 6 --disable-overlap-schedule",
        steps=(_send(30, 60, 40, 150),),
        truth="Six run and 24 wait, beside a KV cache that is nearly empty.",
        right=_ONE_LIMIT,
        verdicts=("running_at_limit",),
        cures=("--max-running-requests up",),
        never=(CONSERVATIVENESS, "--max-total-tokens"),
    ),
    Situation(
        name="page-64-pool-4096",
        what="pages of 64 tokens, a pool of 4,096, and 60 clients with requests of some 70 tokens",
        flags="--page-size 64 --max-total-tokens 4096",
        steps=(_send(60, 60, 24, 60),),
        truth="A request takes one page, then two of 64: 32 to 64 fit, and memory is what the rest waits for.",
        right="A larger pool; a smaller page may be named.",
        verdicts=(*POOL, "retracting_too_often", "conservativeness_ineffective"),
        cures=(*MORE_MEMORY, "--page-size"),
        never=(f"{CONSERVATIVENESS} down", "--max-running-requests up"),
    ),
    Situation(
        name="one-long-answer",
        what="one client whose answers have 3,000 tokens",
        flags="--max-total-tokens 16384",
        steps=(_send(1, 60, 24, 3000, ignore_eos=True),),
        truth="Healthy: one request runs, nothing waits.",
        right="Nothing.",
        verdicts=HEALTHY,
        never=(CONSERVATIVENESS, "--max-running-requests", "replica", "--max-total-tokens"),
    ),
    Situation(
        name="over-careful-small-pool",
        what="30 clients with prompts of 60 and 120 and answers of up to 200, a small pool, and --schedule-conservativeness 3",
        flags="--max-total-tokens 3000 --schedule-conservativeness 3.0",
        steps=(_send(30, 75, (60, 120), 200),),
        truth="The KV cache is short: 17 requests wait, and 4 % of the others are retracted although the flag is above its ceiling."
        " With 6,000 tokens the first token takes 0.33 s in place of 2.55 s, and 1,149 tokens/s become 1,479.",
        right="A larger pool, before anybody is asked to send fewer requests. No change of conservativeness.",
        verdicts=(*POOL, "conservativeness_ineffective", "retracting_too_often"),
        cures=("--max-total-tokens up",),
        never=(CONSERVATIVENESS,),
    ),
    Situation(
        name="chunk-64-shared-prefixes",
        what="six clients with four prefixes of 900 and 300 tokens of their own beside six chats, in chunks of 64",
        flags="--max-total-tokens 32768 --chunked-prefill-size 64",
        steps=((*_send(6, 70, 300, 60, families=4, prefix_tokens=900), *_send(6, 70, 24, 150)),),
        truth="Each chunk of 64 tokens costs a whole pass. Chunks of 1,024 give 764 tokens/s in place of 469; 17 decode steps"
        " between chunks of 64 give 305, and the first token takes 2.8 s in place of 0.14 s.",
        right="A larger chunk, and no decode steps between the chunks.",
        verdicts=("healthy", "latency_prefill_between", "prefill_bound", "latency_long_prompts"),
        cures=("--chunked-prefill-size up",),
        never=("--prefill-decode-interval", CONSERVATIVENESS, "--max-running-requests"),
    ),
    Situation(
        name="mixed-chunks-128",
        what="sixteen clients with prompts of 500 and 1,500 in mixed chunks of 128",
        flags="--max-total-tokens 32768 --enable-mixed-chunk --chunked-prefill-size 128",
        steps=(_send(16, 60, (500, 1500), 100),),
        truth="Nearly every step has a chunk of 128 tokens, so requests wait for prefill beside a KV cache with room. With chunks of"
        " 1,024 the first token takes 0.74 s in place of 8.1 s, and 77 tokens/s become 233.",
        right="A larger chunk. No change of conservativeness.",
        verdicts=(*WAITING, "latency_prefill_between"),
        cures=("--chunked-prefill-size up",),
        never=(CONSERVATIVENESS, "--max-running-requests", "--max-total-tokens"),
    ),
    Situation(
        name="page-256-over-careful",
        what="40 clients with requests of 128 to 320 tokens, pages of 256, and --schedule-conservativeness 2",
        flags="--max-total-tokens 8192 --page-size 256 --schedule-conservativeness 2.0",
        steps=(_send(40, 60, (40, 200), 120),),
        truth="A third to a half of each page is air, and 4 % of the requests are retracted although the flag is above its"
        " ceiling. With pages of 32 the first token takes 0.21 s in place of 1.5 s, and 1,486 tokens/s become 1,716.",
        right="Smaller pages.",
        verdicts=(*POOL, "conservativeness_ineffective", "retracting_too_often", "admission_too_conservative"),
        cures=("--page-size down",),
        never=(CONSERVATIVENESS, "--max-running-requests"),
    ),
    Situation(
        name="ramp-to-a-burst",
        what="four clients, then sixteen, then 60, at --max-running-requests 16",
        flags="--max-total-tokens 32768 --max-running-requests 16",
        steps=(_send(4, 25, 60, 120), _send(16, 25, 60, 120), _send(60, 40, 60, 120)),
        truth="Nothing waits for 50 s. Then 44 requests wait for the running limit for 40 s, and the first token takes 3.4 s.",
        right="--max-running-requests up, and nothing about prompts. The log alone has no first tokens, and no wait over 5 s.",
        verdicts=("latency_queue", "running_at_limit", "queue_too_long"),
        cures=("--max-running-requests up",),
        never=(CONSERVATIVENESS, "--chunked-prefill-size", "--max-total-tokens"),
        silent_sources=("log", "report"),
    ),
    Situation(
        name="ramp-rejected-streams",
        what="six clients, then 40, at --max-running-requests 12 and --max-queued-requests 10",
        flags="--max-total-tokens 32768 --max-running-requests 12 --max-queued-requests 10",
        steps=(_send(6, 40, 60, 100), _send(40, 35, 60, 100)),
        truth="In 35 s the full queue rejects 1,212 streams, with status 200 and no line in the log.",
        right="--max-running-requests up first; not 'add a replica'. The log alone shows nothing.",
        verdicts=("requests_rejected", "running_at_limit"),
        cures=("--max-running-requests up",),
        never=(CONSERVATIVENESS, "--max-total-tokens"),
        silent_sources=("log", "report"),
    ),
    Situation(
        name="ignore-eos-small-pool",
        what="24 clients with prompts of 60 and answers of exactly 200 (ignore_eos), and a pool of 3,000",
        flags="--max-total-tokens 3000",
        steps=(_send(24, 60, 60, 200, ignore_eos=True),),
        truth="Ten of 260 tokens fit. What is free will be used by the answers under way, so no reservation can be smaller.",
        right="A larger pool. No change of conservativeness, also from the log alone, which shows no wait over 5 s.",
        verdicts=POOL,
        cures=("--max-total-tokens up",),
        never=(CONSERVATIVENESS, "--max-running-requests up"),
        silent_sources=("log", "report"),
    ),
    Situation(
        name="limit-6-chunks-128",
        what="30 clients with prompts of 600 and 1,200 in chunks of 128, and --max-running-requests 6",
        flags="--max-total-tokens 32768 --max-running-requests 6 --chunked-prefill-size 128",
        steps=(_send(30, 60, (600, 1200), 80),),
        truth="Six run, 24 wait, and each chunk costs a whole pass. Of 335 tokens/s the limit of 32 makes 394, a chunk of 2,048 makes"
        " 532, and both make 634.",
        right="--max-running-requests up; the chunk now or next.",
        verdicts=("running_at_limit", *WAITING),
        cures=("--max-running-requests up", "--chunked-prefill-size up"),
        never=(CONSERVATIVENESS, "--max-total-tokens"),
    ),
    Situation(
        name="waiting-timeout-streams",
        what="32 clients at --max-running-requests 4, and SGLANG_REQ_WAITING_TIMEOUT=3",
        flags="--max-total-tokens 16384 --max-running-requests 4",
        env=(("SGLANG_REQ_WAITING_TIMEOUT", "3"),),
        steps=(_send(32, 60, 60, 200),),
        truth="Four run, and four in ten streams end in the queue after 3 s, with status 200 and no line in the log.",
        right="--max-running-requests up. The log alone does not show the failed requests.",
        verdicts=("running_at_limit", "requests_rejected"),
        cures=("--max-running-requests up",),
        never=(CONSERVATIVENESS, "requests at once"),
    ),
    Situation(
        name="decode-interval-200",
        what="30 clients with prompts of 300, and --prefill-decode-interval 200",
        flags="--max-total-tokens 32768 --prefill-decode-interval 200",
        steps=(_send(30, 60, 300, 100),),
        truth="Each prefill batch is full, and the next one comes 200 decode steps later: the first token takes 1.4 s. A chunk of"
        " 8,192 leaves it at 1.5 s; without the interval it takes 0.07 s.",
        right="--prefill-decode-interval down.",
        verdicts=WAITING,
        cures=("--prefill-decode-interval down", "--prefill-decode-interval"),
        never=(CONSERVATIVENESS, "--chunked-prefill-size", "--max-running-requests"),
    ),
    Situation(
        name="over-careful-pool-full",
        what="64 clients with prompts of 60 and answers of up to 600, and --schedule-conservativeness 3",
        flags="--max-total-tokens 16384 --schedule-conservativeness 3",
        steps=(_send(64, 70, 60, 600),),
        truth="SGLang keeps all of max_new_tokens free at first, so a third of the cache stays free beside a queue, and less with each"
        " decode step: then use reaches 0.9, and four times requests are retracted.",
        right="A lower conservativeness at first, then a larger pool.",
        verdicts=(
            "admission_too_conservative",
            "conservativeness_ineffective",
            "retracting_too_often",
            "admission_recovering",
            *POOL,
        ),
        never=(f"{CONSERVATIVENESS} up", "--max-running-requests up"),
    ),
    Situation(
        name="six-samples-small-pool",
        what="eight clients that ask for six answers to each prompt of 200 tokens, and a pool of 4,096",
        flags="--max-total-tokens 4096",
        steps=(_send(8, 60, 200, 200, samples=6),),
        truth="48 answers of up to 400 tokens do not fit in 4,096. SGLang computes each prompt once; nothing else is shared.",
        right="A larger pool or a higher conservativeness. Never --schedule-policy lpm.",
        verdicts=(*POOL, "retracting_too_often", "conservativeness_ineffective"),
        cures=(*MORE_MEMORY, f"{CONSERVATIVENESS} up"),
        never=("--schedule-policy", f"{CONSERVATIVENESS} down", "--max-running-requests up"),
    ),
    Situation(
        name="half-of-the-prompts-too-long",
        what="every second prompt has 3,000 tokens, and a pool of 2,048",
        flags="--max-total-tokens 2048",
        steps=(_send(8, 50, (3000, 40), 60),),
        truth="Half of the prompts are longer than the pool and refused at once; the others are served well.",
        right="A pool that holds them.",
        verdicts=HEALTHY,
        cures=("--max-total-tokens up", "--max-total-tokens drop"),
        never=(CONSERVATIVENESS, "requests at once", "replica"),
    ),
    Situation(
        name="context-of-512",
        what="--context-length 512, and every second client sends prompts of 900 tokens",
        flags="--max-total-tokens 16384 --context-length 512",
        steps=((*_send(6, 60, 900, 60), *_send(6, 60, 100, 60)),),
        truth="The long prompts are refused at once, inside answers with status 200; the others are served well.",
        right="A longer context.",
        verdicts=HEALTHY,
        cures=("--context-length up",),
        never=(CONSERVATIVENESS, "requests at once", "replica", "--max-total-tokens"),
        silent_sources=("metrics",),
    ),
    Situation(
        name="schema-without-backend",
        what="--grammar-backend none, and eight clients whose answers are to follow a JSON schema",
        flags="--max-total-tokens 32768",
        steps=(_send(8, 50, 60, 120, schema=_SCHEMA, pause_seconds=(0.5,)),),
        truth="Every request is refused at once, inside an answer with status 200.",
        right="A grammar backend.",
        verdicts=HEALTHY,
        cures=("--grammar-backend",),
        never=(CONSERVATIVENESS, "requests at once", "replica", "--max-total-tokens"),
        silent_sources=("metrics",),
    ),
    Situation(
        name="requests-end-in-500",
        what="--max-total-tokens 16384, six clients, and two whose stop_regex is no regular expression",
        flags="--max-total-tokens 16384",
        steps=((*_send(6, 60, 60, 120), *_send(2, 60, 60, 120, stop_regex="(")),),
        truth="Each request of the two ends in an exception and HTTP 500; the others are served well.",
        right="Look at the exception. No flag.",
        verdicts=("requests_failed",),
        never=("--",),
    ),
    Situation(
        name="impatient-clients-small-pool",
        what="60 clients that give a request up after six seconds, and a pool of 3,000 tokens",
        flags="--max-total-tokens 3000",
        steps=(_send(60, 60, 120, 150, timeout_seconds=6.0),),
        truth="Some twelve requests of 250 tokens fit; what waits for six seconds is given up.",
        right="A larger pool, before anybody is asked to send less.",
        verdicts=(*POOL, "retracting_too_often", "conservativeness_ineffective"),
        cures=(*MORE_MEMORY, f"{CONSERVATIVENESS} up"),
        never=(f"{CONSERVATIVENESS} down", "--max-running-requests up"),
    ),
    Situation(
        name="retry-storm",
        what="60 clients that give a request up after three seconds and ask again, and --max-running-requests 25",
        flags="--max-total-tokens 16384 --max-running-requests 25",
        steps=(_send(60, 60, (200, 900), 150, timeout_seconds=3.0),),
        truth="Nearly all get a first token within two seconds, and most are given up before their answer ends.",
        right="Fewer requests at once or a replica, or a flag of what they wait for. Never that all is well.",
        verdicts=("requests_rejected", "running_at_limit", "queue_too_long", "latency_queue", *POOL),
        never=(CONSERVATIVENESS,),
        silent_sources=("log", "report"),
    ),
    Situation(
        name="priorities-short-queue",
        what="priority scheduling, --max-running-requests 4, --max-queued-requests 10, and 20 clients of three priorities",
        flags="--max-total-tokens 8192 --enable-priority-scheduling --max-running-requests 4 --max-queued-requests 10",
        steps=(_send(20, 55, 60, 120, priorities=(0, 10, 30)),),
        truth="Four run and ten wait beside a pool that is nearly empty; six in ten requests are refused.",
        right="--max-running-requests up; not 'add a replica'.",
        verdicts=("running_at_limit", "requests_rejected"),
        cures=("--max-running-requests up",),
        never=("--schedule-policy", CONSERVATIVENESS, "replica", "--max-total-tokens"),
    ),
    Situation(
        name="one-token-answers",
        what="32 clients with prompts of 600 to 900 tokens and one new token each, in chunks of 512",
        flags="--max-total-tokens 16384 --chunked-prefill-size 512",
        steps=(_send(32, 60, (600, 900), 1),),
        truth="Nothing is decoded: each prompt takes two chunks, and the rest wait for prefill.",
        right="--chunked-prefill-size up.",
        verdicts=(*WAITING, "healthy"),
        cures=("--chunked-prefill-size up", "--chunked-prefill-size drop"),
        never=(CONSERVATIVENESS, "--max-running-requests", "--max-total-tokens"),
    ),
    Situation(
        name="long-idle-then-one-chat",
        what="20 s of nothing, then one client, beside a pool of 4,096 and --max-running-requests 2",
        flags="--max-total-tokens 4096 --max-running-requests 2",
        steps=(_nothing(20), _send(1, 40, 60, 100)),
        truth="Healthy: one request runs, nothing waits.",
        right="Nothing.",
        verdicts=HEALTHY,
        never=(CONSERVATIVENESS, "--max-running-requests", "--max-total-tokens", "replica"),
    ),
    Situation(
        name="asks-for-much-more",
        what="48 clients that allow 4,000 tokens and get some 500",
        flags="--max-total-tokens 16384",
        steps=(_send(48, 70, 60, 4000),),
        truth="SGLang keeps room for much longer answers than come; how much is held back shrinks with each decode step.",
        right="Fewer max_new_tokens, a lower conservativeness, or a larger pool.",
        verdicts=("admission_too_conservative", "admission_recovering", "retracting_too_often", *POOL, "healthy"),
        never=("--max-running-requests up", "--chunked-prefill-size"),
    ),
)

SITUATIONS: tuple[Situation, ...] = (
    *(_stage(process) for process in STAGES),
    Situation(
        name="pool-4200-prompts-1100",
        what="a pool of 4,200 tokens, in which three requests of 1,200 fit and a fourth never does",
        flags="--max-total-tokens 4200",
        steps=(_send(24, 50, 1100, 100),),
        truth="Three of 1,200 tokens fit; the rest of the pool is smaller than a request. Memory limits, not admission.",
        right="A larger pool. No change of conservativeness, no smaller max_new_tokens: clients ask for 100.",
        verdicts=POOL,
        cures=MORE_MEMORY,
        never=(CONSERVATIVENESS, "max_new_tokens"),
    ),
    Situation(
        name="pool-600-prompts-300",
        what="a pool of 600 tokens and prompts of 300: one request fits",
        flags="--max-total-tokens 600",
        steps=(_send(24, 50, 300, 100),),
        truth="One request of 300 to 400 tokens fits in 600. Memory limits.",
        right="A larger pool. No change of conservativeness.",
        verdicts=POOL,
        cures=MORE_MEMORY,
        never=(CONSERVATIVENESS, "max_new_tokens"),
    ),
    Situation(
        name="pool-12288-prompts-1220",
        what="a pool of 12,288 tokens, prompts of 1,220, answers of up to 100",
        flags="--max-total-tokens 12288",
        steps=(_send(48, 50, 1220, 100),),
        truth="Nine of 1,320 tokens fit; the pool is as full as whole requests can fill it.",
        right="A larger pool. No change of conservativeness.",
        verdicts=(*POOL, "prefill_bound"),
        cures=MORE_MEMORY,
        never=(CONSERVATIVENESS,),
    ),
    Situation(
        name="pool-12288-prompts-1500",
        what="a pool of 12,288 tokens, prompts of 1,500, answers of up to 60: an eighth request does not fit",
        flags="--max-total-tokens 12288",
        steps=(_send(24, 50, 1500, 60),),
        truth="Seven of 1,560 tokens fit; an eighth is let in now and then and retracted (three times in 50 s).",
        right="A larger pool. Never a lower conservativeness.",
        verdicts=(*POOL, "prefill_bound", "retracting_too_often"),
        cures=(*MORE_MEMORY, f"{CONSERVATIVENESS} up"),
        never=(f"{CONSERVATIVENESS} down", "max_new_tokens"),
    ),
    Situation(
        name="pool-12288-prompts-1220-answers-400",
        what="a pool of 12,288 tokens, prompts of 1,220, answers of up to 400",
        flags="--max-total-tokens 12288",
        steps=(_send(48, 50, 1220, 400),),
        truth="Seven of 1,620 tokens fit at their end, nine at their start.",
        right="A larger pool. No change of conservativeness.",
        verdicts=(*POOL, "prefill_bound"),
        cures=MORE_MEMORY,
        never=(CONSERVATIVENESS,),
    ),
    Situation(
        name="pool-12288-ignore-eos",
        what="the same pool and prompts with ignore_eos: SGLang reserves all of max_new_tokens for each",
        flags="--max-total-tokens 12288",
        steps=(_send(48, 50, 1220, 400, ignore_eos=True),),
        truth="Requests with ignore_eos are reserved in full at any conservativeness; seven of 1,620 fit.",
        right="A larger pool. Conservativeness cannot help.",
        verdicts=(*POOL, "prefill_bound"),
        cures=MORE_MEMORY,
        never=(CONSERVATIVENESS,),
    ),
    Situation(
        name="page-512",
        what="pages of 512 tokens and requests of 70: most of each page is air",
        flags="--max-total-tokens 16384 --page-size 512",
        steps=(_send(48, 50, 40, 30),),
        truth="A request of 70 tokens takes a page of 512: 32 fit where over 200 would, 85 % of the pool is air.",
        right="A smaller page (the default), not more memory.",
        verdicts=(*POOL, "healthy"),
        cures=("--page-size down", "--page-size drop"),
        never=(CONSERVATIVENESS, "--max-total-tokens up"),
    ),
    Situation(
        name="chat-with-stops",
        what="three people chat, and one answer in six is stopped by its reader",
        flags="--max-total-tokens 16384",
        steps=(_send(3, 75, (24, 60), 160, stopped=1 / 6, pause_seconds=(0.2, 1.0)),),
        truth="Healthy: nothing waits, first tokens come at once. A stopped answer is no trouble.",
        right="Nothing to change, no alert.",
        verdicts=HEALTHY,
        never=("requests at once", "replica"),
    ),
    Situation(
        name="priorities-preempt",
        what="priority scheduling, a small pool, and requests of three priorities that preempt each other",
        flags="--max-total-tokens 4096 --enable-priority-scheduling --max-running-requests 12",
        steps=(_send(32, 60, (60, 200), 300, priorities=(0, 0, 0, 5, 20)),),
        truth="Cached tokens are those of preempted requests that come back; no prefixes are shared.",
        right="Never --schedule-policy lpm: SGLang refuses it beside --enable-priority-scheduling.",
        verdicts=(*POOL, "running_at_limit", "retracting_too_often", "admission_too_conservative"),
        never=("--schedule-policy",),
    ),
    Situation(
        name="priorities-return",
        what="priority scheduling: requests of 900 tokens are preempted, come back, and find their own KV",
        flags="--max-total-tokens 16384 --enable-priority-scheduling --max-running-requests 6",
        steps=(_send(24, 50, 900, 200, priorities=(0, 0, 20, 40)),),
        truth="The running limit of 6. Cached tokens are those of preempted requests that come back; no prefixes are shared.",
        right="--max-running-requests up. Never --schedule-policy lpm, which SGLang refuses beside --enable-priority-scheduling.",
        verdicts=("running_at_limit", "prefill_bound"),
        never=("--schedule-policy", CONSERVATIVENESS),
    ),
    *(
        Situation(
            name=f"early-limit{name}",
            what=f"a minute of nothing{words}, then 27 s with 48 clients at --max-running-requests 4",
            flags="--max-total-tokens 16384 --max-running-requests 4",
            steps=(_nothing(60), _send(48, 27, 40, 300)),
            truth="The running limit of 4: 44 requests wait beside an empty pool.",
            right="--max-running-requests up. Never more requests at once.",
            verdicts=("running_at_limit",),
            cures=("--max-running-requests up",),
            never=("requests at once", CONSERVATIVENESS),
            profile="offline",
            probes=probes,
        )
        for name, words, probes in (("", "", False), ("-probed", " but health probes", True))
    ),
    *(
        Situation(
            name=f"early-chunks{name}",
            what=f"a minute of nothing{words}, then 22 s of prompts of 2,000 tokens in chunks of 128",
            flags="--max-total-tokens 32768 --chunked-prefill-size 128",
            steps=(_nothing(60), _send(16, 22, 2000, 16)),
            truth="Chunks of 128 tokens make prefill slow; requests wait for it.",
            right="--chunked-prefill-size up. Never more requests at once.",
            verdicts=("prefill_bound",),
            cures=("--chunked-prefill-size up", "--chunked-prefill-size drop"),
            never=("requests at once", CONSERVATIVENESS),
            profile="offline",
            probes=probes,
        )
        for name, words, probes in (("", "", False), ("-probed", " but health probes", True))
    ),
    Situation(
        name="bursts-10-in-30",
        what="bursts of 10 s every 30 s from 20 clients at --max-running-requests 4",
        flags="--max-total-tokens 16384 --max-running-requests 4",
        steps=tuple(step for _ in range(4) for step in (_send(20, 10, 40, 100), _nothing(18))),
        truth="In each burst 16 requests wait for the running limit; between bursts nobody asks.",
        right="--max-running-requests up. Never more requests at once.",
        verdicts=("running_at_limit",),
        cures=("--max-running-requests up",),
        never=("requests at once", CONSERVATIVENESS),
        asked_at=95,
        profile="offline",
        probes=False,
    ),
    Situation(
        name="bursts-30-in-120",
        what="bursts of 30 s every two minutes from 20 clients: a short queue that moves fast",
        flags="--max-total-tokens 16384 --max-running-requests 8",
        steps=(_send(20, 30, 40, 20), _nothing(88), _send(20, 30, 40, 20)),
        truth="A queue of 12 at some ten starts a second: a wait of about a second, in range. The limit of 8 is reached.",
        right="No 'send fewer requests'; the running limit may be named.",
        verdicts=("healthy", "running_at_limit", "no_clear_bottleneck"),
        never=("requests at once", "replica"),
        probes=False,
    ),
    Situation(
        name="prefixes-cache-off",
        what="six prefixes of 1,200 tokens, and --disable-radix-cache",
        flags="--max-total-tokens 12288 --disable-radix-cache",
        steps=(_send(24, 60, 24, 48, **_PREFIXES),),
        truth="Every request computes a prefix that the server has computed a hundred times.",
        right="Drop --disable-radix-cache, before any larger pool.",
        verdicts=(*POOL, "healthy", "prefill_bound"),  # whoever waits does so for less than the guide's five seconds
        cures=("--disable-radix-cache drop",),
        never=(CONSERVATIVENESS,),
    ),
    Situation(
        name="prefixes-cache-on",
        what="the same six prefixes with the cache",
        flags="--max-total-tokens 12288",
        steps=(_send(24, 60, 24, 48, **_PREFIXES),),
        truth="Nearly all prompts are found in the cache.",
        right="Nothing, or the pool.",
        verdicts=(*POOL, "healthy", "prefill_bound"),
        never=(CONSERVATIVENESS,),
    ),
    *(
        Situation(
            name=f"chunks-{name}",
            what=f"prompts of 2,000 tokens and {flag}",
            flags=f"--max-total-tokens 32768 {flag}",
            steps=(_send(16, 50, 2000, 16),),
            truth=truth,
            right=right,
            verdicts=(*WAITING, "latency_prefill_between", "healthy") if name != "256" else WAITING,
            cures=cures,
            never=(CONSERVATIVENESS, "--max-running-requests down"),
        )
        for name, flag, truth, right, cures in (
            (
                "off",
                "--chunked-prefill-size -1",
                "Whole prompts up to --max-prefill-tokens in one step; decoding waits for them, for less than a second here.",
                "Little: the flag may be named.",
                (),
            ),
            (
                "256",
                "--chunked-prefill-size 256",
                "Chunks of 256 tokens: each step computes too little.",
                "--chunked-prefill-size up.",
                ("--chunked-prefill-size up", "--chunked-prefill-size drop"),
            ),
            ("1024", "--chunked-prefill-size 1024", "Prefill is what limits; the chunk is about right.", "Little.", ()),
            (
                "prefill-256",
                "--max-prefill-tokens 256",
                "One prompt of 2,000 tokens goes into a prefill batch at a time: the limit ends a batch, and splits no prompt.",
                "Little: the flag may be named.",
                (),
            ),
        )
    ),
    Situation(
        name="prefill-tokens-256",
        what="96 clients with prompts of 120 tokens, four new ones each, and --max-prefill-tokens 256",
        flags="--max-total-tokens 32768 --max-prefill-tokens 256",
        steps=(_send(96, 45, 120, 4),),
        truth="A prefill batch takes two prompts where the chunk has room for dozens; the rest wait.",
        right="--max-prefill-tokens up (or drop it).",
        verdicts=(*WAITING, "latency_prefill_between", "healthy"),
        cures=("--max-prefill-tokens up", "--max-prefill-tokens drop"),
        never=(CONSERVATIVENESS, "--max-running-requests down"),
    ),
    *(
        Situation(
            name=f"refused-{name}",
            what=f"48 clients at --max-running-requests 4 and --max-queued-requests 8: most are refused{words}",
            flags="--max-total-tokens 16384 --max-running-requests 4 --max-queued-requests 8",
            steps=(_send(48, 50, 40, 200, streamed=streamed),),
            truth="The running limit of 4 beside a pool at 5 %: requests are refused that would fit.",
            right="--max-running-requests up first; not 'add a replica'.",
            verdicts=("running_at_limit", "requests_rejected"),
            cures=("--max-running-requests up",),
            never=(CONSERVATIVENESS, "replica"),
        )
        for name, words, streamed in (
            ("503", " with 503", 0.0),
            ("streams", ", streams with 200 and an abort in them", 1.0),
        )
    ),
    Situation(
        name="dp2-one-rank",
        what="two DP ranks, and every request is routed to the first",
        flags="--dp-size 2 --max-total-tokens 8192 --max-running-requests 8 --sleep-on-idle",
        steps=(_send(24, 60, 40, 300, dp_rank=0),),
        truth="One rank is at its limit and 16 or more requests wait for it; the other is idle: imbalance is the cause.",
        right="Spread the requests over the ranks; the full rank's limit is a consequence.",
        verdicts=("dp_imbalanced", "running_at_limit"),
        never=(CONSERVATIVENESS,),
        env=(("SGLANG_CPU_OMP_THREADS_BIND", "0|0"),),
    ),
    Situation(
        name="dp2-idle-twin",
        what="two DP ranks, prompts of 1,220 in pools of 12,288, all for one rank",
        flags="--dp-size 2 --max-total-tokens 12288 --sleep-on-idle",
        steps=(_send(24, 60, 1220, 100, dp_rank=1),),
        truth="One rank's pool is full by whole requests; the other rank is idle.",
        right="Spread the requests; never conservativeness.",
        verdicts=("dp_imbalanced", *POOL, "prefill_bound"),
        never=(CONSERVATIVENESS, "max_new_tokens"),
        env=(("SGLANG_CPU_OMP_THREADS_BIND", "0|0"),),
    ),
    Situation(
        name="decode-beside-prefill",
        what="twelve long answers beside four clients with prompts of 3,000 tokens",
        flags="--max-total-tokens 65536",
        steps=((*_send(12, 60, 24, 400), *_send(4, 60, 3000, 8)),),
        truth="Prefill of long prompts stops decoding again and again; nothing waits for long.",
        right="Nothing, or the chunk size.",
        verdicts=("healthy", "latency_prefill_between", *WAITING),
        never=(CONSERVATIVENESS,),
    ),
    *UNTUNED,
    *(_stage(process, version) for version in ("0.5.9", "0.4.9.post6") for process in STAGES),
    *(
        Situation(
            name=f"healthy-{name}",
            what=what,
            flags=flags,
            steps=steps,
            truth="Healthy: clients get first tokens at once and nothing waits long.",
            right="Nothing to change, no alert.",
            verdicts=(*HEALTHY, *(("client_too_slow",) if profile == "offline" else ())),
            never=(CONSERVATIVENESS, "--max-running-requests down", "replica"),
            profile=profile,
        )
        for name, what, flags, profile, steps in (
            (
                "chat",
                "six people chat and stop one answer in five",
                "--max-total-tokens 16384",
                "online",
                (_send(6, 70, (24, 60, 200), 200, stopped=0.2, pause_seconds=(0.5, 1.0, 3.0)),),
            ),
            (
                "agents",
                "agents that share a prefix and pause for long between short bursts",
                "--max-total-tokens 16384",
                "online",
                (_send(6, 80, (40, 400), 120, families=2, prefix_tokens=600, pause_seconds=(3.0, 8.0, 15.0)),),
            ),
            (
                "batch",
                "a batch of 16 with ignore_eos",
                "--max-total-tokens 16384",
                "offline",
                (_send(16, 70, (40, 100), 200, ignore_eos=True),),
            ),
            (
                "rag",
                "questions about four shared documents",
                "--max-total-tokens 16384",
                "online",
                (_send(5, 70, (60,), 80, families=4, prefix_tokens=1200, pause_seconds=(0.3, 1.0)),),
            ),
            (
                "long",
                "prompts of several thousand tokens, two at a time",
                "--max-total-tokens 32768",
                "long_context",
                (_send(2, 70, (4000, 6000), 60, pause_seconds=(1.0, 3.0)),),
            ),
            (
                "whole",
                "answers that are not streamed",
                "--max-total-tokens 16384",
                "online",
                (_send(8, 60, (40, 100), 100, streamed=0.0, pause_seconds=(0.2, 0.5)),),
            ),
            (
                "tenth-streamed",
                "one answer in ten is streamed",
                "--max-total-tokens 16384",
                "online",
                (_send(8, 60, (40, 100), 100, streamed=0.1, pause_seconds=(0.2, 0.5)),),
            ),
            (
                "bursts",
                "bursts of 8 s every 25 s from six clients",
                "--max-total-tokens 16384",
                "online",
                tuple(step for _ in range(3) for step in (_send(6, 8, (24, 60), 60), _nothing(15))),
            ),
            ("probes", "nobody asks but health probes", "--max-total-tokens 16384", "online", (_nothing(75),)),
        )
    ),
    Situation(
        name="sigterm-idle",
        what="SIGTERM of a server that has been idle for half a minute after a short load",
        flags="--max-total-tokens 16384",
        steps=(_send(3, 10, 40, 40), _nothing(45)),
        acts=(Act(40, "TERM", "main"),),
        truth="It was stopped while idle; it did not end under load.",
        right="Nothing but that it is down.",
        verdicts=("server_down", *HEALTHY),
        never=(CONSERVATIVENESS,),
        asked_at=54,
        probes=False,
    ),
    Situation(
        name="startup",
        what="a server that starts beside an exporter that is there already, and then is idle",
        flags="--max-total-tokens 16384",
        steps=(_nothing(15),),
        truth="It starts for half a minute and then is idle.",
        right="Starting, then idle; never down.",
        verdicts=HEALTHY,
        from_start=True,
    ),
)
BY_NAME = {situation.name: situation for situation in SITUATIONS}
