"""Optional parts of SGLang: speculative decoding, HiCache. Pure."""

from __future__ import annotations

from sglang_tuning_exporter.core.diagnoses.base import NOT_IN_GUIDE, Beside, fact, hint, look
from sglang_tuning_exporter.core.diagnoses.steps import HOST_MEMORY, in_words, say, set_flag
from sglang_tuning_exporter.core.findings import Change
from sglang_tuning_exporter.core.view import View

LEAST_DRAFTED, DRAFT_COST, USUAL_DRAFTS = 0.99, 0.014, 3.0  # tokens a step; of a pass for each draft step; draft steps


def _speculation(view: View) -> float | None:
    """Tokens of a verified step; below 0.99 it is another figure than the mean with the token that needs no draft.

    Even the smallest draft takes a part of a pass for each draft step: what is left of a token after that is at or
    below 1 where it does not pay.
    """
    lines = view.totals["accepted:n"]
    length = view.totals["accepted"] / lines if lines >= view.profile.enough_observations else 0.0
    return None if length < LEAST_DRAFTED else length


def _accepted(view: View) -> str:
    """Say how many draft tokens are accepted."""
    drafts = view.facts.size("speculative_num_draft_tokens") or view.facts.size("speculative_num_steps")
    of = f" of {drafts:g} draft tokens" if drafts else ""
    length = view.totals["accepted"] / view.totals["accepted:n"]
    return f"accept length {length:.2f}{of}; a step without speculation gives 1"


def _least_accepted(view: View) -> float:
    """Return the tokens that a verified step must give to pay for its drafts."""
    return 1.0 + DRAFT_COST * (view.facts.size("speculative_num_steps") or USUAL_DRAFTS)


def _hicache(view: View) -> float | None:
    """Lines about what HiCache could not do."""
    if view.hicache is None:
        return None
    stays = view.hicache.word == "kernel"  # it was printed once, and holds until the next start
    return view.totals["hicache"] or float(stays)


def _mend_hicache(view: View, _: Beside) -> list[Change]:
    facts, row = view.facts, HICACHE_DEGRADED.remedy
    kind, ratio = view.hicache.word if view.hicache is not None else "", facts.number("hicache_ratio")
    if kind == "kernel":
        return [
            say(
                words=row.words + ": if a hit is not faster, run without --enable-hierarchical-cache",
                why=(
                    "Without its JIT kernel SGLang copies between host and GPU in another way, which may be slower than"
                    " computing the prefix again."
                ),
                not_if=row.not_if,
            )
        ]
    if kind == "host":
        words = (
            "give the cache more host memory: raise --hicache-ratio or --hicache-size, or use --hicache-write-policy"
            " write_through"
        )
        if ratio and not facts.size("hicache_size"):
            return [set_flag(view, "hicache_ratio", 2 * ratio)]
        return [in_words(HOST_MEMORY, words)]
    backend = facts.word("hicache_storage_backend")
    return [
        say(
            words=(
                f"look at the storage behind the cache{f' ({backend})' if backend else ''}: its service, its space and"
                " its own log"
            ),
            why=(
                "A prefix that the storage does not give is computed again, and a request may wait for it first"
                " (--hicache-storage-prefetch-policy)."
            ),
            not_if="it happened once, while the storage restarted",
        )
    ]


SPECULATION_REJECTED = hint(
    id="speculation_rejected",
    when=fact(
        measure=_speculation,
        limit=_least_accepted,
        counts=("decode_lines",),
        side="below",
        name="tokens a verified step gives; 1 without speculation",
        unit="ratio",
    ),
    summary="Speculative decoding costs more than it gains: hardly any draft token is accepted.",
    seen="{value}",
    says=_accepted,
    guide=NOT_IN_GUIDE + "drafts cost time whether they are accepted or not",
    remedy=Change(
        direction="drop",
        words="run without --speculative-algorithm, or with a draft model that was trained for this model",
        why=(
            "Each step drafts tokens and verifies them. Where nearly none is accepted, a step gives one token, as"
            " without speculation, and takes longer."
        ),
        not_if="the requests of this time were unusual: accept length depends on the text",
        cost="None, while so few tokens are accepted.",
    ),
    shade=2,
)


HICACHE_DEGRADED = hint(
    id="hicache_degraded",
    any_load=True,
    at_once=True,
    when=fact(measure=_hicache, counts=("hicache",), name="lines about what HiCache could not do", needs="a log"),
    summary="HiCache does not work as it should: SGLang says so.",
    seen="SGLang printed: {value}",
    says=lambda view: view.hicache.short.rstrip(".") if view.hicache is not None else "",
    guide=NOT_IN_GUIDE + "a cache in host memory is worth it while a hit is faster than computing the prefix again",
    remedy=look(
        words="compare the time to first token of a request with a cached prefix and of one without",
        why="SGLang's own line says what the cache in host memory or in the storage could not do.",
        not_if="prefixes are not reused: then run without --enable-hierarchical-cache",
    ),
    advise=_mend_hicache,
    shade=1,
)
