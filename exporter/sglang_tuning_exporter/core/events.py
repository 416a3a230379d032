"""What one line of a log says: an `Event`; and why a server ended or a KV transfer failed, in the words of its own log:
which line explains it, of which class it is, and what follows.

Times are unix seconds as printed; memory is in GB as SGLang prints it (1 GB = 2**30 bytes); usages are 0 to 1. A figure
that the line does not have is absent, never zero. A class of ends comes from the structure of an end (the exception,
the frames below it, the signal), never from one known log. What is quoted is cut, without secrets and without long
words of a request; `public` leaves SGLang's own words alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sglang_tuning_exporter.sglang import clean, messages
from sglang_tuning_exporter.sglang.metrics import MOST_RANKS

LONGEST_TEXT, LONGEST_WORDS = 2000, 200
CAUSE = 2  # the weight of a class that says more than that it ended
EPISODE_SECONDS = 600.0  # between the first sign of an end and the end
OUT_OF_MEMORY_PHASES = ("prefill", "decode", "graph_capture", "startup", "unknown")


class Rank(NamedTuple):
    """The ranks in a line's prefix, None where it has none."""

    dp: int | None = None
    tp: int | None = None
    pp: int | None = None

    @property
    def words(self) -> str:
        """The known ones, such as `DP0 TP1`."""
        return " ".join(f"{name.upper()}{rank}" for name, rank in self._asdict().items() if rank is not None)


NO_RANK = Rank()


# Kinds whose events a server counts under the name of the kind, once for all TP ranks that print the line; with the
# words beside the count on the page and in a report, empty where a finding has it.
COUNTED_KINDS: Mapping[str, str] = {"hicache": "", "no_pool": ""}


@dataclass(slots=True)
class Event:
    """One thing that a line says.

    Its kinds, each with its figures, and with what word, text and others are or what it means:

    - `decode`: running queued tokens usage swa_usage mamba_usage graph (1 replayed, 0 not) throughput accept_length,
      other queues; word: cuda cpu npu musa
    - `prefill`: sequences tokens cached running queued pending usage swa_usage mamba_usage, other queues
    - `retraction`: requests aborted ratio_before ratio_after gained; testing 1 for SGLANG_TEST_RETRACT; usage while it
      waits
    - `out_of_memory`: held_elsewhere_gb; word: prefill decode graph_capture startup unknown; text: the line
    - `arguments`: cut 1 where the line was cut; arguments
    - `pool`: tokens gigabytes; resized 1 (after the graphs were captured)
    - `memory`: available used states; prefill 1 (graphs of prefill batches); word: the stage, `weights_begin` to
      `graph`; sizes: captured batches
    - `limits`: max_total_num_tokens max_running_requests chunked_prefill_size available_gb max_prefill_tokens
      context_len; word: gpu cpu …
    - `ready`: "fired up and ready to roll"
    - `hang`: seconds; word: scheduler tokenizer detokenizer; a watchdog that timed out
    - `health`: silent: seconds without output, where the times in its text agree with its own; a health check that
      failed
    - `end`: word: process_died scheduler_exception launch_failed aborted; text: which process, how
    - `words`: line chain; unsure 1: it may have ended nothing; word: a key of `ENDINGS`; text: a line that may explain
      an end; place, before
    - `advice`: line; word: a text of `sglang.advices`; text: a line before the first request about a flag: an advice,
      or a decision
    - `draining`: SIGTERM received
    - `rejected`: answered with 503
    - `server_error`: answered with 500, or a stream broken by an exception
    - `pause`, `resume`: POST /pause_generation, /continue_generation
    - `too_long`: tokens most; word: context, where the line says so; a prompt that cannot fit
    - `refused`: grammar 1; answered with an error at once
    - `transfer`: room (of the request), attempt 1 where none has failed yet; a failed bootstrap or KV transfer; word:
      decode prefill; text: why
    - `hicache`: word: kernel host storage, which fails; text: the line
    - `no_pool`: tokens, not above 0; no KV cache fits beside the weights; text: the line

    Other queues: prealloc transfer retracted bootstrap inflight unbootstrapped transferring host_receive.
    Stages: weights_begin weights state_cache pool graph_begin graph.
    """

    kind: str
    time: float | None = None
    rank: Rank = NO_RANK
    figures: dict[str, float] = field(default_factory=dict)
    word: str = ""
    text: str = ""
    sizes: tuple[int, ...] = ()
    arguments: dict[str, object] = field(default_factory=dict)
    marked: bool = False  # text of a client or a model was printed close before: it may be no line of SGLang's
    place: str = ""  # the frame inside SGLang that raised an exception
    file: str = ""  # in which the line stands, where that is known
    before: tuple[str, ...] = ()  # recognised lines just before it

    # Of the kind `words`: how it explains an end

    @property
    def ending(self) -> Ending:
        """The class of the end that it explains."""
        return ENDINGS[self.word]

    @property
    def short(self) -> str:
        """Its text, cut at a word; of a long one its beginning and the sentence that says what to do."""
        remedy = _REMEDY.search(self.text)
        if len(self.text) <= LONGEST_WORDS or remedy is None or remedy.end() <= LONGEST_WORDS:
            return shortened(self.text)
        return f"{shortened(self.text, LONGEST_WORDS // 3)} {shortened(remedy[0], 2 * LONGEST_WORDS // 3)}"

    @property
    def spoken(self) -> str:
        """Its text as a label: an exception whose words are not known has the place that raised it."""
        return f"{self.short}, raised at {self.place}" if self.place and ": " not in self.text else self.short

    @property
    def is_sure(self) -> bool:
        """Whether it did end a process."""
        return not self.figures.get("unsure")

    @property
    def denies_memory(self) -> bool:
        """Whether its numbers show that no memory was short, whatever its words say."""
        return self.word == "check" and "out of memory" in self.text

    @property
    def is_of_a_start(self) -> bool:
        """Whether only a server that starts ends like this: what a transfer refuses is found by the first request."""
        return self.word in _OF_A_START and not self.place.startswith("srt/disaggregation/")

    @property
    def where(self) -> str:
        """Rank, line and file, as far as they are known."""
        line = f"line {self.figures['line']:,.0f}" if self.figures.get("line") else ""
        at = f"{line} of {self.file}" if line and self.file else line
        raised = self.place and f"raised {'below' if self.word == 'cut' else 'at'} {self.place}"
        return ", ".join(filter(None, (self.rank.words, at, raised)))

    def explains_better(self, other: Event) -> bool:
        """Whether it explains an end better: more of the same, a heavier class, else the earlier one.

        What is marked is no better.
        """
        mine, its = ((each.figures.get("chain"), each.file, each.rank) for each in (self, other))
        if mine[0] and mine == its:
            return True
        is_cause = other.ending.weight > CAUSE and (other.is_sure or not self.is_sure)
        if self.marked and not other.marked and is_cause:
            return False  # text of others does not outrank a cause, but what ended no process is none
        if other.time is not None and self.time is not None and self.time - other.time > EPISODE_SECONDS:
            return True
        weight, its_weight = self.ending.weight, other.ending.weight
        return (weight >= CAUSE, self.is_sure, weight) > (its_weight >= CAUSE, other.is_sure, its_weight)


