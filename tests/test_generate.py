"""Everything generated is committed, checked, and written where it is asked for."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml

from conftest import program
from sglang_tuning_exporter.mixin import alerts, files

ROOT = Path(__file__).parents[1]
CHART = ROOT / "deploy" / "helm" / "sglang-tuning-exporter"
RULES = "alerts/rules/sglang-tuning.rules.yml"
DURATION = re.compile(r"(?<![\w.])(\d+)(ms|s|m|h)(?![\w.])")
SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def test_the_committed_files_are_those_that_generate_would_write() -> None:
    checked = program("generate", "--check", cwd=ROOT)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_an_edited_file_is_named_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "exporter").mkdir()  # as a checkout has
    for name in files():  # and the pages that hold a generated part
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    edited = (tmp_path / RULES).read_text() + "# by hand\n"
    (tmp_path / RULES).write_text(edited)
    checked = program("generate", "--check", cwd=tmp_path)
    assert checked.returncode == 1
    assert checked.stderr.splitlines() == [f"stale: {RULES}", "run: sglang-tuning-exporter generate"]
    assert (tmp_path / RULES).read_text() == edited


def test_the_folder_of_rules_that_readme_names_holds_those_for_the_exporter_alone() -> None:
    assert "load `alerts/rules/` into Prometheus" in (ROOT / "README.md").read_text()
    assert [str(path.relative_to(ROOT)) for path in (ROOT / "alerts" / "rules").iterdir()] == [RULES]
    assert [path.name for path in (CHART / "files" / "rules").iterdir()] == ["sglang-tuning.rules.yml"]


@pytest.mark.parametrize(
    ("kind", "folder", "name"),
    [
        ("prometheus", "alerts/rules", "sglang-native.rules.yml"),
        ("prometheusrule", "alerts/prometheusrule", "sglang-native.yml"),
        ("mimir", "alerts/mimir", "sglang-native.yml"),
    ],
)
def test_rules_without_the_exporter_keep_their_former_path_for_one_release(
    kind: str, folder: str, name: str, tmp_path: Path
) -> None:
    assert program("generate", "--format", kind, "--output", str(tmp_path), cwd=tmp_path).returncode == 0
    own = (tmp_path / f"{folder}-without-exporter" / name).read_text()
    former = (tmp_path / folder / name).read_text()
    assert yaml.safe_load(former) == yaml.safe_load(own)
    assert former.startswith(f"# Load {folder}-without-exporter/{name} instead")


def test_an_output_directory_that_is_a_file_is_a_usage_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    refused = program("generate", "--output", "taken", cwd=tmp_path)
    assert refused.returncode == 2
    [line] = refused.stderr.splitlines()
    assert "--output=taken: " in line
    assert line.endswith("give a directory that can be written")


@pytest.mark.parametrize("time_scale", ["0", "-1", "nan"])
def test_an_invalid_time_scale_is_refused(time_scale: str, tmp_path: Path) -> None:
    refused = program("generate", f"--time-scale={time_scale}", "--output", str(tmp_path), cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr == f"sglang-tuning-exporter: --time-scale={time_scale}: give a number from 0.001 to 1000\n"
    assert list(tmp_path.iterdir()) == []


def test_links_lead_where_the_options_say(tmp_path: Path) -> None:
    flags = ("--output", str(tmp_path), "--runbook-url", "https://w/{alert}.md", "--grafana-url", "https://g")
    made = program("generate", *flags, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    rules = (tmp_path / RULES).read_text()
    assert "https://w/SGLangServerDown.md" in rules
    assert "https://g/d/sglang-tuning-server?" in rules
    assert "localhost:3000" not in rules


def _durations(text: str) -> list[float]:
    return [int(number) * SECONDS[unit] for number, unit in DURATION.findall(text)]


def _spoken_of_by_prometheus(text: str) -> str:
    """Give the parts of a rule file that have durations: without comments and annotations, which are prose."""
    document = yaml.safe_load(text)
    parts = [
        f"{rule['expr']} {rule.get('for', '')} {rule.get('keep_firing_for', '')}"
        for group in document["groups"]
        for rule in group["rules"]
    ]
    return "\n".join(parts)


def test_every_duration_of_the_rules_is_scaled() -> None:
    plain = _durations(_spoken_of_by_prometheus(alerts.files()[RULES]))
    fast = _durations(_spoken_of_by_prometheus(alerts.files(10)[RULES]))
    assert len(plain) >= 40
    assert fast == pytest.approx([seconds / 10 for seconds in plain])
