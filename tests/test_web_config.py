"""The web configuration file, compared with Debian's node_exporter with the same file, and with a real Prometheus."""

from __future__ import annotations

import errno
import http.client
import json
import os
import re
import socket
import ssl
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from starlette.responses import PlainTextResponse

from conftest import Page, wait_for
from sglang_tuning_exporter.config import files
from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.serve import run
from sglang_tuning_exporter.serve import web_config as module
from sglang_tuning_exporter.serve.guard import MOST_CACHED, Guard, Passwords, credentials
from sglang_tuning_exporter.serve.probe import is_alive
from sglang_tuning_exporter.serve.web_config import (
    CLOSE_SECONDS,
    CURVES,
    HEADERS,
    LOOK_SECONDS,
    SUITES,
    ActiveConfig,
    parse,
)
from web_access import (
    Certificates,
    Ours,
    ask,
    basic,
    certificates,
    hashed,
    limited,
    node_exporter,
    ours,
)

HASH = hashed("right")
PAIR = "cert_file: server.pem, key_file: server.key"
VERIFIED = "client_auth_type: RequireAndVerifyClientCert, client_ca_file: ca.pem"

# Each is a whole file. `{...}` is YAML's own.
FILES = {
    "users": f"basic_auth_users: {{prometheus: '{HASH}'}}",
    "users with odd names": f"basic_auth_users: {{no: '{HASH}', 0123: '{HASH}', 'Žofie': '{HASH}'}}",
    "no users": "basic_auth_users: {}",
    "nothing after users": "basic_auth_users:",
    "a password in clear": "basic_auth_users: {prometheus: secret}",
    "no password": "basic_auth_users: {prometheus: }",
    "a hash cut short": f"basic_auth_users: {{prometheus: '{HASH[:-3]}'}}",
    "a hash of too low a cost": f"basic_auth_users: {{prometheus: '{HASH.replace('$04$', '$03$')}'}}",
    "a hash of too high a cost": f"basic_auth_users: {{prometheus: '{HASH.replace('$04$', '$15$')}'}}",
    "a list of users": "basic_auth_users: [prometheus]",
    "one user twice under a tag": f"basic_auth_users: !users {{prometheus: '{HASH}', prometheus: '{HASH}'}}",
    "an endless interval": "rate_limit: {interval: 9999999999h, burst: 1}",
    "one user twice": f"basic_auth_users: {{prometheus: '{HASH}', prometheus: '{HASH}'}}",
    "a certificate and its key": f"tls_server_config: {{{PAIR}}}",
    "no key": "tls_server_config: {cert_file: server.pem}",
    "no certificate": "tls_server_config: {key_file: server.key}",
    "empty paths": "tls_server_config: {cert_file: '', key_file: ''}",
    "a certificate that is not there": "tls_server_config: {cert_file: absent.pem, key_file: server.key}",
    "a key that is not there": "tls_server_config: {cert_file: server.pem, key_file: absent.key}",
    "another certificate's key": "tls_server_config: {cert_file: server.pem, key_file: friend.key}",
    "a certificate for a key": "tls_server_config: {cert_file: server.pem, key_file: server.pem}",
    "text for a certificate": "tls_server_config: {cert_file: text.pem, key_file: server.key}",
    "clients verified": f"tls_server_config: {{{PAIR}, {VERIFIED}}}",
    "clients verified if they like": f"tls_server_config: {{{PAIR},"
    f" client_auth_type: VerifyClientCertIfGiven, client_ca_file: ca.pem}}",
    "clients not asked": f"tls_server_config: {{{PAIR}, client_auth_type: NoClientCert}}",
    "an authority and nobody asked": f"tls_server_config: {{{PAIR}, client_ca_file: ca.pem}}",
    "an authority that is not there": f"tls_server_config: {{{PAIR}, {VERIFIED.replace('ca.pem', 'absent.pem')}}}",
    "an invented way to ask": f"tls_server_config: {{{PAIR}, client_auth_type: Whatever, client_ca_file: ca.pem}}",
    "TLS 1.3 at least": f"tls_server_config: {{{PAIR}, min_version: TLS13}}",
    "TLS 1.2 at most": f"tls_server_config: {{{PAIR}, max_version: TLS12}}",
    "an invented version": f"tls_server_config: {{{PAIR}, min_version: TLS14}}",
    "a list for a version": f"tls_server_config: {{{PAIR}, min_version: [TLS12]}}",
    "a list for a way to ask": f"tls_server_config: {{{PAIR}, client_auth_type: [NoClientCert]}}",
    "a path of two lines": 'tls_server_config: {cert_file: "server.pem\\n", key_file: server.key}',
    "a version as a figure": f"tls_server_config: {{{PAIR}, min_version: 1.2}}",
    "all suites": f"tls_server_config: {{{PAIR}, cipher_suites: [{', '.join(SUITES)}]}}",
    "an invented suite": f"tls_server_config: {{{PAIR}, cipher_suites: [TLS_WITH_NOTHING]}}",
    "an insecure suite": f"tls_server_config: {{{PAIR}, cipher_suites: [TLS_RSA_WITH_RC4_128_SHA]}}",
    "the client's choice of suites": f"tls_server_config: {{{PAIR}, prefer_server_cipher_suites: false}}",
    "no choice of suites": f"tls_server_config: {{{PAIR}, prefer_server_cipher_suites: perhaps}}",
    **{f"curve {name}": f"tls_server_config: {{{PAIR}, curve_preferences: [{name}]}}" for name in CURVES},
    "an invented curve": f"tls_server_config: {{{PAIR}, curve_preferences: [Curve25]}}",
    "a key of another section": f"tls_server_config: {{{PAIR}, http2: true}}",
    "a list for TLS": "tls_server_config: [server.pem]",
    "HTTP/2 wanted": "http_server_config: {http2: true}",
    "HTTP/2 not wanted": f"tls_server_config: {{{PAIR}}}\nhttp_server_config: {{http2: off}}",
    "HTTP/2 perhaps": "http_server_config: {http2: perhaps}",
    "every header": "http_server_config: {headers: {Content-Security-Policy: x, X-Frame-Options: deny,"
        " X-Content-Type-Options:"
    " nosniff, X-XSS-Protection: '1', Strict-Transport-Security: max-age=9}}",
    "a blank policy": "http_server_config: {headers: {Content-Security-Policy: ''}}",
    "a blank frame option": "http_server_config: {headers: {X-Frame-Options: ''}}",
    "frames by anybody": "http_server_config: {headers: {X-Frame-Options: allowall}}",
    "frames denied loudly": "http_server_config: {headers: {X-Frame-Options: DENY}}",
    "sniffing": "http_server_config: {headers: {X-Content-Type-Options: sniff}}",
    "a header of one's own": "http_server_config: {headers: {Server: mine}}",
    "a header in small letters": "http_server_config: {headers: {x-frame-options: deny}}",
    "an unknown key": "tls_config: {}",
    "a list": "- tls_server_config",
    "a word": "tls_server_config",
    "braces": "{}",
    "not YAML": "basic_auth_users: {",
    # From here on we differ; the tables below say how.
    "nothing": "",
    "a comment": "# soon",
    "TLS 1.0": f"tls_server_config: {{{PAIR}, min_version: TLS10}}",
    "TLS 1.1": f"tls_server_config: {{{PAIR}, min_version: TLS11}}",
    "versions that exclude each other": f"tls_server_config: {{{PAIR}, min_version: TLS13, max_version: TLS12}}",
    "a version without a certificate": "tls_server_config: {min_version: TLS13}",
    "clients verified by everybody's authorities": f"tls_server_config: {{{PAIR},"
    f" client_auth_type: RequireAndVerifyClientCert}}",
    "an authority without a certificate": f"tls_server_config: {{{PAIR}, {VERIFIED.replace('ca.pem', 'text.pem')}}}",
    "clients asked and not verified": f"tls_server_config: {{{PAIR},"
    f" client_auth_type: RequestClientCert, client_ca_file: ca.pem}}",
    "any certificate at all": f"tls_server_config: {{{PAIR},"
    f" client_auth_type: RequireAnyClientCert, client_ca_file: ca.pem}}",
    "several curves": f"tls_server_config: {{{PAIR}, curve_preferences: [X25519, CurveP256]}}",
    "a suite that HTTP/2 lacks": f"tls_server_config: {{{PAIR},"
    f" cipher_suites: [TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384]}}",
    "suites of TLS 1.3 alone": f"tls_server_config: {{{PAIR}, cipher_suites: [TLS_AES_128_GCM_SHA256]}}",
}  # fmt: skip
# node_exporter takes these, and we do not: nothing of them is kept to, or it would let in more than the file seems to.
STRICTER = {
    "nothing", "a comment", "TLS 1.0", "TLS 1.1", "versions that exclude each other", "a version without a certificate",
    "clients verified by everybody's authorities", "an authority without a certificate",
    "clients asked and not verified", "any certificate at all", "several curves", "a hash of too high a cost",
}  # fmt: skip
try:
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).set_ecdh_curve("X25519")
except ssl.SSLError:  # Python 3.10 and Debian 12's 3.11.2
    STRICTER |= {"curve X25519"}
