"""A recording as the core watches it, at the recording's own times."""

from __future__ import annotations

from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.lines import Reader
from sglang_tuning_exporter.core.watch import Watch
from sglang_tuning_exporter.recordings.recording import Recording
from sglang_tuning_exporter.sglang import metrics
from sglang_tuning_exporter.sglang.server_info import parse_server_info

READY = 1_763_640_000.0  # unix seconds at which every recording is ready


def watched(recorded: Recording, profile: str = "online") -> Watch:
    """Watch a whole recording, its log and its metrics."""
    watch = Watch(PROFILES[profile], READY, reads=True, scrapes=True)
    reader = Reader()
    info = parse_server_info(recorded.server_info or b"{}")
    if info is not None:
        watch.take_facts(info)
    lines = [(line.at, 0, line.text) for line in recorded.lines]
    scrapes = [(scrape.at, 1, scrape.text) for scrape in recorded.scrapes]
    for at, is_scrape, text in sorted([*lines, *scrapes], key=lambda piece: piece[:2]):
        if is_scrape:
            starts = watch.server.starts
            watch.take_page(metrics.read(text.decode()), READY + at)
            if info is not None and watch.server.starts != starts:
                watch.take_facts(info)  # it is asked for after each start
            continue
        for event in reader.read(text.rstrip(b"\n")):
            event.time = READY + at
            watch.take_line(event)
    watch.advance(end_of(recorded))
    return watch


def load_of(recorded: Recording) -> tuple[float, float]:
    """Return the positions at which the load of a recording begins and ends."""
    begins = [at for at, name in recorded.events if name in {"load_begin", "burst"}]
    ends = [at for at, name in recorded.events if name == "load_end"]
    if begins:
        return begins[0], ends[-1] if ends and ends[-1] >= begins[-1] else recorded.lines[-1].at
    batches = [line for line in recorded.lines if line.at > 0 and b" batch" in line.text]
    return batches[0].at, batches[-1].at


def end_of(recorded: Recording) -> float:
    """Return the unix seconds at which a watched recording ends."""
    return READY + recorded.length_seconds
