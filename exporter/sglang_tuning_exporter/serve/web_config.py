"""Prometheus's web configuration file: its format, the TLS context made of it, and the configuration in force.

The format is that of prometheus/exporter-toolkit. What its tools refuse is refused here; settings that they accept and
this exporter cannot apply are refused too, in one sentence. Nothing is ignored silently.

The file is read at the start, and again when one of its files changes. Only a complete and valid file replaces the one
in force. While the present one cannot be read or applied, `sglang_tuning_web_config_up` is 0, and soon nobody is let in
any more: the file may be there to shut somebody out. Prometheus's own exporters answer every request with 500 then. One
that is late proves nothing, since a busy machine is late too: what is in force stays so for at most ten minutes
(`files.KEPT_SECONDS`).
"""

from __future__ import annotations

import logging
import os
import re
import ssl
import threading
import time
from collections.abc import Callable, Collection, Hashable, Mapping
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from sglang_tuning_exporter.config import files, values

LOOK_SECONDS = 1.0
# Since a file was first seen to be of no use: a file that is written piece by piece closes nothing, and a revoked
# password is gone.
CLOSE_SECONDS = 3.0
# Go's and OpenSSL's name of each TLS 1.2 suite: those that Go calls secure, and four with RSA key exchange that it
# called secure up to 1.21.
SUITES: Mapping[str, str] = {
    "TLS_RSA_WITH_AES_128_CBC_SHA": "AES128-SHA",
    "TLS_RSA_WITH_AES_256_CBC_SHA": "AES256-SHA",
    "TLS_RSA_WITH_AES_128_GCM_SHA256": "AES128-GCM-SHA256",
    "TLS_RSA_WITH_AES_256_GCM_SHA384": "AES256-GCM-SHA384",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA": "ECDHE-ECDSA-AES128-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA": "ECDHE-ECDSA-AES256-SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA": "ECDHE-RSA-AES128-SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA": "ECDHE-RSA-AES256-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
}
# Suites of TLS 1.3: Go and OpenSSL offer all of them, whatever the list is.
SUITES_OF_TLS13 = frozenset({"TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256"})
CURVES: Mapping[str, str] = {
    "CurveP256": "prime256v1",
    "CurveP384": "secp384r1",
    "CurveP521": "secp521r1",
    "X25519": "X25519",
}
# Headers that can be set, and their allowed values where there is a fixed list.
HEADERS: Mapping[str, tuple[str, ...]] = {
    "Content-Security-Policy": (),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-Content-Type-Options": ("nosniff",),
    "X-XSS-Protection": (),
    "Strict-Transport-Security": (),
}
_HASH = re.compile(r"\$2[aby]\$(0[4-9]|[12][0-9]|3[01])\$[./A-Za-z0-9]{53}")
MOST_COST = 14  # of bcrypt: a check takes about a second, and at 31 days
# A hash or a key in a wrong place, where an error message would show it; also a part of one.
_SECRET = re.compile(r"\$2[abxy]?\$[0-9]{2}\$\S*|-----BEGIN.*|[A-Za-z0-9+/=]{60,}", re.DOTALL | re.IGNORECASE)
_DURATION = re.compile(r"(?:[0-9]+(?:\.[0-9]*)?(?:ns|us|µs|ms|s|m|h))+|0")
_PART = re.compile(r"([0-9.]+)(ns|us|µs|ms|s|m|h)")
_LONGEST_SECONDS = 2**63 * 1e-9  # the longest duration in Go
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_BLANK = ("", "~", "null", "Null", "NULL")
_SWITCH = {**dict.fromkeys(("true", "yes", "y", "on"), True), **dict.fromkeys(("false", "no", "n", "off"), False)}
_UNSAFE = {
    **dict.fromkeys(("TLS10", "TLS11"), "TLS below 1.2 is broken and not supported; give TLS12 or TLS13"),
    **dict.fromkeys(
        ("RequestClientCert", "RequireClientCert", "RequireAnyClientCert"),
        "it asks for a certificate and verifies nothing; give RequireAndVerifyClientCert",
    ),
}
_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_Check: TypeAlias = Callable[[Any], Any]
_Contents: TypeAlias = "dict[Path, bytes | OSError]"

logger = logging.getLogger("sglang_tuning_exporter")