# It refuses these because of HTTP/2, which the exporter does not support.
LOOSER = {"a suite that HTTP/2 lacks", "suites of TLS 1.3 alone"}


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.1)


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    made = certificates(tmp_path_factory.mktemp("certified"))
    (made.directory / "text.pem").write_text("not a certificate\n")
    return made


def accepted(file: Path) -> bool:
    try:
        ActiveConfig(file)
    except UsageError:
        return False
    return True


def test_every_file_is_judged_as_by_node_exporter_but_for_the_named_ones(certified: Certificates) -> None:
    files = {name: certified.write(text, f"{number}.yml") for number, (name, text) in enumerate(FILES.items())}

    def theirs(file: Path) -> bool:
        with node_exporter(file) as running:
            return running.accepted

    with ThreadPoolExecutor(4) as pool:
        judged = dict(zip(files, pool.map(theirs, files.values()), strict=True))
    assert {name for name, valid in judged.items() if valid} == {
        name for name, file in files.items() if accepted(file) and name not in LOOSER
    } | STRICTER
    assert {name for name in LOOSER if judged[name] or not accepted(files[name])} == set()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"tls_server_config: {{{PAIR}, key: x}}", "tls_server_config.key and key_file: give one of them"),
        (f"tls_server_config: {{{PAIR}, client_allowed_sans: [a]}}", "client_allowed_sans: add client_auth_type"),
        ("rate_limit: {interval: 1s}", "rate_limit.burst: missing"),
        ("rate_limit: {interval: soon, burst: 1}", "rate_limit.interval=soon: give a time"),
        ("rate_limit: {interval: 1s, burst: 0}", "rate_limit.burst=0: give a number above 0"),
        ('http_server_config: {headers: {Content-Security-Policy: "a\\r\\nSet-Cookie: b"}}', "one line of plain text"),
        ("basic_auth_users: {'a:b': x}", "with a colon"),
        ("basic_auth_users: {a: '$2b$31$" + "a" * 53 + "'}",
            "basic_auth_users.a: its cost is 31, so that a check takes"),
        ("? [a, b]\n: c", "give a plain word as a key"),
        ('"a\\nb": c\n"a\\nb": d', "a b: it stands there twice"),
        ('"\\UFFFFFFFF": c', "not YAML"),
        ("!!map [[a, b]]", "give a mapping"),
        ("a: &a [*a]", "not YAML"),
        ("\x00", "not YAML"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_file_is_one_sentence_with_its_remedy(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)) as refused:
        parse(text)
    assert "\n" not in str(refused.value)


