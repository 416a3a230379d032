"""Situations that an adviser must read rightly, on a real server: what is started, and what is sent.

What is true of each, and what is right to say, is data beside them: `truth/cases/situations.yaml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias

from closed_loop.load import Load
from truth.cases import data

Process: TypeAlias = Literal["main", "scheduler", "detokenizer"]
STAGES: tuple[Process, ...] = ("detokenizer", "scheduler", "main")

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
    acts: tuple[Act, ...] = ()
    probes: bool = True
    env: tuple[tuple[str, str], ...] = ()
    version: str = "0.5.23"

    @property
    def truth(self) -> str:
        """What limits the server, in words."""
        return str(_truths()[self.name]["truth"])

    @property
    def right(self) -> str:
        """The right advice, in words."""
        return str(_truths()[self.name]["right"])

    @property
    def profile(self) -> str:
        """The exporter's profile for that load."""
        return str(_truths()[self.name].get("profile", "online"))

    def words_of_load(self) -> str:
        """Say what is sent, in one line."""
        return "; then ".join(" beside ".join(_words(load) for load in step) for step in self.steps)


@cache
def _truths() -> Mapping[str, Mapping[str, Any]]:
    captures: dict[str, dict[str, Any]] = data("situations.yaml")["captures"]
    return captures


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
    return Situation(
        name=f"{prefix}stop-{process}",
        what=f"SIGSTOP of the {stage} for 140 s under the load of 24 clients",
        flags="--max-total-tokens 16384",
        steps=(_send(24, 190, (24, 60), 120, timeout_seconds=30.0),),
        acts=(Act(30, "STOP", process), Act(170, "CONT", process)),
        version=version,
    )


_SCHEMA = '{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name", "age"]}'
_PREFIXES = {"families": 6, "prefix_tokens": 1200}

