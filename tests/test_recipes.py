"""The recipes of CONTRIBUTING.md, each followed on a copy of the tree: the files that it names are all that must be
edited by hand.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from test_dashboards import panels_of

REPOSITORY = Path(__file__).parent.parent
PACKAGE = "exporter/sglang_tuning_exporter/"
MOST = {
    "Add a diagnosis": 5,
    "Add a diagnosis with a flag": 6,
    "Add a log line": 2,
    "Add a kind of log line": 3,
    "SGLang renames a metric": 1,
    "Add a panel": 1,
}

DIAGNOSIS = """

def _waits_for_steps(view: View) -> float | None:
    steps = view.facts.number("num_continuous_decode_steps")
    return None if steps is None else view.waited_share if steps > 1 else 0.0


DECODE_STEPS_IN_A_ROW = limit(
    id="decode_steps_in_a_row",
    title="requests wait for decode steps {value} of the time",
    when=fact(measure=_waits_for_steps, limit=OFTEN, name="serving time with requests waiting", unit="share"),
    summary="SGLang runs several decode steps without a look at the queue.",
    past="Until {until} SGLang ran several decode steps without a look at the queue.",
    seen="requests waited {value} of the serving time",
    guide=NOT_IN_GUIDE + "with more than one step in a row, requests wait for all of them",
    remedy=Change(
        arg="num_continuous_decode_steps",
        direction="lower",
        words="1",
        why="Requests that wait are looked at only after so many decode steps.",
        not_if="the scheduler's own time is what limits",
        cost="A little scheduling time for each step.",
        to=1.0,
    ),
    groups=frozenset({Group.WAIT}),
    replica="after a flag",
)
"""
LOG = "[*start(num_continuous_decode_steps=8), *load(20, 120, queue=300)]"
TRUTH = """  logs/decode-steps.log:
    truth: Eight decode steps in a row, and 300 requests wait beside them.
    right: Fewer decode steps in a row.
    from: the arguments of the start
    verdicts: [decode_steps_in_a_row]
    cures: [--num-continuous-decode-steps down]
    ways: [report, log]
"""
RUNBOOK = """## Meaning

Requests wait for several decode steps in a row.

## Impact

First tokens come late.

## Diagnosis

```sh
grep -oE '#queue-req: [0-9]+' LOG | tail -n 5
```

## Mitigation

Set --num-continuous-decode-steps to 1.

It helped when the queue gets shorter within ten minutes.

It will not help if more requests come than SGLang can start.
"""
LINE = "The server has stopped waiting for its scheduler"
BOARD = f"{PACKAGE}mixin/boards/server.yml"
RARE_PANEL = """  - height: 6
    panels:
    - title: Refuted log lines
      type: timeseries
      description: Lines of an event that SGLang's metrics refuted, by kind.
      metric: sglang_tuning_log_doubtful_total
      noValue: No line was refuted
      queries:
      - legend: "{{kind}}"
        expr: "sum by (kind) ([[ rate(own('sglang_tuning_log_doubtful_total')) ]])"