SECRET = "{}"
MISPLACED = (
    f"basic_auth_users: {{me: {SECRET}: {SECRET}}}",
    f"basic_auth_users: [{SECRET}",
    f'basic_auth_users:\n  me: {SECRET}"\n',
    f"basic_auth_users: {{{SECRET}: x}}",
    f"basic_auth_users: {{prometheus: x, prometheus: {SECRET}}}",
    f"{SECRET}: x",
    f"{{{SECRET}: x, {SECRET}: y}}",
    f"http_server_config: {{http2: {SECRET}}}",
    f"http_server_config: {{headers: {{X-Frame-Options: {SECRET}}}}}",
    f"tls_server_config: {{cipher_suites: [{SECRET}]}}",
    f"tls_server_config: {{min_version: {SECRET}}}",
    f"tls_server_config: {{cert_file: {SECRET}, key_file: {SECRET}}}",
    f"rate_limit: {{interval: {SECRET}, burst: 1}}",
)


def test_a_time_without_digits_is_refused(certified: Certificates) -> None:
    with pytest.raises(UsageError, match="give a time such as 1s"):
        ActiveConfig(certified.write('rate_limit: {interval: "a.s", burst: 1}', "time.yml"))


@pytest.mark.parametrize("text", MISPLACED)
def test_a_hash_or_a_key_in_a_wrong_place_is_not_repeated(text: str, certified: Certificates) -> None:
    pem = (certified.directory / "server.key").read_text()
    first_line = pem.splitlines()[1]
    for secret, piece in ((HASH, HASH[:30]), (pem, first_line), (first_line, first_line)):
        with pytest.raises(UsageError) as error:
            ActiveConfig(certified.write(text.replace(SECRET, json.dumps(secret)), "misplaced.yml"))
        assert piece not in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "basic_auth_users: {me: canary}",
        "basic_auth_users: {me: canary: canary}",
        "basic_auth_users: [canary",
        "basic_auth_users:\n  me: 'canary\n",
        "tls_server_config:\n  cert: 'canary'\n  key: 'canary'",
    ],
)
def test_a_password_in_clear_and_a_key_that_is_none_are_not_repeated(text: str, certified: Certificates) -> None:
    with pytest.raises(UsageError) as error:
        ActiveConfig(certified.write(text, "slip.yml"))
    assert "canary" not in str(error.value)


