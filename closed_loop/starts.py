"""Where a loop starts: flags as wrong as people set them, a load, what must be found, and what following the advice
must bring. Data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from closed_loop.load import Load

SECONDS = 45.0  # a notification comes after some 37: 20 of load, then the rule's own
LONGER_SECONDS = 60.0  # where the rate of a slow machine passes the threshold in some minutes of the rules only


@dataclass(frozen=True, slots=True)
class Start:
    """One server set wrong.

    `wrong` and `right` are flags that the advice may change, `fixed` those that stand for hardware, such as a GPU's
    memory.

    `expected` is the diagnosis that must be found at first, `healthy` for a control without any finding or
    notification, empty for any; `alert` the notification that must come. `brings` are the figures that must move when
    the advice is followed, with their direction (`+running`); `never` are changes that must not be advised. `by_hand`:
    a good setting in place of `wrong`, to compare the end with.
    """

    name: str
    what: str
    wrong: str
    load: Load
    fixed: str = "--max-total-tokens 16384"
    right: str = ""
    expected: str = ""
    alert: str = ""
    brings: tuple[str, ...] = ("+tokens_per_cpu_second",)
    never: tuple[tuple[str, str], ...] = ()
    by_hand: str | None = None
    profile: str = "offline"
    env: Mapping[str, str] = field(default_factory=dict)


# What SGLang keeps free for a running request at most: 4096 unless set. Beside a GPU's pool of a hundred thousand
# tokens that is little; beside the small pools here it is so much that nothing is ever taken back. 256 of 8,192 are a
# GPU's proportions; 32 are what an operator sets who wants every request in.
CLIPPED = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "256"}
STORM = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "32"}
_LOWERED, _RAISED = ("--schedule-conservativeness", "down"), ("--schedule-conservativeness", "up")
_MIXED = (24, 24, 24, 24, 1200)

STARTS: tuple[Start, ...] = (
    Start(
        name="conservative",
        what="conservativeness 1.0 although clients ask for 4,000 tokens and end by EOS after some 500",
        wrong="",
        load=Load(clients=48, seconds=SECONDS, most_new_tokens=4000),
        expected="admission_too_conservative",
        alert="SGLangAdmissionTooConservative",
        brings=("+running", "+token_usage", "-first_token_p50"),
    ),
    Start(
        name="retracting",
        what="conservativeness 0.1, and clients that ask for 4,000 tokens of which the server keeps 256 free at most",
        fixed="--max-total-tokens 8192",
        wrong="--schedule-conservativeness 0.1",
        load=Load(clients=48, seconds=LONGER_SECONDS, most_new_tokens=4000),
        expected="retracting_too_often",
        alert="SGLangRetractingTooOften",
        brings=("+tokens_per_cpu_second", "-retractions_per_million_tokens"),
        never=(_LOWERED,),
        env=CLIPPED,
    ),
    Start(
        name="burst",
        what=(
            "conservativeness 0.1: one burst of retractions, and over-careful admission for long after it (no alert:"
            " the burst is over)"
        ),
        fixed="--max-total-tokens 8192",
        wrong="--schedule-conservativeness 0.1",
        load=Load(clients=48, seconds=SECONDS, most_new_tokens=512),
        expected="retracting_too_often",
        brings=("+tokens_per_cpu_second", "+running", "+token_usage"),
        never=(_LOWERED,),
    ),
    Start(
        name="running-limit",
        what="two requests at once, and a pool that holds dozens",
        wrong="--max-running-requests 2",
        load=Load(clients=32, seconds=SECONDS),
        expected="running_at_limit",
        alert="SGLangRunningAtLimit",
        brings=("+tokens_per_cpu_second", "+running", "-latency_p50"),
        never=(_LOWERED,),
    ),
    Start(
        name="queue",
        what="a well-filled server, and many more requests at once than it finishes in time, where people wait",
        fixed="--max-total-tokens 8192",
        wrong="--schedule-conservativeness 1.3",
        load=Load(clients=72, seconds=SECONDS),
        expected="queue_too_long",
        alert="SGLangQueueTooLong",
        brings=("-first_token_p50", "-queued"),
        profile="online",
    ),
    Start(
        name="client",
        what="one request at a time, where throughput counts",
        wrong="",
        load=Load(clients=1, seconds=SECONDS),
        expected="client_too_slow",
        alert="SGLangClientTooSlow",
        brings=("+tokens_per_cpu_second", "+running"),
    ),
    Start(
        name="prefixes",
        what="first come, first served, while a dozen long prefixes take turns in a pool that holds a few",
        fixed="--max-total-tokens 8192",
        wrong="--schedule-policy fcfs",
        load=Load(
            clients=32, seconds=SECONDS, prompt_tokens=(16,), most_new_tokens=32, families=10, prefix_tokens=1500
        ),
        expected="shared_prefixes_unused",
        brings=("+tokens_per_cpu_second", "+cached_share"),
    ),
    Start(
        name="chunks",
        what="prompts of 2,000 tokens in chunks of 128",
        fixed="--max-total-tokens 32768",
        wrong="--chunked-prefill-size 128",
        load=Load(clients=12, seconds=SECONDS, prompt_tokens=(2000,), most_new_tokens=16),
        expected="prefill_bound",
        alert="SGLangPrefillBound",
        brings=("+tokens_per_cpu_second", "-first_token_p50"),
    ),
    Start(
        name="ineffective",
        what="conservativeness 1.6 and still retracting: the server keeps 32 tokens free for each at most",
        fixed="",
        wrong="--max-total-tokens 3000 --schedule-conservativeness 1.6",
        load=Load(clients=40, seconds=SECONDS),
        expected="conservativeness_ineffective",
        alert="SGLangConservativenessIneffective",
        brings=("+tokens_per_cpu_second", "-retractions_per_million_tokens", "-latency_p99"),
        never=(_RAISED,),
        env=STORM,
    ),
    Start(
        name="healthy",
        what="nothing: a well-set server and a load that it carries",
        wrong="",
        load=Load(clients=8, seconds=SECONDS),
        expected="healthy",
        profile="online",
    ),
    Start(
        name="idle",
        what="nothing: no request comes",
        wrong="",
        load=Load(clients=0, seconds=SECONDS),
        expected="healthy",
        profile="online",
    ),
    # Several flags at once
    Start(
        name="everything-small",
        what="two requests at once, conservativeness 0.1, chunks of 128; a fifth of the prompts is long",
        wrong="--max-running-requests 2 --schedule-conservativeness 0.1 --chunked-prefill-size 128",
        load=Load(clients=40, seconds=SECONDS, prompt_tokens=_MIXED, most_new_tokens=600),
        by_hand="--schedule-conservativeness 1.0 --chunked-prefill-size 4096",
    ),
    Start(
        name="three-at-once-in-large-pages",
        what="three requests at once, in chunks and pages of 256; a fifth of the prompts is long",
        wrong="--max-running-requests 3 --chunked-prefill-size 256 --page-size 256",
        load=Load(clients=40, seconds=SECONDS, prompt_tokens=_MIXED, most_new_tokens=200),
        by_hand="--chunked-prefill-size 8192",
    ),
    Start(
        name="mixed-chunks-without-chunks",
        what="chunks are mixed with decoding and switched off, and a prefill batch ends at 512 tokens",
        fixed="--max-total-tokens 32768",
        wrong="--enable-mixed-chunk --chunked-prefill-size -1 --max-prefill-tokens 512",
        load=Load(clients=64, seconds=SECONDS, prompt_tokens=(120, 120, 120, 900), most_new_tokens=8),
        by_hand="--chunked-prefill-size 4096",
    ),
    Start(
        name="pages-of-air",
        what="pages of 512 tokens for requests of 100, the longest output first, and conservativeness 0.1",
        wrong="--page-size 512 --schedule-policy lof --schedule-conservativeness 0.1",
        load=Load(clients=96, seconds=SECONDS, prompt_tokens=(24, 60), most_new_tokens=100),
        by_hand="--schedule-policy fcfs --schedule-conservativeness 1.0",
    ),
    Start(
        name="one-start-in-seventeen-steps",
        what=(
            "one request a prefill batch, sixteen decode steps before the next, and a chunk of 64 for short prompts;"
            " people wait"
        ),
        wrong="--prefill-max-requests 1 --prefill-decode-interval 16 --chunked-prefill-size 64",
        load=Load(clients=32, seconds=SECONDS, prompt_tokens=(24, 60), most_new_tokens=60),
        by_hand="--chunked-prefill-size 4096",
        profile="online",
    ),
    Start(
        name="prefixes-without-a-cache",
        what="no cache beside six shared prefixes, and a prefill batch ends at 512 tokens",
        fixed="--max-total-tokens 12288",
        wrong="--disable-radix-cache --max-prefill-tokens 512",
        load=Load(clients=32, seconds=SECONDS, prompt_tokens=(20,), most_new_tokens=40, families=6, prefix_tokens=1200),
        by_hand="",
    ),
    Start(
        name="small-chunks-and-over-careful",
        what=(
            "chunks of 256 for prompts of up to 1,500 tokens, conservativeness 1.5, and twelve at once in a KV cache of"
            " 6,000"
        ),
        fixed="--max-total-tokens 6000",
        wrong="--chunked-prefill-size 256 --schedule-conservativeness 1.5 --max-running-requests 12",
        load=Load(clients=32, seconds=SECONDS, prompt_tokens=(100, 400, 1500), new_tokens=(100, 200)),
        by_hand="--chunked-prefill-size 1024 --schedule-conservativeness 1.0 --max-running-requests 12",
    ),
)
BY_NAME: dict[str, Start] = {start.name: start for start in STARTS}
