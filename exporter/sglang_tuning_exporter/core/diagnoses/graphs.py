"""CUDA graphs: batches that run without one, and compiled kernels. Pure."""

from __future__ import annotations

from sglang_tuning_exporter.config.profiles import DEFAULT
from sglang_tuning_exporter.core.diagnoses.base import Beside, Offer, chance, fact, limit, share
from sglang_tuning_exporter.core.diagnoses.native import Native, series, total
from sglang_tuning_exporter.core.diagnoses.steps import graph_size, larger_graphs, most_graph, say, set_flag
from sglang_tuning_exporter.core.findings import Change
from sglang_tuning_exporter.core.scheduler import USUAL_CAPTURED
from sglang_tuning_exporter.core.view import View

SMALL_BATCH = 32.0  # the default of --torch-compile-max-bs
_EAGER = series("cuda_graph_passes_total", ', mode="decode_none"')
_DECODED = series("cuda_graph_passes_total", ', mode=~"decode_.+"')
SMALL_MODEL_GB = 20.0  # of all weights
UNCAPTURED_BACKENDS = ("torch_native", "flex_attention")


def _is_switched_off(view: View) -> bool:
    """Whether an argument switches graphs off: then a few served lines are enough."""
    if view.facts.without_graph == "disabled" and view.facts.knows_arguments:
        return view.served > 0 and view.totals["lines"] >= view.profile.enough_observations
    return view.has_enough_load


def _is_beyond_captured(view: View, beside: Beside) -> bool:
    """Whether later batches of a run show which sizes were captured: they explain the earlier ones."""
    return CUDA_GRAPH_NOT_COVERING in beside and view.facts.largest_captured is None


def _assumed(view: View) -> str:
    """Say which graphs are taken for captured where the start is not known."""
    words = (
        f"The start is not in this log: that SGLang captured up to {USUAL_CAPTURED}, as it does by itself, is an"
        " assumption."
    )
    return words if view.facts.largest_captured is None else ""


def _small_batches(view: View) -> float | None:
    """The batch of a small model without torch.compile."""
    facts, weights = view.facts, view.facts.weights_gb
    if facts.is_cpu or facts.without_graph or facts.number("enable_torch_compile") != 0:
        return None
    is_quantized = facts.is_first_edition and facts.word("quantization")
    return None if weights is None or weights * facts.shards >= SMALL_MODEL_GB or is_quantized else view.batch()


def _cover_batches(view: View, _: Beside) -> list[Offer]:
    facts, most = view.facts, most_graph(view)
    now, batch, half = facts.largest_captured or view.totals["replayed_most"] or None, view.batch(), view.batch(0.5)
    if batch is None or half is None:
        return [set_flag(view, facts.graph_arg, now=now)]
    to = graph_size(view, batch) or (float(most) if half <= most else None)  # at least more than half of the batches
    if to is None:
        return [
            say(
                words=(
                    f"leave it, or run at most {most} at once: 99 % of the time batches hold up to {batch:g} requests,"
                    f" and the guide calls CUDA graphs useful up to {most}; in larger batches the launches matter less"
                ),
                why="The guide names no larger graph for this number of GPUs.",
                not_if="most batches are smaller at other times",
            )
        ]
    gain = f"covers batches up to {to:g}; 99 % of the time they were at most {batch:g}"
    if now is None:
        gain += f"; the start is not in this log, and SGLang captures up to {USUAL_CAPTURED} by itself"
    return [] if now is not None and to <= now else [larger_graphs(view, to, now, gain)]


def _mend_graphs(view: View, _: Beside) -> list[Change]:
    facts, backend = view.facts, view.facts.word("attention_backend")
    for arg in ("disable_cuda_graph", "disable_decode_cuda_graph", "disable_cuda_graph_padding"):
        if facts.is_on(arg):
            return [set_flag(view, arg, to=False)]
    if backend in UNCAPTURED_BACKENDS:
        return [set_flag(view, "attention_backend", words=f"one that can be captured (now {backend})", direction="set")]
    if facts.arguments:
        return []
    return [
        say(
            words=(
                "look into the start of the log: graphs are switched off, the batch is larger than the captured ones"
                f" (SGLang captures up to {USUAL_CAPTURED} by itself; --cuda-graph-max-bs, --cuda-graph-max-bs-decode"
                " from 0.5.14 on), or the backend cannot be captured"
            ),
            why="The start is not in this log, so what was captured is an assumption.",
            not_if="LoRA or speculative decoding cannot be captured",
        )
    ]


