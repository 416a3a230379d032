"""A real SGLang on a CPU, unmodified from its wheel, in an environment of its own outside the repository.

The steps were found by trial: a CPU build of torch first; SGLang without its dependencies, which ask for CUDA; of these
only what its import and its CPU path need, pinned in `pins/`; stand-ins for two CUDA-only packages (`absent`); and a
model without weights (`tiny_model`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_tuning_exporter.config.values import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HERE = Path(__file__).parent
TORCH = "2.13.0+cpu"  # a build for CUDA is several GB and needs its libraries
PYTHON = "python3.11"  # what the pins were resolved for
RELEASES = ("0.5.23",)
HOME_VARIABLE = "CLOSED_LOOP_HOME"


def default_home() -> Path:
    """The folder of installations: `$CLOSED_LOOP_HOME`, else in the user's cache."""
    data = os.environ.get(HOME_VARIABLE)
    return Path(data) if data else Path.home() / ".cache" / "sglang-tuning-exporter" / "closed-loop"


@dataclass(frozen=True, slots=True)
class Installation:
    """One release of SGLang and the model that it serves."""

    version: str
    home: Path

    @property
    def python(self) -> Path:
        """The Python that has this SGLang."""
        return self.home / f"venv-{self.version}" / "bin" / "python"

    @property
    def model(self) -> Path:
        """The folder of its model."""
        return self.home / f"model-{self.version}"

    @property
    def is_complete(self) -> bool:
        """Whether the installation finished: the model comes last."""
        return self.python.exists() and (self.model / "generation_config.json").exists()


def install(version: str, home: Path | None = None, say: Callable[[str], None] = lambda _: None) -> Installation:
    """Install a release if it is missing: about three minutes and 3 GB. Raises `UsageError` if a step fails."""
    wanted = Installation(version, home or default_home())
    if wanted.is_complete:
        return wanted
    if version not in RELEASES:
        raise UsageError(f"version={version}: give one of {', '.join(RELEASES)}")
    python = shutil.which(PYTHON)
    if python is None:
        raise UsageError(f"{PYTHON}: not found; it is what these releases are pinned for")
    environment = wanted.python.parent.parent
    wanted.home.mkdir(parents=True, exist_ok=True)
    constraints = wanted.home / f"constraints-{version}.txt"
    constraints.write_text(f"torch=={TORCH}\n", encoding="utf-8")
    pip = [str(wanted.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    remedy = "see that pip's index has CPU builds of torch (PIP_EXTRA_INDEX_URL)"
    say(f"SGLang {version}: environment")
    _run([python, "-m", "venv", str(environment)], "venv: give Python its venv module")
    say(f"SGLang {version}: torch {TORCH}")
    _run([*pip, f"torch=={TORCH}"], remedy)
    say(f"SGLang {version}: its wheel and {_pins(version).name} packages")
    _run([*pip, "--no-deps", f"sglang=={version}"], "see what pip says above")
    _run([*pip, "--no-deps", "-c", str(constraints), "-r", str(_pins(version))], "see what pip says above")
    packages = _packages(wanted)
    shutil.copy(HERE / "absent.py", packages / "closed_loop_absent.py")
    (packages / "closed_loop_absent.pth").write_text("import closed_loop_absent\n", encoding="utf-8")
    say(f"SGLang {version}: model")
    _run([str(wanted.python), str(HERE / "tiny_model.py"), str(wanted.model)], "remove the installation and try again")
    return wanted


def _pins(version: str) -> Path:
    return HERE / "pins" / f"{version}.txt"


def _packages(wanted: Installation) -> Path:
    asked = [str(wanted.python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]
    return Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())


def _run(command: Sequence[str], remedy: str) -> None:
    try:
        subprocess.run(command, check=True)
    except subprocess.CalledProcessError as error:
        raise UsageError(f"{' '.join(command[:4])} …: exit status {error.returncode}; {remedy}") from None
