"""Flags of the start: SGLang's own recommendations, the guide's settings, parallelism. Pure."""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf

from sglang_tuning_exporter.config import profiles
from sglang_tuning_exporter.core.diagnoses.base import (
    LIMIT,
    NOT_IN_GUIDE,
    OFTEN,
    Beside,
    Diagnosis,
    Offer,
    chance,
    fact,
    hint,
    look,
    mostly,
    waits_often,
)
from sglang_tuning_exporter.core.diagnoses.graphs import CUDA_GRAPH_OFF
from sglang_tuning_exporter.core.diagnoses.own_words import recommended_changes
from sglang_tuning_exporter.core.diagnoses.prefill import PREFILL_BOUND
from sglang_tuning_exporter.core.diagnoses.steps import (
    FULL_BATCHES,
    PRESENT,
    SMALL_CHUNK,
    first_accepted,
    say,
    set_flag,
)
from sglang_tuning_exporter.core.diagnoses.suspects import PAGED_BACKENDS, proven, proven_beside
from sglang_tuning_exporter.core.findings import Change, Value
from sglang_tuning_exporter.core.view import MOSTLY_PREFILL, SHARING, View
from sglang_tuning_exporter.sglang import flags

ROOM_FOR_POOL, USUAL_FRACTION = 0.3, 0.88  # of a GPU's memory
DP_ATTENTION_GPUS = 8
TINY_CHUNK = 512.0  # a chunk takes about as long as one of 1,024 tokens
_MOE = re.compile(r"moe|mixtral|deepseek-?_?(?:v[23]|r1)|-a\d+(?:\.\d+)?b\b|kimi-k2|gpt-oss|grok|dbrx", re.IGNORECASE)
_LATENT = re.compile(r"deepseek-?_?(?:v[23]|r1)|kimi-k2", re.IGNORECASE)


def costly_settings(view: View) -> dict[str, tuple[Value, str]]:
    """Return the settings of a start that slow every load down, by argument: a better
    value, and what it does in words.
    """
    off = [arg for arg in ("disable_cuda_graph", "disable_decode_cuda_graph") if view.facts.is_on(arg)]
    costly: dict[str, tuple[Value, str]] = {}
    if not view.facts.role:
        costly.update(dict.fromkeys(off, (False, "CUDA graphs are switched off")))
    chunk = view.facts.typed("chunked_prefill_size")
    if chunk is not None and 0 < chunk <= TINY_CHUNK:
        words = f"prompts are computed in chunks of {chunk:g} tokens, and a chunk takes about as long as one of 1,024"
        costly["chunked_prefill_size"] = (float(SMALL_CHUNK), words)
    return costly


def _slowed_at_once(view: View) -> float | None:
    """Count the costly settings.

    Under load graphs have a row of their own, and chunks count where prompts fill them.
    """
    if view.has_enough_load:
        fills = view.totals["full_lines"] >= FULL_BATCHES * view.totals["prefill_lines"] > 0
        return float(fills and "chunked_prefill_size" in costly_settings(view))
    return None if not view.facts.arguments or view.facts.is_cpu else float(len(costly_settings(view)))


def _proven_in_words(view: View) -> str:
    """Name the flag that figures prove to keep requests waiting; empty where several do,
    or none for most of the time.
    """
    changes = list(proven_beside(view))
    if len(changes) != 1 or not waits_often(view):
        return ""
    flag, value = view.facts.flag(changes[0].arg), (view.facts.typed_arguments or {}).get(changes[0].arg)
    typed = flag if isinstance(value, bool) else f"{flag} {value}"
    return f"Requests wait because of {typed}."


def _fits_one_gpu(view: View) -> float | None:
    """GB of the weights of the whole model, where tensor parallelism alone splits them and
    the load would fit as well.
    """
    facts = view.facts
    if (facts.number("tp_size") or 1.0) <= 1:
        return None
    weights, usage = facts.weights_gb, view.mean("usage")
    other = ("dp_size", "ep_size", "moe_dense_tp_size", "enable_ep_moe", "pp_size")
    spread = facts.attention_ranks > 1 or any((facts.number(name) or 0.0) > (name != "enable_ep_moe") for name in other)
    if spread or facts.is_cpu or not weights or not facts.capacity_gb:
        return None
    model = weights * facts.shards
    left = 1.0 - (model - weights) / facts.pools_gb if facts.pools_gb else 1.0  # of a KV cache
    return None if usage is not None and usage > view.profile.token_usage_target * left else model


