"""Reading a page of SGLang's `/metrics`, against prometheus_client's own parser."""

from __future__ import annotations

import gzip
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

from sglang_tuning_exporter.sglang import exposition, facts

if TYPE_CHECKING:
    from collections.abc import Callable

_RECORDED = Path(__file__).parent.parent / "exporter" / "sglang_tuning_exporter" / "recordings" / "steady"
_SAMPLE = re.compile(r"^(sglang:\w+)\{(.*)\} (.*)$")
_RANK = re.compile(r'tp_rank="\d+"')
_STAGE = 'stage="prefill_forward"'
# The recorded server neither waited nor prefilled in chunks nor for others: a loaded one has a histogram for each.
_STAGES = (
    "prefill_forward", "prefill_waiting", "chunked_prefill", "prefill_prepare", "prefill_bootstrap",
    "prefill_transfer_kv_cache", "decode_waiting",
)  # fmt: skip
RANKS = 8
RUNS = 7


def page() -> str:
    """Give a recorded page with every series of a rank eight times over and the stages of a request that it lacks."""
    recorded = gzip.decompress(max(_RECORDED.glob("metrics-*.prom.gz")).read_bytes()).decode()
    lines: list[str] = []
    for line in recorded.splitlines():
        match = _SAMPLE.match(line)
        if match is None:
            lines.append(line)
            continue
        name, labels, value = match.groups()
        rest = _RANK.sub("", labels).strip(",")
        lines += [
            f'{name}{{{its_labels},tp_rank="{rank}",pp_rank="0",dp_rank="{rank}"}} {value}'
            for its_labels in dict.fromkeys(rest.replace(_STAGE, f'stage="{stage}"') for stage in _STAGES)
            for rank in range(RANKS)
        ]
    unique = dict.fromkeys(lines)
    return "\n".join(re.sub(r'(pp_rank|dp_rank)="0",(?=.*\1=)', "", line) for line in unique) + "\n"


def _seconds(read: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(RUNS):
        begin = time.process_time()
        read()
        best = min(best, time.process_time() - begin)
    return best


def measure() -> tuple[int, int, float, float, float]:
    """Give samples and bytes of the page; CPU seconds of prometheus_client, of our scan, and of scan with figures."""
    text = page()
    theirs = _seconds(lambda: sum(len(family.samples) for family in text_string_to_metric_families(text)))
    ours = _seconds(lambda: exposition.scan(text))
    figures = _seconds(lambda: facts.read(text))
    return len(exposition.samples(text)), len(text.encode()), theirs, ours, figures
