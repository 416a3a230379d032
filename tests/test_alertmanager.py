"""A real Alertmanager with the generated configuration: the text of mails and webhook messages, and which alerts it
inhibits.

Only the addresses (a mail sink and a webhook on loopback) and the waiting times differ from the generated
configuration.
"""

from __future__ import annotations

import email
import email.policy
import json
import re
import shutil
import socketserver
import subprocess
import threading
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta, timezone
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest
import requests
import yaml

from conftest import wait_for
from promtool import fired
from sglang_tuning_exporter.core.diagnoses import BY_ID, EXPORTER
from sglang_tuning_exporter.core.runbooks import BY_ALERT, INHIBITIONS
from sglang_tuning_exporter.mixin import alerts
from sglang_tuning_exporter.recordings.demo import Process, free_port, program
from sglang_tuning_exporter.recordings.notifications import receiver

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from email.message import EmailMessage

LOOPBACK = "127.0.0.1"
MISSING = "is missing: install Alertmanager 0.25 or newer (Debian: apt install prometheus-alertmanager)"
ADVICE = (
    "--schedule-conservativeness 0.1 → 1.3: The KV cache is full. It will not help if the value is already above 1.43."
)
FIGURES = {"advice": ADVICE}
TARGET = 'job="sglang", instance="host:1"'


class MailSink:
    """An SMTP server on loopback that takes every message and keeps it."""

    def __init__(self) -> None:
        sink = self
        self.messages: list[EmailMessage] = []

        class Session(socketserver.StreamRequestHandler):
            timeout = 10

            def handle(self) -> None:
                self.wfile.write(b"220 sink\r\n")
                for line in self.rfile:
                    verb = line.split()[0].upper() if line.split() else b""
                    if verb == b"DATA":
                        self.wfile.write(b"354 go on\r\n")
                        sink.keep(self._body())
                    self.wfile.write(b"221 bye\r\n" if verb == b"QUIT" else b"250 ok\r\n")
                    if verb == b"QUIT":
                        return

            def _body(self) -> bytes:
                lines = []
                for line in self.rfile:
                    if line == b".\r\n":
                        break
                    lines.append(line.removeprefix(b"."))
                return b"".join(lines)

        self._server = socketserver.ThreadingTCPServer((LOOPBACK, 0), Session)
        self._server.daemon_threads = True

    @property
    def address(self) -> str:
        host, port = self._server.server_address[:2]
        return f"{host!s}:{port}"

    def keep(self, body: bytes) -> None:
        self.messages.append(email.message_from_bytes(body, policy=email.policy.default))

    @contextmanager
    def running(self) -> Iterator[None]:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        try:
            yield
        finally:
            self._server.shutdown()
            self._server.server_close()


class Alertmanager:
    """Alertmanager with a mail sink and a webhook, and what has arrived at both."""

    def __init__(self, url: str, mail: MailSink, received: list[Any]) -> None:
        self.url, self.mail, self.received = url, mail, received

    def send(self, *alerts_to_send: dict[str, Any]) -> None:
        answer = requests.post(f"{self.url}/api/v2/alerts", json=list(alerts_to_send), timeout=5)
        assert answer.status_code == 200, answer.text

    def names(self, instance: str) -> list[list[str]]:
        """Give the alert names of every webhook message about a server, in order of arrival."""
        return [
            sorted(alert["labels"]["alertname"] for alert in message["alerts"])
            for message in self.received
            if message["commonLabels"].get("instance") == instance
        ]

    def mails(self, instance: str) -> list[EmailMessage]:
        host = instance.rpartition(":")[0]
        return [mail for mail in self.mail.messages if f"] {host}: " in str(mail["Subject"])]


@cache
def texts() -> dict[str, dict[str, str]]:
    """Give the annotations of every alert as Prometheus renders them, for a server at host:1."""
    series = {
        f'sglang_tuning_{name}{{{TARGET}, diagnosis="{row.id}"}}': (
            f"{4 if (name, row.when.unit) == ('condition', 'per_minute') else figure}x20"
        )
        for row in BY_ALERT.values()
        for name, figure in (("condition", 0.4031), ("alert", 1))
    }
    with TemporaryDirectory() as scratch:
        rules = Path(scratch) / "rules.yml"
        rules.write_text(alerts.files()["alerts/rules/sglang-tuning.rules.yml"])
        names = [name for name, row in BY_ALERT.items() if row not in EXPORTER]
        found = {name: one.annotations for name, [one] in fired(rules, series, names, Path(scratch)).items()}
        written = yaml.safe_load(rules.read_text())["groups"]
    return found | {
        rule["alert"]: rule["annotations"]
        for group in written
        for rule in group["rules"]
        if "alert" in rule and rule["alert"] not in found
    }