def redacted(word: str) -> str:
    """Return a word of the file for a message: one line, shortened, with `…` for a hash or PEM text."""
    return "".join(c if c.isprintable() else " " for c in _SECRET.sub("…", word))[:80]


# Each of the following checks a value of the file, or raises `UsageError`.


def _word(value: Any) -> str:
    if not isinstance(value, str):
        raise values.UsageError("give one word, not a list or a mapping", "")
    return value


def _path(value: Any) -> str:
    if "-----BEGIN" in _word(value) or "\n" in value:
        raise values.UsageError("give the path of a file; a PEM text belongs under the key without _file", "")
    return str(value)


def _switch(value: Any) -> bool:
    if _word(value).lower() not in _SWITCH:
        raise values.UsageError("give true or false")
    return _SWITCH[value.lower()]


def _duration(value: Any) -> float:
    if not _DURATION.fullmatch(_word(value)):
        raise values.UsageError("give a time such as 1s or 250ms")
    seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(value))
    if seconds >= _LONGEST_SECONDS:
        raise values.UsageError("too long; give a time such as 1s or 250ms")
    return seconds


def _count(value: Any) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,8}", _word(value)):
        raise values.UsageError("give a number above 0")
    return int(value)


def _one_of(*known: str) -> _Check:
    remedy = f"give {' or '.join(known)}"

    def check(value: Any) -> str:
        if _word(value) not in known:
            raise values.UsageError(_UNSAFE.get(value, remedy))
        return str(value)

    return check


def _list_of(known: Collection[str], remedy: str) -> _Check:
    """Return the check of a list of known words, or without these of any."""

    def check(value: Any) -> list[str]:
        if not isinstance(value, list):
            raise values.UsageError("give a list", "")
        for name in map(_word, value):
            if known and name not in known:
                raise values.UsageError(remedy, name)
        return value

    return check


def _headers(value: Any) -> dict[str, str]:
    for name, text in values.mapping(value).items():
        if name not in HEADERS:
            raise values.UsageError(f"it cannot be set; those that can are {', '.join(HEADERS)}", "", name)
        if HEADERS[name] and text not in HEADERS[name]:
            raise values.UsageError(f"give {' or '.join(HEADERS[name])}", str(text), name)
        if not isinstance(text, str) or not (text.isascii() and (text.isprintable() or not text)):
            raise values.UsageError("give one line of plain text", "", name)
    return dict(value)


def _users(value: Any) -> dict[str, str]:
    for name, hashed in values.mapping(value).items():
        if ":" in name:
            raise values.UsageError("a name with a colon cannot be sent; give another", "", name)
        match = _HASH.fullmatch(hashed) if isinstance(hashed, str) else None
        remedy = f"give a bcrypt hash, such as `htpasswd -nBC 10 {redacted(name)}` prints"
        if match is None:
            raise values.UsageError(remedy, "", name)
        if int(match[1]) > MOST_COST:
            costs = f"its cost is {match[1]}, so that a check takes seconds to days"
            raise values.UsageError(f"{costs}; {remedy}, of {MOST_COST} at most", "", name)
    return dict(value)


def _rate(value: Any) -> tuple[float, int] | None:
    given = values.section({"interval": _duration, "burst": _count}, _BLANK)(value)
    if not given.get("interval"):
        return None
    if "burst" not in given:
        raise values.UsageError("missing; say how many requests may come at once, such as 10", "", "burst")
    return given["interval"], given["burst"]


# Each key of `tls_server_config`: its check, and what it is where it is not given.
_TLS: Mapping[str, tuple[_Check, Any]] = {
    **dict.fromkeys(("cert", "key", "client_ca"), (_word, "")),
    **{f"{kind}_file": (_path, "") for kind in ("cert", "key", "client_ca")},
    "client_auth_type": (
        _one_of("NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert"),
        "NoClientCert",
    ),
    "client_allowed_sans": (_list_of((), ""), ()),
    "min_version": (_one_of("TLS12", "TLS13"), "TLS12"),
    "max_version": (_one_of("TLS12", "TLS13"), "TLS13"),
    "cipher_suites": (
        _list_of({*SUITES, *SUITES_OF_TLS13}, "unknown or insecure; give names of Go's tls.CipherSuites()"),
        (),
    ),
    "prefer_server_cipher_suites": (_switch, True),
    "curve_preferences": (_list_of(CURVES, f"give one of {', '.join(CURVES)}"), ()),
}