@dataclass(frozen=True, slots=True)
class Ending:
    """A class of ends: what it is, what to do, why, and when that does not help.

    `weight`: the heavier one explains an end.

    why_of_start: the reason for a server that never served, where that is another one.
    variable: of a failed transfer, what lets SGLang wait longer.
    """

    what: str
    do: str
    why: str
    not_if: str
    weight: int = 3
    why_of_start: str = ""
    variable: str = ""


_REMEDY = re.compile(r"\b(?:please|try to|consider|(?:you (?:can|may|need to)))\b[^\n]+", re.IGNORECASE)
_REPEATS = "A restart repeats it."
ENDINGS: Mapping[str, Ending] = {
    "memory": Ending(
        "memory does not fit",
        "give it less to hold: a smaller --chunked-prefill-size, a smaller --max-running-requests, or more memory",
        "The line says what could not be allocated. A restart repeats it under the same load.",
        "another process holds the memory: end or move it first",
    ),
    "host_memory": Ending(
        "memory of the host does not fit",
        "give the container or machine more memory, or lower --hicache-size or --hicache-ratio; where /dev/shm is"
        " short, start with --ipc=host or a larger --shm-size",
        _REPEATS,
        "huge pages or another process hold it: free them first",
    ),
    "limit": Ending(
        "a limit of the operating system was reached",
        "raise the limit that the line names, for the container or service: open files (ulimit -n), processes and"
        " threads (pids), pinned memory (memlock)",
        "A restart helps until as many are used again.",
        "the number grows without load: then something leaks, and a larger limit only puts it off",
    ),
    "disk": Ending(
        "a disk is full",
        "free space where the traceback writes: the model's cache (HF_HOME), --hicache-storage-backend, a log or /tmp;"
        " where it is /dev/shm, start with --ipc=host or a larger --shm-size",
        _REPEATS,
        "a quota or inodes are used up: df -i and quota show that",
    ),
    "argument": Ending(
        "an argument was refused",
        "correct the argument, the file or the combination that the line names",
        _REPEATS,
        "the same command ran before with this release and model: then something else has changed",
    ),
    "size": Ending(
        "a size that a flag sets does not fit this load",
        "change the flag that the line names, in the direction that it names",
        f"SGLang's own words name it. {_REPEATS}",
        "it was changed already: then send fewer or shorter requests, or give it more GPUs",
    ),
    "model": Ending(
        "the model's files are missing or damaged, or could not be fetched",
        "check that --model-path holds every file of the model and that SGLang may read it; where it is a name, that"
        " this machine reaches the model hub (proxy, HF_ENDPOINT, HF_TOKEN), or download the model first and give its"
        " folder",
        _REPEATS,
        "the hub itself was down: then a restart helps later",
    ),
    "address": Ending(
        "an address or a port is in use",
        "end what listens there (ss -ltnp), often a server from before, or give another one: --port, --dist-init-addr,"
        " --nccl-port, --disaggregation-bootstrap-port, or the port in --kv-events-config",
        "Two processes cannot listen at one address. A restart repeats it while the other one runs.",
        "two ranks of this server ask for the same address: then it is a bug of the release",
    ),
    "port": Ending(
        "the server's own port is in use",
        "end what listens there (ss -ltnp), often a server from before, or give another --port",
        "Two processes cannot listen at one port. A restart repeats it while the other one runs.",
        "nothing listens there: then the container or the host gives the port to something else",
    ),
    "proxy": Ending(
        "its warm-up request was answered by something else than SGLang",
        "set no_proxy=localhost,127.0.0.1,0.0.0.0 in the server's environment, or unset http_proxy",
        "SGLang asks itself before it serves; such a status is a proxy's, and SGLang then ends itself.",
        "no proxy is set: then read the error of the scheduler before it",
    ),
    "device": Ending(
        "SGLang found no GPU that it can use",
        "give the container its GPUs (--gpus all, nvidia.com/gpu), and check nvidia-smi, CUDA_VISIBLE_DEVICES,"
        " --tp-size and --base-gpu-id",
        _REPEATS,
        "nvidia-smi fails on the host as well: then it is the driver or the hardware",
    ),
    "library": Ending(
        "a library or a kernel is missing, too old, or not made for this GPU",
        "install what the line names in the version that this release of SGLang asks for, or choose a backend that this"
        " GPU has",
        _REPEATS,
        "the same image ran before on this kind of GPU",
    ),
    "gpu": Ending(
        "SGLang or a kernel of it does not support this GPU",
        "use a GPU of a generation that the line names, or the backend or the data type that this GPU has",
        f"SGLang's own words name what is needed. {_REPEATS}",
        "the server ran before on this kind of GPU: then something else has changed",
    ),
    "occupied": Ending(
        "another process seems to hold memory of a GPU",
        "end what holds it (nvidia-smi shows that), or give the server free GPUs (CUDA_VISIBLE_DEVICES)",
        f"SGLang compares the free memory of its GPUs before it loads the model. {_REPEATS}",
        "only this server's own processes are on these GPUs, such as a draft model's: then"
        " SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK=false turns the check off",
    ),
    "unsupported": Ending(
        "SGLang does not support what it was given, or lacks what it requires",
        "do what the line asks for, or change the argument, the model or the combination that it refuses",
        f"SGLang's own words say it. {_REPEATS}",
        "the same command ran before with this release and model: then something else has changed",
    ),
    "check": Ending(
        "a check of SGLang's own code failed: a bug, not tuning",
        "search SGLang's issues for the words of this line and the release; then update, or drop the option that it is"
        " about",
        "Until then it comes back with the same kind of request.",
        "the release or the model was changed by hand",
        why_of_start="Until then each start with these arguments ends in the same way.",
    ),
    "unclassified": Ending(
        "its log names no known cause",
        "read the words of this line, and search SGLang's issues for them and the release",
        "The line is the last that a process said before it ended; this program has no class for its words.",
        "another rank or node ended before: then its last lines say why",
    ),
    "kernel": Ending(
        "a kernel or a native library failed",
        "search SGLang's issues for this line, the model and the GPU; run once with CUDA_LAUNCH_BLOCKING=1 (AMD:"
        " AMD_SERIALIZE_KERNEL=3, Ascend: ASCEND_LAUNCH_BLOCKING=1) to see which kernel it is, and look for errors of"
        " the GPU in the system's log (dmesg)",
        "Such a failure ends the process wherever it happens; the line may name a later call than the one that failed.",
        "dmesg shows a hardware error: then replace the GPU",
    ),
    "network": Ending(
        "the processes of the server cannot reach each other",
        "check that each node reaches --dist-init-addr, and name the network interface in GLOO_SOCKET_IFNAME and"
        " NCCL_SOCKET_IFNAME on all nodes",
        f"{_REPEATS} NCCL_DEBUG=INFO prints which interface is used.",
        "another node ended first: its log says why",
    ),
    "transfer": Ending(
        "the KV cache could not be sent to the other server of the pair",
        "read the other server's log at the same time, and check that it runs and that the two reach each other",
        "One side of a prefill/decode pair ends or waits because of the other.",
        "the other server was stopped on purpose",
    ),
    "storage": Ending(
        "HiCache's storage could not be used",
        "check that the service behind --hicache-storage-backend runs, that this machine reaches it, and that its"
        " package has the version that this release of SGLang asks for; or start without the storage",
        "SGLang connects to it when it starts. A restart repeats it as long as the storage does not answer.",
        "other servers use the same storage without trouble: then compare their settings",
    ),
    "peer": Ending(
        "another process of the server ended or stopped first",
        "read what the other ranks and nodes printed just before: the first of them says why",
        "When one rank ends, the others lose their connection to it.",
        "all ranks print the same: then it is the network",
        2,
    ),
    "killed": Ending(
        "it was killed from outside",
        "find out who: the kernel's OOM killer (dmesg), the container's memory limit, a supervisor, or a person",
        "No exception of SGLang's that names a cause comes before it. Host memory is most often short while weights are"
        " loaded, or with --hicache-ratio.",
        "it was stopped on purpose",
    ),
    "hang": Ending(
        "a process made no progress, and SGLang ended the server",
        "save the log and a stack dump (py-spy dump), and search SGLang's issues for the frames of it",
        "The watchdog ends a server that does not move for --watchdog-timeout seconds (default 300), and SGLang a start"
        " whose warm-up request has no answer.",
        "one step takes that long by design: then a larger --watchdog-timeout",
        2,
    ),
    "cut": Ending(
        "its traceback is cut before the line that says why",
        "find the rest of the traceback in the whole log: its last line says why",
        "Python prints what went wrong below the frames.",
        "the process was killed while it printed: dmesg shows that",
        1,
    ),
    "unknown": Ending(
        "its log does not say why",
        "read the lines just before it, and the logs of the other nodes",
        "All that ran is lost, and an automatic restart can hide the cause.",
        "the processes were ended on purpose",
        1,
    ),
}


