"""Logs of one server and of several, as the released wheel of 0.5.23 formats their lines, with times and figures of our
own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

READY = "The server is fired up and ready to roll!"


def at(seconds: int, text: str, ranks: str = "") -> str:
    return f"[2025-11-20 {10 + seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}{ranks}] {text}\n"


def start(seconds: int, **args: object) -> str:
    printed = {"model_path": "m", "host": "0.0.0.0", "port": 30000, "max_running_requests": 4, **args}
    return at(seconds, f"server_args=ServerArgs({', '.join(f'{name}={value!r}' for name, value in printed.items())})")


def decode(seconds: int, running: int = 4, queued: int = 0, ranks: str = "") -> str:
    return at(
        seconds,
        f"Decode batch, #running-req: {running}, #token: 925, token usage: 0.40, cuda graph: True, "
        f"gen throughput (token/s): 100.00, #queue-req: {queued}",
        ranks,
    )


def load(begin: int, end: int, **figures: Any) -> str:
    return "".join(decode(second, **figures) for second in range(begin, end, 5))


def files(tmp_path: Path, *texts: str) -> list[str]:
    paths = [tmp_path / f"{name}.log" for name in "abcdef"[: len(texts)]]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    return [str(path) for path in paths]


def mixed(*frames: str, starts: int = 2, ranks: tuple[str, ...] = ("", "")) -> str:
    """The lines of two servers in turn, each inside its frame at `{}`; `starts` of them print their start."""
    printed = ""
    for frame in frames[:starts]:
        printed += frame.format(start(0).rstrip("\n")) + "\n"
    for second in range(40):
        for frame, rank in zip(frames, ranks, strict=True):
            printed += frame.format(decode(second, ranks=rank).rstrip("\n")) + "\n"
    return printed


TWO_SOURCES = {
    "docker compose": ("sglang-1  | {}", "sglang-2  | {}"),
    "docker compose, colours": ("\x1b[36msglang-1  | \x1b[0m{}", "\x1b[33msglang-2  | \x1b[0m{}"),
    "kubectl logs --prefix --timestamps": (
        "[pod/llm-7c9-x1/sglang] 2025-11-20T10:00:00.123456789Z {}",
        "[pod/llm-7c9-x2/sglang] 2025-11-20T10:00:00.123456999Z {}",
    ),
    "stern": ("llm-7c9-x1 sglang {}", "llm-7c9-x2 sglang {}"),
    "Ray": ("(SGLangEngine pid=35555) {}", "(SGLangEngine pid=111711, ip=10.15.36.1) {}"),
    "JSON of a node's shipper": (
        '{{"log": "{}", "stream": "stderr", "kubernetes": {{"pod_name": "llm-0"}}, "time": "2025-11-20T10:00:00.1Z"}}',
        '{{"log": "{}", "stream": "stderr", "kubernetes": {{"pod_name": "llm-1"}}, "time": "2025-11-20T10:00:00.2Z"}}',
    ),
}


def together(*starts: str, ready: int, before: str = "") -> str:
    return before + "".join(starts) + ready * at(90, READY) + load(100, 400)