def _tls(value: Any) -> dict[str, Any] | None:
    """Return the section with every key; a certificate, key or authority is PEM text, or the path of a file as it was
    written.
    """
    given = values.section({key: check for key, (check, _) in _TLS.items()}, _BLANK)(value)
    tls = {key: default for key, (_, default) in _TLS.items()} | given
    asks, must = tls["client_auth_type"] != "NoClientCert", tls["client_auth_type"] == "RequireAndVerifyClientCert"
    has_authority = bool(tls["client_ca"] or tls["client_ca_file"])
    problems = {
        f"{kind} and {kind}_file: give one of them": kind in given and f"{kind}_file" in given
        for kind in ("cert", "key", "client_ca")
    } | {
        f"{kind}_file: missing; name the PEM file": given and not (tls[kind] or tls[f"{kind}_file"])
        for kind in ("cert", "key")
    }
    problems |= {
        "client_ca_file: add client_auth_type: RequireAndVerifyClientCert": has_authority and not asks,
        # Go would trust every authority of the system: anybody with a certificate of a public one would be let in.
        "client_ca_file: missing; name the authority whose clients are let in": asks and not has_authority,
        "client_allowed_sans: add client_auth_type: RequireAndVerifyClientCert": (
            tls["client_allowed_sans"] and not must
        ),
        f"min_version={tls['min_version']}: it is above max_version; nobody could connect": (
            tls["min_version"] > tls["max_version"]
        ),
        "cipher_suites: all are of TLS 1.3, and max_version is TLS12": (
            tls["cipher_suites"] and SUITES_OF_TLS13.issuperset(tls["cipher_suites"]) and tls["max_version"] == "TLS12"
        ),
        # Python's ssl has no call for a list before 3.15.
        "curve_preferences: only one curve can be set; give one, or leave the key out for OpenSSL's choice": (
            len(tls["curve_preferences"]) > 1
        ),
    }
    for problem, is_there in problems.items():
        if is_there:
            key, _, remedy = problem.partition(": ")
            raise values.UsageError(remedy, "", key)
    return tls if given else None


_FILE = values.section(
    {
        "tls_server_config": _tls,
        "http_server_config": values.section({"http2": _switch, "headers": _headers}, _BLANK),
        "basic_auth_users": _users,
        "rate_limit": _rate,
    },
    _BLANK,
)