def _sign(ending: str, *texts: str, place: str = "") -> tuple[str, re.Pattern[str], re.Pattern[str]]:
    return ending, re.compile("|".join(texts), re.IGNORECASE), re.compile(place)


# What shows a class, in this order: patterns of the words of an exception or a line, each an alternative, and of the
# frame that raised it.
# They are those of Python, PyTorch, NCCL, Gloo, CUDA, HIP, Ascend and SGLang 0.3.0 to 0.5.23.
SIGNS = (
    _sign("killed", r"exit ?code:? ?\(?-?(?:9|137)\b", r"^(?:\S{1,80}: line \d+: *)?(?:\d+ )?Killed\b"),
    _sign("hang", r"watchdog[ _]timeout"),
    _sign("hang", r"\bRead timed out\b", place=r"warmup$"),
    _sign("port", r"^\[Errno \d{1,3}\] (?:error while attempting to bind on [^\n]{1,200}: )?address already in use"),
    _sign("address", r"address already in use", r"\bEADDRINUSE\b", r"port \d+ is (?:not available|already)",
        r"port \d+ [^.]{0,40}in use"),
    _sign("proxy", r"res=<Response \[(?:407|50[234])\]>"),
    _sign("limit", r"Too many open files", r"can't start new thread", r"RLIMIT_\w+", r"\bmemlock\b"),
    _sign(
        "argument", r"40[134] Client", r"gated repo", r"not a (?:local folder|valid model identifier)",
        r"Permission denied",
        r"greater than the derived context_length", r"Cannot assign requested address",
    ),
    _sign(
        "model", r"connect to 'https?://", r"LocalEntryNotFound", r"does not appear to have (?:a file|files)",
        r"HTTPSConnectionPool",
        r"urllib3\.exceptions\.(?:Protocol|SSL)Error", r"SafetensorError", r"(?:Cannot find any|No) model weights",
        r"header is truncated",
        r"HfHubHTTPError",
        r"CERTIFICATE_VERIFY_FAILED", r"429 Client",
    ),
    _sign(
        "device", r"No (?:CUDA|HIP|NPU|XPU) GPUs? are available", r"no (?:CUDA|ROCm)-capable device",
        r"invalid device ordinal",
        r"Found no NVIDIA driver", r"devices are busy or unavailable",
    ),
    _sign(
        "peer", r"from another rank", r"(?:closed|reset|aborted) (?:the connection )?by (?:remote )?peer",
        r"remote (?:process|rank|node|end)[^.]{0,40}(?:exit|close|closing|terminate|died)",
        r"Watchdog caught collective operation timeout",
        r"recvValue failed", r"Socket closed", r"Broken ?pipe", r"ConnectionResetError", r"\bEOFError\b",
        r"ncclRemoteError",
        r"Rank \d+ scheduler (?:died|is dead)", r"scheduler (?:process )?died", r"child (?:process|failed)",
        r"\bpeer\b[^.]{0,40}(?:exit|died|dead|gone)", r"from rank \d+\b", r"check rank \d+ logs",
        r"other ranks (?:that )?(?:did|have|are|were)",
    ),
    _sign("occupied", r"occupied by other processes", r"memory capacity is unbalanced"),
    _sign(
        "gpu",
        r"(?:only|not|is) (?:support(?:s|ed)?|available) (?:on |by |for )?(?:the |this |your |current )?(?:\w+ ){0,2}"
        r"(?:sm_?\d\d|compute capability|ampere|hopper|blackwell|turing|volta|ada)\b",
        r"requires? (?:an? |the )?(?:\w+ ){0,3}(?:sm_?\d\d|compute capability|ampere|hopper|blackwell|GPU"
        r" architecture)\b",
        r"\bsm_?\d{2,3}\+? (?:and above|or (?:above|higher|newer|later))",
        r"compute capability (?:of )?(?:>=|at least|\d+\.\d+ or)",
    ),
    _sign(
        "library", r"ptxas", r"\bsm_\d\d", r"compute capability", r"no kernel image", r"hipErrorNoBinaryForGpu",
        r"undefined symbol",
        r"cannot open shared object", r"(?:Import|ModuleNotFound)Error", r"not compiled (?:with|for)", r"GLIBC(?:XX)?_",
        r"driver version is insufficient", r"provided PTX", r"unsupported toolchain",
        r"requires? [^.]{0,60}(?:>=|or (?:newer|later|higher)|version)",
        r"please (?:install|upgrade|update)", r"version mismatch", r"incompatible version", r"pip install",
        r"does not recognize this architecture",
        r"architectures? [^.]{0,120}(?:not supported|unsupported)", r"\bnvcc\b", r"\bninja\b",
        r"/(?:gcc|cc|clang)\b", r"C compiler", r"\bCUDA_HOME\b", r"Python\.h\b", r"driver on your system is too old",
        r"(?:not supported|unsupported|only supported|not available) (?:on|by|for) (?:this |the |your |current"
        r" )?(?:\w+ )?"
        r"(?:gpu|device|hardware|arch|platform|hopper|blackwell|ampere|sm)",
        r"Unsupported (?:arch|architecture|device|gpu)",
    ),
    _sign(
        "host_memory", r"\[Errno 12\]", r"Cannot allocate memory \(12\)", r"error code 12\b", r"DefaultCPUAllocator",
        r"^MemoryError",
        r"(?:host|CPU|pinned|shared) memory[^.]{0,60}(?:not|insufficient|only|fail|exceed|available)",
        r"(?:not enough|insufficient|no|out of) (?:host|CPU|pinned|shared) memory",
        r"\bshm\b[^.]{0,40}(?:full|space|size|No such)",
    ),
    _sign("disk", r"No space left on device", r"Disk quota exceeded"),
    _sign("kernel", r"out of resource: shared memory"),  # of the GPU, which a kernel asks for
    _sign("check", r"req_slots"),  # places for requests, which no memory of the GPU holds
    _sign(
        "memory", r"out of (?:\w+ )?memory", r"outofmemory", r"not enough (?:\w+ ){0,2}memory",
        r"no (?:GPU |available )?memory",
        r"(?:failed|cannot|unable|could not) (?:to )?allocate (?:[\w.]+ ){0,4}(?:memory|bytes|[KMG]i?B\b|workspace"
        r"|buffer)",
        r"insufficient (?:\w+ )?memory", r"STATUS_ALLOC_FAILED", r"OUT_OF_RESOURCES",
        r"exceeds? (?:the )?(?:available|free) memory",
    ),
    _sign(
        "argument", r"\bSGL(?:ANG)?_[A-Z_]{3,60}(?:=\S{1,40})? (?:must|should|requires?|has to|needs?|is not)\b",
        r"\brequires? --[a-z]", r"--[a-z][a-z0-9-]{3,}(?:=\S{1,40})? (?:must|requires?|is (?:not|only|incompatible))\b",
    ),
    _sign("unsupported", r"\brequires\b", r"\bunsupported\b", place=r"/disaggregation/"),
    # a combination of the pair
    _sign("argument", r"(?:does not|doesn't) support\b", r"\bnot supported\b", place=r"/disaggregation/"),
    _sign(
        "transfer", r"KVTransferError", r"\bmooncake", r"\bnixl\b", r"transfer engine", r"KVPoll",
        r"bootstrap (?:server|room|failed)",
        r"prefill parallel info",
    ),
    _sign("transfer", place=r"/disaggregation/(?!encoder/)"),
    _sign("storage", place=r"/mem_cache/(?:storage|mooncake_store)/"),
    _sign(
        "network", r"\bGloo\b", r"TCPStore", r"Dist(?:Network|Store|Backend)Error",
        r"nccl(?:SystemError|InternalError|InvalidUsage)",
        r"NCCL (?:error|WARN|communicator)", r"ibv_\w+", r"rendezvous", r"No route to host", r"Network is unreachable",
        r"Connection refused",
        r"Timed out waiting (?:for )?\d+ ?ms", r"gaierror",
        r"connect(?:FullMesh|(?:ion)? timed? ?out)", r"Failed to connect", r"init_process_group",
        r"timed out after \d+(?:ms| ?s)? waiting for (?:clients|all)",
    ),
    _sign(
        "kernel", r"exit ?code:? ?\(?-?(?:4|6|7|8|11|13[2459]|136)\b",
        r"illegal memory access", r"misaligned address", r"device-side assert", r"unspecified launch failure",
        r"Segmentation fault",
        r"SIG(?:SEGV|BUS|ABRT)", r"Bus error", r"Memory access fault by GPU", r"HSA_STATUS_ERROR",
        r"(?:CUDA|HIP|NPU|XPU|MUSA) (?:\w+ )?error",
        r"(?:cuda|hip)Error", r"CU(?:BLAS|DNN)_STATUS", r"Triton Error", r"AcceleratorError",
        r"invalid pointer",
        r"(?:malloc|free)\(\)", r"\bXid\b", r"EZ\d{4}", r"E[A-Z]9999", r"ERR\d{5}", r"aclError", r"ACL (?:error|api)",
        r"XlaRuntimeError",
        r"not permitted when stream is capturing", r"Internal Triton", r"\bMLIR\b", r"nanobind",
        # What SGLang itself raises about a library is none of the library's.
        r"^(?!(?:Assertion|Value|NotImplemented|Type)Error)[\s\S]*"
        r"(?:double free|corrupted|cutlass|flashinfer|deep_?gemm|\baiter\b)",
    ),
    _sign(
        "argument", r"unrecogni[sz]ed arguments", r"invalid choice", r"expected (?:one|at least one) argument",
        r"is the correct path", r"trust_remote_code", r"(?:Can't|cannot) load (?:the )?(?:configuration|tokenizer)",
        r"Unrecognized (?:model|configuration)", r"No such file or directory", r"(?:must be|is not|not) divisible",
    ),
    _sign("argument", place=r"/(?:server_args|launch_server|arg_groups/\w+|parser/\w+|configs/\w+)\.py|/cli/"),
    _sign("size", r"\b(?:increase|reduce|raise|lower|decrease)\b[^.]{0,80}--[a-z][a-z0-9-]+"),
    _sign(
        "argument", r"--[a-z][a-z0-9-]{3,}[^.]{0,40}(?:must|should|cannot|is not|requires)",
        r"\b(?:set|use|using|specify|add|pass|enable|disable)\b[^.]{0,80}--[a-z][a-z0-9-]+",
    ),
    _sign("check", r"memory leak detected", r"^AssertionError:?$"),
    # Python's own errors, which nobody raises on purpose, and tensors that do not fit each other.
    _sign(
        "check",
        r"^(?:Attribute|Key|Index|Name|UnboundLocal|ZeroDivision|Recursion|Overflow)Error\b",
        r"^TypeError\b(?!.*\brequires?\b)", r"must be [1-5]D\b", r"\bgot shape\b", r"must be contiguous",
        r"not page[- ]aligned", r"(?:should|must) (?:not|never) be called", r"size of tensor a",
        r"shapes cannot be multiplied", r"is invalid for input of size", r"shape mismatch",
        r"Expected all tensors", r"Sizes of tensors must match",
        place=r"^(?:sglang|srt)/",
    ),
    _sign("check", r"^NotImplementedError:?(?: *\S+=\S+)*$"),  # without a word: a branch that nobody wrote
    _sign(
        "unsupported", r"\bunsupported\b", r"\b(?:is|are|does) ?n(?:o|')t (?:yet )?support",
        r"\bsupports? (?:only|at most)",
        r"\bonly supports?\b", r"not implemented",
    ),
    _sign(
        "unsupported", r"NotImplementedError", r"incompatible", r"\brequire[sd]?\b",
        r"\b(?:is|are|does|do|was|were) ?n(?:o|')t (?:yet )?(?:currently )?"
        r"(?:support|available|enabled|installed|compatible|allowed|valid)",
        r"\b(?:only|must|should|cannot|can't|can not|has to|have to|needs?|at least|at most|expected?|invalid|unknown"
        r"|unrecogni[sz]ed|missing|please)\b",
        place=r"^(?:sglang|srt)/(?!managers/(?:schedule|scheduler)|mem_cache/)",
    ),
    _sign("unsupported", r"please (?:set|use)\b"),
    _sign("check", r"^AssertionError"),
    # What a scheduler and its memory find wrong is their own state.
    _sign("check", r"^[\w.]*(?:Error|Exception)\b", place=r"^(?:sglang/)?srt/(?:mem_cache/|managers/schedule)"),
    _sign("unclassified", r"^[\w.]*(?:Error|Exception)\b", place=r"^(?:sglang|srt)/"),
    _sign("kernel", r"^Fatal Python error", r"^terminate called",
        r"^(?:\S{1,80}: line \d+: *)?(?:\d+ )?(?:Aborted|Illegal instruction)"),
)  # fmt: skip
_WEAK = frozenset({"check", "unclassified", "unknown", "peer"})
_OF_A_START = frozenset({"argument", "model", "address", "port", "proxy", "device", "gpu", "occupied"})