def test_a_key_with_a_password_is_refused_without_a_prompt_on_the_terminal(certified: Certificates) -> None:
    subprocess.run(
        ["openssl", "pkey", "-aes128", "-passout", "pass:word", "-in", "server.key", "-out", "locked.key"],
        cwd=certified.directory, check=True, capture_output=True,
    )  # fmt: skip
    file = certified.write("tls_server_config: {cert_file: server.pem, key_file: locked.key}", "locked.yml")
    with pytest.raises(UsageError, match="the key has a password"):
        ActiveConfig(file)


GUARDED = f"tls_server_config: {{{PAIR}}}\nbasic_auth_users: {{prometheus: '{HASH}', other: '{hashed('its own')}'}}\n"


def test_the_same_requests_are_let_in_and_turned_away_as_by_node_exporter(certified: Certificates) -> None:
    file = certified.write(GUARDED)
    requests_made = {
        "nobody": None,
        "right": basic("prometheus", "right"),
        "right again": basic("prometheus", "right"),
        "wrong": basic("prometheus", "wrong"),
        "another's": basic("prometheus", "its own"),
        "unknown": basic("nobody", "right"),
        "no name": basic("", "right"),
        "no password": basic("prometheus", ""),
        "other letters": basic("Prometheus", "right"),
        "small scheme": basic("prometheus", "right").replace("Basic", "basic"),
        "another scheme": basic("prometheus", "right").replace("Basic", "Bearer"),
        "no colon": "Basic cHJvbWV0aGV1cw==",
        "not base64": "Basic %%%",
        "no credentials": "Basic",
        "long": basic("prometheus", "right" * 1000),
        "not UTF-8": "Basic /////w==",
        "a NUL": basic("prometheus", "right\x00"),
        "a space before": " " + basic("prometheus", "right"),
    }
    with ours(file) as exporter, node_exporter(file) as theirs:
        assert exporter.url.startswith("https://")
        client = certified.client()
        for name, authorization in requests_made.items():
            expected = ask(theirs.url, client, authorization, "/").status
            assert expected in {200, 401}
            for path in ("/metrics", "/-/healthy", "/absent"):
                met = ask(exporter.url, client, authorization, path).status
                assert (met == 401) == (expected == 401), f"{name} at {path}"
                assert (expected == 200) == (name in {"right", "right again", "small scheme", "a space before"}), name
        refused = ask(exporter.url, certified.client())
        assert refused.header("WWW-Authenticate")[0].startswith("Basic ")
        assert ask(exporter.url.replace("https", "http")).status is None, "it spoke without TLS"


