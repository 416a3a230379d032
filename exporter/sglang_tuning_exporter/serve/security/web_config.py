"""Parser of the web configuration file of Prometheus's exporters.

The format is that of `docs/web-configuration.md` in prometheus/exporter-toolkit. What its tools refuse is refused here; settings that
they accept and this exporter cannot apply are refused too, in one sentence. Nothing is ignored silently.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Mapping
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import ErrorDetails

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
_BLANK = frozenset({"", "~", "null", "Null", "NULL"})
_SWITCH = {**dict.fromkeys(("true", "yes", "y", "on"), True), **dict.fromkeys(("false", "no", "n", "off"), False)}
_UNSAFE = {
    **dict.fromkeys(("TLS10", "TLS11"), "TLS below 1.2 is broken and not supported; give TLS12 or TLS13"),
    **dict.fromkeys(
        ("RequestClientCert", "RequireClientCert", "RequireAnyClientCert"),
        "it asks for a certificate and verifies nothing; give RequireAndVerifyClientCert",
    ),
}
# Remedy for each kind of Pydantic error. A validator's own `ValueError` has the text after the key's name.
_REMEDIES = {
    "string_type": "give one word, not a list or a mapping",
    "string_unicode": "give plain text",
    "tuple_type": "give a list",
    "dict_type": "give a mapping of keys to values",
    "model_type": "give a mapping of keys to values",
}


class WebConfigError(Exception):
    """The file cannot be applied: one sentence with key, value and remedy, without secrets."""


def redacted(word: str) -> str:
    """Return a word of the file for a message: one line, shortened, with `…` for a hash or PEM text."""
    return "".join(c if c.isprintable() else " " for c in _SECRET.sub("…", word))[:80]


def _is_text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f": {_REMEDIES['string_type']}")  # noqa: TRY004 - Pydantic does not turn a TypeError into a validation error
    return value


def _switch(value: Any) -> bool:
    try:
        return _SWITCH[_is_text(value).lower()]
    except KeyError:
        raise ValueError(f"={redacted(value)}: give true or false") from None


def _duration(value: Any) -> float:
    seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(_is_text(value)))
    if not _DURATION.fullmatch(value):
        raise ValueError(f"={redacted(value)}: give a time such as 1s or 250ms")
    if seconds >= _LONGEST_SECONDS:
        raise ValueError(f"={redacted(value)}: too long; give a time such as 1s or 250ms")
    return seconds


def _count(value: Any) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,8}", _is_text(value)):
        raise ValueError(f"={redacted(value)}: give a number above 0")
    return int(value)


def _safe(value: Any) -> Any:
    if isinstance(value, str) and value in _UNSAFE:
        raise ValueError(f"={value}: {_UNSAFE[value]}")
    return value


def _path(word: str, info: ValidationInfo) -> str:
    if "-----BEGIN" in word or "\n" in word:
        kind = str(info.field_name).removesuffix("_file")
        raise ValueError(f": give the path of a file; a PEM text belongs under {kind}")
    return word


def _each_of(known: Collection[str], remedy: str) -> AfterValidator:
    def check(names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in known:
                raise ValueError(f"={redacted(name)}: {remedy}")
        return names

    return AfterValidator(check)


def _one_curve(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(names) > 1:  # Python's ssl has no call for a list before 3.15
        raise ValueError(": only one curve can be set; give one, or leave the key out for OpenSSL's choice")
    return names


def _headers(given: dict[str, Any]) -> dict[str, str]:
    for name, value in given.items():
        if name not in HEADERS:
            raise ValueError(f".{redacted(name)}: it cannot be set; those that can are {', '.join(HEADERS)}")
        if not isinstance(value, str):
            raise ValueError(f".{name}: {_REMEDIES['string_type']}")  # noqa: TRY004 - as above
        if HEADERS[name] and value not in HEADERS[name]:
            raise ValueError(f".{name}={redacted(value)}: give {' or '.join(HEADERS[name])}")
        if not (value.isascii() and (value.isprintable() or not value)):
            raise ValueError(f".{name}: give one line of plain text")
    return given


def _users(given: dict[str, Any]) -> dict[str, str]:
    for name, hashed in given.items():
        if ":" in name:
            raise ValueError(f".{redacted(name)}: a name with a colon cannot be sent; give another")
        match = _HASH.fullmatch(hashed) if isinstance(hashed, str) else None
        remedy = f"give a bcrypt hash, such as `htpasswd -nBC 10 {redacted(name)}` prints"
        if match is None:
            raise ValueError(f".{redacted(name)}: {remedy}")
        if int(match[1]) > MOST_COST:
            raise ValueError(
                f".{redacted(name)}: its cost is {match[1]}, so that a check takes seconds to days; {remedy}, of {MOST_COST} at most"
            )
    return given


Path = Annotated[str, AfterValidator(_path)]
Switch = Annotated[bool, BeforeValidator(_switch)]


class _Section(BaseModel):
    """One mapping of the file. Unknown keys are errors; an empty value counts as not set."""

    model_config = ConfigDict(frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, content: Any) -> Any:
        if isinstance(content, str) and content in _BLANK:
            return {}
        if not isinstance(content, dict):
            return content
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for key in content:
            if key not in known:
                raise ValueError(f".{redacted(key)}: unknown key; known are {', '.join(sorted(known))}")
        return {key: value for key, value in content.items() if not (isinstance(value, str) and value in _BLANK)}


class TLS(_Section):
    """`tls_server_config`. A certificate, key or authority is PEM text, or the path of a file as it was written."""

    cert: str = ""
    cert_file: Path = ""
    key: str = Field("", repr=False)
    key_file: Path = ""
    client_ca: str = ""
    client_ca_file: Path = ""
    client_auth_type: Annotated[
        Literal["NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert"], BeforeValidator(_safe)
    ] = "NoClientCert"
    client_allowed_sans: tuple[str, ...] = ()
    min_version: Annotated[Literal["TLS12", "TLS13"], BeforeValidator(_safe)] = "TLS12"
    max_version: Annotated[Literal["TLS12", "TLS13"], BeforeValidator(_safe)] = "TLS13"
    cipher_suites: Annotated[
        tuple[str, ...],
        _each_of({*SUITES, *SUITES_OF_TLS13}, "unknown or insecure; give names of Go's tls.CipherSuites()"),
    ] = ()
    prefer_server_cipher_suites: Switch = True
    curve_preferences: Annotated[
        tuple[str, ...], _each_of(CURVES, f"give one of {', '.join(CURVES)}"), AfterValidator(_one_curve)
    ] = ()

    @model_validator(mode="after")
    def _check_together(self) -> TLS:
        given = self.model_fields_set
        for kind in ("cert", "key", "client_ca"):
            if {kind, f"{kind}_file"} <= given:
                raise ValueError(f".{kind} and {kind}_file: give one of them")
        for kind in ("cert", "key"):
            if given and not {kind, f"{kind}_file"} & given:
                raise ValueError(f".{kind}_file: missing; name the PEM file")
        has_authority, asks = bool(self.client_ca or self.client_ca_file), self.client_auth_type != "NoClientCert"
        if has_authority and not asks:
            raise ValueError(".client_ca_file: add client_auth_type: RequireAndVerifyClientCert")
        if asks and not has_authority:
            # Go would trust every authority of the system: anybody with a certificate of a public one would be let in.
            raise ValueError(".client_ca_file: missing; name the authority whose clients are let in")
        if self.client_allowed_sans and self.client_auth_type != "RequireAndVerifyClientCert":
            raise ValueError(".client_allowed_sans: add client_auth_type: RequireAndVerifyClientCert")
        if self.min_version > self.max_version:
            raise ValueError(f".min_version={self.min_version}: it is above max_version; nobody could connect")
        if self.cipher_suites and SUITES_OF_TLS13.issuperset(self.cipher_suites) and self.max_version == "TLS12":
            raise ValueError(".cipher_suites: all are of TLS 1.3, and max_version is TLS12")
        return self


class HTTP(_Section):
    """`http_server_config`; `http2` is whether the file asks for it in so many words."""

    http2: Switch = False
    headers: Annotated[dict[str, Any], AfterValidator(_headers)] = {}


class RateLimit(_Section):
    """A bucket of `burst` requests that fills by one every `interval` seconds; without an interval, no limit."""

    interval: Annotated[float, BeforeValidator(_duration)] = 0.0
    burst: Annotated[int, BeforeValidator(_count)] = 0

    @model_validator(mode="after")
    def _check_together(self) -> RateLimit:
        if self.interval and not self.burst:
            raise ValueError(".burst: missing; say how many requests may come at once, such as 10")
        return self


class WebConfig(_Section):
    """A whole file; `tls` and `rate_limit` are None where it has none. `users` are names and bcrypt hashes."""

    tls: Annotated[TLS | None, AfterValidator(lambda tls: tls if tls and tls.model_fields_set else None)] = Field(
        None, alias="tls_server_config"
    )
    http: HTTP = Field(HTTP(), alias="http_server_config")
    users: Annotated[dict[str, Any], AfterValidator(_users)] = Field({}, alias="basic_auth_users", repr=False)
    rate_limit: Annotated[RateLimit | None, AfterValidator(lambda rate: rate if rate and rate.interval else None)] = (
        None
    )


class _Loader(yaml.BaseLoader):
    """Scalars stay the text they are (a user may be called `no` or `0123`), tags mean nothing, and no key stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002 - the base class's signature
        found: dict[Hashable, Any] = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep)
            if not isinstance(key, str):
                raise WebConfigError(f"line {key_node.start_mark.line + 1}: give a plain word as a key")
            if key in found:
                raise WebConfigError(f"{redacted(key)}: it stands there twice; keep one")
            found[key] = self.construct_object(value_node, deep)
        return found


