"""The CI workflows, checked from their files: schema, pinned actions, permissions, and that each step runs a target of
the Makefile.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PATHS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
# YAML 1.1 reads the key `on` as true.
WORKFLOWS: dict[str, dict[Any, Any]] = {path.stem: yaml.safe_load(path.read_text()) for path in PATHS}
JOBS = {f"{name}/{job}": found for name, flow in WORKFLOWS.items() for job, found in flow["jobs"].items()}
STEPS = [(f"{job}/{at}", step) for job, found in JOBS.items() for at, step in enumerate(found.get("steps", []))]
RUNS = {name: step["run"] for name, step in STEPS if "run" in step}
USES = {name: step["uses"] for name, step in STEPS if "uses" in step}


def test_the_workflows_fit_their_schema() -> None:
    assert [path.name for path in PATHS] == ["ci.yml", "release.yml"]
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"),
            *map(str, PATHS),
        ],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("step", sorted(USES))
def test_an_action_is_pinned_to_a_commit_that_is_named(step: str) -> None:
    text = (ROOT / ".github" / "workflows" / f"{step.partition('/')[0]}.yml").read_text()
    assert re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", USES[step])
    assert re.search(re.escape(USES[step]) + r" # v\d+\.\d+\.\d+$", text, re.MULTILINE)


@pytest.mark.parametrize("name", sorted(WORKFLOWS))
def test_a_workflow_may_read_and_nothing_else_unless_a_job_says_so(name: str) -> None:
    assert WORKFLOWS[name]["permissions"] == {"contents": "read"}


def test_only_a_release_writes_and_only_what_its_job_is_for() -> None:
    assert {name: job["permissions"] for name, job in JOBS.items() if "permissions" in job} == {
        "release/index": {"id-token": "write"},
        "release/image": {"contents": "read", "packages": "write"},
        "release/page": {"contents": "write"},
    }


def test_a_release_is_made_by_a_tag_alone_after_every_test() -> None:
    assert WORKFLOWS["release"][True] == {"push": {"tags": ["v*"]}}
    jobs = WORKFLOWS["release"]["jobs"]
    assert jobs["test"] == {"uses": "./.github/workflows/ci.yml"}
    assert "workflow_call" in WORKFLOWS["ci"][True]
    needs = {name: job.get("needs", []) for name, job in jobs.items()}
    assert needs == {
        "test": [],
        "archives": "test",
        "index": "archives",
        "image": "archives",
        "page": ["index", "image"],
    }


def test_no_checkout_leaves_a_token_behind() -> None:
    checkouts = [step for _, step in STEPS if step.get("uses", "").startswith("actions/checkout@")]
    assert len(checkouts) >= 7
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_ci_runs_the_same_targets_as_a_contributor() -> None:
    assert "make check test" in RUNS.values()
    assert "make dist" in RUNS.values()
    assert "make test-image" in RUNS.values()


def test_the_local_ci_uses_no_python_but_the_systems_own() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert re.findall(r"^PATH=(.*)$", script, re.MULTILINE) == ["/usr/sbin:/usr/bin:/sbin:/bin"]
    assert 'env -i HOME="$HOME" PATH="$PATH"' in script
    assert "make VENV=build/ci check test" in script  # never the .venv that a newer Python made
