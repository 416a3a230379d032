"""The web configuration file of Prometheus's exporters: its text in, settings out.

The format is that of `docs/web-configuration.md` in prometheus/exporter-toolkit. What its tools refuse is refused here; what they
accept and we could not keep to is refused as well, in one sentence, and nothing is passed over in silence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import yaml

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_Check: TypeAlias = "Callable[[str, Any], Any]"
TLSVersion: TypeAlias = Literal["TLS12", "TLS13"]
ClientAuth: TypeAlias = Literal["NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert"]

# Go's name for a suite of TLS 1.2 and OpenSSL's: those that Go calls secure, and the four with RSA key exchange that it
# called so up to 1.21.
SUITES: Mapping[str, str] = MappingProxyType(
    {
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
)
# Of TLS 1.3, whose suites Go and OpenSSL both offer whatever the list says.
SUITES_OF_TLS13 = frozenset({"TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256"})
CURVES: Mapping[str, str] = MappingProxyType(
    {"CurveP256": "prime256v1", "CurveP384": "secp384r1", "CurveP521": "secp521r1", "X25519": "X25519"}
)
# A header that may be set, and the values it may have where they are a closed list.
HEADERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "Content-Security-Policy": (),
        "X-Frame-Options": ("deny", "sameorigin"),
        "X-Content-Type-Options": ("nosniff",),
        "X-XSS-Protection": (),
        "Strict-Transport-Security": (),
    }
)
_HASH = re.compile(r"\$2[aby]\$(?:0[4-9]|[12][0-9]|3[01])\$[./A-Za-z0-9]{53}")
# A hash or a key that slipped into another place than its own, where a message would show it: in part, too.
_SECRET = re.compile(r"\$2[abxy]?\$[0-9]{2}\$\S*|-----BEGIN.*|[A-Za-z0-9+/=]{60,}", re.DOTALL | re.IGNORECASE)
_DURATION = re.compile(r"(?:[0-9]+(?:\.[0-9]*)?(?:ns|us|µs|ms|s|m|h))+|0")
_PART = re.compile(r"([0-9.]+)(ns|us|µs|ms|s|m|h)")
_LONGEST_SECONDS = 2**63 * 1e-9  # of a duration in Go
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


class Refused(Exception):  # noqa: N818 - what it says of the file
    """The file cannot be kept to; one sentence with the key, the value and the remedy, and without a secret."""


@dataclass(frozen=True, slots=True)
class TLS:
    """`tls_server_config`. A certificate, key or authority is PEM text, or the path of a file as it was written."""

    cert: str = ""
    cert_file: str = ""
    key: str = field(default="", repr=False)
    key_file: str = ""
    client_ca: str = ""
    client_ca_file: str = ""
    client_auth_type: ClientAuth = "NoClientCert"
    client_allowed_sans: tuple[str, ...] = ()
    min_version: TLSVersion = "TLS12"
    max_version: TLSVersion = "TLS13"
    cipher_suites: tuple[str, ...] = ()
    prefer_server_cipher_suites: bool = True
    curve_preferences: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RateLimit:
    """A bucket of `burst` requests that fills by one every `interval` seconds."""

    interval: float
    burst: int


@dataclass(frozen=True, slots=True)
class WebConfig:
    """A whole file; `tls` and `rate_limit` are None where it has none. `users` are names and bcrypt hashes."""

    tls: TLS | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    users: Mapping[str, str] = field(default_factory=dict, repr=False)
    rate_limit: RateLimit | None = None
    http2: bool = False  # whether the file asks for it in so many words


class _Loader(yaml.BaseLoader):
    """Scalars stay the text they are (a user may be called `no` or `0123`), tags mean nothing, and no key stands twice."""


def _content(loader: _Loader, _tag: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return _mapping(loader, node)
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    assert isinstance(node, yaml.ScalarNode)
    return loader.construct_scalar(node)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise Refused(f"line {key_node.start_mark.line + 1}: give a plain word as a key")
        if key in found:
            raise Refused(f"{shown(key)}: it stands there twice; keep one")
        found[key] = loader.construct_object(value_node, deep=True)
    return found


_Loader.add_multi_constructor("", _content)


def shown(word: str) -> str:
    """Give a word of the file as it may stand in a message: one line, not too long, with `…` for a hash or a piece of PEM."""
    return "".join(c if c.isprintable() else " " for c in _SECRET.sub("…", word))[:80]


def parse(text: str) -> WebConfig:
    """Read the text of a web configuration file. Raises `Refused`."""
    try:
        content = yaml.load(text, Loader=_Loader)  # noqa: S506 # nosec B506 # a BaseLoader, which makes nothing but text, lists and mappings
    except yaml.MarkedYAMLError as error:
        # Without the line itself, which PyYAML would show: it may be a password's.
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        raise Refused(f"not YAML{line}; write one 'key: value' on each line") from None
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError):  # as of an escape beyond Unicode
        raise Refused("not YAML; write one 'key: value' on each line") from None
    if content is None or content == "":
        raise Refused("it is empty; write what is to be guarded, or start without it")
    return _whole(content)


def _table(where: str, content: Any, checks: Mapping[str, _Check]) -> dict[str, Any]:
    """Check each key of one mapping; what is left blank counts as not written. `where` ends in a dot, or is empty."""
    if _is_blank(content):
        return {}
    if not isinstance(content, dict):
        raise Refused(f"{where.rstrip('.') or 'it'}: give a mapping of keys to values")
    for key in content:
        if key not in checks:
            raise Refused(f"{where}{shown(key)}: unknown key; known are {', '.join(sorted(checks))}")
    return {key: checks[key](where + key, value) for key, value in content.items() if not _is_blank(value)}


def _is_blank(value: Any) -> bool:
    return isinstance(value, str) and value in {"", "~", "null", "Null", "NULL"}


def _word(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise Refused(f"{key}: give one word, not a list or a mapping")
    return value


def _path(key: str, value: Any) -> str:
    word = _word(key, value)
    if "-----BEGIN" in word or "\n" in word:
        raise Refused(f"{key}: give the path of a file; a PEM text belongs under {key.rpartition('.')[2][:-5]}")
    return word


def _words(key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise Refused(f"{key}: give a list")
    return tuple(_word(key, item) for item in value)


def _one_of(*known: str) -> _Check:
    def check(key: str, value: Any) -> str:
        word = _word(key, value)
        if word not in known:
            raise Refused(f"{key}={shown(word)}: give one of {', '.join(known)}")
        return word

    return check


def _switch(key: str, value: Any) -> bool:
    word = _word(key, value).lower()
    if word not in {"true", "yes", "y", "on", "false", "no", "n", "off"}:
        raise Refused(f"{key}={shown(word)}: give true or false")
    return word in {"true", "yes", "y", "on"}


def _version(key: str, value: Any) -> str:
    if _word(key, value) in {"TLS10", "TLS11"}:
        raise Refused(f"{key}={value}: TLS below 1.2 is broken and not spoken here; give TLS12 or TLS13")
    return str(_one_of("TLS12", "TLS13")(key, value))


def _client_auth(key: str, value: Any) -> str:
    if _word(key, value) in {"RequestClientCert", "RequireClientCert", "RequireAnyClientCert"}:
        raise Refused(f"{key}={value}: it asks for a certificate and verifies nothing; give RequireAndVerifyClientCert")
    return str(_one_of("NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert")(key, value))


def _suites(key: str, value: Any) -> tuple[str, ...]:
    names = _words(key, value)
    for name in names:
        if name not in SUITES and name not in SUITES_OF_TLS13:
            raise Refused(f"{key}={shown(name)}: unknown or insecure; give names of Go's tls.CipherSuites()")
    return names


def _curves(key: str, value: Any) -> tuple[str, ...]:
    names = _words(key, value)
    for name in names:
        if name not in CURVES:
            raise Refused(f"{key}={shown(name)}: give one of {', '.join(CURVES)}")
    if len(names) > 1:  # Python's ssl has no call for a list before 3.15
        raise Refused(f"{key}: only one curve can be kept to; give one, or leave the key out for OpenSSL's choice")
    return names


def _headers(key: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise Refused(f"{key}: give a mapping of headers to values")
    for name, content in value.items():
        if name not in HEADERS:
            raise Refused(f"{key}.{shown(name)}: it cannot be set; those that can are {', '.join(HEADERS)}")
        word, allowed = _word(f"{key}.{name}", content), HEADERS[name]
        if allowed and word not in allowed:
            raise Refused(f"{key}.{name}={shown(word)}: give {' or '.join(allowed)}")
        if not (word.isascii() and (word.isprintable() or not word)):
            raise Refused(f"{key}.{name}: give one line of plain text")
    return dict(value)


def _users(key: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise Refused(f"{key}: give a mapping of names to bcrypt hashes")
    for name, hashed in value.items():
        if ":" in name:
            raise Refused(f"{key}.{shown(name)}: no browser or scraper can send a name with a colon; give another")
        if not (isinstance(hashed, str) and _HASH.fullmatch(hashed)):
            raise Refused(f"{key}.{shown(name)}: give a bcrypt hash, such as `htpasswd -nBC 10 {shown(name)}` prints")
    return dict(value)


def _duration(key: str, value: Any) -> float:
    word = _word(key, value)
    if not _DURATION.fullmatch(word):
        raise Refused(f"{key}={shown(word)}: give a time such as 1s or 250ms")
    seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(word))
    if seconds >= _LONGEST_SECONDS:
        raise Refused(f"{key}={shown(word)}: too long; give a time such as 1s or 250ms")
    return seconds


def _count(key: str, value: Any) -> int:
    word = _word(key, value)
    if not re.fullmatch(r"[1-9][0-9]{0,8}", word):
        raise Refused(f"{key}={shown(word)}: give a number above 0")
    return int(word)


_TLS: Mapping[str, _Check] = {
    "cert": _word,
    "cert_file": _path,
    "key": _word,
    "key_file": _path,
    "client_ca": _word,
    "client_ca_file": _path,
    "client_auth_type": _client_auth,
    "client_allowed_sans": _words,
    "min_version": _version,
    "max_version": _version,
    "cipher_suites": _suites,
    "prefer_server_cipher_suites": _switch,
    "curve_preferences": _curves,
}


def _tls(key: str, value: Any) -> TLS | None:
    given = _table(f"{key}.", value, _TLS)
    tls = TLS(**given)
    if not given:
        return None
    for kind in ("cert", "key", "client_ca"):
        if kind in given and f"{kind}_file" in given:
            raise Refused(f"{key}.{kind} and {kind}_file: give one of them")
    for kind in ("cert", "key"):
        if kind not in given and f"{kind}_file" not in given:
            raise Refused(f"{key}.{kind}_file: missing; name the PEM file")
    _check_clients(key, tls)
    if tls.min_version > tls.max_version:
        raise Refused(f"{key}.min_version={tls.min_version}: it is above max_version; nobody could connect")
    if tls.cipher_suites and SUITES_OF_TLS13.issuperset(tls.cipher_suites) and tls.max_version == "TLS12":
        raise Refused(f"{key}.cipher_suites: all are of TLS 1.3, and max_version is TLS12")
    return tls


def _check_clients(key: str, tls: TLS) -> None:
    has_authority, asks = bool(tls.client_ca or tls.client_ca_file), tls.client_auth_type != "NoClientCert"
    if has_authority and not asks:
        raise Refused(f"{key}.client_ca_file: add client_auth_type: RequireAndVerifyClientCert")
    if asks and not has_authority:
        # Go would trust every authority of the system: anybody with a certificate of a public one would be let in.
        raise Refused(f"{key}.client_ca_file: missing; name the authority whose clients are let in")
    if tls.client_allowed_sans and tls.client_auth_type != "RequireAndVerifyClientCert":
        raise Refused(f"{key}.client_allowed_sans: add client_auth_type: RequireAndVerifyClientCert")


def _http(key: str, value: Any) -> dict[str, Any]:
    return _table(f"{key}.", value, {"http2": _switch, "headers": _headers})


def _rate_limit(key: str, value: Any) -> RateLimit | None:
    given = _table(f"{key}.", value, {"interval": _duration, "burst": _count})
    if not given.get("interval"):
        return None
    if "burst" not in given:
        raise Refused(f"{key}.burst: missing; say how many requests may come at once, such as 10")
    return RateLimit(**given)


def _whole(content: Any) -> WebConfig:
    given = _table(
        "",
        content,
        {"tls_server_config": _tls, "http_server_config": _http, "basic_auth_users": _users, "rate_limit": _rate_limit},
    )
    http = given.get("http_server_config", {})
    return WebConfig(
        tls=given.get("tls_server_config"),
        headers=http.get("headers", {}),
        users=given.get("basic_auth_users", {}),
        rate_limit=given.get("rate_limit"),
        http2=http.get("http2", False),
    )
