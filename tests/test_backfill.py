"""`backfill`: from a log the metrics that the live exporter would have exposed, in valid OpenMetrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as plain_families
from prometheus_client.samples import Sample

from conftest import complaint, config
from scenes import Timed, recording
from sglang_tuning_exporter.cli import main
from sglang_tuning_exporter.core.lines import stamp_of
from sglang_tuning_exporter.serve.backfill import _whole
from sglang_tuning_exporter.serve.metrics import collect
from sglang_tuning_exporter.serve.metrics.families import text_format

START = "[2025-11-20 11:40:00] The server is fired up and ready to roll!\n"


def backfilled(directory: Path, log: bytes, *flags: str) -> list[Sample]:
    source, output = directory / "server.log", directory / "night.om"
    source.write_bytes(log)
    assert main(["backfill", str(source), "--output", str(output), *flags]) == 0
    return [sample for family in read(output) for sample in family.samples]


def read(path: Path) -> list[Metric]:
    """Parse the file as strict OpenMetrics; it holds the samples moment by moment, and this parser wants them family by family."""
    families: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        if line.startswith("# HELP"):
            families[line.split()[2]] = []
        name = line.split()[2] if line.startswith("# ") and line != "# EOF" else line.partition("{")[0]
        if line != "# EOF":
            families[
                next(each for each in (name, *map(name.removesuffix, ("_total", "_info"))) if each in families)
            ].append(line)
    ordered = [
        line
        for lines in families.values()
        for line in sorted(lines, key=lambda line: "" if line.startswith("#") else line.rpartition("}")[0])
    ]
    return list(text_string_to_metric_families("\n".join([*ordered, "# EOF\n"])))  # type: ignore[no-untyped-call]


def values(samples: list[Sample], name: str, **labels: str) -> dict[float, float]:
    """Time -> value of the one series with these labels."""
    found = [sample for sample in samples if sample.name == name and labels.items() <= sample.labels.items()]
    assert len({tuple(sample.labels.items()) for sample in found}) <= 1
    return {moment(sample): sample.value for sample in found}


def moment(sample: Sample) -> float:
    assert sample.timestamp is not None
    return float(sample.timestamp)


def named(sample: Sample) -> str:
    labels = sorted((name, text) for name, text in sample.labels.items() if name not in {"job", "instance"})
    return f"{sample.name}{labels}"


def refused(directory: Path, log: bytes, *flags: str) -> str:
    source = directory / "server.log"
    source.write_bytes(log)
    return complaint("backfill", str(source), *flags)


def test_the_series_of_the_live_exporter_and_the_backfilled_ones_are_the_same(tmp_path: Path) -> None:
    """The same lines at the same times, once through a followed file and once through `backfill`, every fifteen seconds."""
    log = b"".join(line.text for line in recording("retract").lines)
    exposed: defaultdict[float, dict[str, float]] = defaultdict(dict)
    for sample in backfilled(tmp_path, log):
        exposed[moment(sample)][named(sample)] = sample.value
    for at, page in live(tmp_path, log, sorted(exposed)):
        # Lines that say nothing are counted with the next one that does: nothing else has their time.
        left_out = ("last_line", "log_up", "'other'")
        ours = {series: value for series, value in page.items() if not any(name in series for name in left_out)}
        theirs = {series: exposed[at].get(series) for series in ours}
        assert ours == pytest.approx(theirs, abs=1e-6), at
        others = {
            series for series in exposed[at].keys() - page.keys() if not series.startswith(("sglang:", "up", "ALERTS"))
        }
        assert {series for series in others if not any(name in series for name in left_out)} == set()


def live(directory: Path, log: bytes, moments: list[float]) -> list[tuple[float, dict[str, float]]]:
    """The series of the live exporter when each line is printed at its time. Lines of one moment come one by one."""
    followed = directory / "followed.log"
    followed.touch()
    exporter = Timed(config(log_file=(str(followed),)), moments[0] - 1)
    pages = []
    events: list[tuple[float, bytes]] = []
    now = moments[0]
    for line in log.splitlines(keepends=True):
        stamp = stamp_of(line)
        now = max(now, (stamp and stamp[0]) or now)
        events.append((now, line))
    for at in moments[:-1]:  # the last comes after the log's end
        while events and events[0][0] < at:
            exporter.at = events[0][0]
            with followed.open("ab") as file:
                while events and events[0][0] == exporter.at:
                    file.write(events.pop(0)[1])
            exporter._read_log()
        exporter.at = at
        page = text_format(collect(exporter))
        samples = (sample for family in plain_families(page) for sample in family.samples)
        pages.append((at, {named(sample): sample.value for sample in samples}))
    exporter.stop()
    return pages


# --- times -----------------------------------------------------------------------------------------------------------


def test_a_log_without_dates_needs_its_day(tmp_path: Path) -> None:
    log = b"[11:40:00] The server is fired up and ready to roll!\n"
    assert "--date 2025-01-31" in refused(tmp_path, log, "--output", str(tmp_path / "x"))
    samples = backfilled(tmp_path, log, "--date", "2025-11-20")
    assert min(values(samples, "up")) == 1763638800.0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--date", "2025-11-20"], "the log prints its own days; leave --date out"),
        (["--profile", "fast"], "give one of online"),
        (["--job", ""], "--job=: give a name"),
        (["--output", "."], "is a directory; give a file"),
        (["--output", "no/such/file"], "there is no such directory"),
        (["--output", "/dev/null"], "is no ordinary file"),
    ],
)
def test_a_usage_error_is_one_line(tmp_path: Path, flags: list[str], words: str) -> None:
    given = flags if "--output" in flags else ["--output", str(tmp_path / "x"), *flags]
    assert words in refused(tmp_path, START.encode(), *given)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["server.log"]


def test_input_that_is_not_a_log_leaves_no_file(tmp_path: Path) -> None:
    assert "no line of SGLang's" in refused(tmp_path, b"[2025-11-20 11:40:00] hello\n", "--output", str(tmp_path / "x"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["server.log"]


# --- the file --------------------------------------------------------------------------------------------------------


def test_an_unfinished_file_does_not_appear(tmp_path: Path) -> None:
    def interrupted() -> None:
        with _whole(tmp_path / "x") as file:
            file.write("one 1 1\n")
            raise KeyboardInterrupt

    attempt: Callable[[], None] = interrupted
    with pytest.raises(KeyboardInterrupt):
        attempt()
    assert list(tmp_path.iterdir()) == []