"""
IN_TESTS = "import sys; sys.path.insert(0, 'tests'); from test_core_course import judged, load, stamp, start; "


class Tree:
    """A copy of what a contributor edits and runs; `edited` are the files that were changed by hand."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.edited = folder, set[str]()
        for name in ("exporter", "alerts", "dashboards", "docs", "release", "tests", "truth"):
            shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("README.md", "CONTRIBUTING.md", "pyproject.toml", "docker-compose.yml", "ARCHITECTURE.md"):
            shutil.copy(REPOSITORY / name, folder / name)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text, encoding="utf-8")
        self.edited.add(name)

    def read(self, name: str) -> str:
        return (self.folder / name).read_text(encoding="utf-8")

    def replace(self, name: str, old: str, new: str) -> None:
        """Put `new` in the place of the last `old` of a file."""
        before, found, after = self.read(name).rpartition(old)
        assert found
        self.write(name, before + new + after)

    def run(self, *words: str) -> str:
        """Run Python there, with its package; gives what it printed.

        Fails with that where it ends with another status than 0.
        """
        env = {**os.environ, "PYTHONPATH": f"{self.folder / 'exporter'}{os.pathsep}{self.folder}"}
        done = subprocess.run(
            [sys.executable, *words], cwd=self.folder, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def generate(self) -> set[str]:
        """Run `generate`; gives the files that it wrote."""
        return set(re.findall(r"^written: (\S+)$", self.run("-m", "sglang_tuning_exporter", "generate"), re.MULTILINE))

    def test(self, *words: str) -> None:
        self.run("-m", "pytest", "-q", "-p", "no:cacheprovider", *words)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def named(recipe: str) -> set[str]:
    """Give the files that a recipe names; `<name>` stands for any name."""
    text = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition(f"### {recipe}\n")[2].partition("\n#")[0]
    return set(re.findall(r"^\d\. `([^`]+)`", section, re.MULTILINE))


def are_named(edited: set[str], recipe: str) -> bool:
    """Whether a recipe names each edited file, and nothing that was not needed."""
    patterns = [re.compile(re.sub(r"<[^>]+>", r"[\\w-]+", re.escape(each))) for each in named(recipe)]
    return len(patterns) == len(edited) and all(any(each.fullmatch(name) for each in patterns) for name in edited)


@pytest.mark.parametrize("recipe", MOST)
def test_a_recipe_names_few_files(recipe: str) -> None:
    assert 1 <= len(named(recipe)) <= MOST[recipe]


COLOURS = (
    "import json; from sglang_tuning_exporter.mixin.boards.looks import VERDICT_LOOKS; print(json.dumps(VERDICT_LOOKS))"
)
ANSWER = """judgement = judged({log})
own, queue = judgement.own, next(each for each in judgement.findings if each.diagnosis == "queue_too_long")
words = (word for change in own.changes for word in (change.flag, change.now, change.to))
print(judgement.verdict, *words, queue.because[0])
"""


def test_a_new_diagnosis_is_the_verdict_over_its_consequence_with_its_flag(tree: Tree) -> None:
    colours = json.loads(tree.run("-c", COLOURS))
    family = tree.folder / PACKAGE / "core/diagnoses/admission.py"
    tree.write(PACKAGE + "core/diagnoses/admission.py", family.read_text(encoding="utf-8") + DIAGNOSIS)
    entry = "    admission.GRAMMAR_QUEUE,\n"
    tree.replace(PACKAGE + "core/diagnoses/__init__.py", entry, f"{entry}    admission.DECODE_STEPS_IN_A_ROW,\n")
    tree.write(PACKAGE + "core/diagnoses/prose/decode_steps_in_a_row.md", RUNBOOK)
    arguments = '"served_model_name", "speculative_algorithm"'
    tree.replace(PACKAGE + "sglang/flags.py", arguments, f'"num_continuous_decode_steps", {arguments}')
    log = tree.run("-c", f"{IN_TESTS}print(*{LOG}, sep='\\n')")
    tree.write("truth/cases/logs/decode-steps.log", log)
    tree.replace("truth/cases/situations.yaml", "\nlogs:\n", f"\nlogs:\n{TRUTH}")

    assert {
        "alerts/rules/sglang-tuning.rules.yml",
        "alerts/runbooks/SGLangDecodeStepsInARow.md",
        "docs/diagnoses.md",
        "docs/reference/alerts.md",
    } <= tree.generate()
    files = (
        f"tests/test_{name}.py" for name in ("diagnoses", "runbooks", "alert_rules", "core_advice", "arguments_sent")
    )
    tree.test(*files, "-k", "diagnosis or decode_steps or DecodeSteps or what_the_core_names")
    answer = tree.run("-c", f"{IN_TESTS}\n{ANSWER.format(log=LOG)}")
    assert answer.split() == [
        "decode_steps_in_a_row",
        "--num-continuous-decode-steps",
        "8.0",
        "1",
        "decode_steps_in_a_row",
    ]
    assert "0 wrong" in tree.run("-m", "truth", "situations", "--only", "decode-steps", "--way", "report")
    now = json.loads(tree.run("-c", COLOURS))
    assert {name: now[name] for name in colours} == colours
    assert are_named(tree.edited, "Add a diagnosis with a flag")
    with_a_flag = PACKAGE + "sglang/flags.py"
    assert named("Add a diagnosis") == named("Add a diagnosis with a flag") - {with_a_flag}


def test_the_recipe_for_a_kind_of_log_line_counts_it_once_and_shows_the_count(tree: Tree) -> None:
    row = '    Message("draining", rb"SIGTERM received'
    tree.replace(PACKAGE + "core/lines.py", row, f'    Message("adapter", rb"{LINE}", "0.5.24"),\n{row}')
    kinds = 'COUNTED_KINDS: Mapping[str, str] = {"hicache": "",'
    tree.replace(PACKAGE + "core/events.py", kinds, f'{kinds} "adapter": "adapters not loaded",')
    examples = "EXAMPLES: list[tuple[str, str, str, dict[str, float]]] = [\n"
    tree.replace("tests/test_core_lines.py", examples, f'{examples}    ("{LINE}", "adapter", "", {{}}),\n')
    tree.test("tests/test_core_lines.py", "tests/test_sums.py", "-k", "gives_its_event or has_a_line_here or adapter")
    log = f"[2025-11-20 11:40:13 TP0] {LINE}\n[2025-11-20 11:40:13 TP1] {LINE}\n"
    (tree.folder / "server.log").write_text(log, encoding="utf-8")
    report = tree.run("-m", "sglang_tuning_exporter", "report", "server.log")
    assert ", adapters not loaded 1," in report  # once, though each TP rank prints it
    assert are_named(tree.edited, "Add a kind of log line")
    assert named("Add a log line") == {PACKAGE + "core/lines.py", "tests/test_core_lines.py"}


def test_the_recipe_for_a_panel_draws_a_rare_event_and_leaves_other_panels_alone(tree: Tree) -> None:
    def panels() -> dict[str, object]:
        board = json.loads(tree.read("dashboards/sglang-tuning-server.json"))
        return {panel["title"]: {**panel, "id": 0, "gridPos": {}} for panel in panels_of(board)}

    before = panels()
    tree.write(BOARD, tree.read(BOARD) + RARE_PANEL)
    assert tree.generate() == {"dashboards/sglang-tuning-server.json"}
    after = panels()
    assert after.pop("Refuted log lines")
    assert after == before
    proven = "a_panel_is_empty_only or finds_something or every_metric or Refuted"
    tree.test("tests/test_boards_proven.py", "tests/test_dashboards.py", "-k", proven)
    assert are_named(tree.edited, "Add a panel")
