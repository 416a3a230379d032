"""Reading a page of SGLang's `/metrics`, against prometheus_client's own parser."""

from __future__ import annotations

import gzip
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

from sglang_tuning_exporter.sglang.metrics import exposition
from sglang_tuning_exporter.sglang.metrics import page_figures as facts
from sglang_tuning_exporter.sglang.metrics.page_figures import PageReader

if TYPE_CHECKING:
    from collections.abc import Callable

RECORDED = Path(__file__).parent.parent / "exporter" / "sglang_tuning_exporter" / "recordings" / "steady"
_RANK = re.compile(r'\btp_rank="\d+"')
_DP_RANK = re.compile(r'\bdp_rank="\d+",?')
RANKS = 24
RUNS = 7


def page(ranks: int) -> str:
    """Return a recorded page; for more than one rank with every series of a scheduler once for each, as DP attention prints it."""
    recorded = gzip.decompress(max(RECORDED.glob("metrics-*.prom.gz")).read_bytes()).decode()
    if ranks == 1:
        return recorded
    lines: list[str] = []
    for line in recorded.splitlines():
        copies = range(ranks) if line.startswith("sglang:") and _RANK.search(line) else ()
        plain = _DP_RANK.sub("", line)
        lines += [_RANK.sub(f'tp_rank="{rank}",dp_rank="{rank}"', plain) for rank in copies] or [line]
    return "\n".join(lines) + "\n"


def _seconds(read: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(RUNS):
        begin = time.process_time()
        read()
        best = min(best, time.process_time() - begin)
    return best


def measure() -> tuple[int, int, float, float, float, float]:
    """Return samples and bytes of the page; CPU seconds of prometheus_client, of our scan, of scan with figures, and of the page again."""
    text = page(RANKS)
    theirs = _seconds(lambda: sum(len(family.samples) for family in text_string_to_metric_families(text)))
    ours = _seconds(lambda: exposition.scan(text))
    figures = _seconds(lambda: facts.read(text))
    reader = PageReader()
    reader.read(text)
    again = _seconds(lambda: reader.read(text))
    return len(exposition.scan(text).samples), len(text.encode()), theirs, ours, figures, again
