"""An imitated server that counts every line it writes: its log, rotated as logrotate does, and its page."""

from __future__ import annotations

import gzip
import random
import re
import time
from collections import Counter
from pathlib import Path

from fuzz.forgeries import CARRIERS, FORGED

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "tests" / "data" / "metrics" / "recorded-0.5.23-retract.prom").read_text()
_TOKENS = re.compile(r'(sglang:generation_tokens_total\{[^}]*is_streaming="true"[^}]*\}) \S+')
_RETRACTED = re.compile(r"(sglang:num_retracted_requests_total\{[^}]*\}) \S+")
BLOCK_LINES = 2000
ROTATE_LINES = 200_000
KEPT_FILES = 8
_PACKED_FROM = 2  # delaycompress
_POOL = 1_040_384
_FORGED_REQUESTS = 9999  # more than the server ever retracts between two scrapes

KINDS, _WEIGHTS = ("decode", "prefill", "access", "words"), (60, 25, 10, 5)
_BODIES = 5000  # different lines of a kind
# After a message with raw text lines are read one by one for three seconds; as on real servers, such messages are rare.
_BURST_EVERY, _FORGERIES_IN_BURST, _FORGERIES_APART = 40, 10, 150
_RETRACTION = (
    "{at}KV cache pool is full. Retract requests. #retracted_reqs: %d, #new_tokens_gained: %d, #new_token_ratio: 0.3002"
    " -> 0.5783"
)

_START = (
    (
        "server_args=ServerArgs(model_path='/srv/model', tp_size=1, dp_size=1, schedule_conservativeness=1.0,"
        " enable_metrics=True)"
    ),
    (
        f"max_total_num_tokens={_POOL}, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=400,"
        " context_len=8192"
    ),
    "The server is fired up and ready to roll!",
)
# What is forged, behind messages with words of a client or a model.
_SINKS = [message.decode() for message in CARRIERS.values()]
_NAMES = ("out of memory", "its traceback", "a bare traceback", "retraction", "start", "glued", "behind a return")
_FORGERIES = [
    FORGED[name].decode().replace("#retracted_reqs: 99,", f"#retracted_reqs: {_FORGED_REQUESTS},") for name in _NAMES
]


class Server:
    """Writes its log block by block; `written` counts its own lines by kind, `lines` all, `retracted` its requests."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.lines = self.blocks = self.rotations = 0
        self.retracted = self.tokens = 0
        self.written: Counter[str] = Counter()
        self.forges = True
        self._dice = random.Random(seed)
        self._bodies = {kind: [self._body(kind) for _ in range(_BODIES)] for kind in KINDS}
        self._file = path.open("ab", buffering=0)
        self._file.write("".join(f"{self._at()}{line}\n" for line in _START).encode())

    @staticmethod
    def _at() -> str:
        return time.strftime("[%Y-%m-%d %H:%M:%S] ")

    def block(self) -> None:
        """Write a block of lines: batches, requests and lines of other programs, at the end a retraction; sometimes
        with forgeries before it.
        """
        at, dice = self._at(), self._dice
        kinds = dice.choices(KINDS, _WEIGHTS, k=BLOCK_LINES - 2)
        texts = [dice.choice(self._bodies[kind]) for kind in kinds]
        forgeries = _FORGERIES_IN_BURST if self.forges and self.blocks % _BURST_EVERY == _BURST_EVERY - 1 else 0
        for place in range(0, forgeries * _FORGERIES_APART, _FORGERIES_APART):
            kinds[place], texts[place] = (
                "forged",
                dice.choice(_SINKS).replace("%s", dice.choice(_FORGERIES)).removesuffix("\n").replace("%p", "{at}"),
            )
        retracted = dice.randrange(1, 5)
        kinds += ["decode", "retraction"]  # the KV cache is full
        texts += [
            dice.choice(self._bodies["decode"]),
            _RETRACTION % (retracted, self.blocks),
        ]  # all different: a repetition counts as another rank's line
        text = "".join(f"{line}\n" for line in texts).replace("{at}", at).encode("utf-8", "surrogateescape")
        self.retracted += retracted
        self.tokens += 40 * 200 * kinds.count("decode")
        before = self.lines
        self.written.update(kinds)
        self.lines += len(text.splitlines())  # a carriage return ends a line too
        self.blocks += 1
        # In two pieces that end anywhere, as a pipe passes them on.
        cut = dice.randrange(len(text))
        self._file.write(text[:cut])
        self._file.write(text[cut:])
        if self.lines // ROTATE_LINES != before // ROTATE_LINES:
            self.rotate()

    def _body(self, kind: str) -> str:
        dice = self._dice
        if kind == "decode":
            return (
                f"{{at}}Decode batch, #running-req: {dice.randrange(180, 240)}, #token: {_POOL - 20000}, token usage:"
                f" 0.98, cuda graph: True, gen throughput (token/s): {dice.uniform(4000, 5000):.2f}, #queue-req:"
                f" {dice.randrange(9)}"
            )
        if kind == "prefill":
            return (
                f"{{at}}Prefill batch, #new-seq: 1, #new-token: {dice.randrange(1, 8192)}, #cached-token: 0, token"
                f" usage: 0.97, #running-req: {dice.randrange(180, 240)}, #queue-req: {dice.randrange(9)}"
            )
        if kind == "access":
            return f'{{at}}INFO:     127.0.0.1:{dice.randrange(65536)} - "POST /generate HTTP/1.1" 200 OK'
        garbage = dice.randbytes(dice.randrange(1, 60)).translate(None, b"\0\n\r\x1b[{}")
        return "words " + garbage.decode("utf-8", "surrogateescape")

    def rotate(self) -> None:
        """Rename as logrotate with `delaycompress` does, and delete the oldest."""
        self.rotations += 1
        for number in range(KEPT_FILES, 0, -1):
            for end in ("", ".gz"):
                old = Path(f"{self.path}.{number}{end}")
                if not old.exists():
                    continue
                if number == KEPT_FILES:
                    old.unlink()
                elif number + 1 >= _PACKED_FROM and not end:
                    to = Path(f"{self.path}.{number + 1}.gz")
                    with old.open("rb") as source, gzip.open(to, "wb", compresslevel=1) as packed:
                        while chunk := source.read(1 << 20):
                            packed.write(chunk)
                    old.unlink()
                else:
                    old.rename(f"{self.path}.{number + 1}{end}")
        self.path.rename(f"{self.path}.1")
        self._file.close()
        self._file = self.path.open("ab", buffering=0)

    def page(self) -> bytes:
        """SGLang's /metrics as it would be now."""
        page = _TOKENS.sub(rf"\g<1> {99_521 + self.tokens}", PAGE)
        page = _RETRACTED.sub(rf"\g<1> {10 + self.retracted}", page)
        return f'{page}sglang:soak{{number="{self.lines % 100_000}"}} 1\n'.encode()
