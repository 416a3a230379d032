"""The loops: a wrong setting, its load, the diagnosis it must get, and the effect of the advice. Data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from closed_loop.load import Load

SECONDS = 45.0  # a notification comes after some 37: 20 of load, then the rule's own
LONGER_SECONDS = 60.0  # where the rate of a slow machine passes the threshold in some minutes of the rules only


@dataclass(frozen=True, slots=True)
class Loop:
    """One wrong setting. `flags` are added to those of every server here; `brings` is the expected effect in words.

    `expected` is the diagnosis, empty for a control: no finding, no notification. `alert` is the notification waited for,
    empty where there is none. `wins`: the figures that must move, with the direction. `fixed`: flags that stand for hardware, here a GPU's
    memory, and are kept against any advice.
    """

    name: str
    what: str
    flags: str
    load: Load
    expected: str
    alert: str
    brings: str = ""
    wins: tuple[tuple[str, str], ...] = ()  # measure -> up, down
    fixed: tuple[str, ...] = ("--max-total-tokens",)
    never: tuple[tuple[str, str], ...] = ()  # flag and direction that must not be advised
    profile: str = "offline"
    env: Mapping[str, str] = field(default_factory=dict)


MORE = ("tokens_per_cpu_second", "up")
# What SGLang keeps free for a running request at most: 4096 unless set. Beside a GPU's pool of a hundred thousand tokens that
# is little; beside the small pools here it is so much that nothing is ever taken back. 256 of 8,192 are a GPU's proportions;
# 32 are what an operator sets who wants every request in.
CLIPPED = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "256"}
STORM = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "32"}

LOOPS: tuple[Loop, ...] = (
    Loop(
        name="conservative",
        what="conservativeness 1.0 although clients ask for 4,000 tokens and end by EOS after some 500",
        flags="--max-total-tokens 16384",
        load=Load(clients=48, seconds=SECONDS, most_new_tokens=4000),
        expected="admission_too_conservative",
        alert="SGLangAdmissionTooConservative",
        brings="more requests run at once, and first tokens come sooner",
        wins=(("running", "up"), ("token_usage", "up"), ("first_token_p50", "down")),
    ),
    Loop(
        name="retracting",
        what="conservativeness 0.1, and clients that ask for 4,000 tokens of which the server keeps 256 free at most",
        flags="--max-total-tokens 8192 --schedule-conservativeness 0.1",
        load=Load(clients=48, seconds=LONGER_SECONDS, most_new_tokens=4000),
        expected="retracting_too_often",
        alert="SGLangRetractingTooOften",
        brings="fewer requests are taken back and computed again",
        wins=(MORE, ("retractions_per_million_tokens", "down")),
        never=(("--schedule-conservativeness", "down"),),
        env=CLIPPED,
    ),
    Loop(
        name="burst",
        what="conservativeness 0.1: one burst of retractions, and over-careful admission for long after it (no alert: the burst is over)",
        flags="--max-total-tokens 8192 --schedule-conservativeness 0.1",
        load=Load(clients=48, seconds=SECONDS, most_new_tokens=512),
        expected="retracting_too_often",
        alert="",
        brings="the server is careful for a shorter time and runs more at once",
        wins=(MORE, ("running", "up"), ("token_usage", "up")),
        never=(("--schedule-conservativeness", "down"),),
    ),
    Loop(
        name="running-limit",
        what="two requests at once, and a pool that holds dozens",
        flags="--max-total-tokens 16384 --max-running-requests 2",
        load=Load(clients=32, seconds=SECONDS),
        expected="running_at_limit",
        alert="SGLangRunningAtLimit",
        brings="a batch of as many as fit",
        wins=(MORE, ("running", "up"), ("latency_p50", "down")),
        never=(("--schedule-conservativeness", "down"),),
    ),
    Loop(
        name="queue",
        what="a well-filled server, and many more requests at once than it finishes in time, where people wait",
        flags="--max-total-tokens 8192 --schedule-conservativeness 1.3",
        load=Load(clients=72, seconds=SECONDS),
        expected="queue_too_long",
        alert="SGLangQueueTooLong",
        brings="first tokens in time for the same tokens a second",
        wins=(("first_token_p50", "down"), ("queued", "down")),
        profile="online",
    ),
    Loop(
        name="client",
        what="one request at a time, where throughput counts",
        flags="--max-total-tokens 16384",
        load=Load(clients=1, seconds=SECONDS),
        expected="client_too_slow",
        alert="SGLangClientTooSlow",
        brings="full batches",
        wins=(MORE, ("running", "up")),
    ),
    Loop(
        name="prefixes",
        what="first come, first served, while a dozen long prefixes take turns in a pool that holds a few",
        flags="--max-total-tokens 8192 --schedule-policy fcfs",
        load=Load(
            clients=32, seconds=SECONDS, prompt_tokens=(16,), most_new_tokens=32, families=10, prefix_tokens=1500
        ),
        expected="shared_prefixes_unused",
        alert="",
        brings="requests of one prefix are served together while it is cached",
        wins=(MORE, ("cached_share", "up")),
    ),
    Loop(
        name="chunks",
        what="prompts of 2,000 tokens in chunks of 128",
        flags="--max-total-tokens 32768 --chunked-prefill-size 128",
        load=Load(clients=12, seconds=SECONDS, prompt_tokens=(2000,), most_new_tokens=16),
        expected="prefill_bound",
        alert="SGLangPrefillBound",
        brings="fewer, larger steps",
        wins=(MORE, ("first_token_p50", "down")),
    ),
    Loop(
        name="ineffective",
        what="conservativeness 1.6 and still retracting: the server keeps 32 tokens free for each at most",
        flags="--max-total-tokens 3000 --schedule-conservativeness 1.6",
        load=Load(clients=40, seconds=SECONDS),
        expected="conservativeness_ineffective",
        alert="SGLangConservativenessIneffective",
        brings="a larger pool, in which fewer requests are taken back",
        wins=(MORE, ("retractions_per_million_tokens", "down"), ("latency_p99", "down")),
        never=(("--schedule-conservativeness", "up"),),
        fixed=(),  # it is what the advice is about
        env=STORM,
    ),
    Loop(
        name="healthy",
        what="nothing: a well-set server and a load that it carries",
        flags="--max-total-tokens 16384",
        load=Load(clients=8, seconds=SECONDS),
        expected="",
        alert="",
        profile="online",
    ),
    Loop(
        name="idle",
        what="nothing: nobody asks",
        flags="--max-total-tokens 16384",
        load=Load(clients=0, seconds=SECONDS),
        expected="",
        alert="",
        profile="online",
    ),
)
BY_NAME: dict[str, Loop] = {loop.name: loop for loop in LOOPS}