def _replicas(view: View) -> float | None:
    """Replicas that one server runs by itself."""
    facts = view.facts
    is_other = facts.is_cpu or facts.is_on("enable_dp_attention") or facts.attention_ranks > 1
    return None if is_other else facts.number("dp_size")


def _experts(view: View) -> float | None:
    """GPUs that share every expert of a mixture of experts."""
    facts = view.facts
    if facts.is_cpu or not _MOE.search(facts.model) or "tp_size" not in facts.arguments:
        return None
    if (facts.number("ep_size") or 1.0) > 1 or facts.is_on("enable_ep_moe") or facts.is_on("enable_deepep_moe"):
        return None
    return facts.number("tp_size") or 1.0


def _latent_pool_full(view: View) -> float | None:
    """The share of the time with a full KV cache that every GPU stores."""
    facts = view.facts
    if facts.is_cpu or not _LATENT.search(facts.model) or (facts.number("tp_size") or 1.0) < DP_ATTENTION_GPUS:
        return None
    split = facts.is_on("enable_dp_attention") or facts.attention_ranks > 1
    return None if split else view.share("admission", "pool_full")


def differing(view: View) -> list[profiles.Setting]:
    """Return the guide's settings for the profile's workload that this server lacks, unless its load speaks against
    them.
    """
    if not view.facts.knows_arguments:
        return []
    settings = (_spelled(view, setting) for setting in view.profile.settings)
    return [setting for setting in settings if _differs(view, setting) and _fits_evidence(setting, view)]


def _spelled(view: View, setting: profiles.Setting) -> profiles.Setting:
    return replace(setting, arg=view.facts.graph_arg) if setting.arg == "cuda_graph_max_bs" else setting


def _differs(view: View, setting: profiles.Setting) -> bool:
    """Whether the release has the argument, and the server a value that is not the guide's nor beyond it."""
    facts = view.facts
    now: object = facts.typed(setting.arg) if isinstance(setting.value, float) else facts.arguments.get(setting.arg)
    if setting.is_switch:
        now = float(facts.is_on(setting.arg))
    elif setting.arg == facts.graph_arg:
        now = facts.largest_captured
    elif setting.arg == LIMIT and now is None:
        now = facts.least_limit
    is_judged = setting.needed or not facts.is_cpu
    return now is not None and setting.is_needed_beside(now) and is_judged and bool(facts.flag(setting.arg))


def _fits_evidence(setting: profiles.Setting, view: View) -> bool:
    """Whether the load speaks for the guide's setting; where another diagnosis decides about it, this one does not."""
    online, batch = view.profile.queue_lower is None, view.batch() or 0.0
    tests: dict[str, bool] = {
        "mem_fraction_static": view.facts.reserve_gb is None and online,
        # A larger batch costs latency alone: where tokens come in time, or nobody measures it, it is no fault.
        "max_running_requests": isinstance(setting.value, float)
        and online
        and batch > setting.value
        and view.late_share("inter_token", view.profile.inter_token_seconds) > view.profile.late_bound(1.0),
        # A server that computes prompts alone retracts nothing.
        "schedule_conservativeness": online and mostly(view, "admission", "no_queue") and view.facts.role != "prefill",
        "chunked_prefill_size": view.prefill_share > MOSTLY_PREFILL / 2,
        "schedule_policy": (view.cached_share or 0.0) >= SHARING[0],
        # SGLang captures no size above the running limit, and a graph that no batch needs takes memory alone.
        view.facts.graph_arg: (view.facts.largest_captured or 0.0) < (view.facts.least_limit or inf)
        and (view.share("cuda_graph", "beyond_captured") or 0.0) > 0.0,
        "page_size": view.facts.word("attention_backend") not in PAGED_BACKENDS,
    }
    return tests.get(setting.arg, True)


def _share_experts(view: View, _: Beside) -> list[Offer]:
    facts, shards = view.facts, view.facts.number("tp_size")
    own, offers = say(words="use expert parallelism, by the flag that this release has for it"), list[Offer]()
    if facts.release and flags.flag_of("enable_ep_moe", facts.release) is not None:
        offers = [set_flag(view, "enable_ep_moe", to=True)]
    elif "ep_size" in facts.arguments and shards:
        offers = [set_flag(view, "ep_size", shards)]
    return first_accepted(view, *offers, own)


