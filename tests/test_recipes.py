"""The recipes of CONTRIBUTING.md, each followed on a copy of the tree: the files that it names are all that must be edited by hand."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
PACKAGE = "exporter/sglang_tuning_exporter/"
MOST = {
    "Add a diagnosis": 2,
    "Add a diagnosis with a flag": 4,
    "Add a log line": 2,
    "Add a kind of log line": 4,
    "SGLang renames a metric": 1,
    "Add a panel": 1,
}

WITH_A_FLAG = """
    Row(
        id="batch_queue_short",
        alert="SGLangBatchQueueShort",
        title="queue short {value} of the time",
        past="Until {until} fewer requests waited than kept the batches full.",
        severity="warning",
        profiles=("offline",),
        when=_share("queue", "below_range", name="serving time with the queue below its range"),
        summary="Fewer requests wait than keep the batches full.",
        seen="{value} of the serving time with the queue below its range",
        guide="not in the guide",
        remedy=Change("scheduler_recv_interval", "raise", "10", "The scheduler looks for requests at each step.", "few requests come", ""),
    ),
)

_FIRST_TOKENS"""
RUNBOOK = """## Meaning

Fewer requests wait than keep the batches full.

## Impact

Throughput is lower than it could be.

## Diagnosis

```sh
grep -oE '#queue-req: [0-9]+' LOG | tail -n 5
```

## Mitigation

Send more requests at once.

It helped when the queue stays in its range for ten minutes.

It will not help if nobody has more to send.
"""
LINE = "The server has stopped waiting for its scheduler"
COUNT = """import sys
from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.lines import Reader
from sglang_tuning_exporter.core.server import Server
server = Server(PROFILES["online"])
for event in Reader().read(sys.argv[1].encode()):
    server.take(event)
print(server.counted[sys.argv[2]])
"""
IN_TESTS = "import sys; sys.path.insert(0, 'tests'); from test_core_course import judged, load, stamp, start; "


class Tree:
    """A copy of what a contributor edits and runs; `edited` are the files that were changed by hand."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.edited = folder, set[str]()
        for name in ("exporter", "alerts", "dashboards", "docs", "tests"):
            shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("README.md", "CONTRIBUTING.md", "pyproject.toml", "docker-compose.yml", "ARCHITECTURE.md"):
            shutil.copy(REPOSITORY / name, folder / name)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text, encoding="utf-8")
        self.edited.add(name)

    def replace(self, name: str, old: str, new: str) -> None:
        """Put `new` in the place of the last `old` of a file."""
        before, found, after = (self.folder / name).read_text(encoding="utf-8").rpartition(old)
        assert found
        self.write(name, before + new + after)

    def run(self, *words: str) -> str:
        """Run Python there, with its package; gives what it printed. Fails with that where it ends with another status than 0."""
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


def test_the_recipe_for_a_diagnosis_with_a_flag_gives_its_value_rule_runbook_and_documents(tree: Tree) -> None:
    tree.replace(PACKAGE + "core/rows.py", "\n)\n\n_FIRST_TOKENS", WITH_A_FLAG)
    tree.write(PACKAGE + "core/diagnoses/prose/batch_queue_short.md", RUNBOOK)
    value = '    "client_too_slow": _more,\n'
    tree.replace(
        PACKAGE + "core/advice.py",
        value,
        f'{value}    "batch_queue_short": lambda view, _: [_set(view, "scheduler_recv_interval", 10.0)],\n',
    )
    arguments = '"served_model_name", "speculative_algorithm"'
    tree.replace(PACKAGE + "sglang/flags.py", arguments, f'"scheduler_recv_interval", {arguments}')
    assert {
        "alerts/rules/sglang-tuning.rules.yml",
        "alerts/runbooks/SGLangBatchQueueShort.md",
        "docs/diagnoses.md",
        "docs/reference/alerts.md",
    } <= tree.generate()
    files = (f"tests/test_{name}.py" for name in ("runbooks", "alert_rules", "core_advice", "arguments_sent"))
    tree.test(*files, "-k", "batch_queue_short or BatchQueueShort or what_the_core_names")
    lines = "[*start(scheduler_recv_interval=1), *load(20, 120, queue=30)]"
    finding = f"next(each for each in judged({lines}, 'offline').findings if each.diagnosis == 'batch_queue_short')"
    change = tree.run("-c", f"{IN_TESTS}(change,) = {finding}.changes; print(change.flag, change.now, change.to)")
    assert change.split() == ["--scheduler-recv-interval", "1.0", "10"]
    assert are_named(tree.edited, "Add a diagnosis with a flag")
    assert named("Add a diagnosis") == {PACKAGE + "core/rows.py", PACKAGE + "core/diagnoses/prose/<id>.md"}


def test_the_recipe_for_a_kind_of_log_line_counts_it(tree: Tree) -> None:
    row = '    Row("draining", rb"SIGTERM received'
    tree.replace(PACKAGE + "core/lines.py", row, f'    Row("adapter", rb"{LINE}", "0.5.24"),\n{row}')
    tree.replace(
        PACKAGE + "core/events.py",
        "    | `no_pool`",
        "    | `adapter` | | an adapter was not loaded |\n    | `no_pool`",
    )
    case = '            case "rejected" | "pause"'
    tree.replace(
        PACKAGE + "core/server.py",
        case,
        f'            case "adapter":\n                self.count(event.kind, now, event)\n{case}',
    )
    examples = "EXAMPLES: list[tuple[str, str, str, dict[str, float]]] = [\n"
    tree.replace("tests/test_core_lines.py", examples, f'{examples}    ("{LINE}", "adapter", "", {{}}),\n')
    tree.test("tests/test_core_lines.py", "-k", "gives_its_event or has_a_line_here")
    assert tree.run("-c", COUNT, f"[2025-11-20 11:40:13 TP0] {LINE}", "adapter").split() == ["1.0"]
    assert are_named(tree.edited, "Add a kind of log line")
    assert named("Add a log line") == {PACKAGE + "core/lines.py", "tests/test_core_lines.py"}