def class_of(texts: Sequence[str], place: str = "") -> str:
    """Return the class of an end by the texts of a chain of exceptions, the last one last, and the frame that raised
    it.

    An earlier exception counts where the last one shows no cause of its own.
    """
    found = "unknown"
    for text in reversed(texts):
        sign = next((ending for ending, words, where in SIGNS if words.search(text) and where.search(place)), "")
        if sign and (found == "unknown" or (found in _WEAK and sign not in _WEAK)):
            found = sign
        if found not in _WEAK:
            break
    return found


def quoted(text: str, longest: int = LONGEST_TEXT) -> str:
    """Return text of a log as it may be shown: on one line, cut, without secrets and words of requests."""
    text = clean.without_requests(clean.without_secrets(text[: 4 * longest]))
    text = _WHAT.sub("", clean.clean(" ".join(text.split())))
    return shortened(text, longest)


def public(event: Event) -> Event:
    """Return an event with texts that everybody may read: SGLang's own words and figures. `serve` takes no other ones.

    A place that may be text of others is none, and so are the lines before it.
    """
    if not (event.text or event.place or event.before):
        return event  # nearly all
    event.text, event.before = messages.quoted(event.text, marked=event.marked), ()
    event.place = "" if event.marked or _PLACE.fullmatch(event.place) is None else event.place
    return event


