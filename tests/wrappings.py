"""Forms in which a server's log reaches people: each a function from the bare line, its number and its time."""

# ruff: noqa: ARG001, ARG005 - every form is given what any of them needs

from __future__ import annotations

import csv
import datetime as dt
import gzip
import io
import json
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def _json(**fields: object) -> str:
    return json.dumps(fields)


def _compact(**fields: object) -> str:
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False)


def _csv(*fields: str, quoting: int = csv.QUOTE_MINIMAL) -> str:
    out = io.StringIO()
    csv.writer(out, quoting=quoting, lineterminator="").writerow(fields)  # type: ignore[arg-type]
    return out.getvalue()


def _iso(when: dt.datetime, timespec: str = "milliseconds") -> str:
    return when.isoformat(timespec=timespec) + "Z"


def _epoch(when: dt.datetime) -> float:
    return when.replace(tzinfo=dt.timezone.utc).timestamp()


def _escaped(line: str) -> str:
    return line.replace("\\", "\\\\").replace('"', '\\"')


def otlp(lines: list[tuple[str, dt.datetime]]) -> str:
    """One document of OpenTelemetry's file exporter: several records of one resource."""
    records = [{"timeUnixNano": str(int(_epoch(t)) * 10**9), "body": {"stringValue": line}} for line, t in lines]
    resource = {"attributes": [{"key": "host.name", "value": {"stringValue": "gpu-01"}}]}
    return _compact(resourceLogs=[{"resource": resource, "scopeLogs": [{"scope": {}, "logRecords": records}]}])