class _Loader(yaml.BaseLoader):
    """Scalars stay the text they are (a user may be called `no` or `0123`), tags mean
    nothing, and no key stands twice.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002 - the base class's signature
        found: dict[Hashable, Any] = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep)
            if not isinstance(key, str):
                raise values.UsageError(f"line {key_node.start_mark.line + 1}: give a plain word as a key")
            if key in found:
                raise values.UsageError(f"{redacted(key)}: it stands there twice; keep one")
            found[key] = self.construct_object(value_node, deep)
        return found


def parse(text: str) -> dict[str, Any]:
    """Return the checked sections of a web configuration file. Raises `UsageError`."""
    try:
        content = yaml.load(text, Loader=_Loader)  # noqa: S506 # nosec B506 # a BaseLoader, which makes nothing but text, lists and mappings
    except yaml.MarkedYAMLError as error:
        # Without the line itself, which PyYAML would show: it may be a password's.
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        raise values.UsageError(f"not YAML{line}; write one 'key: value' on each line") from None
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError):  # as of an escape beyond Unicode
        raise values.UsageError("not YAML; write one 'key: value' on each line") from None
    if content is None or content == "":
        raise values.UsageError("it is empty; write what is to be guarded, or start without it")
    try:
        return _FILE(content)
    except values.UsageError as error:
        shown = redacted((error.shown or "")[1:])
        raise values.UsageError(error.remedy, shown, *map(redacted, error.place)) from None


def load(path: Path, contents: _Contents) -> tuple[dict[str, Any], ssl.SSLContext | None]:
    """Return the sections of a file, and with TLS a context made of the certificates that it names.

    Raises `UsageError`.

    `contents`: the files that were read so far; one that is not among them is read and added.
    """
    try:
        text = _content(path, contents).decode("utf-8")
    except OSError as error:
        raise values.UsageError(f"{error.strerror or error}; give a file that this user may read") from None
    except ValueError:  # not UTF-8
        raise values.UsageError("not text; give YAML") from None
    found = parse(text)
    if found.get("basic_auth_users"):
        try:
            import bcrypt  # noqa: F401, PLC0415 - only where passwords are set
        except ImportError:
            raise values.UsageError("basic_auth_users: needs the package bcrypt; pip install bcrypt") from None
    tls = found.get("tls_server_config")
    return found, None if tls is None else _tls_context(tls, lambda name: _content(path.parent / name, contents))


def _content(path: Path, contents: _Contents) -> bytes:
    """Return the content of a file, remembered in `contents`. Raise `OSError`."""
    if path not in contents:
        try:
            contents[path] = files.read_or_last(path)
        except OSError as error:
            contents[path] = error
    found = contents[path]
    if isinstance(found, OSError):
        raise found
    return found


class ActiveConfig:
    """The configuration in force; `watch` reloads it while the exporter runs.

    `users`: names and bcrypt hashes. `rate`: seconds for one request more, and how many may come at once.
    """

    def __init__(self, path: Path) -> None:
        """Read the file. Raises `UsageError`."""
        self._path = path
        self._judged: _Contents = {}  # what is in force, or was refused
        try:
            self._apply(*load(path, self._judged))
        except values.UsageError as error:
            raise values.UsageError(f"--web-config={path}: {error}") from None
        self._seen = self._judged  # at the last look
        self._problem = ""
        self._closes_at = inf

    def _apply(self, found: Mapping[str, Any], context: ssl.SSLContext | None) -> None:
        self.headers: Mapping[str, str] = found.get("http_server_config", {}).get("headers", {})
        self.users: Mapping[str, str] = found.get("basic_auth_users", {})
        self.rate: tuple[float, int] | None = found.get("rate_limit")
        self._tls, self._context = found.get("tls_server_config"), context

    @property
    def is_tls(self) -> bool:
        """Whether TLS is on, which is decided at the start."""
        return self._context is not None

    def listener_context(self) -> ssl.SSLContext | None:
        """Return the listener's context, which gives each new handshake to the one in force then; None without TLS."""
        if not self.is_tls:
            return None

        def wrap_bio(*args: Any, **more: Any) -> ssl.SSLObject:
            assert self._context is not None
            return self._context.wrap_bio(*args, **more)

        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.wrap_bio = wrap_bio  # type: ignore[method-assign]
        return made

    @property
    def is_up(self) -> bool:
        """Whether the present file is in force, and known to be the present one."""
        return not self._problem and files.late.isdisjoint(self._judged)

    @property
    def is_open(self) -> bool:
        """Whether anybody is let in: not where the present file has not been in force for some seconds."""
        return time.monotonic() < self._closes_at

    def watch(self, stopping: threading.Event, on_change: Callable[[], object]) -> None:
        """Look for changes until the end, so that no request reads or waits for a file; call `on_change` after one."""
        logger.info("%s: loaded: %s", self._path, self._summary())
        while not stopping.wait(LOOK_SECONDS):
            if self.reload():
                on_change()

    def reload(self) -> bool:
        """Reload where files changed, and did not change since the last look; return whether a new configuration is in
        force.
        """
        before, self._seen = self._seen, {}
        for path in self._judged:
            with suppress(OSError):
                _content(path, self._seen)
        if not _are_same(self._seen, before) or _are_same(self._seen, self._judged):
            return False
        self._judged = self._seen
        try:
            found, context = load(self._path, self._judged)
            if (context is None) is self.is_tls:
                raise values.UsageError("tls_server_config: restart the exporter to turn TLS on or off")  # noqa: TRY301 - one place reports
        except values.UsageError as error:
            self._report(str(error))
            return False
        self._apply(found, context)
        self._problem, self._closes_at = "", inf
        logger.info("%s: reloaded: %s", self._path, self._summary())
        return True

    def _report(self, problem: str) -> None:
        if not self._problem:
            self._closes_at = time.monotonic() + CLOSE_SECONDS
        self._problem = problem
        logger.error("%s: not in force, and soon nobody is let in: %s", self._path, problem)

    def _summary(self) -> str:
        encryption = "no TLS" if self._tls is None else f"TLS, client_auth_type {self._tls['client_auth_type']}"
        return f"{encryption}, {f'passwords for {len(self.users)}' if self.users else 'no passwords'}"


