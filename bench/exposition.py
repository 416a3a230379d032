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
_RANK = re.compile(r'\btp_rank="\d+"')
_DP_RANK = re.compile(r'\bdp_rank="\d+",?')
RANKS = 24
RUNS = 7


def page() -> str:
    """Give a recorded page with every series of a scheduler once for each of `RANKS` DP ranks, as DP attention prints it."""
    recorded = gzip.decompress(max(_RECORDED.glob("metrics-*.prom.gz")).read_bytes()).decode()
    lines: list[str] = []
    for line in recorded.splitlines():
        ranks = range(RANKS) if line.startswith("sglang:") and _RANK.search(line) else ()
        plain = _DP_RANK.sub("", line)
        lines += [_RANK.sub(f'tp_rank="{rank}",dp_rank="{rank}"', plain) for rank in ranks] or [line]
    return "\n".join(lines) + "\n"


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
