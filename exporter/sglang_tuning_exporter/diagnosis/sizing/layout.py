"""How a model is spread over GPUs, ranks and experts, and how load is balanced over them. Pure."""

from __future__ import annotations

from dataclasses import replace

from sglang_tuning_exporter.diagnosis.sizing.advised_value import AdvisedValue, SizingInput, in_words
from sglang_tuning_exporter.sglang.args.flags import flag_of

BY_LOAD = ("total_requests", "shortest_queue")  # the first one that a release accepts and has implemented
SPLIT = "start {:g} servers without --dp-size, each on its own GPUs, and put SGLang's router (model gateway) in front"
ROUTER = "put a router in front that balances by the load of the ranks"
MORE_DECODE = "add decode servers, let each run more requests (its --max-running-requests), or make the transfer faster"
MORE_PREFILL = (
    "add prefill servers, or make the transfer faster; if the prealloc queue is the long one, add decode servers"
)
OWN_EXPERTS = "use expert parallelism, by the flag that this release has for it"


def balance(basis: SizingInput) -> list[AdvisedValue]:
    """Balance by load if this release can, else by a router."""
    method = basis.facts.args.get("load_balance_method")
    router = in_words(ROUTER, "router")
    if method not in ("round_robin", "auto"):
        return [router]
    first, *others = (AdvisedValue(better, str(method)) for better in BY_LOAD)
    return [AdvisedValue(first.suggested, first.current, otherwise=(*others, router))]


def one_gpu(basis: SizingInput) -> list[AdvisedValue]:
    """Run one server on each GPU; nothing if ranks or experts are spread over the same GPUs."""
    facts, gpus = basis.facts, basis.facts.arg("tp_size")
    others = (facts.arg("dp_size"), facts.arg("ep_size"), facts.arg("moe_dense_tp_size"), float(facts.attention_ranks))
    if any((other or 1.0) > 1 for other in others) or facts.arg("enable_ep_moe"):
        return []
    each = f"each of the {gpus:g} GPUs" if gpus else "each GPU"
    return [in_words(f"run one server with --tp-size 1 on {each}, behind a router")]


def behind_a_router(basis: SizingInput) -> list[AdvisedValue]:
    """Run each replica as a server of its own."""
    replicas = basis.facts.arg("dp_size") or 1.0
    return [in_words(SPLIT.format(replicas))]


def experts(basis: SizingInput) -> list[AdvisedValue]:
    """Put whole experts on each GPU, by the flag of the release."""
    shards, release = basis.facts.arg("tp_size"), basis.facts.release
    own = in_words(OWN_EXPERTS)
    if _has(release, "enable_ep_moe"):
        return [AdvisedValue(1.0, 0.0, arg="enable_ep_moe", is_switch=True, otherwise=(own,))]
    if "ep_size" in basis.facts.args and shards and release is not None:
        return [AdvisedValue(shards, basis.facts.arg("ep_size"), otherwise=(own,))]
    return [own]


def dp_attention(basis: SizingInput) -> list[AdvisedValue]:
    """Enable DP attention with as many ranks as GPUs; nothing beside replicas, which it would replace."""
    facts, gpus = basis.facts, basis.facts.arg("tp_size")
    replicas = facts.arg("dp_size") or 1.0
    if not gpus:
        return [AdvisedValue(None, words="add it, with --dp-size set to the value of --tp-size")]
    if replicas > 1 or facts.attention_ranks > 1:
        return []
    if _has(facts.release, "attn_dp_size"):
        return [AdvisedValue(gpus, 1.0, arg="attn_dp_size")]
    switch = AdvisedValue(1.0, 0.0, is_switch=True)
    return [replace(switch, set_together=(AdvisedValue(gpus, replicas, arg="dp_size"),), otherwise=(switch,))]


def other_side(basis: SizingInput) -> list[AdvisedValue]:
    """Name what to add to the side of disaggregation for which this server's requests wait."""
    if basis.facts.role == "prefill":
        return [in_words(MORE_DECODE, "decode_side_is_slow")]
    return [in_words(MORE_PREFILL, "prefill_side_is_slow")] if basis.facts.role else [AdvisedValue(None)]


def _has(release: str | None, arg: str) -> bool:
    return release is not None and flag_of(arg, release) is not None