_PLACE = re.compile(r"(?:srt|sglang)/[\w./-]{1,150}:\d{1,9} in [\w.<>]{1,80}")


# Before the words of an exception of C++, or of a line of PyTorch's.
_WHAT = re.compile(r"^(?:- |what\(\): +|\[rank\d{1,5}\]:\[[EF][^\]\n]{1,120}\] )+")


def shortened(text: str, longest: int = LONGEST_WORDS) -> str:
    """Return a quotation cut at a word."""
    return text if len(text) <= longest else text[: longest - 2].rpartition(" ")[0] + " " + clean.CUT


# Why the KV cache of a request did not get from the prefill to the decode server, by the words of SGLang's own line, as
# the wheels 0.4.6 to 0.5.23 print them (srt/disaggregation). Where a line names a variable, the advice does too.

LONG_WAIT = 600  # seconds, as SGLang's own line advises
_SECONDS = re.compile(r"timed out after (\d{1,6}(?:\.\d{1,3})?) ?s")
# Each of these variables belongs to one side.
_SIDES = {"SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "decode", "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "prefill"}
_ADVISED = re.compile(r"(SGLANG_[A-Z_]{3,60})=(\d{1,9})")


def _transfer(
    pattern: str,
    do: str,
    why: str,
    not_if: str = "the other server was stopped on purpose, or is still starting",
    variable: str = "",
) -> tuple[re.Pattern[str], Ending]:
    return re.compile(pattern, re.IGNORECASE), Ending("", do, why, not_if, variable=variable)


