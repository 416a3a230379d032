"""The CI workflows, checked from their files: schema, pinned actions, permissions, and that each step runs a target of the Makefile."""

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
MAKEFILE = (ROOT / "Makefile").read_text()
PROJECT = (ROOT / "pyproject.toml").read_text()


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


def test_no_secret_is_kept_for_a_release() -> None:
    assert not any("secrets." in path.read_text() for path in PATHS)
    assert JOBS["release/index"]["environment"] == "release"


@pytest.mark.parametrize("name", sorted(job for job in JOBS if "uses" not in JOBS[job]))
def test_a_job_ends_by_itself(name: str) -> None:
    assert 0 < JOBS[name]["timeout-minutes"] <= 60


def test_no_checkout_leaves_a_token_behind() -> None:
    checkouts = [step for _, step in STEPS if step.get("uses", "").startswith("actions/checkout@")]
    assert len(checkouts) >= 7
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


@pytest.mark.parametrize("step", sorted(RUNS))
def test_a_step_is_readable_for_a_shell_and_takes_nothing_from_the_event(step: str) -> None:
    assert "${{" not in RUNS[step]
    ran = subprocess.run(["sh", "-n"], input=RUNS[step], capture_output=True, text=True, timeout=10, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


def targets(script: str) -> list[str]:
    """Give the targets of each `make` in a script."""
    calls = re.findall(r"^\s*make((?: [\w=\"$-]+)+)", script, re.MULTILINE)
    return [word for call in calls for word in call.split() if re.fullmatch(r"[a-z][a-z-]*", word)]


@pytest.mark.parametrize("step", sorted(step for step in RUNS if "make " in RUNS[step]))
def test_every_target_of_a_step_exists(step: str) -> None:
    asked = targets(RUNS[step])
    assert asked
    for target in asked:
        assert re.search(rf"^\.PHONY: {target}$", MAKEFILE, re.MULTILINE), target
        planned = subprocess.run(
            ["make", "--dry-run", "--always-make", target],
            capture_output=True, text=True, timeout=60, check=False, cwd=ROOT,
        )  # fmt: skip
        assert planned.returncode == 0, planned.stderr


def test_ci_runs_the_same_targets_as_a_contributor() -> None:
    assert "make check test" in RUNS.values()
    assert "make dist" in RUNS.values()
    assert "make test-image" in RUNS.values()


def test_every_python_that_is_promised_is_tried() -> None:
    tried = JOBS["ci/test"]["strategy"]["matrix"]["python"]
    promised = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    least = re.search(r'^requires-python = ">=(3\.\d+)"$', PROJECT, re.MULTILINE)
    assert least is not None
    assert promised[0] == tried[0] == least[1]
    assert set(promised) <= set(tried)