def _dp_attention(view: View, _: Beside) -> list[Offer]:
    facts = view.facts
    gpus, replicas = facts.number("tp_size"), facts.number("dp_size") or 1.0
    if not gpus or replicas > 1 or facts.attention_ranks > 1:
        return []
    if facts.release and flags.flag_of("attn_dp_size", facts.release) is not None:
        return [set_flag(view, "attn_dp_size", gpus, now=1.0)]
    return [(set_flag(view, "enable_dp_attention", to=True), set_flag(view, "dp_size", gpus, now=replicas))]


def _guide_settings(view: View, _: Beside) -> list[Change]:
    """Give each of the guide's settings, with the guide's reason."""
    changes = []
    for setting in differing(view):
        to = bool(setting.value) if setting.is_switch else setting.value
        if setting.arg == view.facts.graph_arg and isinstance(setting.value, float):
            to = min(setting.value, view.facts.least_limit or inf)
        now = view.facts.typed(LIMIT) if setting.arg == LIMIT else PRESENT
        is_cache = setting.arg == "enable_hierarchical_cache"
        gain = "with --hicache-ratio 2: a cache of twice the size in host memory" if is_cache else ""
        why = f"The guide sets it for this workload: it {setting.why}."
        change = set_flag(view, setting.arg, to, gain, now=now)
        changes.append(replace(change, why=why, not_if="the workload is another one"))
    return changes


FLAGS_AWAY_FROM_DEFAULTS = chance(
    id="flags_away_from_defaults",
    headline=_proven_in_words,
    of_flags=True,
    limits=lambda view: waits_often(view) and bool(proven(view)),  # figures show that they are the cause
    when=fact(
        measure=lambda view: float(len(proven_beside(view))),
        name="flags that differ from SGLang's defaults and can cause this",
    ),
    summary="Flags that differ from SGLang's defaults can delay requests.",
    seen="{value} flag{s} with a value other than the default that can cause this",
    guide=NOT_IN_GUIDE + "without another explanation, check the flags that differ from the defaults first",
    remedy=Change(
        direction="try",
        words="restart without these flags, one flag at a time",
        why=(
            "SGLang's defaults suit most loads. A flag that was set for another load or another release may limit this"
            " one."
        ),
        not_if="the flag is needed for what this server does",
    ),
    replica="after a flag",
    shade=2,
)


COSTLY_SETTINGS = chance(
    id="costly_settings",
    any_load=True,
    at_once=True,
    when=fact(measure=_slowed_at_once, name="settings of the start that slow every request down", needs="the start"),
    summary="A setting of this start slows every request down.",
    seen="{value}",
    says=lambda view: " and ".join(words for _, words in costly_settings(view).values()),
    guide=(
        '"Tune --cuda-graph-max-bs" and "chunked prefill": decoding with CUDA graphs, and prompts in chunks of'
        " thousands of tokens"
    ),
    remedy=Change(
        direction="drop",
        words="start without these flags",
        why=(
            "Each decode step without a CUDA graph, and each small chunk of a prompt, costs a full pass of kernel"
            " launches."
        ),
        not_if="the flag is there to find a fault, or the memory has room for nothing more",
    ),
    unless=(CUDA_GRAPH_OFF, FLAGS_AWAY_FROM_DEFAULTS, PREFILL_BOUND),
    advise=lambda view, _: [set_flag(view, arg, to) for arg, (to, _words) in costly_settings(view).items()],
    shade=2,
)


PROFILE_SETTINGS = chance(
    id="profile_settings",
    when=fact(
        measure=lambda view: float(len(differing(view))) if view.facts.knows_arguments else None,
        name="settings other than the guide's for this workload",
    ),
    summary="SGLang's guide recommends other settings for this profile.",
    seen="{value} setting{s} other than what the guide recommends for this profile",
    guide="newest edition: settings for online, offline, long-context and multi-turn servers",
    remedy=Change(
        direction="set",
        words="what the guide recommends for this workload",
        why="SGLang's guide recommends this for the workload of the exporter's --profile.",
        not_if="the profile does not match the workload of this server: then use another --profile",
    ),
    advise=_guide_settings,
    shade=2,
)


def _recommends_about(view: View, others: tuple[Diagnosis, ...]) -> bool:
    """Whether SGLang's recommendations matter: under load only beside a limit, or where another diagnosis is about
    their flag.
    """
    if not view.has_enough_load or any(diagnosis.is_limit(view) for diagnosis in others):
        return True
    return any(diagnosis.remedy.arg and view.facts.recommended(diagnosis.remedy.arg) for diagnosis in others)


