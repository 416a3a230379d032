"""Why the KV cache of a request did not get from the prefill to the decode server, by the words of SGLang's own line. Data, with one look-up.

Patterns are of the reasons that the wheels 0.4.6 to 0.5.23 print (srt/disaggregation). Where a line names a variable, the advice does too.
"""

from __future__ import annotations

import re
from typing import NamedTuple

LONG_WAIT = 600  # seconds, as SGLang's own line advises
WAITING, BOOTSTRAP = "SGLANG_DISAGGREGATION_WAITING_TIMEOUT", "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT"
_SECONDS = re.compile(r"timed out after (\d{1,6}(?:\.\d{1,3})?) ?s")
_ADVISED = re.compile(r"(SGLANG_[A-Z_]{3,60})=(\d{1,9})")


class Cause(NamedTuple):
    """A reason as SGLang prints it: what to look at, why, when that does not help, and the variable that relaxes it, with its side."""

    words: re.Pattern[str]
    look: str
    why: str
    not_if: str = "the other server was stopped on purpose, or is still starting"
    variable: str = ""
    side: str = ""


def _cause(pattern: str, look: str, why: str, **more: str) -> Cause:
    return Cause(re.compile(pattern, re.IGNORECASE), look, why, **more)


# The first that fits.
CAUSES: tuple[Cause, ...] = (
    _cause(
        r"KVPoll\.WaitingForInput|transfer done signal|waiting_timeout|waiting for prefill completion",
        "read the prefill server's log at the same time, and check that it answers: it did not send the KV cache in time",
        "The decode server has room for the request and waits for the KV cache, which the prefill server computes and sends.",
        variable=WAITING,
        side="decode",
    ),
    _cause(
        r"KVPoll\.Bootstrapping|timed out when bootstrapping",
        "look at the decode server at the same time: whether it runs, and whether its KV cache is full (#prealloc-req in its log)",
        "The prefill server waits until the decode server has room for the request and says where its KV cache belongs.",
        variable=BOOTSTRAP,
        side="prefill",
    ),
    _cause(
        r"decode instance could be dead|remote mooncake session",
        "read the last lines of the decode server's log, and check that it runs: its session with this prefill server is gone",
        "The prefill server takes a decode server for dead after a transfer to it failed.",
    ),
    _cause(
        r"prefill instance, it might be dead",
        "read the prefill server's log at the same time, where it says why: Prefill transfer failed, and the lines of the transfer backend before it",
        "SGLang prints these words when the prefill server reports that it could not send: that server answers, and its network or its transfer"
        " backend failed.",
        not_if="the prefill server ended at that time: then its last lines say why",
    ),
    _cause(
        r"los(?:t|ing) connection with prefill|prefill down|node failure",
        "read the last lines of the prefill server's log, and check that it runs: it no longer answers the decode server's heartbeat",
        "The decode server gives up all requests that wait for a prefill server without a heartbeat"
        " (SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL, SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE).",
    ),
    _cause(
        r"could not fetch (?:prefill|bootstrap)|failed to get prefill|error fetching prefill|bootstrap server",
        "check that the prefill server runs and that its bootstrap port (--disaggregation-bootstrap-port, default 8998) is reached from the other"
        " server",
        "Both sides find each other through the bootstrap server, which runs in the prefill server.",
    ),
    _cause(
        r"staging (?:ring|pool)|STAGING",
        "give the staging buffer more room: raise SGLANG_DISAGG_STAGING_POOL_SIZE_MB, or lower --chunked-prefill-size of the prefill server",
        "SGLang's own line asks for it: a chunk does not fit the buffer that it is sent through.",
        not_if="prefill and decode have the same attention TP size: then nothing is staged",
    ),
    _cause(
        r"FORCE_QUERY_PREFILL_DP_RANK",
        "set SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK=1 on both servers, or let the router choose the DP rank by the bootstrap room",
        "SGLang's own line asks for it: the router sent the request to another DP rank than its bootstrap room implies.",
        not_if="all requests come through one router",
    ),
    _cause(
        r"corruption detected|checksum mismatch",
        "search SGLang's issues for the words of this line and the release",
        "What arrived is not what was sent: a bug, not tuning.",
        not_if="the two servers run different releases: then give them the same one first",
    ),
    _cause(
        r"hicache .{0,40}restore failed",
        "look at the host or storage cache of the decode server: a prefix could not be restored from it",
        "The transfer itself did not fail.",
    ),
    _cause(
        r"failed to send kv chunk|session \S+ failed|transport error|transfer failed|submission failed|NIXL|mori",
        "check the network between the two servers: the transfer backend's own lines just before, --disaggregation-ib-device, and whether the other"
        " server runs",
        "The transfer backend could not write into the other server's memory.",
    ),
)  # fmt: skip
UNKNOWN_CAUSE = _cause(
    "",
    "read the other server's log at the same time, and the lines of the other ranks of this one: one of them has the reason",
    "One side of a prefill/decode pair, or one rank, ends a request because another one did.",
)


def says_why(text: str) -> bool:
    """Whether the words of a failed transfer are a reason of their own, and not another rank's."""
    return bool(text) and "from another rank" not in text


def cause_of(text: str) -> Cause:
    """Return the cause that the words of a failed transfer name."""
    return next((each for each in CAUSES if says_why(text) and each.words.search(text)), UNKNOWN_CAUSE)


def relaxed(cause: Cause, text: str) -> str:
    """Return how to wait longer, where SGLang has a variable for it; empty where it has none, or where it is long already."""
    if not cause.variable:
        return ""
    advised = next((f"{name}={value}" for name, value in _ADVISED.findall(text) if name == cause.variable), "")
    waited = _SECONDS.search(text)
    if waited is not None and float(waited[1]) >= 600:
        return f"longer waits will hardly help: {cause.variable} is {float(waited[1]):.0f} s already"
    return f"if it is only slow: export {advised or f'{cause.variable}={LONG_WAIT}'} on the {cause.side} server (default 300 seconds)"
