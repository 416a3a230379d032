"""The receivers of deploy/alertmanager.example.yml: what a real Alertmanager sends to Slack, PagerDuty, a mailbox and a
webhook.

Only the addresses differ from the example, and the waiting times.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from conftest import wait_for
from test_alertmanager import ADVICE, Alertmanager, MailSink, alert, alertmanager, receiving

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "deploy" / "alertmanager.example.yml"
DOCUMENT: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
RUNBOOK = "http://gpu1:9741/runbooks/SGLangRetractingTooOften"
TITLE = "[warn] gpu1: retracting 4.0/min → --schedule-conservativeness 0.1→1.3"


class Sinks:
    """What has arrived, by receiver; and the Alertmanager that sends it."""

    def __init__(self, manager: Alertmanager, received: dict[str, list[Any]]) -> None:
        self.manager, self.received = manager, received

    def last(self, name: str, number: int) -> Any:
        wait_for(lambda: len(self.received[name]) >= number, 20)
        return self.received[name][number - 1]


@contextmanager
def sending(directory: Path) -> Iterator[Sinks]:
    document = yaml.safe_load(EXAMPLE.read_text())
    received: dict[str, list[Any]] = {name: [] for name in ("slack", "pagerduty", "webhook", "email")}
    by_name = {each["name"]: each for each in document["receivers"]}
    mail = MailSink()
    mail.messages = received["email"]
    hooks = ("slack", "pagerduty", "webhook")
    with mail.running(), receiving(*(received[name] for name in hooks)) as [slack, pagerduty, webhook]:
        (directory / "secret").write_text("a" * 32)
        (directory / "slack").write_text(slack)
        by_name["slack"]["slack_configs"][0]["api_url_file"] = str(directory / "slack")
        by_name["pagerduty"]["pagerduty_configs"][0] |= {
            "routing_key_file": str(directory / "secret"),
            "url": pagerduty,
        }
        by_name["webhook"]["webhook_configs"][0] |= {"url": webhook}
        del by_name["webhook"]["webhook_configs"][0]["http_config"]
        config = by_name["email"]["email_configs"][0]
        for key in ("auth_username", "auth_password_file"):
            del config[key]
        config |= {"smarthost": mail.address, "require_tls": False}
        document["templates"] = [str(ROOT / "alerts" / "templates" / "*.tmpl")]
        routes = [{"receiver": name, "continue": True} for name in received]
        document["route"] |= {"group_wait": "1s", "group_interval": "1s", "routes": routes}
        with alertmanager(document, directory) as url:
            yield Sinks(Alertmanager(url, mail, []), received)


@pytest.fixture(scope="module")
def sinks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sinks]:
    """Send one alert to all receivers, and then its end."""
    with sending(tmp_path_factory.mktemp("receivers")) as found:
        words = {"advice": ADVICE, "runbook_url": RUNBOOK}
        name = "SGLangRetractingTooOften"
        found.manager.send(alert(name, "gpu1:9741", words))
        for receiver in found.received:
            found.last(receiver, 1)
        found.manager.send(alert(name, "gpu1:9741", words, ended=True))
        yield found


def test_slack_gets_title_colour_link_and_advice(sinks: Sinks) -> None:
    [attachment] = sinks.last("slack", 1)["attachments"]
    assert (attachment["title"], attachment["color"], attachment["title_link"]) == (TITLE, "warning", RUNBOOK)
    assert attachment["fallback"] == TITLE
    assert f"Change {ADVICE}" in attachment["text"]


def test_pagerduty_gets_title_severity_link_and_advice(sinks: Sinks) -> None:
    event = sinks.last("pagerduty", 1)
    assert (event["event_action"], event["payload"]["summary"]) == ("trigger", TITLE)
    assert event["payload"]["severity"] == "warning"
    assert [link["href"] for link in event["links"]] == [RUNBOOK]
    assert f"Change {ADVICE}" in event["payload"]["custom_details"]["what"]


def test_a_webhook_gets_every_text_as_an_annotation(sinks: Sinks) -> None:
    [sent] = sinks.last("webhook", 1)["alerts"]
    assert {"title", "summary", "past", "description", "advice", "runbook_url"} == set(sent["annotations"])


def test_what_is_over_is_said_in_the_past_everywhere(sinks: Sinks) -> None:
    past = "[resolved] SGLang retracted running requests: the KV cache was full. It lasted "
    [attachment] = sinks.last("slack", 2)["attachments"]
    assert attachment["color"] == "good"
    assert attachment["text"].strip().startswith(past)
    assert sinks.last("email", 2).get_body(("plain",)).get_content().strip().startswith(past)
    assert sinks.last("pagerduty", 2)["event_action"] == "resolve"
    assert attachment["title"].startswith("[resolved] gpu1: retracting")


def test_the_example_has_grouping_and_inhibition_of_the_generated_configuration() -> None:
    generated = yaml.safe_load((ROOT / "alerts" / "alertmanager.yml").read_text())
    assert DOCUMENT["inhibit_rules"] == generated["inhibit_rules"]
    assert DOCUMENT["route"]["group_by"] == generated["route"]["group_by"]


HOSTILE = "<!channel> <http://evil.example/login|Open Grafana> & <script>alert(1)</script>"


def hostile() -> dict[str, Any]:
    """Give an alert whose annotations and labels are text of others."""
    words = dict.fromkeys(("title", "summary", "past", "description"), f"zq {HOSTILE}\r\nBcc: all@example.com")
    links = {"runbook_url": "http://gpu/a?b=1&c=2|<!channel>", "dashboard_url": "javascript:alert(1)"}
    found = alert(
        "SGLangQueueTooLong", "evil:1", {**words, **links, "advice": f"--max-running-requests 4 → 5: {HOSTILE}"}
    )
    found["labels"] |= {"instance": f"evil{HOSTILE}:1", "server": HOSTILE}
    return found


def of_evil(sinks: Sinks, name: str, text: Any) -> Any:
    """Give the message of a receiver that is about the hostile alert."""
    sinks.manager.send(hostile())
    wait_for(lambda: any("zq" in text(each) for each in sinks.received[name]), 20)
    return next(each for each in sinks.received[name] if "zq" in text(each))


def test_slack_gets_no_markup_but_the_templates_own_links(sinks: Sinks) -> None:
    [attachment] = of_evil(sinks, "slack", lambda each: each["attachments"][0]["text"])["attachments"]
    for part in ("title", "fallback"):
        assert not {"<", ">"} & {*attachment[part]}, attachment[part]
        assert "&lt;!channel&gt;" in attachment[part]
    links = ("<http://gpu/a?b=1&amp;c=2%7C%3C!channel%3E|Runbook>", "<javascript:alert(1)|Dashboard>")
    text = attachment["text"]
    assert "&lt;http://evil.example/login|Open Grafana&gt; &amp; &lt;script&gt;" in text
    for link in links:
        text = text.replace(link, "")
    assert not {"<", ">"} & {*text}, text


def test_mail_has_no_header_and_no_markup_of_others(sinks: Sinks) -> None:
    mail = of_evil(sinks, "email", lambda each: str(each["Subject"]))
    assert mail["Bcc"] is None
    html = mail.get_body(("html",)).get_content()
    assert "<script>" not in html
    assert "javascript:" not in html
    assert "&lt;!channel&gt; &lt;http://evil.example/login|Open Grafana&gt;" in html
    assert HOSTILE in mail.get_body(("plain",)).get_content()  # which has no markup


def test_pagerduty_gets_plain_text_of_its_length(sinks: Sinks) -> None:
    event = of_evil(sinks, "pagerduty", lambda each: each["payload"]["summary"])
    assert "<!channel>" in event["payload"]["summary"]  # PagerDuty shows text as it is
    assert len(event["payload"]["summary"]) <= 1024
    assert event["payload"]["severity"] == "warning"
