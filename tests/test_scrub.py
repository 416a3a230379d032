"""Scrubbed recordings keep figures and nothing that reveals who runs the server."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from sglang_tuning_exporter.core.lines import Reader
from sglang_tuning_exporter.recordings.scrub import Scrubber

AT = b"[2025-11-20 11:40:11"


def kept(*lines: bytes, **how: bool) -> list[str]:
    scrubber = Scrubber(**how)
    found = [scrubber.line(line + b"\n") for line in lines]
    return [line.decode().rstrip("\n") for line in found if line is not None]


@pytest.mark.parametrize(
    "line",
    [
        b"] Receive: obj=GenerateReqInput(text='my cat is called Minka', rid='8f')",
        b"] Finish: obj=GenerateReqInput(text='my cat is called Minka')",
        b"] Tool call could not be parsed: Minka",
    ],
)
def test_a_line_that_may_hold_a_request_is_left_out(line: bytes) -> None:
    assert kept(AT + line, b"Minka, on a line of her own") == []


def test_a_request_that_looks_like_a_line_of_the_servers_is_left_out() -> None:
    asked = AT + b"] Receive: obj=GenerateReqInput(text='look:"
    assert kept(asked, AT + b"] KV cache pool is full. Retract requests. Minka #retracted_reqs: 1') or so") == []


def test_requests_stay_when_they_are_asked_for_but_not_their_secrets() -> None:
    line = AT + b"] Receive: obj=GenerateReqInput(text='my cat', path='/home/jo/cat.txt')"
    secret = AT + b"] Receive: obj=GenerateReqInput(text='api_key=sk-verysecret123')"
    assert kept(line, secret, keep_request_text=True) == [
        "[2025-11-20 11:40:11] Receive: obj=GenerateReqInput(text='my cat', path='/path')"
    ]


def test_arguments_keep_figures_and_lose_names_and_secrets() -> None:
    line = (
        AT
        + b"] server_args={'model_path': '/models/secret-llama', 'served_model_name': 'acme-chat', 'api_key': 'sk-abc',"
        b" 'host': '10.1.2.3', 'schedule_conservativeness': 0.3, 'max_running_requests': 128, 'attention_backend':"
        b" 'fa3', 'dist_init_addr': 'node7:5000', 'tool_server': 'https://tools.acme.example/x', 'sidecar_args':"
        b" ['--token', 'abc'], 'log_requests': True}"
    )
    [scrubbed] = kept(line)
    assert (
        scrubbed == "[2025-11-20 11:40:11] server_args={'model_path': 'model', 'served_model_name': 'model', 'host':"
        " '127.0.0.1', 'schedule_conservativeness': 0.3, 'max_running_requests': 128, 'attention_backend': 'fa3',"
        " 'dist_init_addr': 'scrubbed', 'tool_server': 'scrubbed', 'sidecar_args': 'scrubbed', 'log_requests': True}"
    )


def test_a_traceback_keeps_where_it_was_and_not_what_it_says() -> None:
    lines = (
        AT + b" TP0] Scheduler hit an exception: Traceback (most recent call last):",
        b'  File "/home/jo/sglang/scheduler.py", line 12, in forward_decode',
        b"    raise ValueError(text)",
        b"ValueError: cannot read: my cat is called Minka",
    )
    assert kept(*lines) == [
        "[2025-11-20 11:40:11 TP0] Scheduler hit an exception: Traceback (most recent call last):",
        '  File "/path", line 12, in forward_decode',
    ]


def test_a_page_keeps_sglangs_series_and_numbers_foreign_labels() -> None:
    page = (
        "# HELP sglang:num_running_reqs of /models/x\n# TYPE sglang:num_running_reqs gauge\n"
        'sglang:num_running_reqs{model_name="/models/x",tp_rank="0",tenant="acme"} 3.0\n'
        'sglang:num_running_reqs{model_name="/models/x",tp_rank="0",tenant="other"} 4.0\n'
        'sglang:num_running_reqs{model_name="/models/x",tp_rank="0",tenant="acme",le="+Inf"} 5.0\n'
        'process_open_fds{host="node7"} 4\n'
    )
    assert (
        Scrubber().page(page) == "# TYPE sglang:num_running_reqs gauge\n"
        'sglang:num_running_reqs{model_name="model",tp_rank="0",scrubbed_1="scrubbed-1"} 3.0\n'
        'sglang:num_running_reqs{model_name="model",tp_rank="0",scrubbed_1="scrubbed-2"} 4.0\n'
        'sglang:num_running_reqs{model_name="model",tp_rank="0",scrubbed_1="scrubbed-1",le="+Inf"} 5.0\n'
    )


@pytest.mark.parametrize(
    ("text", "scrubbed"),
    [
        ("listens at 10.20.30.40:5000", "listens at 127.0.0.1"),
        ("fe80::1%eth0 is away", "127.0.0.1 is away"),
        ("tcp://node7.cluster:29500 refused", "http://host refused"),
        ("cannot reach gpu-7.acme.internal", "cannot reach host"),
        ("ip-10-0-17-4 is away", "host is away"),
        ("wrote ~/logs/x.txt", "wrote /path"),
        ("used hf_abcdefgh1234", "used <redacted>"),
        (
            "at 11:40:11, 4471.70 token/s of 1.2.3, torch.bfloat16",
            "at 11:40:11, 4471.70 token/s of 1.2.3, torch.bfloat16",
        ),
        ("at::native::sum and std::bad_alloc", "at::native::sum and std::bad_alloc"),
    ],
)
def test_words_that_name_a_place_are_replaced(text: str, scrubbed: str) -> None:
    assert Scrubber().text(text) == scrubbed


# An invented word in every place where a real server has one: none may remain, in any form.
CANARIES = (
    "zanzibari",
    "zanzibari7",
    "zanzibari.example",
    "rel/zanzibari/x.py",
    "Zanzibari:",
    "gpu-zanzibari-3",
    "zanzibari_key=1",
    "user@zanzibari",
    "'zanzibari'",
)
DATA = Path(__file__).parent / "data"
LOGS = sorted((DATA / "logs").glob("*.log"))


def canary_in(text: str) -> list[str]:
    return [line for line in text.splitlines() if "zanzibari" in line.lower()]


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.stem)
def test_a_foreign_word_anywhere_in_a_line_is_not_kept(log: Path) -> None:
    lines = sorted({line for line in log.read_text(errors="replace").splitlines() if len(line) < 1000})
    for number, canary in enumerate(CANARIES):
        scrubber = Scrubber()
        for line in lines:
            words = line.split(" ")
            for at in range(number % 3, len(words) + 1, 3):
                spoiled = " ".join([*words[:at], canary, *words[at:]])
                kept_line = scrubber.line(spoiled.encode() + b"\n") or b""
                assert not canary_in(kept_line.decode()), spoiled


# Words of SGLang's own and figures, put together to names of hosts, addresses and numbers of people.
@pytest.mark.parametrize(
    "value",
    [
        *(
            "ip-10-0-17-4",
            "gpu-17-04",
            "ip-10-0-17-4:5000",
            "prefill-worker-0",
            "tp0.internal",
            "10.0.0.7",
            "1.2.3.4.5",
            "10_0_0_7",
        ),
        *(
            "4111 1111 1111 1111",
            "4111111111111111",
            "+49 170 1234567",
            "12345678-1234-1234-1234-123456789012",
            "\U0001f642",
            "a@b",
        ),
    ],
)
def test_known_words_and_figures_that_make_a_name_are_not_kept(value: str) -> None:
    args = {"dist_init_addr": value, "tool_server": [value], "model": {"name": value}, value: 1}
    assert value not in json.dumps(Scrubber().arguments(args), ensure_ascii=False)
    page = "".join(
        f'sglang:num_running_reqs{{{name}="{value}"}} 1\n' for name in ("engine_type", "reason", "source", "le")
    )
    assert value not in Scrubber().page(page)


@pytest.mark.parametrize(
    "value",
    [
        *(
            "auto",
            "fp8_e4m3",
            "w8a8_int8",
            "write_through",
            "trtllm_mha",
            "round-robin-split",
            "Hierarchical cache is disabled",
        ),
        *("0.5.23", "0.5.9.post1", "0.5", "1e-05", "-1", "{}", ""),
    ],
)
def test_a_value_that_names_nobody_is_kept(value: str) -> None:
    assert Scrubber().arguments({"quantization": value}) == {"quantization": value}


def spoiled(value: Any, canary: str) -> Any:
    if isinstance(value, dict):
        return {key: spoiled(item, canary) for key, item in value.items()} | {
            re.sub(r"\W", "_", canary): 1,
            "x" + canary: {},
        }
    if isinstance(value, list):
        return [spoiled(item, canary) for item in value] + [canary]
    return canary if isinstance(value, str) else value


@pytest.mark.parametrize("canary", CANARIES)
def test_a_foreign_word_in_any_field_of_an_answer_or_label_is_not_kept(canary: str) -> None:
    scrubber = Scrubber()
    for path in sorted(Path(__file__).parent.glob("recordings/*/server_info.json.gz")):
        answer = spoiled(json.loads(gzip.decompress(path.read_bytes())), canary)
        assert not canary_in(json.dumps(scrubber.arguments(answer), indent=0))
    for path in sorted((DATA / "metrics").glob("*.prom")):
        page = path.read_text()
        odd = re.sub(r'="[^"]*"', f'="{canary}"', page) + re.sub(r"\{", f'{{zanzibari_team="{canary}",', page)
        odd += "\n# TYPE sglang:zanzibari gauge\nsglang:zanzibari 1\n"
        assert not canary_in(scrubber.page(odd))


COUNTED = ("decode", "out_of_memory", "prefill", "retraction")


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.stem)
def test_kept_lines_give_the_same_events_as_before(log: Path) -> None:
    scrubber, before, after = Scrubber(), Reader(), Reader()
    for line in log.read_bytes().splitlines():
        original = [event.kind for event in before.read(line) if event.kind in COUNTED]
        kept_lines = (scrubber.line(line) or b"").splitlines()
        again = [event.kind for each in kept_lines for event in after.read(each) if event.kind in COUNTED]
        assert again == original, line
