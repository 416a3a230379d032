"""Web configuration files, and request headers for authentication. Hashes are made anew by every process."""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bcrypt
import yaml

from sglang_tuning_exporter.serve.security.active_config import ActiveConfig, load
from sglang_tuning_exporter.serve.security.guard import METHODS, Guard
from sglang_tuning_exporter.serve.security.web_config import HEADERS, SUITES, WebConfigError, parse

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

_HASH = re.compile(rb"\$2[abxy]?\$[0-9]{2}\$[./A-Za-z0-9]{20,}")
_PEM_LINE = re.compile(rb"^[ \t]*([A-Za-z0-9+/=]{60,})[ \t\r]*$", re.MULTILINE)
# The second is longer than the part of a password that bcrypt looks at.
_PASSWORDS = {"prometheus": "right", "Žofie": "pass:word " * 9}
_BCRYPT_BYTES = 72


@cache
def _place() -> Path:
    """Where a configuration lies; kept until the process ends."""
    _kept.append(kept := tempfile.TemporaryDirectory(prefix="fuzz-"))
    return Path(kept.name)


_kept: list[tempfile.TemporaryDirectory[str]] = []


@cache
def _hash(name: str) -> str:
    return bcrypt.hashpw(_PASSWORDS[name].encode()[:_BCRYPT_BYTES], bcrypt.gensalt(4)).decode()


def web_config_seeds() -> list[bytes]:
    """Whole files: each section, with PEM texts and paths to none, and some that must be refused."""
    headers = {name: (*allowed, "max-age=9")[0] for name, allowed in HEADERS.items()}
    pem = "|\n    -----BEGIN CERTIFICATE-----\n    " + "A" * 64 + "\n    -----END CERTIFICATE-----\n"
    clients = "client_auth_type: RequireAndVerifyClientCert, client_ca_file: ca.pem, client_allowed_sans: [a.example]"
    suites = f"cipher_suites: [{', '.join(SUITES)}], curve_preferences: [X25519], min_version: TLS13"
    files = [
        f"basic_auth_users:\n  prometheus: {_hash('prometheus')}\n  'Žofie': {_hash('Žofie')}\n",
        f"tls_server_config: {{cert_file: a.pem, key_file: b.key, {clients}, {suites}}}\n",
        f"tls_server_config:\n  cert: {pem}  key: {pem}  client_ca: {pem}",
        yaml.safe_dump({"http_server_config": {"headers": headers, "http2": True}}),
        "rate_limit:\n  interval: 1m1.5s\n  burst: 10\n",
        "basic_auth_users: &u {prometheus: secret}\nrate_limit: *u\n---\n!!str x: ? [y]\n",
    ]
    return [file.encode() for file in files]


def check_web_config(data: bytes) -> None:
    """A file is refused in one line without its secrets, or its settings are valid."""
    path = _place() / "web.yml"
    path.write_bytes(data)
    try:
        config = load(path, {}).config
    except WebConfigError as error:
        said = str(error)
        assert said.isprintable(), ascii(said)
        assert said
        assert not [
            word for word in (b"-----BEGIN", *_HASH.findall(data), *_PEM_LINE.findall(data)) if word in said.encode()
        ]
        return
    assert config == parse(data.decode("utf-8")), "a second reading differs"
    _has_no_key_twice(yaml.compose(data.decode("utf-8"), Loader=yaml.BaseLoader))
    assert all(re.fullmatch(r"\$2[aby]\$[0-3][0-9]\$[./A-Za-z0-9]{53}", hashed) for hashed in config.users.values())
    assert all(name in HEADERS and "\n" not in value for name, value in config.http.headers.items())


def _has_no_key_twice(node: yaml.Node | None) -> None:
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        assert len(set(keys)) == len(keys), "a key stands twice"
        for _, value in node.value:
            _has_no_key_twice(value)


def request_seeds() -> list[bytes]:
    """Requests as method and headers: accepted, rejected, and too large ones."""
    first, second = (b"\nAuthorization: " + _basic(name, word) for name, word in _PASSWORDS.items())
    wrong = [b"\nAuthorization: " + _basic(*each) for each in (("prometheus", "wrong"), ("nobody", "right"))]
    return [
        *(b"GET" + each for each in (first, first.replace(b"Basic", b"bAsIC") + b"\nAuthorization: Bearer x", *wrong)),
        *(b"GET\nHost: localhost", b"HEAD\nHost: localhost" + second, b"POST\nContent-Length: 70000" + first),
        *(b"GET\nContent-Length: 65536" + first, b"GET\nTransfer-Encoding: chunked" + first),
    ]


def _basic(name: str, password: str) -> bytes:
    return b"Basic " + base64.b64encode(f"{name}:{password}".encode())


@cache
def _guard() -> Guard:
    path = _place() / "users.yml"
    path.write_text("basic_auth_users:\n" + "".join(f"  '{name}': {_hash(name)}\n" for name in _PASSWORDS))
    return Guard(_let_in, ActiveConfig(path), Counter())


async def _let_in(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def check_request(data: bytes) -> None:
    """No header raises; only a request with a name and its password is accepted, and each plain one with them is."""
    method, *lines = data.split(b"\n")
    pairs = [line.partition(b":") for line in lines]
    headers = [(name.strip().lower(), value.strip()) for name, _, value in pairs]  # as h11 hands them on
    status, said = asyncio.run(_asked(method.decode("latin-1"), headers))
    assert status in {200, 401, 405, 413}
    given = next((value for name, value in headers if name == b"authorization"), b"")
    names = {name for name, _ in headers}
    if status != 401:
        assert _is_right(given), given
        assert status == 405 or (status == 200) == (
            method.decode("latin-1") in METHODS and not _has_large_body(headers)
        )
    else:
        assert any(name == b"www-authenticate" for name, _ in said)
        assert given not in {_basic(*each) for each in _PASSWORDS.items()}
    if status != 200 and b"transfer-encoding" in names:
        assert (b"connection", b"close") in said


def _is_right(given: bytes) -> bool:
    """Decide independently whether a header has a name and its password, or one with the same bcrypt hash."""
    try:
        name, _, password = binascii.a2b_base64(given[len("Basic ") :]).partition(b":")
    except binascii.Error:
        return False
    word = _PASSWORDS.get(name.decode("utf-8", "replace"), "").encode()
    return given[:6].lower() == b"basic " and word != b"" and password[:_BCRYPT_BYTES] == word[:_BCRYPT_BYTES]


def _has_large_body(headers: list[tuple[bytes, bytes]]) -> bool:
    first: dict[bytes, bytes] = {}
    for name, value in headers:
        first.setdefault(name, value)
    length = first.get(b"content-length", b"0")
    return b"transfer-encoding" in first or not re.fullmatch(rb"[0-9]+", length) or int(length[:4000]) > 65536


async def _asked(method: str, headers: list[tuple[bytes, bytes]]) -> tuple[int, list[tuple[bytes, bytes]]]:
    sent: list[Any] = []

    async def receive() -> Message:
        await asyncio.Event().wait()  # the client waits for its answer
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    await _guard()({"type": "http", "method": method, "path": "/metrics", "headers": headers}, receive, send)
    return sent[0]["status"], list(sent[0]["headers"])