VERSIONS = [("TLSv1", "TLSv1_1"), ("TLSv1_2", "TLSv1_2"), ("TLSv1_3", "TLSv1_3"), ("TLSv1_2", "TLSv1_3")]
ONE_SUITE = "cipher_suites: [TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256]"


@pytest.mark.parametrize(
    "settings",
    [
        "",
        "min_version: TLS13",
        "max_version: TLS12",
        f"max_version: TLS12, {ONE_SUITE}",
        "curve_preferences: [CurveP384]",
    ],
)
def test_the_same_versions_and_suites_are_agreed_on_as_by_node_exporter(settings: str, certified: Certificates) -> None:
    file = certified.write(f"tls_server_config: {{{PAIR}, {settings}}}", "versions.yml")
    with ours(file) as exporter, node_exporter(file) as theirs:
        for versions in VERSIONS:
            met = ask(exporter.url, limited(certified.client(), *versions))
            expected = ask(theirs.url, limited(certified.client(), *versions))
            assert (met.status, met.version) == (expected.status, expected.version), versions
            assert versions != ("TLSv1", "TLSv1_1") or met.status is None
            if ONE_SUITE in settings:
                assert met.suite == expected.suite


@pytest.mark.parametrize("policy", ["RequireAndVerifyClientCert", "VerifyClientCertIfGiven", "NoClientCert"])
def test_the_same_client_certificates_are_let_in_as_by_node_exporter(policy: str, certified: Certificates) -> None:
    authority = "" if policy == "NoClientCert" else ", client_ca_file: ca.pem"
    file = certified.write(f"tls_server_config: {{{PAIR}, client_auth_type: {policy}{authority}}}", "clients.yml")
    with ours(file) as exporter, node_exporter(file) as theirs:
        met = {name: ask(exporter.url, certified.client(name)).status for name in (None, "friend", "stranger")}
        assert met == {name: ask(theirs.url, certified.client(name)).status for name in met}
        assert met["friend"] == 200
        assert (met[None] == 200) == (policy != "RequireAndVerifyClientCert")
        assert (met["stranger"] == 200) == (policy == "NoClientCert")


@pytest.mark.parametrize("san", ["prometheus.example", "friend@example.org"])
def test_of_verified_clients_those_alone_are_let_in_whose_name_is_listed(san: str, certified: Certificates) -> None:
    file = certified.write(
        f"tls_server_config: {{{PAIR}, {VERIFIED}, client_allowed_sans: [nobody, {san}]}}", "sans.yml"
    )
    with ours(file) as exporter:
        assert ask(exporter.url, certified.client("friend")).status == 200
        for name in ("acquaintance", "stranger", None):
            assert ask(exporter.url, certified.client(name)).status is None
        assert not [line for line in exporter.said if "Traceback" in line]