# The first that fits.
TRANSFERS: Sequence[tuple[re.Pattern[str], Ending]] = (
    _transfer(
        r"KVPoll\.WaitingForInput|transfer done signal|waiting_timeout|waiting for prefill completion",
        "read the prefill server's log at the same time, and check that it answers: it did not send the KV cache in"
        " time",
        "The decode server has room for the request and waits for the KV cache, which the prefill server computes"
        " and sends.",
        variable="SGLANG_DISAGGREGATION_WAITING_TIMEOUT",
    ),
    _transfer(
        r"KVPoll\.Bootstrapping|timed out when bootstrapping",
        "look at the decode server at the same time: whether it runs, and whether its KV cache is full"
        " (#prealloc-req in its log)",
        "The prefill server waits until the decode server has room for the request and says where its KV cache"
        " belongs.",
        variable="SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT",
    ),
    _transfer(
        r"decode instance could be dead|remote mooncake session",
        "read the last lines of the decode server's log, and check that it runs: its session with this prefill"
        " server is gone",
        "The prefill server takes a decode server for dead after a transfer to it failed.",
    ),
    _transfer(
        r"prefill instance, it might be dead",
        "read the prefill server's log at the same time, where it says why: Prefill transfer failed, and the lines"
        " of the transfer backend before it",
        "SGLang prints these words when the prefill server reports that it could not send: that server answers, and"
        " its network or its transfer"
        " backend failed.",
        not_if="the prefill server ended at that time: then its last lines say why",
    ),
    _transfer(
        r"los(?:t|ing) connection with prefill|prefill down|node failure",
        "read the last lines of the prefill server's log, and check that it runs: it no longer answers the decode"
        " server's heartbeat",
        "The decode server gives up all requests that wait for a prefill server without a heartbeat"
        " (SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL, SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE).",
    ),
    _transfer(
        r"could not fetch (?:prefill|bootstrap)|failed to get prefill|error fetching prefill|bootstrap server",
        "check that the prefill server runs and that its bootstrap port (--disaggregation-bootstrap-port, default"
        " 8998) is reached from the other"
        " server",
        "Both sides find each other through the bootstrap server, which runs in the prefill server.",
    ),
    _transfer(
        r"staging (?:ring|pool)|STAGING",
        "give the staging buffer more room: raise SGLANG_DISAGG_STAGING_POOL_SIZE_MB, or lower"
        " --chunked-prefill-size of the prefill server",
        "SGLang's own line asks for it: a chunk does not fit the buffer that it is sent through.",
        not_if="prefill and decode have the same attention TP size: then nothing is staged",
    ),
    _transfer(
        r"FORCE_QUERY_PREFILL_DP_RANK",
        "set SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK=1 on both servers, or let the router choose the DP"
        " rank by the bootstrap room",
        "SGLang's own line asks for it: the router sent the request to another DP rank than its bootstrap room"
        " implies.",
        not_if="all requests come through one router",
    ),
    _transfer(
        r"corruption detected|checksum mismatch",
        "search SGLang's issues for the words of this line and the release",
        "What arrived is not what was sent: a bug, not tuning.",
        not_if="the two servers run different releases: then give them the same one first",
    ),
    _transfer(
        r"hicache .{0,40}restore failed",
        "look at the host or storage cache of the decode server: a prefix could not be restored from it",
        "The transfer itself did not fail.",
    ),
    _transfer(
        r"failed to send kv chunk|session \S+ failed|transport error|transfer failed|submission failed|NIXL|mori",
        "check the network between the two servers: the transfer backend's own lines just before,"
        " --disaggregation-ib-device, and whether the other"
        " server runs",
        "The transfer backend could not write into the other server's memory.",
    ),
    _transfer(
        "",
        "read the other server's log at the same time, and the lines of the other ranks of this one: one of them has"
        " the reason",
        "One side of a prefill/decode pair, or one rank, ends a request because another one did.",
    ),
)  # fmt: skip