def alert(
    name: str, instance: str, annotations: Mapping[str, str] | None = None, *, ended: bool = False
) -> dict[str, Any]:
    """Give an alert as Prometheus posts it."""
    row = BY_ALERT[name]
    now = datetime.now(timezone.utc)
    words = {key: text.replace("host:1:", f"{instance}:") for key, text in texts()[name].items()}
    return {
        "labels": {"alertname": name, "job": "sglang", "instance": instance, "severity": row.severity},
        "annotations": {**words, **(annotations or {})},
        # Alertmanager does not wait for a group's other alerts when the first is older than group_wait.
        "startsAt": (now - timedelta(minutes=2) if ended else now).isoformat(),
        "endsAt": (now + timedelta(minutes=-1 if ended else 5)).isoformat(),
    }


@pytest.fixture(scope="module")
def configuration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the generated configuration and templates to a directory of their own."""
    directory = tmp_path_factory.mktemp("alertmanager")
    for name, text in alerts.files().items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory / "alerts" / "alertmanager.yml"


@contextmanager
def alertmanager(document: Any, directory: Path) -> Iterator[str]:
    """Run an Alertmanager with this configuration; gives its address."""
    path = program("alertmanager")
    if path is None:
        pytest.fail(f"prometheus-alertmanager {MISSING}", pytrace=False)
    (directory / "running.yml").write_text(yaml.safe_dump(document))
    url = f"http://{LOOPBACK}:{free_port()}"
    command = [
        path, f"--config.file={directory / 'running.yml'}", f"--storage.path={directory / 'data'}",
        "--cluster.listen-address=",
        f"--web.listen-address={url.removeprefix('http://')}",
    ]  # fmt: skip
    process = Process("alertmanager", command, directory / "alertmanager.log")
    try:
        process.wait_until_ready(f"{url}/-/ready")
        yield url
    finally:
        process.stop()


@contextmanager
def receiving(*lists: list[Any]) -> Iterator[list[str]]:
    """A webhook for each list, which gets what arrives; gives their addresses."""
    with ExitStack() as stack:
        yield [stack.enter_context(receiver(f"{LOOPBACK}:0", each.append)) for each in lists]


@pytest.fixture(scope="module")
def manager(configuration: Path) -> Iterator[Alertmanager]:
    mail, received = MailSink(), list[Any]()
    document = yaml.safe_load(configuration.read_text())
    document["global"]["smtp_smarthost"] = mail.address
    document["route"] |= {"receiver": "both", "group_wait": "400ms", "group_interval": "1s"}
    by_name = {receiver["name"]: receiver for receiver in document["receivers"]}
    with mail.running(), receiving(received) as [webhook]:
        hook = {**by_name["terminal"]["webhook_configs"][0], "url": webhook}
        both = {"name": "both", "email_configs": by_name["email"]["email_configs"], "webhook_configs": [hook]}
        document["receivers"].append(both)
        with alertmanager(document, configuration.parent) as url:
            yield Alertmanager(url, mail, received)


def test_the_mail_names_the_flag_its_present_value_the_value_to_try_and_the_reason(manager: Alertmanager) -> None:
    manager.send(alert("SGLangRetractingTooOften", "mail:1", FIGURES))
    wait_for(lambda: manager.mails("mail:1"), 20)
    mail = manager.mails("mail:1")[0]
    plain = mail.get_body(("plain",))
    assert plain is not None
    words = plain.get_content()
    assert mail["Subject"] == "[warn] mail: retracting 4.0/min → --schedule-conservativeness 0.1→1.3"
    assert "mail:1: 4.0 retractions/min." in words
    assert f"Change {ADVICE}" in words


def test_the_mails_html_says_the_same_and_escapes_what_comes_from_outside(manager: Alertmanager) -> None:
    hostile = "<script>alert(1)</script>"
    manager.send(alert("SGLangRetractingTooOften", "html:1", {**FIGURES, "description": hostile}))
    wait_for(lambda: manager.mails("html:1"), 20)
    body = manager.mails("html:1")[0].get_body(("html",))
    assert body is not None
    html = body.get_content()
    assert f"<strong>Change {ADVICE}</strong>" in html
    assert "&lt;script&gt;" in html
    assert hostile not in html


def rendered(configuration: Path, template: str, status: str, *shown: Mapping[str, Any]) -> str:
    """Give a template's text for these alerts, as amtool renders it."""
    amtool = shutil.which("amtool")
    assert amtool is not None, f"amtool {MISSING}"
    data = configuration.with_name("shown.json")
    common = {"instance": shown[0]["labels"].get("instance", "")}
    data.write_text(
        json.dumps({"status": status, "alerts": [{**each, "status": status} for each in shown], "commonLabels": common})
    )
    kind = "html" if template == "html" else "text"
    ran = subprocess.run(
        [amtool, "template", "render", f"--template.glob={configuration.parent}/templates/*.tmpl",
            f"--template.data={data}",
         f"--template.type={kind}", f'--template.text={{{{ template "sglang_tuning.{template}" . }}}}'],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


FOREIGN = {"labels": {"alertname": "NodeFilesystemFull"}, "annotations": {}}


@pytest.mark.parametrize("template", ["title", "text", "slack", "html"])
def test_an_alert_of_another_source_gets_no_empty_sentences(configuration: Path, template: str) -> None:
    firing, over = (rendered(configuration, template, status, FOREIGN) for status in ("firing", "resolved"))
    for text in (firing, over):
        assert "NodeFilesystemFull" in text
        for empty in ("Do:", "Change", "costs", "not help", "[]", "()", "<p></p>", "· "):
            assert empty not in text, text
    assert "esolved" in over
    said = {**FOREIGN, "annotations": {"summary": "The disk is full.", "description": "/var has 1 % left."}}
    text = rendered(configuration, template, "firing", said)
    assert "The disk is full." in text
    assert ("/var has 1 % left." in text) == (template != "title")


def test_two_alerts_of_one_server_are_one_message_and_two_servers_are_two(manager: Alertmanager) -> None:
    manager.send(
        alert("SGLangMemoryReserveTooLarge", "group:1"),
        alert("SGLangCudaGraphNotCovering", "group:1"),
        alert("SGLangCudaGraphNotCovering", "group:2"),
    )
    wait_for(lambda: manager.names("group:1") and manager.names("group:2"), 20)
    assert manager.names("group:1") == [["SGLangCudaGraphNotCovering", "SGLangMemoryReserveTooLarge"]]
    assert manager.names("group:2") == [["SGLangCudaGraphNotCovering"]]


EXPORTER_DOWN = "SGLangTuningExporterDown"
PAIRS = [
    (cause, name) for of, causes, held in INHIBITIONS if of in {"target", "server"} for cause in causes for name in held
]


def test_alerts_of_hours_and_of_a_dead_exporters_server_are_held_back(manager: Alertmanager) -> None:
    instances = {f"cause:{number}": pair for number, pair in enumerate(PAIRS)}
    manager.send(*[alert(name, instance) for instance, pair in instances.items() for name in pair])
    wait_for(lambda: all(manager.names(instance) for instance in instances), 20)
    assert {instance: manager.names(instance) for instance in instances} == {
        instance: [[cause]] for instance, (cause, _) in instances.items()
    }
    assert {name for cause, name in PAIRS if cause == EXPORTER_DOWN} == set(BY_ALERT) - {EXPORTER_DOWN}


def of_fleet(instance: str, diagnosis: str, **labels: str) -> dict[str, Any]:
    """Give an alert of one server of a fleet, with its diagnosis as Prometheus has it."""
    one = alert(BY_ID[diagnosis].alert, instance)
    one["labels"] |= {"diagnosis": diagnosis, **labels}
    return one


def test_one_message_stands_for_many_servers_with_the_same_diagnosis(manager: Alertmanager) -> None:
    many = alert("SGLangManyServers", "")
    many["labels"] = {
        "alertname": "SGLangManyServers",
        "job": "big",
        "diagnosis": "queue_too_long",
        "severity": "warning",
    }
    held = [of_fleet(f"held:{number}", "queue_too_long", job="big") for number in range(4)]
    sent = {
        "free:1": of_fleet("free:1", "retracting_too_often", job="big"),  # of another diagnosis
        "free:2": of_fleet("free:2", "queue_too_long", job="small"),  # of another pool
        "free:3": of_fleet("free:3", "queue_too_long", job="big", cluster="b"),
    }
    manager.send(many, *held, *sent.values())
    wait_for(lambda: all(manager.names(instance) for instance in sent), 20)
    alerts_of = [[each["labels"]["alertname"] for each in message["alerts"]] for message in manager.received]
    assert alerts_of.count(["SGLangManyServers"]) == 1
    assert not any(manager.names(each["labels"]["instance"]) for each in held)


def test_two_servers_of_one_exporter_have_a_message_each_unless_it_is_dead(
    manager: Alertmanager,
) -> None:
    manager.send(*[of_fleet("both:9741", "queue_too_long", server=name) for name in ("chat", "code")])
    wait_for(lambda: len(manager.names("both:9741")) > 1, 20)
    assert manager.names("both:9741") == [["SGLangQueueTooLong"]] * 2
    dead = [of_fleet("dead:9741", "queue_too_long", server=name) for name in ("chat", "code")]
    manager.send(alert(EXPORTER_DOWN, "dead:9741"), *dead)
    wait_for(lambda: manager.names("dead:9741"), 20)
    assert manager.names("dead:9741") == [[EXPORTER_DOWN]]


def test_of_alerts_sent_together_the_most_severe_comes_first(manager: Alertmanager) -> None:
    manager.send(
        alert("SGLangInterTokenLatencyBurningFast", "order:1"), alert("SGLangRetractingTooOften", "order:1", FIGURES)
    )
    wait_for(lambda: manager.mails("order:1"), 20)
    [mail] = manager.mails("order:1")
    assert str(mail["Subject"]).startswith("[crit] order: ITL too long for ")
    assert str(mail["Subject"]).endswith("(1 of 2 alerts)")
    body = mail.get_body(("plain",))
    assert body is not None
    severities = re.findall(r"^\[(\w+)\] ", body.get_content(), re.MULTILINE)
    assert severities == ["critical", "warning"]