SGLANG_RECOMMENDS = chance(
    id="sglang_recommends",
    any_load=True,
    when=fact(
        measure=lambda view: float(len(view.facts.recommended())),
        name="recommendations of SGLang's own at its start",
        needs="the start",
    ),
    summary="SGLang itself recommends other settings in the lines of its start.",
    at_once=True,
    seen="{value} recommendation{s} in the lines of its start",
    guide=NOT_IN_GUIDE + "SGLang's own words",
    remedy=look(
        words="read these lines of the start",
        why="Its lines are about this model, this GPU and its own limits.",
        not_if="the load needs nothing of it",
    ),
    advise=recommended_changes,
    matters=_recommends_about,
)


DATA_PARALLEL_WOULD_FIT = hint(
    id="data_parallel_would_fit",
    any_load=True,
    when=fact(
        measure=_fits_one_gpu,
        limit=lambda view: (USUAL_FRACTION - ROOM_FOR_POOL) * (view.facts.capacity_gb or 0.0),  # room for a KV cache
        side="below",
        name="weights of the whole model",
        unit="GB",
        needs="the start",
    ),
    summary="The weights fit on one GPU, but tensor parallelism splits them over several.",
    seen="the weights of the whole model take {value}",
    guide=(
        '"Tune --dp-size and --tp-size": prefer data parallelism where memory allows, by the router (model gateway)'
        " rather than by --dp-size"
    ),
    remedy=Change(
        direction="lower",
        words="run one server with --tp-size 1 on each GPU, behind a router",
        why="Each replica then runs without exchanging the results of every layer, and throughput adds up.",
        not_if="latency of a single request matters most, or a prompt is longer than the KV cache of one GPU",
        cost="Each GPU holds all weights, so each KV cache is smaller; single requests are slower.",
    ),
)


ROUTER_CANDIDATE = hint(
    id="router_candidate",
    any_load=True,
    when=fact(measure=_replicas, limit=1.0, name="replicas in one server", needs="the start"),
    summary=(
        "One server runs several replicas by --dp-size; SGLang's guide prefers a router in front of single servers."
    ),
    seen="{value} replicas in one server",
    guide='"Tune --dp-size and --tp-size": use the router (model gateway) for data parallelism rather than --dp-size',
    remedy=Change(
        direction="split",
        words=(
            "start one server for each replica, each on its own GPUs, and put SGLang's router (model gateway) in front"
        ),
        why=(
            "A router sends each request to a replica with its prefix cached and with free KV cache. One replica can"
            " fail or restart alone."
        ),
        not_if="the replicas are meant for DP attention, or nobody can run a router",
        cost="One more process to run, and a port for each server.",
    ),
    shade=1,
)


EXPERT_PARALLEL_CANDIDATE = chance(
    id="expert_parallel_candidate",
    any_load=True,
    when=fact(measure=_experts, limit=1.0, name="GPUs that share every expert", needs="the start"),
    summary="Tensor parallelism splits every expert of this mixture-of-experts model over all GPUs.",
    seen="{value} GPUs share every expert",
    guide='"Try other options": use expert parallelism for mixture-of-experts models',
    remedy=Change(
        arg="ep_size",
        direction="raise",
        words="the value of --tp-size",
        why="With whole experts on each GPU the matrix multiplications are fewer and larger.",
        not_if="batches are small, or some experts are used far more than others",
        cost="Requests wait for the GPU whose experts are used most.",
    ),
    advise=_share_experts,
    lends=(("ep_size", "raise"), ("enable_ep_moe", "add")),
    shade=2,
)


DP_ATTENTION_CANDIDATE = chance(
    id="dp_attention_candidate",
    when=fact(measure=_latent_pool_full, limit=OFTEN, name="serving time with a full KV cache"),
    summary="A DeepSeek model stores the same KV cache on every GPU, and the KV cache fills up.",
    seen="the KV cache was full for {value} of the serving time",
    guide='"Try other options": for DeepSeek models use DP attention (--enable-dp-attention --dp-size 8)',
    remedy=Change(
        arg="enable_dp_attention",
        direction="add",
        words="add it, with --dp-size set to the value of --tp-size",
        why=(
            "The model's compressed KV cache cannot be split over GPUs: tensor parallelism stores it on each GPU, DP"
            " attention once."
        ),
        not_if="few requests run at once: then latency gets worse",
        cost="SGLang then multiplies --schedule-conservativeness by 0.3: divide the value you want by 0.3.",
    ),
    advise=_dp_attention,
)