def says_why(text: str) -> bool:
    """Whether the words of a failed transfer are a reason of their own, and not another rank's."""
    return bool(text) and "from another rank" not in text


def of_transfer(text: str) -> Ending:
    """Return the reason that the words of a failed transfer name."""
    return next(ending for words, ending in TRANSFERS if not words.pattern or (says_why(text) and words.search(text)))


def relaxed(cause: Ending, text: str) -> str:
    """Return how to wait longer, where SGLang has a variable for it; empty where it has none, or where it is long
    already.
    """
    if not cause.variable:
        return ""
    advised = next((f"{name}={value}" for name, value in _ADVISED.findall(text) if name == cause.variable), "")
    waited = _SECONDS.search(text)
    if waited is not None and float(waited[1]) >= LONG_WAIT:
        return f"longer waits will hardly help: {cause.variable} is {float(waited[1]):.0f} s already"
    return (
        f"if it is only slow: export {advised or f'{cause.variable}={LONG_WAIT}'} on the {_SIDES[cause.variable]}"
        " server (default 300 seconds)"
    )


# As plain JSON, for a state file

_TEXTS = {"word": 200, "text": 4 * LONGEST_TEXT, "place": 200, "file": 400}  # and how many characters of each


def to_json(event: Event) -> dict[str, object]:
    """Return an event as plain JSON, without arguments and sizes: a start is not saved."""
    kept = {name: getattr(event, name) for name in ("time", "figures", "marked", *_TEXTS)}
    return {"kind": event.kind, "rank": list(event.rank), **{name: value for name, value in kept.items() if value}}


