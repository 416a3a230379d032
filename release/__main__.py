"""`python -m release check|notes|build|lowest`: what a release needs.

Exit status 1 and a line for each thing that is wrong.

check [--tag TAG]  whether every place says the one version, and the changelog has a dated section for it
notes              the changelog's section of this version, for the release's page
build [DIR]        the sdist and the wheel of HEAD, built twice; they must have the same bytes (default dist)
lowest             the dependencies at their lowest supported versions, one a line, for pip
"""

from __future__ import annotations

import argparse
import re
import sys
from importlib.metadata import requires
from pathlib import Path

from release.archives import ROOT, ReleaseError, release
from release.statements import sections, unreleasable, version

_REQUIREMENT = re.compile(r"([A-Za-z0-9_.-]+)>=([0-9.]+)$")


def lowest(requirements: list[str]) -> list[str]:
    """`name>=1.2` as `name==1.2`; what an extra asks for is left out.

    Raises `ReleaseError` for one without a lower bound.
    """
    pinned = []
    for requirement in (entry for entry in requirements if "extra ==" not in entry):
        found = _REQUIREMENT.fullmatch(requirement.replace(" ", ""))
        if found is None:
            raise ReleaseError(f"{requirement}: give it a lower bound and nothing else")
        pinned.append(f"{found[1]}=={found[2]}")
    return pinned


def main() -> int:
    """Run one command."""
    parser = argparse.ArgumentParser(
        prog="python -m release", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check").add_argument("--tag", metavar="TAG", help="the tag that the release is made from")
    commands.add_parser("notes")
    commands.add_parser("build").add_argument("directory", nargs="?", type=Path, default=Path("dist"))
    commands.add_parser("lowest")
    arguments = parser.parse_args()
    try:
        return _run(arguments)
    except ReleaseError as error:
        print(error, file=sys.stderr)
        return 1


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command == "check":
        wrong = unreleasable(ROOT, arguments.tag)
        print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
        return 1 if wrong else 0
    if arguments.command == "notes":
        text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
        found = [section.text for section in sections(text) if section.version == version(ROOT)]
        print(*found)
        return 0 if found and found[0] else 1
    if arguments.command == "build":
        for name, digest in release(arguments.directory).items():
            print(f"{digest}  {name}")
        return 0
    print(*lowest(requires("sglang-tuning-exporter") or []), sep="\n")
    return 0


sys.exit(main())