def test_certificates_may_stand_in_the_file_itself_and_leave_no_file_behind(
    certified: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {"cert": "server.pem", "key": "server.key", "client_ca": "ca.pem"}
    text = {kind: (certified.directory / name).read_text() for kind, name in kinds.items()}
    file = tmp_path / "web.yml"
    file.write_text(yaml.safe_dump({"tls_server_config": {**text, "client_auth_type": "RequireAndVerifyClientCert"}}))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with ours(file) as exporter:
        assert ask(exporter.url, certified.client("friend")).status == 200
        assert ask(exporter.url, certified.client()).status is None
        held = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        assert not [name for name in held if "memfd:" in name]
    assert list(tmp_path.iterdir()) == [file]


def test_the_headers_of_the_file_replace_the_exporters_own_on_every_answer(certified: Certificates) -> None:
    file = certified.write(
        "http_server_config: {headers: {X-Frame-Options: sameorigin, Content-Security-Policy: '',"
        " Strict-Transport-Security: max-age=9}}\n"
        f"basic_auth_users: {{prometheus: '{HASH}'}}", "headers.yml",
    )  # fmt: skip
    with ours(file) as exporter, node_exporter(file) as theirs:
        for authorization, status in ((basic("prometheus", "right"), 200), (None, 401)):
            met, expected = (ask(url, None, authorization) for url in (exporter.url, theirs.url))
            assert met.status == expected.status == status
            for name in ("X-Frame-Options", "Strict-Transport-Security"):
                assert met.header(name) == expected.header(name) != []
            assert met.header("Content-Security-Policy") == []
            assert met.header("X-Content-Type-Options") == ["nosniff"], "of those that the file leaves alone ours stay"
    assert {"X-Frame-Options", "Strict-Transport-Security", "Content-Security-Policy"} < set(HEADERS)


def test_a_new_password_and_a_new_certificate_hold_without_a_restart(tmp_path: Path) -> None:
    own = certificates(tmp_path)
    file = own.write(GUARDED)
    with ours(file) as exporter, node_exporter(file) as theirs:
        before = ask(exporter.url, own.client(), basic("prometheus", "right"))
        assert before.status == 200
        own.issue("server", own.authority, "localhost", "127.0.0.1")
        own.write(GUARDED.replace(HASH, hashed("new")))
        wait_for(lambda: ask(exporter.url, own.client(), basic("prometheus", "new")).status == 200, 8)
        for url in (exporter.url, theirs.url):
            assert ask(url, own.client(), basic("prometheus", "new")).status == 200
            assert ask(url, own.client(), basic("prometheus", "right")).status == 401
            assert ask(url, own.client(), basic("prometheus", "new")).serial not in {before.serial, None, "None"}


def test_a_connection_opened_under_the_old_rules_ends_with_them(tmp_path: Path) -> None:
    own = certificates(tmp_path)
    file = own.write(f"tls_server_config: {{{PAIR}, {VERIFIED}}}")
    with ours(file) as exporter:
        kept = http.client.HTTPSConnection("localhost", exporter.port, context=own.client("friend"), timeout=10)
        kept.request("GET", "/-/healthy")
        assert kept.getresponse().read()
        own.other.cert_pem.write_to_path(own.directory / "new.pem")
        own.write(f"tls_server_config: {{{PAIR}, {VERIFIED.replace('ca.pem', 'new.pem')}}}")
        wait_for(lambda: ask(exporter.url, own.client("stranger")).status == 200, 8)
        assert ask(exporter.url, own.client("friend")).status is None
        assert kept.sock.recv(1) == b"", "whoever was let in by the old authority is still connected"
        kept.close()


def is_up(exporter: Ours, client: ssl.SSLContext) -> bool:
    """Whether its page, over TLS and with the password, says that it has its file."""
    page = Page(ask(exporter.url, client, basic("prometheus", "right"), "/metrics").text)
    return page.value("sglang_tuning_web_config_up") == 1


BROKEN = {
    "not YAML": GUARDED + "rate_limit: {",
    "it is empty": "",
    "unknown key": GUARDED + "typo: 1\n",
    "absent.pem": GUARDED.replace("server.pem", "absent.pem"),
    "restart the exporter to turn TLS on or off": f"basic_auth_users: {{prometheus: '{HASH}'}}",
}


def test_a_file_that_breaks_while_it_runs_opens_nothing_and_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLOSE_SECONDS", 1e6)  # the time that a writer has
    own = certificates(tmp_path)
    file = own.write(GUARDED)
    with ours(file) as exporter:
        assert is_up(exporter, own.client())
        for said, text in BROKEN.items():
            own.write(text)
            wait_for(lambda said=said: any(said in line for line in exporter.said), 8)  # type: ignore[misc]
            assert ask(exporter.url, own.client()).status == 401
            assert ask(exporter.url, own.client(), basic("prometheus", "wrong")).status == 401
            assert not is_up(exporter, own.client())
        file.unlink()
        wait_for(lambda: any("No such file or directory; give a file" in line for line in exporter.said), 8)
        assert ask(exporter.url, own.client()).status == 401
        own.write(GUARDED)
        wait_for(lambda: is_up(exporter, own.client()), 8)
        errors = [line for line in exporter.said if line.startswith("ERROR")]
        assert len(errors) == len(BROKEN) + 1, "each problem is logged once"
        assert HASH not in "".join(exporter.said)


@pytest.mark.parametrize("broken", ["a FIFO", "it is empty", "absent.pem"])
def test_while_the_file_is_of_no_use_nobody_is_let_in_as_with_node_exporter(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.0)
    own = certificates(tmp_path)
    file = own.write(GUARDED)
    with ours(file) as exporter:
        assert ask(exporter.url, own.client(), basic("prometheus", "right")).status == 200
        if broken == "a FIFO":
            os.mkfifo(tmp_path / "fifo")
            (tmp_path / "fifo").rename(file)
        else:
            own.write(BROKEN[broken])
        wait_for(lambda: ask(exporter.url, own.client(), basic("prometheus", "right")).status == 403, 8)
        assert is_alive("127.0.0.1", exporter.port), "its container is not to be restarted"
        file.unlink()
        own.write(GUARDED.replace(HASH, hashed("new")))
        wait_for(lambda: ask(exporter.url, own.client(), basic("prometheus", "new")).status == 200, 8)
        assert ask(exporter.url, own.client(), basic("prometheus", "right")).status == 401


def test_a_file_that_is_late_closes_nothing_for_ten_minutes_and_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(_: Path) -> bytes:
        raise OSError(errno.ETIMEDOUT, "no answer for 2 s")

    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.0)
    own = certificates(tmp_path)
    web_config = ActiveConfig(own.write(GUARDED))
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(files, "read", late)
        assert [web_config.reload() for _ in range(3)] == [False, False, False]
        assert (web_config.is_up, web_config.is_open) == (False, True)
        meanwhile.setattr(files, "KEPT_SECONDS", 0.0)
        assert [web_config.reload() for _ in range(2)] == [False, False]
        assert (web_config.is_up, web_config.is_open) == (False, False)
    assert [web_config.reload() for _ in range(2)] == [False, True]
    assert (web_config.is_up, web_config.is_open) == (True, True)