CUDA_GRAPH_NOT_COVERING = limit(
    id="cuda_graph_not_covering",
    title="CUDA graph not covering {value} of the time",
    when=share(
        "cuda_graph",
        "beyond_captured",
        name="serving time in decode batches larger than the largest captured CUDA graph",
    ),
    summary="Decode batches are larger than the largest captured CUDA graph, so they run without a graph.",
    past="Until {until} decode batches were larger than the largest captured CUDA graph.",
    seen="{value} of the serving time in decode batches larger than the largest captured size",
    remark=lambda view: "" if view.totals["replayed_most"] else _assumed(view),
    guide=(
        '"Tune --cuda-graph-max-bs": raise it to 512 or 768 for large batches, and lower --mem-fraction-static at the'
        " same time"
    ),
    remedy=Change(
        arg="cuda_graph_max_bs",
        direction="raise",
        words="the next usual size that covers the running batch, at most {most_graph}",
        why="For a batch larger than the captured sizes SGLang launches each kernel separately, which takes longer.",
        not_if="CUDA graphs are disabled, or the attention backend cannot be captured",
        cost="Larger CUDA graphs take GPU memory.",
    ),
    advise=_cover_batches,
    replica="after a flag",
    lends=(("cuda_graph_max_bs", "raise"),),
    shade=2,
    native=Native(
        alert="SGLangDecodeWithoutCudaGraph",
        expr=f"{total(f'rate({_EAGER}[10m])')}\n/ {total(f'sum without (mode) (rate({_DECODED}[10m]))')}",
        limit=f"> {DEFAULT.frequent_share:g}",
        seen="{value} of the decode batches ran without a CUDA graph",
        also="or remove --disable-cuda-graph",
    ),
)


CUDA_GRAPH_OFF = limit(
    id="cuda_graph_off",
    limits=lambda view: not view.may_exceed_small_graphs,  # else it is assumed
    title="CUDA graph off {value} of the time",
    when=share("cuda_graph", "eager", "disabled", name="serving time in decode batches without a CUDA graph"),
    summary="SGLang decodes small batches without CUDA graphs.",
    past="Until {until} SGLang decoded small batches without CUDA graphs.",
    remark=_assumed,
    guide=(
        '"Tune --cuda-graph-max-bs": small batches should run with CUDA graphs; check --disable-cuda-graph and'
        " --attention-backend"
    ),
    remedy=Change(
        arg="disable_cuda_graph",
        direction="drop",
        words="see in the log's start why: graphs switched off, no padding, LoRA, or a backend that cannot be captured",
        why="At small batches launching the kernels one by one takes longer than running them.",
        not_if="the attention backend, LoRA or speculative decoding cannot be captured",
        cost="CUDA graphs take GPU memory, about 1 GB at usual sizes.",
    ),
    advise=_mend_graphs,
    replica="after a flag",
    enough=_is_switched_off,
    denied=_is_beyond_captured,
    lends=(("disable_cuda_graph", "drop"), ("disable_decode_cuda_graph", "drop")),
)


TORCH_COMPILE_CANDIDATE = chance(
    id="torch_compile_candidate",
    when=fact(
        measure=_small_batches,
        limit=SMALL_BATCH + 1,
        side="below",
        name="requests running together, 99 % of the time",
    ),
    summary="A small model runs in small batches: torch.compile may speed it up.",
    seen="at most {value} requests ran together 99 % of the time",
    guide=(
        '"Try other options": --enable-torch-compile speeds up small models at small batches; keep its cache under'
        " TORCHINDUCTOR_CACHE_DIR, since /tmp may be cleared; with it machines of one kind can share it"
    ),
    remedy=Change(
        arg="enable_torch_compile",
        direction="add",
        words="add it",
        why="At small batches the GPU waits for kernel launches; compiled kernels need fewer.",
        not_if="batches grow beyond --torch-compile-max-bs (default 32)",
        cost=(
            "Each start takes minutes longer until the cache is filled. Set TORCHINDUCTOR_CACHE_DIR to a persistent"
            " folder (/tmp may be cleared): servers with the same GPU and model can share it."
        ),
        to=True,
    ),
)
