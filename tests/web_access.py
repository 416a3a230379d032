"""Helpers for tests of the web configuration: fresh certificates, Debian's node_exporter, and a client that reports how
each request ended.
"""

from __future__ import annotations

import base64
import http.client
import logging
import os
import queue
import socket
import ssl
import subprocess
import threading
import warnings
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import bcrypt
import trustme

from conftest import config, wait_for
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.serve.app import make_app
from sglang_tuning_exporter.serve.process import bind
from sglang_tuning_exporter.serve.run import ExporterServer, uvicorn_config
from sglang_tuning_exporter.serve.web_config import ActiveConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

NODE_EXPORTER = "prometheus-node-exporter"


def hashed(password: str, cost: int = 4) -> str:
    """A hash of the lowest bcrypt cost, unless a test is about the cost."""
    return bcrypt.hashpw(password.encode(), bcrypt.gensalt(cost)).decode()


@dataclass(frozen=True)
class Certificates:
    """Files in one directory: the server's pair, its authority's, and clients' of two authorities."""

    directory: Path
    authority: trustme.CA
    other: trustme.CA

    @property
    def ca(self) -> Path:
        return self.directory / "ca.pem"

    def issue(self, name: str, authority: trustme.CA, *identities: str) -> Path:
        """A new certificate as NAME.pem and NAME.key."""
        made = authority.issue_cert(*identities)
        made.private_key_pem.write_to_path(self.directory / f"{name}.key")
        (self.directory / f"{name}.pem").write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
        return self.directory / f"{name}.pem"

    def write(self, text: str, name: str = "web.yml") -> Path:
        """A web configuration file in the same directory, replaced whole: who looks often never sees half of it."""
        path, new = self.directory / name, self.directory / f"{name}.new"
        new.write_text(text)
        return new.replace(path)

    def client(self, name: str | None = None) -> ssl.SSLContext:
        """A client that trusts the server's authority, with a certificate of its own or none."""
        context = ssl.create_default_context(cafile=self.ca)
        if name is not None:
            context.load_cert_chain(self.directory / f"{name}.pem", self.directory / f"{name}.key")
        return context


def certificates(directory: Path) -> Certificates:
    made = Certificates(directory, trustme.CA(), trustme.CA())
    made.authority.cert_pem.write_to_path(made.ca)
    made.issue("server", made.authority, "localhost", "127.0.0.1")
    made.issue("friend", made.authority, "prometheus.example", "friend@example.org")
    made.issue("acquaintance", made.authority, "grafana.example")
    made.issue("stranger", made.other, "prometheus.example")
    return made


@dataclass(frozen=True)
class Met:
    """The result of a request: the status, or none when the connection failed, the agreed TLS version and suite, and
    the text.
    """

    status: int | None
    version: str | None = None
    suite: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    serial: str | None = None
    text: str = ""

    def header(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name.lower()]


def basic(name: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()


def ask(url: str, context: ssl.SSLContext | None = None, authorization: str | None = None, path: str = "/") -> Met:
    """One request on a connection of its own."""
    parts = urlsplit(url)
    assert parts.hostname
    assert parts.port
    given = {} if authorization is None else {"Authorization": authorization}
    try:
        with socket.create_connection((parts.hostname, parts.port), timeout=10) as plain:
            connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=10)
            connection.sock = plain if context is None else context.wrap_socket(plain, server_hostname="localhost")
            try:
                connection.request("GET", path, headers=given)
                answer = connection.getresponse()
                text = answer.read().decode()
                secure = connection.sock if isinstance(connection.sock, ssl.SSLSocket) else None
                certificate = (secure.getpeercert() or {}) if secure is not None else {}
                cipher = secure.cipher() if secure is not None else None
                return Met(
                    answer.status,
                    secure.version() if secure is not None else None,
                    cipher[0] if cipher is not None else None,
                    tuple(answer.getheaders()),
                    str(certificate.get("serialNumber")),
                    text,
                )
            finally:
                connection.close()
    except (OSError, http.client.HTTPException):
        return Met(None)


def limited(context: ssl.SSLContext, lowest: str, highest: str) -> ssl.SSLContext:
    """The same client, limited to these TLS versions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of versions that a test offers to be refused with
        context.minimum_version, context.maximum_version = ssl.TLSVersion[lowest], ssl.TLSVersion[highest]
        if lowest < "TLSv1_2":
            context.set_ciphers("ALL:@SECLEVEL=0")
    return context


class NodeExporter:
    """Debian's node_exporter on a free port, without collectors; `accepted`: it runs with its file."""

    def __init__(self, file: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self._process = subprocess.Popen(
            [NODE_EXPORTER, f"--web.listen-address=127.0.0.1:{port}", f"--web.config.file={file}",
             "--collector.disable-defaults"],
            stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, env=dict(os.environ),
        )  # fmt: skip
        self.said: list[str] = []
        self._has_started: queue.Queue[bool] = queue.Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self._has_started.get(timeout=30)
        # Go's server reports its own errors only after it has logged that it listens.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=0.3)
        self.accepted = self._process.poll() is None
        scheme = "https" if any("TLS is enabled" in line for line in self.said) else "http"
        self.url = f"{scheme}://127.0.0.1:{port}"

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.said.append(line.decode())
            if b"TLS is " in line:
                self._has_started.put(True)  # noqa: FBT003 - a signal: it has started
        self._has_started.put(True)  # noqa: FBT003

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._listener.join(timeout=10)
        assert self._process.stderr is not None
        self._process.stderr.close()


class Ours(logging.Handler):
    """This exporter on a free port of this process, with its log."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.said: list[str] = []
        self.web_config = ActiveConfig(file)
        sidecar = Sidecar(config(log_file=(str(file.parent / "server.log"),)))
        settings = uvicorn_config(make_app(sidecar, self.web_config), self.web_config)
        self._server = ExporterServer(settings, sidecar, self.web_config)
        self._listener = bind("127.0.0.1:0")
        self.port = self._listener.getsockname()[1]
        self.url = f"{'https' if self.web_config.is_tls else 'http'}://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listener]}, daemon=True)

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(f"{record.levelname} {record.getMessage()}")

    def start(self) -> None:
        logger = logging.getLogger("sglang_tuning_exporter")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)
        self._thread.start()
        wait_for(lambda: self._server.started)

    def end(self) -> None:
        self._server.end()
        self._thread.join(timeout=10)
        self._listener.close()
        logging.getLogger("sglang_tuning_exporter").removeHandler(self)


@contextmanager
def ours(file: Path) -> Iterator[Ours]:
    running = Ours(file)
    running.start()
    try:
        yield running
    finally:
        running.end()


@contextmanager
def node_exporter(file: Path) -> Iterator[NodeExporter]:
    running = NodeExporter(file)
    try:
        yield running
    finally:
        running.end()