def test_a_file_that_is_soon_whole_again_closes_nothing(tmp_path: Path) -> None:
    assert (LOOK_SECONDS, CLOSE_SECONDS) == (1.0, 3.0), "as docs/tls.md says"
    own = certificates(tmp_path)
    web_config = ActiveConfig(own.write(GUARDED))
    own.write("")
    assert [web_config.reload(), web_config.reload()] == [False, False]
    assert (web_config.is_up, web_config.is_open) == (False, True)
    own.write(GUARDED)
    assert [web_config.reload(), web_config.reload()] == [False, True]
    assert (web_config.is_up, web_config.is_open) == (True, True)


def test_a_missing_file_is_used_once_it_exists(tmp_path: Path) -> None:
    own = certificates(tmp_path)
    file = own.write(GUARDED)
    web_config = ActiveConfig(file)
    own.write(GUARDED.replace("server.", "later."))
    assert [web_config.reload(), web_config.reload()] == [False, False]
    own.issue("later", own.authority, "localhost")
    assert [web_config.reload() for _ in range(3)] == [False, True, False]


def test_more_requests_than_the_rate_are_answered_429_and_passwords_do_not_matter(certified: Certificates) -> None:
    file = certified.write(
        f"rate_limit: {{interval: 1h, burst: 3}}\nbasic_auth_users: {{prometheus: '{HASH}'}}", "rate.yml"
    )
    with ours(file) as exporter:
        met = [ask(exporter.url, None, basic("prometheus", "right")).status for _ in range(5)]
    assert met == [200, 200, 200, 429, 429]