# What keeps SGLang's own line whole.
AROUND: dict[str, Callable[[str, int, dt.datetime], str]] = {
    "nothing": lambda line, n, t: line,
    "indented paste": lambda line, n, t: "    " + line,
    "grep -C": lambda line, n, t: f"logs/server.log{':-'[n % 3 > 0]}{n}{':-'[n % 3 > 0]}{line}",
    "rg -C": lambda line, n, t: f"{n}{':-'[n % 3 > 0]}{line}",
    "aws logs filter-log-events": lambda line, n, t: (
        f"EVENTS\t{n}\t{int(_epoch(t)) + 2}000\tgpu-01\t{line}\t{int(_epoch(t))}000"
    ),
    "Python's bytes": lambda line, n, t: repr((line + "\n").encode()),
    "cat -n": lambda line, n, t: f"{n:6d}\t{line}",
    "stern": lambda line, n, t: f"sglang-7d9f8b-x2x9k server {line}",
    "stern in colour": lambda line, n, t: f"\x1b[36msglang-0\x1b[0m \x1b[32mserver\x1b[0m {line}",
    "stern --timestamps": lambda line, n, t: f"sglang-0 server {_iso(t, 'microseconds')} {line}",
    "kubetail": lambda line, n, t: f"[sglang-0 server] {line}",
    "docker service logs -t": lambda line, n, t: f"{_iso(t)} llm_sglang.1.kx0vn2p3q4r5@gpu-01    | {line}",
    "compose -t": lambda line, n, t: f"sglang-1  | {_iso(t)} {line}",
    "docker --timestamps": lambda line, n, t: f"{_iso(t, 'microseconds')} {line}",
    "kubernetes": lambda line, n, t: f"{_iso(t, 'microseconds')} stderr F {line}",
    "kubernetes and stern": lambda line, n, t: f"{_iso(t, 'microseconds')} stderr F sglang-0 server {line}",
    "slurm, node and rank": lambda line, n, t: f"node3: [rank0] {line}",
    "torchrun": lambda line, n, t: f"[rank0]: {line}",
    "nomad": lambda line, n, t: f"{t:%Y-%m-%dT%H:%M:%S}.000Z [INFO]  sglang: {line}",
    "supervisor": lambda line, n, t: f"{t:%Y-%m-%d %H:%M:%S},123 DEBG 'sglang' stderr output: {line}",
    "CloudWatch tail": lambda line, n, t: f"{_iso(t, 'microseconds')[:-1]}+00:00 ecs/sglang/0f1e2d3c4b5a {line}",
    "CloudWatch export": lambda line, n, t: f"{_iso(t)} {line}",
    "Loki text": lambda line, n, t: f'{_iso(t)} {{app="sglang", pod="sglang-0"}} {line}',
    "Loki JSONL": lambda line, n, t: _compact(labels={"app": "sglang", "pod": "a"}, line=line, timestamp=_iso(t)),
    "Loki API values": lambda line, n, t: _compact(stream={"app": "a"}, values=[[str(int(_epoch(t)) * 10**9), line]]),
    "Fluent Bit": lambda line, n, t: _compact(date=_epoch(t), log=line + "\n", stream="stderr"),
    "Fluent Bit, kubernetes": lambda line, n, t: _compact(
        kubernetes={"pod_name": "sglang-0", "labels": {"app": "x"}}, log=line, time=_iso(t)
    ),
    "GCP": lambda line, n, t: _compact(
        insertId=f"a{n}", resource={"type": "k8s_container", "labels": {"p": "q"}}, textPayload=line, timestamp=_iso(t)
    ),
    "GCP, nested": lambda line, n, t: _compact(
        insertId="a", jsonPayload={"message": line, "pid": 7}, timestamp=_iso(t)
    ),
    "journald JSON": lambda line, n, t: _compact(
        __CURSOR="s=1", __REALTIME_TIMESTAMP=str(int(_epoch(t) * 1e6)), PRIORITY="6", MESSAGE=line, _PID="4711"
    ),
    "structlog": lambda line, n, t: _json(event=line, level="info", timestamp=_iso(t)),
    "loguru": lambda line, n, t: _json(text=line + "\n", record={"message": line, "time": {"timestamp": _epoch(t)}}),
    "Elasticsearch": lambda line, n, t: _compact(_index="logs", _source={"@timestamp": _iso(t), "message": line}),
    "Splunk JSON": lambda line, n, t: _compact(preview=False, result={"_raw": line, "_time": _iso(t)}),
    "JSON without a time": lambda line, n, t: _compact(log=line),
    "JSON behind a name": lambda line, n, t: f"sglang-0 server {_compact(level='info', body_text=line, ts=_epoch(t))}",
    "JSON in JSON": lambda line, n, t: _compact(
        log=_compact(line=line, ts=_iso(t)) + "\n", stream="stdout", time=_iso(t)
    ),
    "logfmt": lambda line, n, t: f"time={_iso(t)} level=info msg={json.dumps(line)}",
    "GCP, pretty-printed": lambda line, n, t: f'    "textPayload": {json.dumps(line)},',
    "CSV": lambda line, n, t: _csv(_iso(t), "sglang-0", line),
    "CSV, all quoted": lambda line, n, t: _csv(_iso(t), line, "gpu-01", quoting=csv.QUOTE_ALL),
    "syslog": lambda line, n, t: f"{t:%b} {t.day:2d} {t:%H:%M:%S} gpu-01 sglang[4711]: {line}",
    "syslog with priority": lambda line, n, t: f"<30>{t:%b} {t.day:2d} {t:%H:%M:%S} gpu-01 sglang[4711]: {line}",
    "syslog 5424": lambda line, n, t: f"<134>1 {_iso(t)} gpu-01 sglang 4711 - - {line}",
    "journalctl short-monotonic": lambda line, n, t: f"[{n + 4000:5d}.{n:06d}] gpu-01 sglang[4711]: {line}",
    "journalctl short-unix": lambda line, n, t: f"{_epoch(t):.6f} gpu-01 sglang[4711]: {line}",
    "journalctl short-full": lambda line, n, t: f"{t:%a %Y-%m-%d %H:%M:%S} UTC gpu-01 sglang[4711]: {line}",
    "moreutils ts": lambda line, n, t: f"{t:%b %d %H:%M:%S} {line}",
    "s6-log": lambda line, n, t: f"{t:%Y-%m-%d %H:%M:%S}.123456789  {line}",
    "Ray": lambda line, n, t: f"(SGLangEngine pid=123, ip=10.0.0.1) {line}",
    "vector": lambda line, n, t: _compact(
        file="/var/log/sglang.log", host="gpu-01", message=line, source_type="file", timestamp=_iso(t)
    ),
    "promtail --dry-run": lambda line, n, t: f'{_iso(t)}\t{{app="sglang", filename="/var/log/sglang.log"}}\t{line}',
    "logcli raw with labels": lambda line, n, t: f'{_iso(t)} {{stream="stderr"}}    {line}',
    "rsyslog with facility": lambda line, n, t: f"daemon.info: {t:%b} {t.day:2d} {t:%H:%M:%S} gpu-01 sglang: {line}",
    "logfmt without a level": lambda line, n, t: f"ts={_iso(t)} caller=sglang msg={json.dumps(line)}",
    "kubectl --timestamps --prefix": lambda line, n, t: f"[pod/sglang-0/server] {_iso(t, 'microseconds')} {line}",
    "compose, padded and coloured": lambda line, n, t: f"\x1b[33msglang-server-1    |\x1b[0m {line}",
    "compose, two services": lambda line, n, t: f"{('prefill-1 ', 'decode-10')[n % 2]} | {line}",
    "Airflow": lambda line, n, t: f"[{_iso(t)[:-1]}+0000] {{subprocess.py:93}} INFO - {line}",
    "Airflow, remote": lambda line, n, t: f"[{_iso(t)[:-1]}+0000] {{pod_manager.py:431}} INFO - [base] {line}",
    "Jenkins timestamper": lambda line, n, t: f"[{_iso(t)}] {line}",
    "Buildkite": lambda line, n, t: f"\x1b_bk;t={int(_epoch(t) * 1000)}\x07{line}",
    "Splunk export": lambda line, n, t: _csv(line, _iso(t), "gpu-01", "sglang", quoting=csv.QUOTE_ALL),
    "Azure Container Apps": lambda line, n, t: _compact(
        TimeStamp=_iso(t), Log=f"{line}", ContainerName="sglang", RevisionName="sglang--1"
    ),
    "Azure, kubernetes": lambda line, n, t: _compact(
        TimeGenerated=_iso(t), Computer="aks-1", LogMessage=line, LogSource="stderr", PodName="sglang-0"
    ),
    "CloudWatch get-log-events": lambda line, n, t: _compact(
        timestamp=int(_epoch(t) * 1000), message=line, ingestionTime=int(_epoch(t) * 1000) + 900
    ),
    "CloudWatch text output": lambda line, n, t: f"EVENTS\t{int(_epoch(t) * 1000) + 900}\t{line}",
    "FireLens": lambda line, n, t: _compact(
        container_id="0f1e", container_name="/sglang", log=line, source="stderr", ecs_task_definition="x:1"
    ),
    "Datadog": lambda line, n, t: _compact(
        attributes={"host": "gpu-01", "message": line, "timestamp": _iso(t), "tags": ["a:b"]}, id=f"A{n}", type="log"
    ),
    "Datadog export": lambda line, n, t: _json(
        id=f"A{n}", content={"message": line, "timestamp": _iso(t), "tags": ["a:b"]}
    ),
    "OpenTelemetry file exporter": lambda line, n, t: otlp([(line, t)]),
    "jq without -r": lambda line, n, t: json.dumps(line),
    "Elastic Common Schema": lambda line, n, t: json.dumps(
        {"@timestamp": _iso(t), "log.level": "INFO", "message": line, "ecs": {"version": "8.11.0"}}
    ),
    "Logstash rubydebug field": lambda line, n, t: f'       "message" => {json.dumps(line)},',
    "OpenTelemetry": lambda line, n, t: _compact(
        timeUnixNano=str(int(_epoch(t)) * 10**9), severityText="INFO", body={"stringValue": line}, attributes=[]
    ),
    "GELF": lambda line, n, t: _compact(version="1.1", host="gpu-01", short_message=line, timestamp=_epoch(t)),
    "foreman": lambda line, n, t: f"{t:%H:%M:%S} server.1 | {line}",
    "pm2 with times": lambda line, n, t: f"0|sglang  | {t:%Y-%m-%dT%H:%M:%S}: {line}",
    "mpirun --timestamp-output": lambda line, n, t: f"{t:%a %b} {t.day:2d} {t:%H:%M:%S %Y}[1,0]<stderr>:{line}",
    "moreutils ts -i": lambda line, n, t: f"00:00:0{n % 10} {line}",
    "moreutils ts, epoch": lambda line, n, t: f"{_epoch(t):.6f} {line}",
    "svlogd": lambda line, n, t: f"{t:%Y-%m-%d_%H:%M:%S}.12345 {line}",
    "Windows line ends": lambda line, n, t: line + "\r",
    "a return before and after": lambda line, n, t: "\r" + line + "\r",
    "script with a keypad": lambda line, n, t: f"\x1b[?2004l\x1b[K{line}\x1b[0m\r",
    "dstack": lambda line, n, t: f"[{t:%H:%M:%S}] {line}",
    "JSON in CRI": lambda line, n, t: (
        f"{_iso(t, 'microseconds')} stderr F {_compact(level='info', msg=line, ts=_epoch(t))}"
    ),
    "prefix in JSON in CRI": lambda line, n, t: (
        f"{_iso(t, 'microseconds')} stderr F " + _compact(log=f"sglang-1  | {line}\n", time=_iso(t), stream="stderr")
    ),
    "JSON in Docker": lambda line, n, t: _compact(
        log=_compact(level="info", message=line, timestamp=_iso(t)) + "\n", stream="stderr", time=_iso(t)
    ),
    "JSON in JSON in journald": lambda line, n, t: (
        f"{t:%b} {t.day:2d} {t:%H:%M:%S} gpu-01 dockerd[1]: "
        + _compact(log=_compact(msg=line, level="info"), ts=_iso(t))
    ),
    "CSV in Docker": lambda line, n, t: _compact(log=_csv(_iso(t), line) + "\n", stream="stderr", time=_iso(t)),
    "two stamps": lambda line, n, t: f"[{t:%Y-%m-%d %H:%M:%S}] {line}",
    "JSON in an array": lambda line, n, t: _compact(log=line, time=_iso(t)) + ",",
    "Kibana CSV": lambda line, n, t: _csv(f"{t:%b} {t.day}, {t:%Y} @ {t:%H:%M:%S}.123", line, quoting=csv.QUOTE_ALL),
    "fluentd out_file": lambda line, n, t: (
        f"{t:%Y-%m-%dT%H:%M:%S}+00:00\tdocker.sglang\t" + _compact(log=line, container_id="ab", source="stderr")
    ),
    "fluent bit stdout": lambda line, n, t: (
        f'[{n}] kube.var.log: [[{_epoch(t):.9f}, {{}}], {{"log"=>"{_escaped(line)}", "stream"=>"stderr"}}]'
    ),
    "journalctl json-sse": lambda line, n, t: (
        "data: " + _compact(__REALTIME_TIMESTAMP=str(int(_epoch(t) * 1e6)), MESSAGE=line)
    ),
    "journalctl json-seq": lambda line, n, t: (
        "\x1e" + _compact(__REALTIME_TIMESTAMP=str(int(_epoch(t) * 1e6)), MESSAGE=line)
    ),
    "nginx time": lambda line, n, t: f"[{t:%d/%b/%Y:%H:%M:%S} +0000] {line}",
    "ansible": lambda line, n, t: f"gpu-01 | CHANGED | rc=0 >> {line}",
    "ray, pasted with an indentation": lambda line, n, t: f"   (SGLangEngine pid=32887) {line}",
    "ray serve full": lambda line, n, t: (
        f"\x1b[36m(ServeReplica:default:LLM:q pid=123, ip=10.0.0.1)\x1b[0m INFO {t:%Y-%m-%d %H:%M:%S},123 default_LLM"
        f" abc1 -- {line}"
    ),
    "airflow logging_mixin": lambda line, n, t: f"[{t:%Y-%m-%d %H:%M:%S},123] {{logging_mixin.py:115}} INFO - {line}",
    "cloudwatch insights csv 3": lambda line, n, t: (
        ("@timestamp,@message,@logStream,@ptr\n" if n == 1 else "")
        + _csv(f"{t:%Y-%m-%d %H:%M:%S}.123", line, "AllTraffic/i-0ab", "CmEKJg==")
    ),
    "kinesis firehose": lambda line, n, t: _compact(
        messageType="DATA_MESSAGE",
        owner="1",
        logGroup="g",
        logStream="s",
        subscriptionFilters=["f"],
        logEvents=[{"id": "1", "timestamp": int(_epoch(t) * 1000), "message": line}],
    ),
    "az containerapp stderr": lambda line, n, t: _compact(
        TimeStamp=f"{t:%Y-%m-%dT%H:%M:%S}.12345", Log=f"{_iso(t, 'microseconds')} stderr F {line}"
    ),
    "az log analytics csv": lambda line, n, t: (
        ("TimeGenerated [UTC],Log_s,ContainerName_s\n" if n == 1 else "")
        + _csv(f"{t.month}/{t.day}/{t:%Y}, {t:%I:%M:%S}.123 {t:%p}", line, "sglang")
    ),
    "splunk hec": lambda line, n, t: _compact(
        time=f"{_epoch(t):.3f}",
        host="g",
        source="docker",
        sourcetype="x",
        event={"line": line, "source": "stderr", "tag": "ab"},
    ),
    "splunk csv export serial": lambda line, n, t: _csv(str(n), f"{t:%Y-%m-%d %H:%M:%S}.000 UTC", line, "a"),
    "es fields": lambda line, n, t: _compact(
        _index="i", _id=f"x{n}", fields={"@timestamp": [_iso(t)], "message": [line]}
    ),
    "drone json": lambda line, n, t: _compact(pos=n, out=line + "\r\n", time=n // 5),
    "teamcity": lambda line, n, t: f"[{t:%H:%M:%S}]W:\t [Step 1/1] {line}",
    "gcloud yaml": lambda line, n, t: "textPayload: '" + line.replace("'", "''") + "'",
    "gcp csv": lambda line, n, t: (
        ("insertId,severity,textPayload,timestamp\n" if n == 1 else "") + _csv(f"a{n}", "ERROR", line, _iso(t))
    ),
    "datadog agent stream": lambda line, n, t: (
        f"Integration Name: docker | Type: docker | Status: info | Timestamp: {_iso(t)} | Hostname: g | Service: sglang"
        f" | Message: {line}"
    ),
    "honeycomb": lambda line, n, t: _compact(time=_iso(t), data={"body": line, "severity": "info"}),
    "grafana explore csv": lambda line, n, t: (
        ('"Date","Line","labels"\n' if n == 1 else "") + _csv(_iso(t), line, '{"app":"a"}', quoting=csv.QUOTE_ALL)
    ),
    "otel debug exporter": lambda line, n, t: f"Body: Str({line})",
    "pino-pretty": lambda line, n, t: f"[{t:%H:%M:%S}.123] \x1b[32mINFO\x1b[39m (4711): \x1b[36m{line}\x1b[39m",
    "tracing-subscriber": lambda line, n, t: (
        f"\x1b[2m{_iso(t, 'microseconds')}\x1b[0m \x1b[32m INFO\x1b[0m \x1b[2mpump::child\x1b[0m\x1b[2m:\x1b[0m {line}"
    ),
    "serilog": lambda line, n, t: f"[{t:%H:%M:%S} INF] {line}",
    "triton": lambda line, n, t: f'I{t:%m%d %H:%M:%S}.123456 1 python_be.cc:1] "' + _escaped(line) + '"',
    "html": lambda line, n, t: f"<pre>{line}</pre>",
    "html escaped": lambda line, n, t: f'<span class="line">{line}</span><br>',
    "markdown table": lambda line, n, t: f"| {_iso(t)} | {line} |",
    "yaml list": lambda line, n, t: "- '" + line.replace("'", "''") + "'",
    "python dict": lambda line, n, t: repr({"time": _iso(t), "log": line}),
    "protobuf text": lambda line, n, t: f"message: {json.dumps(line)}",
    "clickhouse JSONEachRow": lambda line, n, t: _compact(
        timestamp=f"{t:%Y-%m-%d %H:%M:%S}.123456", body=line, level="info"
    ),
    "JSON array rows": lambda line, n, t: json.dumps([_iso(t), "gpu-01", line]),
    "json text key": lambda line, n, t: _compact(time=_iso(t), text=line),
    "json optional field": lambda line, n, t: _compact(time=_iso(t), log=line, **({"extra": n} if n % 3 else {})),
    "docker in fluent in CSV": lambda line, n, t: _csv(
        _iso(t),
        "g",
        f"{t:%Y-%m-%dT%H:%M:%S}+00:00\tdocker.x\t"
        + _compact(log=_compact(log=line + "\n", stream="stderr", time=_iso(t))),
    ),
    "stern around docker json": lambda line, n, t: (
        "sglang-0 server " + _compact(log=line + "\n", stream="stderr", time=_iso(t))
    ),
    "json in logfmt": lambda line, n, t: f"ts={_iso(t)} msg={json.dumps(_compact(log=line, stream='stderr'))}",
    "csv in csv": lambda line, n, t: _csv(_iso(t), _csv("a", line, quoting=csv.QUOTE_ALL)),
    "syslog around CRI": lambda line, n, t: (
        f"{t:%b} {t.day:2d} {t:%H:%M:%S} n1 kubelet[1]: {_iso(t, 'microseconds')} stderr F {line}"
    ),
    "trailing tag": lambda line, n, t: f"{line} host=gpu-01",
    "single quotes": lambda line, n, t: "'" + line.replace("'", "''") + "'",
    "alibaba sls": lambda line, n, t: _compact(
        __time__=str(int(_epoch(t))), __source__="10.0.0.1", content=line, _container_name_="s"
    ),
    "zero width": lambda line, n, t: "\u200b" + line,
    "CJK": lambda line, n, t: f"服务器 {line}",
}


# Several lines for each of the server's: the text before and after it looks like a request's text.
AMID: dict[str, Callable[[str, int, dt.datetime], str]] = {
    "journalctl verbose": lambda line, n, t: (
        f"{t:%a %Y-%m-%d %H:%M:%S}.123456 UTC [s=ab;i={n:x};b=cd;m=1;t=2;x=3]\n    _TRANSPORT=stdout\n"
        f"    PRIORITY=6\n    MESSAGE={line}\n    _PID=4711\n    SYSLOG_IDENTIFIER=sglang"
    ),
    "gcloud, YAML": lambda line, n, t: (
        f"---\ninsertId: ab{n}\ntextPayload: '" + line.replace("'", "''") + f"'\ntimestamp: '{_iso(t)}'"
    ),
    "Elasticsearch bulk": lambda line, n, t: '{"index":{"_index":"a"}}\n' + _json(message=line, time=_iso(t)),
    "supervisord at loglevel debug": lambda line, n, t: (
        f"{t:%Y-%m-%d %H:%M:%S},{n % 1000:03d} DEBG 'sglang' stderr output:\n{line}\n"
    ),
}


def custom(head: Callable[[dt.datetime, str], str]) -> Callable[[str, int, dt.datetime], str]:
    """Put a logging configuration's own head in the place of SGLang's."""

    def wrap(line: str, n: int, t: dt.datetime) -> str:
        start, bracket, message = line.partition("] ")
        if not (bracket and start.startswith("[20")):
            return line
        return head(t, start[20:]) + message

    return wrap


without_head = custom(lambda t, ranks: "")

# What stands in the place of SGLang's own head, and gives the time.
INSTEAD: dict[str, Callable[[str, int, dt.datetime], str]] = {
    "custom formatter": custom(
        lambda t, ranks: f"{t:%Y-%m-%d %H:%M:%S}.874 INFO 120984 [{ranks} scheduler_metrics_mixin.py:415] "
    ),
    "Python logging": custom(lambda t, ranks: f"{t:%Y-%m-%d %H:%M:%S},123 - sglang.srt - INFO - "),
    "Python logging, module": custom(lambda t, ranks: f"{t:%Y-%m-%d %H:%M:%S},123 INFO sglang.srt.managers: "),
    "glog": custom(lambda t, ranks: f"I{t:%m%d %H:%M:%S}.123456 4711 scheduler.py:415] "),
    "epoch seconds": custom(lambda t, ranks: f"{_epoch(t):.3f} INFO scheduler "),
    "epoch milliseconds": custom(lambda t, ranks: f"{int(_epoch(t) * 1000)} INFO scheduler: "),
    "epoch microseconds": custom(lambda t, ranks: f"{int(_epoch(t) * 1e6)} INFO scheduler: "),
    "epoch nanoseconds": custom(lambda t, ranks: f"{int(_epoch(t)) * 10**9} INFO scheduler: "),
    "time behind the level": custom(lambda t, ranks: f"INFO | {t:%Y-%m-%d %H:%M:%S} | scheduler | "),
    "slashes": custom(lambda t, ranks: f"{t:%Y/%m/%d %H:%M:%S} INFO scheduler | "),
    "syslog time": custom(lambda t, ranks: f"{t:%b} {t.day:2d} {t:%H:%M:%S} gpu-01 sglang[7]: "),
    "a level, then ranks": custom(lambda t, ranks: f"{t:%Y-%m-%d %H:%M:%S} INFO {ranks} "),
    "all in brackets": custom(lambda t, ranks: f"[INFO][{t:%Y-%m-%d %H:%M:%S}][pid=12][{ranks}] "),
    "a process id behind the time": custom(lambda t, ranks: f"[{t:%Y-%m-%d %H:%M:%S}] [pid=12] "),
    "a thread behind the ranks": custom(lambda t, ranks: f"[{t:%Y-%m-%d %H:%M:%S}{ranks}] [thread=MainThread] "),
    "month and day": custom(lambda t, ranks: f"(Scheduler pid=77) INFO {t:%m-%d %H:%M:%S} [scheduler.py:12] "),
    "date of a web server": custom(lambda t, ranks: f"[{t:%d/%b/%Y:%H:%M:%S} +0000] [info] "),
    "date of a mail": custom(lambda t, ranks: f"{t:%a, %d %b %Y %H:%M:%S +0000} INFO: "),
    "compact date": custom(lambda t, ranks: f"{t:%Y%m%d-%H:%M:%S}.123 INFO scheduler: "),
    "compact date and time": custom(lambda t, ranks: f"{t:%Y%m%dT%H%M%SZ} INFO scheduler: "),
    "structlog console": custom(lambda t, ranks: f"{t:%Y-%m-%dT%H:%M:%S}Z [info     ] "),
    "Rust's tracing, as Dynamo": custom(
        lambda t, ranks: f"{t:%Y-%m-%dT%H:%M:%S}.243403Z  INFO module_{t.second}.function: "
    ),
    "JSON event": lambda line, n, t: _json(event=without_head(line, n, t), level="info", timestamp=_iso(t)),
    "JSON log, epoch": lambda line, n, t: _compact(log=without_head(line, n, t), ts=int(_epoch(t) * 1000)),
}

assert not AROUND.keys() & INSTEAD.keys()


Lines = list[tuple[str, int, dt.datetime]]
RECORDING = Path(__file__).parent / "recordings" / "v0.5.9-retract" / "server.log.gz"
STARTED = dt.datetime(2026, 11, 20, 19, 50, 0)  # noqa: DTZ001 - as a server prints it, without a zone
PRINTED = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")


@cache
def recorded() -> Lines:
    """The lines of a real log, each with its number and the time last printed."""
    found, when = [], STARTED
    for number, line in enumerate(gzip.decompress(RECORDING.read_bytes()).decode().splitlines(), 1):
        if match := PRINTED.match(line):
            when = dt.datetime.fromisoformat(match[1])
        found.append((line, number, when))
    return found


def wrapped(name: str, lines: Lines) -> bytes:
    """The lines in a form."""
    wrap = (AROUND | INSTEAD | AMID)[name]
    return ("\n".join(wrap(*line) for line in lines) + "\n").encode()