def parse(text: str) -> WebConfig:
    """Read the text of a web configuration file. Raises `WebConfigError`."""
    try:
        content = yaml.load(text, Loader=_Loader)  # noqa: S506 # nosec B506 # a BaseLoader, which makes nothing but text, lists and mappings
    except yaml.MarkedYAMLError as error:
        # Without the line itself, which PyYAML would show: it may be a password's.
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        raise WebConfigError(f"not YAML{line}; write one 'key: value' on each line") from None
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError):  # as of an escape beyond Unicode
        raise WebConfigError("not YAML; write one 'key: value' on each line") from None
    if content is None or content == "":
        raise WebConfigError("it is empty; write what is to be guarded, or start without it")
    try:
        return WebConfig.model_validate(content)
    except ValidationError as error:
        raise WebConfigError(_sentence(error.errors(include_url=False)[0])) from None


def _sentence(error: ErrorDetails) -> str:
    """The key, its value and the remedy, of what Pydantic found first."""
    place = ".".join(redacted(part) for part in error["loc"] if isinstance(part, str))
    context = error.get("ctx", {})
    if error["type"] == "value_error":
        return f"{place}{context['error']}".removeprefix(".")
    if error["type"] == "literal_error" and isinstance(error["input"], str):
        return f"{place}={redacted(error['input'])}: give {context['expected'].replace(chr(39), '')}"
    return f"{place or 'it'}: {_REMEDIES.get(error['type'], _REMEDIES['string_type'])}"
