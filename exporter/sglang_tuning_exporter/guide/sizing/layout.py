"""Over how many GPUs, ranks and experts a model is spread. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_tuning_exporter.guide.sizing.case import Value, people

if TYPE_CHECKING:
    from sglang_tuning_exporter.guide.sizing.case import Case


def balance(case: Case) -> list[Value]:
    """Balance by load where this release can."""
    method = case.facts.args.get("load_balance_method")
    if method in ("round_robin", "auto"):
        return [Value("total_requests", str(method))]
    return people("put a router in front that knows the ranks' load")


def one_gpu(case: Case) -> list[Value]:
    """Run one server on each GPU."""
    return [Value(1.0, case.facts.arg("tp_size"))]


def behind_a_router(case: Case) -> list[Value]:
    """Run each replica as a server of its own."""
    replicas = case.facts.arg("dp_size") or 1.0
    return people(
        f"start {replicas:g} servers without --dp-size, each on its own GPUs, and put SGLang's router (model gateway) in front"
    )


def experts(case: Case) -> list[Value]:
    """Spread whole experts over the GPUs."""
    shards = case.facts.arg("tp_size")
    if "ep_size" in case.facts.args and shards:
        return [Value(shards, case.facts.arg("ep_size"))]
    return people("use expert parallelism, by the flag that this release has for it")
