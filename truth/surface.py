"""Today's public surface, asked from outside.

A thing that is gone or new is wrong, unless `changes` has the sentence that orders it.
"""

from __future__ import annotations

import fcntl
import gzip
import http.client
import json
import os
import re
import signal
import socket
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any

import yaml

from truth.cases import Answer, Case, Checks, data
from truth.processes import PROGRAM
from truth.recording import ROOT, Page, Recording, read
from truth.stand_in import StandIn
from truth.ways import ENVIRONMENT, ask, command

FILE = ROOT / "truth" / "cases" / "surface.yaml"  # `asked` and `changes` are written by hand, `today` by `record`
CAPTURES = ROOT / "tests" / "captures"
ASKED = data("surface.yaml")["asked"]


def commands() -> dict[str, Any]:
    """Return each command's flags with metavar, default and variable, as `--help` has them."""
    names = re.findall(r"(?m)^    ([a-z]+)\b", command(["--help"])[1])
    return {name: dict(_flags(command([*name.split(), "--help"])[1])) for name in ["", *names]}


def _flags(text: str) -> Iterator[tuple[str, str]]:
    for part in re.split(r"\n\n(?=positional arguments:|options:)", text)[1:]:
        for entry in re.split(r"\n  (?=\S)", part)[1:]:
            name, *rest = re.split(r"\s\s+|\n", entry)
            kept = re.findall(r"\((default:? [^;)]*)|(\[SGLANG_TUNING_\w+\])|again: (.*?)(?= \[|$)", " ".join(rest))
            yield name, " ".join(each for groups in kept for each in groups if each)


def _rows(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Give each row of the Markdown tables by its first cell, without its prose."""
    head: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip(" `") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells and head and not cells[0].startswith("---"):
            row = {k: v for k, v in zip(head, cells, strict=True) if k not in ASKED["prose"] and not v.endswith(".")}
            yield re.sub(r"\]\(.*\)|[`\[]", "", cells[0]), dict(list(row.items())[1:])
        head = (head or cells) if cells else []


def generated() -> dict[str, Any]:
    """Return the files that `generate` writes, rows of the reference, alerts, recording rules and boards."""
    with tempfile.TemporaryDirectory() as folder:
        command(["generate", "--output", folder])
        files = {str(path.relative_to(folder)): path.read_text() for path in Path(folder).rglob("*") if path.is_file()}
    texts = {Path(name).stem: dict(_rows(text)) for name, text in files.items() if name.startswith("docs/reference")}
    groups = [
        group for name, text in files.items() if name.endswith(".rules.yml") for group in yaml.safe_load(text)["groups"]
    ]
    rules = [rule for group in groups for rule in group["rules"]]
    for rule in (each for each in rules if "alert" in each):
        shown = {"annotations": sorted(rule["annotations"]), "for": rule.get("for")}
        texts.setdefault("rules", {})[rule["alert"]] = {**rule.get("labels", {}), **shown}
    boards = [json.loads(text) for name, text in files.items() if name.endswith(".json")]
    variables = {board["uid"]: [each["name"] for each in board["templating"]["list"]] for board in boards}
    records = sorted(rule["record"] for rule in rules if "record" in rule)
    return {**texts, "files": sorted(files), "records": records, "dashboards": variables}


def _keys(value: Any, path: str = "") -> Iterator[str]:
    """Give the path of each value in a JSON document."""
    if isinstance(value, dict) and value and path.rpartition(".")[2] not in ASKED["open"]:
        for key, each in value.items():
            yield from _keys(each, f"{path}.{key}".strip("."))
    elif isinstance(value, list) and value:
        for each in value:
            yield from _keys(each, path + "[]")
    else:
        yield path


def answers() -> dict[str, Any]:
    """Return the keys of every JSON answer, and every series with its labels' values, of servers of several kinds."""
    found: dict[str, set[str]] = {"api": set()}
    for argv in ASKED["documents"]:
        found.setdefault(argv.split()[0], set()).update(_keys(json.loads(command(argv.format(root=ROOT).split())[1])))
    series: dict[str, Any] = {}
    for capture, way in ASKED["servers"]:
        for answer in ask(Case(capture, partial(read, CAPTURES / f"{capture}.tar.xz"), lambda *_: {}), way):
            found["api"] |= set(_keys(answer.document))
            for name in answer.metrics:
                labels = series.setdefault(name.partition("{")[0], {})
                for label, value in re.findall(r'(\w+)="([^"]*)"', name):
                    labels[label] = sorted({*labels.get(label, ()), "any" if label in ASKED["own"] else value})
    return {**{name: dict.fromkeys(sorted(keys), "") for name, keys in found.items()}, "series": series}


def _ended(argv: list[str], how: str) -> int:
    """Run a command whose reader has left, or that gets a signal while it reads."""
    reader, writer = os.pipe()
    if how == "closed":
        os.close(reader)
        return Popen([*PROGRAM, *argv], env=ENVIRONMENT, stdout=writer, stderr=DEVNULL).wait()
    process = Popen([*PROGRAM, *argv], env=ENVIRONMENT, stdin=reader, stdout=DEVNULL, stderr=DEVNULL)
    os.write(writer, b"[2025-11-20 11:40:13 TP0] \n" * 10_000)  # more than a pipe holds: it reads
    while any(fcntl.ioctl(reader, termios.FIONREAD, bytes(4))):  # until it has read all, and waits for more
        time.sleep(0.05)
    process.send_signal(getattr(signal, how))
    return process.wait(60)


def programs() -> dict[str, Any]:
    """Return how commands end and where they print, how `serve` answers, and every file that was written.

    `types`: the families of its page that the reference lacks or gives another type.
    """
    found = {name: dict[str, str]() for name in ("statuses", "requests", "types")}
    page = (ROOT / "tests" / "data" / "metrics" / "0.5.23_tp8-retract.prom").read_text()
    documented = dict(_rows((ROOT / "docs" / "reference" / "metrics.md").read_text()))
    stand_in, log = (
        StandIn([Page(0.0, "/metrics", 200, page)], time.time),
        read(CAPTURES / "healthy-probes.tar.xz").text,
    )
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0)) as free:
        folder, port = Path(name), free.getsockname()[1]
        given = {"folder": folder, "port": port, "sglang": stand_in.port}
        free.close()
        for file, text in {**ASKED["files"], "server.log": log, "server.log.gz": gzip.compress(log)}.items():
            (folder / file).write_bytes(text if isinstance(text, bytes) else text.encode())
        for end in ("SIGINT", "SIGTERM"):
            serving = Popen([*PROGRAM, *ASKED["serve"].format(**given).split()], env=ENVIRONMENT, stderr=DEVNULL)
            while socket.socket().connect_ex(("127.0.0.1", port)):
                time.sleep(0.05)
            for method, path, accept in ASKED["requests"] if end == "SIGINT" else ASKED["requests"][:1]:
                client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                client.request(method, path, headers={"Accept": accept})
                answer = client.getresponse()
                found["requests"][f"{method} {path} {accept}"] = f"{answer.status} {answer.headers['Content-Type']}"
                for family, kind in re.findall(r"(?m)^# TYPE (?!sglang:)(\S+) (\S+)", answer.read().decode()):
                    # Which families it has depends on the moment; in the text format an info is a gauge.
                    if kind != documented.get(family, {}).get("type", "").replace("info", "gauge"):
                        found["types"][family] = kind
            serving.send_signal(getattr(signal, end))
            found["statuses"][f"serve, {end}"] = str(serving.wait())
            found["statuses"][f"report, {end}"] = str(_ended(["report", "-"], end))
        found["statuses"]["report, closed"] = str(_ended(["report", str(folder / "server.log")], "closed"))
        for line in ASKED["commands"]:
            status, out, error = command(line.format(**given).split(), log)
            found["statuses"][line] = f"{status}{', output' * bool(out)}{', error' * bool(error)}"
        files = sorted({re.sub(r"\d+", "N", str(path.relative_to(folder))) for path in folder.rglob("*")})
    return {**found, "files": files}


