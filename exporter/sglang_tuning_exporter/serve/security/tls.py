"""TLS settings of a web configuration file as an `ssl.SSLContext`."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from typing import Any

from sglang_tuning_exporter.serve.security.web_config import CURVES, SUITES, TLS, WebConfigError, redacted

_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}


def context(tls: TLS, read: Callable[[str], bytes]) -> ssl.SSLContext:
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