# Loads that nothing was tuned for when they were first sent.
UNTUNED: tuple[Situation, ...] = (
    *(
        Situation(
            name=f"late-by-prefill{name}",
            what=f"twelve long answers beside eight clients with prompts of 3,000 tokens{words}",
            flags=f"--max-total-tokens 65536{flags}",
            steps=((*_send(12, 60, 24, 400), *_send(8, 60, 3000, 8)),),
        )
        for name, words, flags in (
            ("", "", ""),
            ("-chunk-512", " in chunks of 512", " --chunked-prefill-size 512"),
            ("-mixed", " and mixed chunks", " --enable-mixed-chunk"),
            ("-mixed-512", " and mixed chunks of 512", " --enable-mixed-chunk --chunked-prefill-size 512"),
            ("-interval-10", " and ten decode steps after each prefill", " --prefill-decode-interval 10"),
            (
                "-interval-17",
                " and seventeen decode steps after each prefill, as was advised",
                " --prefill-decode-interval 17",
            ),
            (
                "-interval-1-2048",
                " in chunks of 2,048 and a decode step after each",
                " --prefill-decode-interval 1 --chunked-prefill-size 2048",
            ),
        )
    ),
    Situation(
        name="long-answers-tiny-pool",
        what="a pool of 1,500 tokens, prompts of 16 and answers of up to 600",
        flags="--max-total-tokens 1500",
        steps=(_send(16, 60, 16, 600),),
    ),
    Situation(
        name="giants-among-small",
        what="one prompt of 6,000 tokens to nine of 40",
        flags="--max-total-tokens 16384",
        steps=(_send(24, 60, (*[40] * 9, 6000), 60),),
    ),
    Situation(
        name="eight-samples",
        what="six clients that ask for eight answers to each prompt, and --max-running-requests 12",
        flags="--max-total-tokens 32768 --max-running-requests 12",
        steps=(_send(6, 60, 40, 120, samples=8),),
    ),
    Situation(
        name="one-at-a-time",
        what="--max-running-requests 1 and six clients",
        flags="--max-total-tokens 16384 --max-running-requests 1",
        steps=(_send(6, 60, 40, 120),),
    ),
    Situation(
        name="policy-lof",
        what="--schedule-policy lof beside --max-running-requests 8",
        flags="--max-total-tokens 16384 --max-running-requests 8 --schedule-policy lof",
        steps=(_send(32, 60, (24, 60), 200),),
    ),
    Situation(
        name="stream-interval-50",
        what="twelve chats whose tokens come fifty at a time (--stream-interval 50)",
        flags="--max-total-tokens 16384 --stream-interval 50",
        steps=(_send(12, 60, (24, 60), 200, pause_seconds=(0.2, 1.0)),),
    ),
    Situation(
        name="impatient-clients",
        what="24 clients that give a request up after four seconds, and --max-running-requests 4",
        flags="--max-total-tokens 16384 --max-running-requests 4",
        steps=(_send(24, 60, 40, 200, timeout_seconds=4.0),),
    ),
    Situation(
        name="dp2-even",
        what="two DP ranks with an even load, and --max-running-requests 8",
        flags="--dp-size 2 --max-total-tokens 8192 --max-running-requests 8 --sleep-on-idle",
        steps=(_send(40, 60, 40, 200),),
        env=(("SGLANG_CPU_OMP_THREADS_BIND", "0|0"),),
    ),
    Situation(
        name="prompts-beyond-the-pool",
        what="one prompt of 5,000 tokens to three of 40, and a pool of 4,200",
        flags="--max-total-tokens 4200",
        steps=(_send(6, 60, (40, 40, 40, 5000), 60, pause_seconds=(0.2,)),),
    ),
    Situation(
        name="answers-by-schema",
        what="twelve clients whose answers are held to a JSON schema",
        flags="--max-total-tokens 16384 --grammar-backend xgrammar",
        steps=(_send(12, 60, 40, 100, schema=_SCHEMA),),
    ),
    Situation(
        name="cache-off-nothing-shared",
        what="eight chats beside --disable-radix-cache, and no prompt begins like another",
        flags="--max-total-tokens 16384 --disable-radix-cache",
        steps=(_send(8, 60, (60, 200), 120, pause_seconds=(0.2, 1.0)),),
    ),
    Situation(
        name="bursts-short-queue",
        what="bursts of 40 requests at once beside --max-queued-requests 4",
        flags="--max-total-tokens 16384 --max-queued-requests 4",
        steps=tuple(step for _ in range(6) for step in (_send(40, 4, 40, 60), _nothing(6))),
    ),
    Situation(
        name="prompts-then-answers",
        what="40 s of prompts of 2,000 tokens in chunks of 256, then 50 s of short prompts at --max-running-requests 6",
        flags="--max-total-tokens 32768 --chunked-prefill-size 256 --max-running-requests 6",
        steps=(_send(16, 40, 2000, 8), _send(32, 50, 24, 200)),
    ),
    Situation(
        name="limit-without-overlap",
        what="30 clients at --max-running-requests 6 beside --disable-overlap-schedule",
        flags="--max-total-tokens 16384 --max-running-requests 6 --disable-overlap-schedule",
        steps=(_send(30, 60, 40, 150),),
    ),
    Situation(
        name="page-64-pool-4096",
        what="pages of 64 tokens, a pool of 4,096, and 60 clients with requests of some 70 tokens",
        flags="--page-size 64 --max-total-tokens 4096",
        steps=(_send(60, 60, 24, 60),),
    ),
    Situation(
        name="one-long-answer",
        what="one client whose answers have 3,000 tokens",
        flags="--max-total-tokens 16384",
        steps=(_send(1, 60, 24, 3000, ignore_eos=True),),
    ),
    Situation(
        name="over-careful-small-pool",
        what="30 clients with prompts of 60 and 120 and answers of up to 200, a small pool, and --schedule-conservativeness 3",
        flags="--max-total-tokens 3000 --schedule-conservativeness 3.0",
        steps=(_send(30, 75, (60, 120), 200),),
    ),
    Situation(
        name="chunk-64-shared-prefixes",
        what="six clients with four prefixes of 900 and 300 tokens of their own beside six chats, in chunks of 64",
        flags="--max-total-tokens 32768 --chunked-prefill-size 64",
        steps=((*_send(6, 70, 300, 60, families=4, prefix_tokens=900), *_send(6, 70, 24, 150)),),
    ),
    Situation(
        name="mixed-chunks-128",
        what="sixteen clients with prompts of 500 and 1,500 in mixed chunks of 128",
        flags="--max-total-tokens 32768 --enable-mixed-chunk --chunked-prefill-size 128",
        steps=(_send(16, 60, (500, 1500), 100),),
    ),
    Situation(
        name="page-256-over-careful",
        what="40 clients with requests of 128 to 320 tokens, pages of 256, and --schedule-conservativeness 2",
        flags="--max-total-tokens 8192 --page-size 256 --schedule-conservativeness 2.0",
        steps=(_send(40, 60, (40, 200), 120),),
    ),
    Situation(
        name="ramp-to-a-burst",
        what="four clients, then sixteen, then 60, at --max-running-requests 16",
        flags="--max-total-tokens 32768 --max-running-requests 16",
        steps=(_send(4, 25, 60, 120), _send(16, 25, 60, 120), _send(60, 40, 60, 120)),
    ),
    Situation(
        name="ramp-rejected-streams",
        what="six clients, then 40, at --max-running-requests 12 and --max-queued-requests 10",
        flags="--max-total-tokens 32768 --max-running-requests 12 --max-queued-requests 10",
        steps=(_send(6, 40, 60, 100), _send(40, 35, 60, 100)),
    ),
    Situation(
        name="ignore-eos-small-pool",
        what="24 clients with prompts of 60 and answers of exactly 200 (ignore_eos), and a pool of 3,000",
        flags="--max-total-tokens 3000",
        steps=(_send(24, 60, 60, 200, ignore_eos=True),),
    ),
    Situation(
        name="limit-6-chunks-128",
        what="30 clients with prompts of 600 and 1,200 in chunks of 128, and --max-running-requests 6",
        flags="--max-total-tokens 32768 --max-running-requests 6 --chunked-prefill-size 128",
        steps=(_send(30, 60, (600, 1200), 80),),
    ),
    Situation(
        name="waiting-timeout-streams",
        what="32 clients at --max-running-requests 4, and SGLANG_REQ_WAITING_TIMEOUT=3",
        flags="--max-total-tokens 16384 --max-running-requests 4",
        env=(("SGLANG_REQ_WAITING_TIMEOUT", "3"),),
        steps=(_send(32, 60, 60, 200),),
    ),
    Situation(
        name="decode-interval-200",
        what="30 clients with prompts of 300, and --prefill-decode-interval 200",
        flags="--max-total-tokens 32768 --prefill-decode-interval 200",
        steps=(_send(30, 60, 300, 100),),
    ),
    Situation(
        name="over-careful-pool-full",
        what="64 clients with prompts of 60 and answers of up to 600, and --schedule-conservativeness 3",
        flags="--max-total-tokens 16384 --schedule-conservativeness 3",
        steps=(_send(64, 70, 60, 600),),
    ),
    Situation(
        name="six-samples-small-pool",
        what="eight clients that ask for six answers to each prompt of 200 tokens, and a pool of 4,096",
        flags="--max-total-tokens 4096",
        steps=(_send(8, 60, 200, 200, samples=6),),
    ),
    Situation(
        name="half-of-the-prompts-too-long",
        what="every second prompt has 3,000 tokens, and a pool of 2,048",
        flags="--max-total-tokens 2048",
        steps=(_send(8, 50, (3000, 40), 60),),
    ),
    Situation(
        name="context-of-512",
        what="--context-length 512, and every second client sends prompts of 900 tokens",
        flags="--max-total-tokens 16384 --context-length 512",
        steps=((*_send(6, 60, 900, 60), *_send(6, 60, 100, 60)),),
    ),
    Situation(
        name="schema-without-backend",
        what="--grammar-backend none, and eight clients whose answers are to follow a JSON schema",
        flags="--max-total-tokens 32768",
        steps=(_send(8, 50, 60, 120, schema=_SCHEMA, pause_seconds=(0.5,)),),
    ),
    Situation(
        name="requests-end-in-500",
        what="--max-total-tokens 16384, six clients, and two whose stop_regex is no regular expression",
        flags="--max-total-tokens 16384",
        steps=((*_send(6, 60, 60, 120), *_send(2, 60, 60, 120, stop_regex="(")),),
    ),
    Situation(
        name="impatient-clients-small-pool",
        what="60 clients that give a request up after six seconds, and a pool of 3,000 tokens",
        flags="--max-total-tokens 3000",
        steps=(_send(60, 60, 120, 150, timeout_seconds=6.0),),
    ),
    Situation(
        name="retry-storm",
        what="60 clients that give a request up after three seconds and ask again, and --max-running-requests 25",
        flags="--max-total-tokens 16384 --max-running-requests 25",
        steps=(_send(60, 60, (200, 900), 150, timeout_seconds=3.0),),
    ),
    Situation(
        name="priorities-short-queue",
        what="priority scheduling, --max-running-requests 4, --max-queued-requests 10, and 20 clients of three priorities",
        flags="--max-total-tokens 8192 --enable-priority-scheduling --max-running-requests 4 --max-queued-requests 10",
        steps=(_send(20, 55, 60, 120, priorities=(0, 10, 30)),),
    ),
    Situation(
        name="one-token-answers",
        what="32 clients with prompts of 600 to 900 tokens and one new token each, in chunks of 512",
        flags="--max-total-tokens 16384 --chunked-prefill-size 512",
        steps=(_send(32, 60, (600, 900), 1),),
    ),
    Situation(
        name="long-idle-then-one-chat",
        what="20 s of nothing, then one client, beside a pool of 4,096 and --max-running-requests 2",
        flags="--max-total-tokens 4096 --max-running-requests 2",
        steps=(_nothing(20), _send(1, 40, 60, 100)),
    ),
    Situation(
        name="asks-for-much-more",
        what="48 clients that allow 4,000 tokens and get some 500",
        flags="--max-total-tokens 16384",
        steps=(_send(48, 70, 60, 4000),),
    ),
)

