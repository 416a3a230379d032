"""The sdist and the wheel of this tree, and whether a second build gives the same bytes."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONSTRAINTS = ROOT / "release" / "constraints.txt"
# Without git everything in the tree is source but what tools leave behind.
_LEFT_BEHIND = shutil.ignore_patterns(
    ".git", ".venv", "__pycache__", "build", "dist", "*.egg-info", ".*_cache", ".hypothesis", "var"
)


class ReleaseError(Exception):
    """What keeps this tree from being released, in one line."""


def committed(target: Path, commit: str = "HEAD") -> int:
    """Write the files of a commit under `target`.

    Returns its time, seconds since the epoch. Raises `ReleaseError` without git.
    """
    packed = target.with_suffix(".tar")
    try:
        with packed.open("wb") as file:
            subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, stdout=file)
        seconds = subprocess.run(
            ["git", "log", "-1", "--format=%ct", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise ReleaseError(f"{commit}: a release is built from a commit, and git gives none: {error}") from None
    unpack(packed, target)
    packed.unlink()
    return int(seconds)


def unpack(archive: Path, target: Path) -> None:
    """Write the files, folders and symbolic links of a tar archive under `target`; hard links and devices are left out.

    Raises `ReleaseError` for a member that lies, or a link that leads, outside `target`. The filter of `extractall`
    refuses the same, but came with Python 3.10.12 and 3.11.4, and Debian 12 has 3.11.2.
    """
    target = target.resolve()
    with tarfile.open(archive) as packed:
        for member in packed:
            path = target / member.name
            leads_to = path.parent / member.linkname if member.issym() else path
            if not (path.parent.resolve().is_relative_to(target) and leads_to.resolve().is_relative_to(target)):
                raise ReleaseError(f"{archive}: {member.name} is or leads outside {target}")
            path.parent.mkdir(parents=True, exist_ok=True)
            if member.issym():
                path.symlink_to(member.linkname)
            elif member.isdir():
                path.mkdir(exist_ok=True)
            elif member.isfile() and (content := packed.extractfile(member)):
                with content, path.open("wb") as file:
                    shutil.copyfileobj(content, file)
                path.chmod(0o755 if member.mode & 0o100 else 0o644)


def copied(target: Path, root: Path = ROOT) -> None:
    """Write the tree as it is, uncommitted changes and all, under `target`."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        check=False,
        capture_output=True,
    )
    if not (root / ".git").exists() or listed.returncode:
        shutil.copytree(root, target, ignore=_LEFT_BEHIND)
        return
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (root / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, target / name)


def build(tree: Path, output: Path, epoch: int, *, isolated: bool) -> list[Path]:
    """Build the sdist and from it the wheel: their paths.

    `isolated`: with the backend of `constraints.txt` from the index; else with this environment's.

    `epoch`, in seconds, is the time that everything in the archives gets. Raises `ReleaseError` with the tool's last
    words.
    """
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch), "PIP_CONSTRAINT": str(CONSTRAINTS)}
    flags = [] if isolated else ["--no-isolation"]
    ran = subprocess.run(
        [sys.executable, "-m", "build", *flags, "--outdir", str(output), str(tree)],
        check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
    )  # fmt: skip
    if ran.returncode:
        raise ReleaseError(f"the build failed: {ran.stdout[-1500:]}")
    return sorted(output.glob("*.whl")) + sorted(output.glob("*.tar.gz"))


def digests(paths: list[Path]) -> dict[str, str]:
    """SHA-256 of each file, by its name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def release(output: Path) -> dict[str, str]:
    """Build the archives of HEAD into `output`, twice and in different places: their digests.

    Raises `ReleaseError` where the second build has other bytes.
    """
    with tempfile.TemporaryDirectory() as scratch:
        found = []
        for place in ("here", "elsewhere/deeper"):
            tree = Path(scratch) / place
            tree.mkdir(parents=True)
            epoch = committed(tree)
            found.append(build(tree, Path(scratch) / "dist" / place, epoch, isolated=True))
        first, second = map(digests, found)
        if first != second:
            raise ReleaseError(f"two builds of one commit differ: {first} and {second}")
        output.mkdir(parents=True, exist_ok=True)
        for path in found[0]:
            shutil.copyfile(path, output / path.name)
    return first