def from_json(saved: object) -> Event | None:
    """Return the event that `to_json` returned, its texts as `public` has them; None where it cannot be one."""
    match saved:
        case {"kind": str() as kind, "rank": [dp, tp, pp], **rest} if kind and all(map(_is_rank, (dp, tp, pp))):
            figures: Any = rest.get("figures", {})
            time: Any = rest.get("time")
            texts: dict[str, Any] = {name: rest.get(name, "") for name in _TEXTS}
            if (
                isinstance(figures, dict)
                and all(map(is_count, figures.values()))
                and (time is None or is_count(time))
                and all(isinstance(text, str) for text in texts.values())
                and (kind != "words" or texts["word"] in ENDINGS)
            ):
                event = Event(kind, time, Rank(dp, tp, pp), {str(name): float(figures[name]) for name in figures})
                event.marked = rest.get("marked") is True
                for name, most in _TEXTS.items():
                    setattr(event, name, texts[name][:most])
                return public(event)
    return None


def aged(saved: object, then: float) -> Iterator[tuple[float, Event]]:
    """Give the events of a list of ages and events, each with its time; `then`: when it was saved."""
    for entry in lists(saved):
        event = from_json(entry[1]) if len(entry) == 2 and is_count(entry[0]) else None
        if event is not None:
            yield then - entry[0], event


def lists(value: object) -> list[list[Any]]:
    """Return the lists in a list of a state file, which may be damaged."""
    return [each for each in value if isinstance(each, list)] if isinstance(value, list) else []


def is_count(value: object) -> bool:
    """Whether a value of a state file is a number that a count or an age may be."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e15


def _is_rank(value: object) -> bool:
    return value is None or (is_count(value) and isinstance(value, int) and value < MOST_RANKS)
