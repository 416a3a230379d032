"""The web configuration in force: read at the start, and again when one of its files changes.

Only a complete and valid file replaces it. While the present one cannot be read or applied, `sglang_tuning_web_config_up` is 0, and soon
nobody is let in any more: the file may be there to shut somebody out. Prometheus's own exporters answer every request with 500 then.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, TypeAlias

from sglang_tuning_exporter.config import files
from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.serve.security.web_config import (
    CURVES,
    SUITES,
    TLS,
    WebConfig,
    WebConfigError,
    parse,
    redacted,
)

LOOK_SECONDS = 1.0
# Since a file was first seen to be of no use: a file that is written piece by piece closes nothing, and a revoked password is gone.
CLOSE_SECONDS = 3.0
_Contents: TypeAlias = "dict[Path, bytes | OSError]"

logger = logging.getLogger("sglang_tuning_exporter")


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """The file's settings and the TLS context made of them (None without TLS)."""

    config: WebConfig
    context: ssl.SSLContext | None


def load(path: Path, contents: _Contents) -> LoadedConfig:
    """Make a configuration of a file and those that it names; what is not in `contents` yet is read. Raises `WebConfigError`."""
    try:
        text = _content(path, contents).decode("utf-8")
    except OSError as error:
        raise WebConfigError(f"{error.strerror or error}; give a file that this user may read") from None
    except ValueError:  # not UTF-8
        raise WebConfigError("not text; give YAML") from None
    config = parse(text)
    if config.users:
        try:
            import bcrypt  # noqa: F401, PLC0415 - only where passwords are set
        except ImportError:
            raise WebConfigError("basic_auth_users: needs the package bcrypt; pip install bcrypt") from None
    if config.tls is None:
        return LoadedConfig(config, None)
    return LoadedConfig(config, tls_context(config.tls, lambda name: _content(path.parent / name, contents)))


def _content(path: Path, contents: _Contents) -> bytes:
    """Return the content of a file, remembered in `contents`. Raise `OSError`."""
    if path not in contents:
        try:
            contents[path] = files.read(path)
        except OSError as error:
            contents[path] = error
    found = contents[path]
    if isinstance(found, OSError):
        raise found
    return found


class ActiveConfig:
    """Holds the configuration in force, `loaded`; `watch` reloads it while the exporter runs."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises `UsageError`."""
        self._path = path
        self._judged: _Contents = {}  # what is in force, or was refused
        try:
            self.loaded = load(path, self._judged)
        except WebConfigError as error:
            raise UsageError(f"--web-config={path}: {error}") from None
        self._seen = self._judged  # at the last look
        self._problem = ""
        self._closes_at = inf

    @property
    def is_tls(self) -> bool:
        """Whether TLS is on, which is decided at the start."""
        return self.loaded.context is not None

    def listener_context(self) -> ssl.SSLContext | None:
        """Return the listener's context, which follows each change; None without TLS."""
        return ReloadingContext(self._context) if self.is_tls else None

    @property
    def is_up(self) -> bool:
        """Whether the present file is in force."""
        return not self._problem

    @property
    def is_open(self) -> bool:
        """Whether anybody is let in: not where the present file has not been in force for some seconds."""
        return time.monotonic() < self._closes_at

    def watch(self, stopping: threading.Event, on_change: Callable[[], object]) -> None:
        """Look for changes until the end, so that no request reads or waits for a file; call `on_change` after one."""
        logger.info("%s: loaded: %s", self._path, _summary(self.loaded.config))
        while not stopping.wait(LOOK_SECONDS):
            if self.reload():
                on_change()

    def reload(self) -> bool:
        """Reload where files changed, and did not change since the last look; return whether a new configuration is in force."""
        before, self._seen = self._seen, {}
        for path in self._judged:
            with suppress(OSError):
                _content(path, self._seen)
        if not _are_same(self._seen, before) or _are_same(self._seen, self._judged):
            return False
        self._judged = self._seen
        try:
            loaded = load(self._path, self._judged)
            if (loaded.context is None) is self.is_tls:
                raise WebConfigError("tls_server_config: restart the exporter to turn TLS on or off")  # noqa: TRY301 - one place reports
        except WebConfigError as error:
            self._report(str(error))
            return False
        self.loaded, self._problem, self._closes_at = loaded, "", inf
        logger.info("%s: reloaded: %s", self._path, _summary(loaded.config))
        return True

    def _report(self, problem: str) -> None:
        if not self._problem:
            self._closes_at = time.monotonic() + CLOSE_SECONDS
        self._problem = problem
        logger.error("%s: not in force, and soon nobody is let in: %s", self._path, problem)

    def _context(self) -> ssl.SSLContext:
        assert self.loaded.context is not None
        return self.loaded.context


def _are_same(contents: _Contents, others: _Contents) -> bool:
    """Whether files have the same contents, or cannot be read for the same reason."""
    return [(path, each if isinstance(each, bytes) else each.errno) for path, each in contents.items()] == [
        (path, each if isinstance(each, bytes) else each.errno) for path, each in others.items()
    ]


def _summary(config: WebConfig) -> str:
    words = ["no TLS" if config.tls is None else f"TLS, client_auth_type {config.tls.client_auth_type}"]
    words.append(f"passwords for {len(config.users)}" if config.users else "no passwords")
    return ", ".join(words)


