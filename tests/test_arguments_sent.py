"""Of a start the API and the page send the arguments that are read; all others with `?all=1`."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import requests

from conftest import config, web
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.sglang.flags import READ_ARGUMENTS, argument_names

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(__file__).resolve().parent.parent / "exporter" / "sglang_tuning_exporter"
# Named in the core for another reason than to judge: where the server listens, what differs between any two starts.
NOT_JUDGED = {"host", "port", "nccl_port", "random_seed", "dist_init_addr"}


def named_in_the_core() -> set[str]:
    """Every name of an argument that stands as a text in the core, the capacity or the profiles."""
    files = [*PACKAGE.glob("core/**/*.py"), *PACKAGE.glob("config/*.py")]
    texts = {
        node.value
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return texts & set(argument_names())


def test_what_is_sent_is_what_the_core_names() -> None:
    assert named_in_the_core() - NOT_JUDGED == READ_ARGUMENTS, "sglang/flags.py lists them"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An exporter of a server that printed every argument that is known."""
    log = tmp_path_factory.mktemp("log") / "server.log"
    printed = dict.fromkeys(argument_names(), "other") | {"mem_fraction_static": 0.8, "model_path": "a/b"}
    log.write_text(f"[2025-11-20 11:39:59] server_args={printed}\n")
    sidecar = Sidecar(config(log_file=(str(log),), from_start=True))
    sidecar.start()
    with web(sidecar) as url:
        yield url


def test_the_api_sends_the_arguments_that_are_read_and_all_when_asked(address: str) -> None:
    few, every = (
        json.loads(requests.get(address + "/api/v1/findings" + query, timeout=20).text)["server"]["args"]
        for query in ("", "?all=1")
    )
    assert few.items() <= every.items()
    assert few.keys() <= READ_ARGUMENTS
    assert few["mem_fraction_static"] == 0.8
    assert len(every) > 500
    assert 60 < len(few) < 100


@pytest.mark.parametrize("query", ["?all=0", "?all=", "?every=1", "?still"])
def test_nothing_else_asks_for_all(query: str, address: str) -> None:
    answer = json.loads(requests.get(address + "/api/v1/findings" + query, timeout=20).text)
    assert answer["server"]["args"].keys() <= READ_ARGUMENTS


def test_the_page_shows_them_likewise_and_stands_still_with_all(address: str) -> None:
    few, every = (requests.get(address + "/" + query, timeout=20).text for query in ("", "?all=1"))
    assert "mem_fraction_static=0.8" in few
    assert "enable_metrics_for_all_schedulers=other" not in few
    assert "enable_metrics_for_all_schedulers=other" in every
    assert 'href="?all=1"' in few
    assert 'http-equiv="refresh"' in few
    assert 'http-equiv="refresh"' not in every