def files() -> dict[str, Any]:
    """Return the schema without its prose, the chart's values and the variables of `docker compose`."""
    chart, variables = ROOT / "deploy/helm/sglang-tuning-exporter/values.yaml", ROOT / ".env.example"
    schema = (ROOT / "docs/report.schema.json").read_text()
    return {
        "schema": json.loads(schema, object_hook=lambda each: {k: v for k, v in each.items() if k != "description"}),
        "values": yaml.safe_load(chart.read_text()),
        "variables": re.findall(r"(?m)^#?([A-Z_]+)=", variables.read_text()),
    }


SECTIONS = {each.__name__: each for each in (commands, generated, answers, programs, files)}


def _flat(value: Any, path: str) -> dict[str, Any]:
    """Name each thing by its path: a line of text each, lists in one."""
    if not isinstance(value, dict):
        return {path: value}
    return {name: each for key, part in value.items() for name, each in _flat(part, f"{path}/{key}").items()} | {
        path: ""
    }


def _check(section: str, _way: str, asked: Sequence[Answer]) -> Checks:
    """Name what differs and is not ordered; an order holds for all below it too."""
    kept, now = data("surface.yaml"), _flat(asked[0].document, section)
    was = _flat(kept["today"][section], section)
    differ = [
        f"{path}: was {was.get(path, 'absent')}, is {now.get(path, 'absent')}"
        for path in sorted({*was, *now})
        if was.get(path) != now.get(path) and not any(f"{path}/".startswith(f"{order}/") for order in kept["changes"])
    ]
    return {"as today or ordered": "; ".join(differ)}


def _ask(case: Case) -> list[Answer]:
    return [Answer(0.0, 0, "", document=SECTIONS[case.name]())]


def cases() -> Iterator[Case]:
    """Ask for each part of the surface."""
    for name in SECTIONS:
        yield Case(name, lambda: Recording(()), partial(_check, name), ("outside",), ask=_ask)


if __name__ == "__main__" and sys.argv[1:] == ["record"]:
    by_hand = FILE.read_text().partition("today:")[0]
    today = {"today": {name: section() for name, section in SECTIONS.items()}}
    FILE.write_text(by_hand + yaml.safe_dump(today, sort_keys=False, width=150, default_flow_style=None))