def _are_same(contents: _Contents, others: _Contents) -> bool:
    """Whether files have the same contents, or cannot be read for the same reason."""
    return [(path, each if isinstance(each, bytes) else each.errno) for path, each in contents.items()] == [
        (path, each if isinstance(each, bytes) else each.errno) for path, each in others.items()
    ]


def _tls_context(tls: Mapping[str, Any], read: Callable[[str], bytes]) -> ssl.SSLContext:
    """Return a server context made of the files that `tls` names, which `read` reads. Raises `UsageError`."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.set_alpn_protocols(["http/1.1"])
    made.minimum_version, made.maximum_version = _VERSIONS[tls["min_version"]], _VERSIONS[tls["max_version"]]
    _choose_suites(made, tls)
    for curve in tls["curve_preferences"]:
        try:
            made.set_ecdh_curve(CURVES[curve])
        except (ssl.SSLError, ValueError):  # Python 3.10 and 3.11.2 cannot set X25519
            raise values.UsageError(f"curve_preferences={curve}: this Python cannot set it; leave it out") from None
    _load_pair(made, _pem(tls, read, "cert"), _pem(tls, read, "key"))
    if tls["client_auth_type"] != "NoClientCert":
        try:
            made.load_verify_locations(cadata=_pem(tls, read, "client_ca").decode("ascii", "replace"))
        except (ssl.SSLError, ValueError):
            words = "no certificate in it; give the authority's as PEM"
            raise values.UsageError(f"tls_server_config.client_ca_file: {words}") from None
        is_required = tls["client_auth_type"] == "RequireAndVerifyClientCert"
        made.verify_mode = ssl.CERT_REQUIRED if is_required else ssl.CERT_OPTIONAL
    if tls["client_allowed_sans"]:
        made.sslobject_class = _allowing(frozenset(tls["client_allowed_sans"]))
    return made


def _allowing(allowed: frozenset[str]) -> type[ssl.SSLObject]:
    """Return TLS connections of clients one of whose subject alternative names is allowed."""
    kinds = {"DNS", "IP Address", "email", "URI"}

    class NameCheckedTLS(ssl.SSLObject):
        def do_handshake(self) -> None:
            super().do_handshake()
            names: Any = (self.getpeercert() or {}).get("subjectAltName", ())
            if allowed.isdisjoint(value for kind, value in names if kind in kinds):
                raise ssl.SSLCertVerificationError("the client's certificate has none of client_allowed_sans")

    return NameCheckedTLS


def _choose_suites(made: ssl.SSLContext, tls: Mapping[str, Any]) -> None:
    if not tls["prefer_server_cipher_suites"]:
        made.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    if not tls["cipher_suites"]:
        return
    older = [SUITES[name] for name in tls["cipher_suites"] if name in SUITES]
    if not older:  # no suite is left for TLS 1.2
        made.minimum_version = ssl.TLSVersion.TLSv1_3
        return
    try:
        made.set_ciphers(":".join(older))
    except ssl.SSLError:
        raise values.UsageError("tls_server_config.cipher_suites: this machine's OpenSSL allows none of them") from None


def _pem(tls: Mapping[str, Any], read: Callable[[str], bytes], kind: str) -> bytes:
    """Return the PEM text of a certificate, key or authority."""
    name: str = tls[f"{kind}_file"]
    if not name:
        return str(tls[kind]).encode("ascii", "replace")  # PEM is ASCII; other bytes fail later anyway
    try:
        return read(name)
    except OSError as error:
        raise values.UsageError(
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
        raise values.UsageError(
            f"tls_server_config.cert_file and key_file: {reason}; give a certificate and its key as PEM"
        ) from None
    finally:
        for descriptor in held:
            os.close(descriptor)


def _no_password() -> str:
    """Refuse a key with a password; OpenSSL would ask for it at the terminal."""
    raise values.UsageError("tls_server_config.key_file: the key has a password; give one without")