def test_a_bucket_fills_again_up_to_its_burst_and_is_full_under_a_new_limit() -> None:
    limit = parse("rate_limit: {interval: 500ms, burst: 2}")["rate_limit"]
    other = parse("rate_limit: {interval: 1m30s, burst: 1}")["rate_limit"]
    assert limit is not None
    assert other is not None
    assert (limit, other) == ((0.5, 2), (90.0, 1))
    assert parse("rate_limit: {interval: 0, burst: 2}")["rate_limit"] is None
    bucket = Guard(PlainTextResponse(), None, Counter())
    assert [bucket.take(limit, 0.0) for _ in range(3)] == [True, True, False]
    assert [bucket.take(limit, 0.5), bucket.take(limit, 0.6)] == [True, False]
    assert [bucket.take(limit, 99.0) for _ in range(3)] == [True, True, False]
    assert [bucket.take(other, 99.0), bucket.take(other, 99.0)] == [True, False]


def test_a_right_password_is_remembered_while_its_hash_stays_a_wrong_one_never() -> None:
    passwords, users = Passwords(), {"a": HASH}
    assert not passwords.is_cached(users, "a", b"right")
    assert passwords.verify(users, "a", b"right")
    assert passwords.is_cached(users, "a", b"right")
    assert not passwords.verify(users, "a", b"wrong")
    assert not passwords.is_cached(users, "a", b"wrong")
    assert not passwords.is_cached({"a": hashed("right")}, "a", b"right")
    assert not passwords.is_cached({}, "a", b"right")
    assert credentials(None) is None


def test_no_more_than_a_hundred_passwords_are_remembered_and_none_of_them_in_clear() -> None:
    passwords = Passwords()
    users = {str(number): HASH for number in range(MOST_CACHED + 5)}
    for name in users:
        assert passwords.verify(users, name, b"right")
    remembered = [name for name in users if passwords.is_cached(users, name, b"right")]
    assert remembered == list(users)[5:]
    assert b"right" not in b"".join(passwords._verified)


def test_an_unknown_user_name_costs_as_much_time_as_the_slowest_password() -> None:
    passwords, users = Passwords(), {"a": HASH, "b": hashed("x", 6)}
    assert not passwords.verify(users, "nobody", b"right")
    (stand_in,) = passwords._dummy_hashes.values()
    assert stand_in[:7] == users["b"][:7].encode()
    assert not passwords.verify(users, "nobody", b".")


def test_an_unfinished_handshake_is_ended(certified: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run.HANDSHAKE_SECONDS == 10
    monkeypatch.setattr(run, "HANDSHAKE_SECONDS", 0.2)  # asyncio's own limit is a minute
    with (
        ours(certified.write(GUARDED)) as exporter,
        socket.create_connection(("127.0.0.1", exporter.port), timeout=20) as silent,
    ):
        assert silent.recv(1) == b""
        assert ask(exporter.url, certified.client(), basic("prometheus", "right")).status == 200


@pytest.mark.parametrize(
    "text",
    [
        f"tls_server_config: {{{PAIR}}}",
        f"tls_server_config: {{{PAIR}, {VERIFIED}}}",
        GUARDED,
        f"basic_auth_users: {{a: '{HASH}'}}",
    ],
    ids=["tls", "client certificates", "tls and passwords", "passwords"],
)
def test_the_containers_health_check_works_with_every_web_configuration(text: str, certified: Certificates) -> None:
    with ours(certified.write(text, "probed.yml")) as exporter:
        assert is_alive("127.0.0.1", exporter.port)
    assert not is_alive("127.0.0.1", exporter.port)