SITUATIONS: tuple[Situation, ...] = (
    *(_stage(process) for process in STAGES),
    Situation(
        name="pool-4200-prompts-1100",
        what="a pool of 4,200 tokens, in which three requests of 1,200 fit and a fourth never does",
        flags="--max-total-tokens 4200",
        steps=(_send(24, 50, 1100, 100),),
    ),
    Situation(
        name="pool-600-prompts-300",
        what="a pool of 600 tokens and prompts of 300: one request fits",
        flags="--max-total-tokens 600",
        steps=(_send(24, 50, 300, 100),),
    ),
    Situation(
        name="pool-12288-prompts-1220",
        what="a pool of 12,288 tokens, prompts of 1,220, answers of up to 100",
        flags="--max-total-tokens 12288",
        steps=(_send(48, 50, 1220, 100),),
    ),
    Situation(
        name="pool-12288-prompts-1500",
        what="a pool of 12,288 tokens, prompts of 1,500, answers of up to 60: an eighth request does not fit",
        flags="--max-total-tokens 12288",
        steps=(_send(24, 50, 1500, 60),),
    ),
    Situation(
        name="pool-12288-prompts-1220-answers-400",
        what="a pool of 12,288 tokens, prompts of 1,220, answers of up to 400",
        flags="--max-total-tokens 12288",
        steps=(_send(48, 50, 1220, 400),),
    ),
    Situation(
        name="pool-12288-ignore-eos",
        what="the same pool and prompts with ignore_eos: SGLang reserves all of max_new_tokens for each",
        flags="--max-total-tokens 12288",
        steps=(_send(48, 50, 1220, 400, ignore_eos=True),),
    ),
    Situation(
        name="page-512",
        what="pages of 512 tokens and requests of 70: most of each page is air",
        flags="--max-total-tokens 16384 --page-size 512",
        steps=(_send(48, 50, 40, 30),),
    ),
    Situation(
        name="chat-with-stops",
        what="three people chat, and one answer in six is stopped by its reader",
        flags="--max-total-tokens 16384",
        steps=(_send(3, 75, (24, 60), 160, stopped=1 / 6, pause_seconds=(0.2, 1.0)),),
    ),
    Situation(
        name="priorities-preempt",
        what="priority scheduling, a small pool, and requests of three priorities that preempt each other",
        flags="--max-total-tokens 4096 --enable-priority-scheduling --max-running-requests 12",
        steps=(_send(32, 60, (60, 200), 300, priorities=(0, 0, 0, 5, 20)),),
    ),
    Situation(
        name="priorities-return",
        what="priority scheduling: requests of 900 tokens are preempted, come back, and find their own KV",
        flags="--max-total-tokens 16384 --enable-priority-scheduling --max-running-requests 6",
        steps=(_send(24, 50, 900, 200, priorities=(0, 0, 20, 40)),),
    ),
    *(
        Situation(
            name=f"early-limit{name}",
            what=f"a minute of nothing{words}, then 27 s with 48 clients at --max-running-requests 4",
            flags="--max-total-tokens 16384 --max-running-requests 4",
            steps=(_nothing(60), _send(48, 27, 40, 300)),
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
            probes=probes,
        )
        for name, words, probes in (("", "", False), ("-probed", " but health probes", True))
    ),
    Situation(
        name="bursts-10-in-30",
        what="bursts of 10 s every 30 s from 20 clients at --max-running-requests 4",
        flags="--max-total-tokens 16384 --max-running-requests 4",
        steps=tuple(step for _ in range(4) for step in (_send(20, 10, 40, 100), _nothing(18))),
        probes=False,
    ),
    Situation(
        name="bursts-30-in-120",
        what="bursts of 30 s every two minutes from 20 clients: a short queue that moves fast",
        flags="--max-total-tokens 16384 --max-running-requests 8",
        steps=(_send(20, 30, 40, 20), _nothing(88), _send(20, 30, 40, 20)),
        probes=False,
    ),
    Situation(
        name="prefixes-cache-off",
        what="six prefixes of 1,200 tokens, and --disable-radix-cache",
        flags="--max-total-tokens 12288 --disable-radix-cache",
        steps=(_send(24, 60, 24, 48, **_PREFIXES),),
    ),
    Situation(
        name="prefixes-cache-on",
        what="the same six prefixes with the cache",
        flags="--max-total-tokens 12288",
        steps=(_send(24, 60, 24, 48, **_PREFIXES),),
    ),
    *(
        Situation(
            name=f"chunks-{name}",
            what=f"prompts of 2,000 tokens and {flag}",
            flags=f"--max-total-tokens 32768 {flag}",
            steps=(_send(16, 50, 2000, 16),),
        )
        for name, flag in (
            ("off", "--chunked-prefill-size -1"),
            ("256", "--chunked-prefill-size 256"),
            ("1024", "--chunked-prefill-size 1024"),
            ("prefill-256", "--max-prefill-tokens 256"),
        )
    ),
    Situation(
        name="prefill-tokens-256",
        what="96 clients with prompts of 120 tokens, four new ones each, and --max-prefill-tokens 256",
        flags="--max-total-tokens 32768 --max-prefill-tokens 256",
        steps=(_send(96, 45, 120, 4),),
    ),
    *(
        Situation(
            name=f"refused-{name}",
            what=f"48 clients at --max-running-requests 4 and --max-queued-requests 8: most are refused{words}",
            flags="--max-total-tokens 16384 --max-running-requests 4 --max-queued-requests 8",
            steps=(_send(48, 50, 40, 200, streamed=streamed),),
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
        env=(("SGLANG_CPU_OMP_THREADS_BIND", "0|0"),),
    ),
    Situation(
        name="dp2-idle-twin",
        what="two DP ranks, prompts of 1,220 in pools of 12,288, all for one rank",
        flags="--dp-size 2 --max-total-tokens 12288 --sleep-on-idle",
        steps=(_send(24, 60, 1220, 100, dp_rank=1),),
        env=(("SGLANG_CPU_OMP_THREADS_BIND", "0|0"),),
    ),
    Situation(
        name="decode-beside-prefill",
        what="twelve long answers beside four clients with prompts of 3,000 tokens",
        flags="--max-total-tokens 65536",
        steps=((*_send(12, 60, 24, 400), *_send(4, 60, 3000, 8)),),
    ),
    *UNTUNED,
    *(_stage(process, version) for version in ("0.5.9", "0.4.9.post6") for process in STAGES),
    *(
        Situation(
            name=f"healthy-{name}",
            what=what,
            flags=flags,
            steps=steps,
        )
        for name, what, flags, steps in (
            (
                "chat",
                "six people chat and stop one answer in five",
                "--max-total-tokens 16384",
                (_send(6, 70, (24, 60, 200), 200, stopped=0.2, pause_seconds=(0.5, 1.0, 3.0)),),
            ),
            (
                "agents",
                "agents that share a prefix and pause for long between short bursts",
                "--max-total-tokens 16384",
                (_send(6, 80, (40, 400), 120, families=2, prefix_tokens=600, pause_seconds=(3.0, 8.0, 15.0)),),
            ),
            (
                "batch",
                "a batch of 16 with ignore_eos",
                "--max-total-tokens 16384",
                (_send(16, 70, (40, 100), 200, ignore_eos=True),),
            ),
            (
                "rag",
                "questions about four shared documents",
                "--max-total-tokens 16384",
                (_send(5, 70, (60,), 80, families=4, prefix_tokens=1200, pause_seconds=(0.3, 1.0)),),
            ),
            (
                "long",
                "prompts of several thousand tokens, two at a time",
                "--max-total-tokens 32768",
                (_send(2, 70, (4000, 6000), 60, pause_seconds=(1.0, 3.0)),),
            ),
            (
                "whole",
                "answers that are not streamed",
                "--max-total-tokens 16384",
                (_send(8, 60, (40, 100), 100, streamed=0.0, pause_seconds=(0.2, 0.5)),),
            ),
            (
                "tenth-streamed",
                "one answer in ten is streamed",
                "--max-total-tokens 16384",
                (_send(8, 60, (40, 100), 100, streamed=0.1, pause_seconds=(0.2, 0.5)),),
            ),
            (
                "bursts",
                "bursts of 8 s every 25 s from six clients",
                "--max-total-tokens 16384",
                tuple(step for _ in range(3) for step in (_send(6, 8, (24, 60), 60), _nothing(15))),
            ),
            ("probes", "nobody asks but health probes", "--max-total-tokens 16384", (_nothing(75),)),
        )
    ),
    Situation(
        name="sigterm-idle",
        what="SIGTERM of a server that has been idle for half a minute after a short load",
        flags="--max-total-tokens 16384",
        steps=(_send(3, 10, 40, 40), _nothing(45)),
        acts=(Act(40, "TERM", "main"),),
        probes=False,
    ),
    Situation(
        name="startup",
        what="a server that starts beside an exporter that is there already, and then is idle",
        flags="--max-total-tokens 16384",
        steps=(_nothing(15),),
    ),
)
BY_NAME = {situation.name: situation for situation in SITUATIONS}