_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}


def tls_context(tls: TLS, read: Callable[[str], bytes]) -> ssl.SSLContext:
    """Return a server context made of the files that `tls` names, which `read` reads. Raises `WebConfigError`."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.set_alpn_protocols(["http/1.1"])
    made.minimum_version, made.maximum_version = _VERSIONS[tls.min_version], _VERSIONS[tls.max_version]
    _choose_suites(made, tls)
    for curve in tls.curve_preferences:
        try:
            made.set_ecdh_curve(CURVES[curve])
        except (ssl.SSLError, ValueError):  # Python 3.10 and 3.11.2 cannot set X25519
            raise WebConfigError(f"curve_preferences={curve}: this Python cannot set it; leave it out") from None
    _load_pair(made, _pem(tls, read, "cert"), _pem(tls, read, "key"))
    if tls.client_auth_type != "NoClientCert":
        _trust(made, _pem(tls, read, "client_ca"))
        is_required = tls.client_auth_type == "RequireAndVerifyClientCert"
        made.verify_mode = ssl.CERT_REQUIRED if is_required else ssl.CERT_OPTIONAL
    if tls.client_allowed_sans:
        made.sslobject_class = _allowing(frozenset(tls.client_allowed_sans))
    return made


class ReloadingContext(ssl.SSLContext):
    """A listener's context; each new handshake uses the context that `current` returns at that time."""

    current: Callable[[], ssl.SSLContext]

    def __new__(cls, current: Callable[[], ssl.SSLContext]) -> ReloadingContext:  # noqa: PYI034 - Self came with Python 3.11
        """Create it; the base class's own settings are never used."""
        made = super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)
        made.current = current
        return made

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """Start a handshake."""
        return self.current().wrap_bio(*args, **kwargs)


def names(certificate: dict[str, Any]) -> set[str]:
    """Return the subject alternative names (DNS, IP, e-mail, URI) of what `getpeercert` returns."""
    kinds = {"DNS", "IP Address", "email", "URI"}
    return {value for kind, value in certificate.get("subjectAltName", ()) if kind in kinds}


def _allowing(allowed: frozenset[str]) -> type[ssl.SSLObject]:
    class NameCheckedTLS(ssl.SSLObject):
        def do_handshake(self) -> None:
            super().do_handshake()
            if allowed.isdisjoint(names(self.getpeercert() or {})):
                raise ssl.SSLCertVerificationError("the client's certificate has none of client_allowed_sans")

    return NameCheckedTLS


def _choose_suites(made: ssl.SSLContext, tls: TLS) -> None:
    if not tls.prefer_server_cipher_suites:
        made.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    if not tls.cipher_suites:
        return
    older = [SUITES[name] for name in tls.cipher_suites if name in SUITES]
    if not older:  # no suite is left for TLS 1.2
        made.minimum_version = ssl.TLSVersion.TLSv1_3
        return
    try:
        made.set_ciphers(":".join(older))
    except ssl.SSLError:
        raise WebConfigError("tls_server_config.cipher_suites: this machine's OpenSSL allows none of them") from None


def _pem(tls: TLS, read: Callable[[str], bytes], kind: str) -> bytes:
    """Return the PEM text of a certificate, key or authority."""
    name: str = getattr(tls, f"{kind}_file")
    if not name:
        return str(getattr(tls, kind)).encode("ascii", "replace")  # PEM is ASCII; other bytes fail later anyway
    try:
        return read(name)
    except OSError as error:
        raise WebConfigError(
            f"tls_server_config.{kind}_file={redacted(name)}: {error.strerror}; give a PEM file that this user may read"
        ) from None


def _load_pair(made: ssl.SSLContext, cert: bytes, key: bytes) -> None:
    """Load a certificate and its key from memory, so that both are from the same read."""
    # OpenSSL reads files only; these are in memory and have no path.
    held = [os.memfd_create(name, os.MFD_CLOEXEC) for name in ("cert", "key")]
    try:
        for descriptor, content in zip(held, (cert, key), strict=True):
            with os.fdopen(os.dup(descriptor), "wb") as file:
                file.write(content)
        paths = [f"/proc/self/fd/{descriptor}" for descriptor in held]
        made.load_cert_chain(paths[0], paths[1], password=_no_password)
    except ssl.SSLError as error:
        reason = (error.reason or "not PEM").lower().replace("_", " ")
        raise WebConfigError(
            f"tls_server_config.cert_file and key_file: {reason}; give a certificate and its key as PEM"
        ) from None
    finally:
        for descriptor in held:
            os.close(descriptor)


def _no_password() -> str:
    """Refuse a key with a password; OpenSSL would ask for it at the terminal."""
    raise WebConfigError("tls_server_config.key_file: the key has a password; give one without")


def _trust(made: ssl.SSLContext, authority: bytes) -> None:
    try:
        made.load_verify_locations(cadata=authority.decode("ascii", "replace"))
    except (ssl.SSLError, ValueError):
        raise WebConfigError(
            "tls_server_config.client_ca_file: no certificate in it; give the authority's as PEM"
        ) from None
