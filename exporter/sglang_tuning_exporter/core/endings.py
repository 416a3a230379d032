"""Why a server ended, in the words of its own log: which line explains it, of which class it is, and what follows. Pure.

A class comes from the structure of an end (the exception, the frames below it, the signal), never from one known log. What is quoted is
cut, without secrets and without words of a request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sglang_tuning_exporter.core import events
from sglang_tuning_exporter.core.events import Event
from sglang_tuning_exporter.sglang import clean

LONGEST_TEXT, LONGEST_WORDS = 2000, 200
CAUSE = 2  # the weight of a class that says more than that it ended
EPISODE_SECONDS = 600.0  # between the first sign of an end and the end


@dataclass(frozen=True, slots=True)
class Ending:
    """A class of ends: what it is, what to do, why, and when that does not help. `weight`: the heavier one explains an end."""

    what: str
    do: str
    why: str
    not_if: str
    weight: int = 3


_REPEATS = "A restart repeats it."
CLASSES: Mapping[str, Ending] = {
    "memory": Ending(
        "memory does not fit",
        "give it less to hold: a smaller --chunked-prefill-size, a smaller --max-running-requests, or more memory",
        "The line says what could not be allocated. A restart repeats it under the same load.",
        "another process holds the memory: end or move it first",
    ),
    "host_memory": Ending(
        "memory of the host does not fit",
        "give the container or machine more memory, or lower --hicache-size or --hicache-ratio; where /dev/shm is short, start with --ipc=host or a"
        " larger --shm-size",
        _REPEATS,
        "huge pages or another process hold it: free them first",
    ),
    "limit": Ending(
        "a limit of the operating system was reached",
        "raise the limit that the line names, for the container or service: open files (ulimit -n), processes and threads (pids), pinned memory (memlock)",
        "A restart helps until as many are used again.",
        "the number grows without load: then something leaks, and a larger limit only puts it off",
    ),
    "disk": Ending(
        "a disk is full",
        "free space where the traceback writes: the model's cache (HF_HOME), --hicache-storage-backend, a log or /tmp; where it is /dev/shm, start"
        " with --ipc=host or a larger --shm-size",
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
        "check that --model-path holds every file of the model and that SGLang may read it; where it is a name, that this machine reaches the model"
        " hub (proxy, HF_ENDPOINT, HF_TOKEN), or download the model first and give its folder",
        _REPEATS,
        "the hub itself was down: then a restart helps later",
    ),
    "address": Ending(
        "an address or a port is in use",
        "end what listens there (ss -ltnp), often a server from before, or give another one: --port, --dist-init-addr, --nccl-port,"
        " --disaggregation-bootstrap-port, or the port in --kv-events-config",
        "Two processes cannot listen at one address. A restart repeats it while the other one runs.",
        "two ranks of this server ask for the same address: then it is a bug of the release",
    ),
    "proxy": Ending(
        "its warm-up request was answered by something else than SGLang",
        "set no_proxy=localhost,127.0.0.1,0.0.0.0 in the server's environment, or unset http_proxy",
        "SGLang asks itself before it serves; such a status is a proxy's, and SGLang then ends itself.",
        "no proxy is set: then read the error of the scheduler before it",
    ),
    "device": Ending(
        "SGLang found no GPU that it can use",
        "give the container its GPUs (--gpus all, nvidia.com/gpu), and check nvidia-smi, CUDA_VISIBLE_DEVICES, --tp-size and --base-gpu-id",
        _REPEATS,
        "nvidia-smi fails on the host as well: then it is the driver or the hardware",
    ),
    "library": Ending(
        "a library or a kernel is missing, too old, or not made for this GPU",
        "install what the line names in the version that this release of SGLang asks for, or choose a backend that this GPU has",
        _REPEATS,
        "the same image ran before on this kind of GPU",
    ),
    "check": Ending(
        "a check of SGLang's own code failed: a bug, not tuning",
        "search SGLang's issues for the words of this line and the release; then update, or drop the option that it is about",
        "Until then it comes back with the same kind of request.",
        "the release or the model was changed by hand",
    ),
    "kernel": Ending(
        "a kernel or a native library failed",
        "search SGLang's issues for this line, the model and the GPU; run once with CUDA_LAUNCH_BLOCKING=1 (AMD: AMD_SERIALIZE_KERNEL=3) to see"
        " which kernel it is, and look for errors of the GPU in the system's log (dmesg)",
        "Such a failure ends the process wherever it happens; the line may name a later call than the one that failed.",
        "dmesg shows a hardware error: then replace the GPU",
    ),
    "network": Ending(
        "the processes of the server cannot reach each other",
        "check that each node reaches --dist-init-addr, and name the network interface in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME on all nodes",
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
        "check that the service behind --hicache-storage-backend runs, that this machine reaches it, and that its package has the version that this"
        " release of SGLang asks for; or start without the storage",
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
        "No exception of SGLang's that names a cause comes before it. Host memory is most often short while weights are loaded, or with --hicache-ratio.",
        "it was stopped on purpose",
    ),
    "hang": Ending(
        "a process made no progress, and SGLang ended the server",
        "save the log and a stack dump (py-spy dump), and search SGLang's issues for the frames of it",
        "The watchdog ends a server that does not move for --watchdog-timeout seconds (default 300), and SGLang a start whose warm-up request has"
        " no answer.",
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


# What shows a class, in this order: patterns of the words of an exception or a line, each an alternative, and of the frame that raised it.
# They are those of Python, PyTorch, NCCL, Gloo, CUDA, HIP, Ascend and SGLang 0.3.0 to 0.5.23.
SIGNS = (
    _sign("killed", r"exit ?code:? ?\(?-?(?:9|137)\b", r"^(?:\S{1,80}: line \d+: *)?(?:\d+ )?Killed\b"),
    _sign("hang", r"watchdog[ _]timeout"),
    _sign("hang", r"\bRead timed out\b", place=r"warmup$"),
    _sign("address", r"address already in use", r"\bEADDRINUSE\b", r"port \d+ is (?:not available|already)", r"port \d+ [^.]{0,40}in use"),
    _sign("proxy", r"res=<Response \[(?:407|50[234])\]>"),
    _sign("limit", r"Too many open files", r"can't start new thread", r"RLIMIT_\w+", r"\bmemlock\b"),
    _sign(
        "argument", r"40[134] Client", r"gated repo", r"not a (?:local folder|valid model identifier)", r"Permission denied",
        r"greater than the derived context_length", r"Cannot assign requested address",
    ),
    _sign(
        "model", r"connect to 'https?://", r"LocalEntryNotFound", r"does not appear to have (?:a file|files)", r"HTTPSConnectionPool",
        r"urllib3\.exceptions\.(?:Protocol|SSL)Error", r"SafetensorError", r"Cannot find any model weights", r"HfHubHTTPError",
        r"CERTIFICATE_VERIFY_FAILED", r"429 Client",
    ),
    _sign(
        "device", r"No (?:CUDA|HIP|NPU|XPU) GPUs? are available", r"no (?:CUDA|ROCm)-capable device", r"invalid device ordinal",
        r"Found no NVIDIA driver", r"devices are busy or unavailable",
    ),
    _sign(
        "peer", r"from another rank", r"(?:closed|reset|aborted) (?:the connection )?by (?:remote )?peer",
        r"remote (?:process|rank|node|end)[^.]{0,40}(?:exit|close|closing|terminate|died)", r"Watchdog caught collective operation timeout",
        r"recvValue failed", r"Socket closed", r"Broken ?pipe", r"ConnectionResetError", r"\bEOFError\b", r"ncclRemoteError",
        r"Rank \d+ scheduler (?:died|is dead)", r"scheduler (?:process )?died", r"child (?:process|failed)",
        r"\bpeer\b[^.]{0,40}(?:exit|died|dead|gone)", r"from rank \d+\b", r"check rank \d+ logs", r"other ranks (?:that )?(?:did|have|are|were)",
    ),
    _sign(
        "library", r"ptxas", r"\bsm_\d\d", r"compute capability", r"no kernel image", r"hipErrorNoBinaryForGpu", r"undefined symbol",
        r"cannot open shared object", r"(?:Import|ModuleNotFound)Error", r"not compiled (?:with|for)", r"GLIBC(?:XX)?_",
        r"driver version is insufficient", r"provided PTX", r"unsupported toolchain", r"requires? [^.]{0,60}(?:>=|or (?:newer|later|higher)|version)",
        r"please (?:install|upgrade|update)", r"version mismatch", r"incompatible version", r"pip install", r"does not recognize this architecture",
        r"architectures? [^.]{0,120}(?:not supported|unsupported)", r"\bnvcc\b", r"\bninja\b",
        r"/(?:gcc|cc|clang)\b", r"C compiler", r"\bCUDA_HOME\b", r"Python\.h\b", r"driver on your system is too old",
        r"(?:not supported|unsupported|only supported|not available) (?:on|by|for) (?:this |the |your |current )?(?:\w+ )?"
        r"(?:gpu|device|hardware|arch|platform|hopper|blackwell|ampere|sm)",
        r"Unsupported (?:arch|architecture|device|gpu)",
    ),
    _sign(
        "host_memory", r"\[Errno 12\]", r"Cannot allocate memory \(12\)", r"error code 12\b", r"DefaultCPUAllocator", r"^MemoryError",
        r"(?:host|CPU|pinned|shared) memory[^.]{0,60}(?:not|insufficient|only|fail|exceed|available)",
        r"(?:not enough|insufficient|no|out of) (?:host|CPU|pinned|shared) memory", r"\bshm\b[^.]{0,40}(?:full|space|size|No such)",
    ),
    _sign("disk", r"No space left on device", r"Disk quota exceeded"),
    _sign("kernel", r"out of resource: shared memory"),  # of the GPU, which a kernel asks for
    _sign("check", r"req_slots"),  # places for requests, which no memory of the GPU holds
    _sign(
        "memory", r"out of (?:\w+ )?memory", r"outofmemory", r"not enough (?:\w+ ){0,2}memory", r"no (?:GPU |available )?memory",
        r"(?:failed|cannot|unable|could not) (?:to )?allocate (?:[\w.]+ ){0,4}(?:memory|bytes|[KMG]i?B\b|workspace|buffer)",
        r"insufficient (?:\w+ )?memory", r"STATUS_ALLOC_FAILED", r"OUT_OF_RESOURCES",
        r"exceeds? (?:the )?(?:available|free) memory",
    ),
    _sign("argument", r"(?:does not|doesn't) support\b", r"\bnot supported\b", place=r"/disaggregation/"),  # a combination of the pair
    _sign(
        "transfer", r"KVTransferError", r"\bmooncake", r"\bnixl\b", r"transfer engine", r"KVPoll", r"bootstrap (?:server|room|failed)",
        r"prefill parallel info",
    ),
    _sign("transfer", place=r"/disaggregation/"),
    _sign("storage", place=r"/mem_cache/(?:storage|mooncake_store)/"),
    _sign(
        "network", r"\bGloo\b", r"TCPStore", r"Dist(?:Network|Store|Backend)Error", r"nccl(?:SystemError|InternalError|InvalidUsage)",
        r"NCCL (?:error|WARN|communicator)", r"ibv_\w+", r"rendezvous", r"No route to host", r"Network is unreachable", r"Connection refused",
        r"Timed out waiting (?:for )?\d+ ?ms", r"gaierror",
        r"connect(?:FullMesh|(?:ion)? timed? ?out)", r"Failed to connect", r"init_process_group", r"timed out after \d+(?:ms| ?s)? waiting for (?:clients|all)",
    ),
    _sign(
        "kernel", r"exit ?code:? ?\(?-?(?:4|6|7|8|11|13[2459]|136)\b",
        r"illegal memory access", r"misaligned address", r"device-side assert", r"unspecified launch failure", r"Segmentation fault",
        r"SIG(?:SEGV|BUS|ABRT)", r"Bus error", r"Memory access fault by GPU", r"HSA_STATUS_ERROR", r"(?:CUDA|HIP|NPU|XPU|MUSA) (?:\w+ )?error",
        r"(?:cuda|hip)Error", r"CU(?:BLAS|DNN)_STATUS", r"Triton Error", r"AcceleratorError", r"double free", r"corrupted", r"invalid pointer",
        r"(?:malloc|free)\(\)", r"\bXid\b", r"EZ\d{4}", r"E[A-Z]9999", r"ERR\d{5}", r"aclError", r"ACL (?:error|api)", r"XlaRuntimeError",
        r"not permitted when stream is capturing", r"Internal Triton", r"cutlass", r"\bMLIR\b", r"nanobind", r"flashinfer", r"deep_?gemm",
        r"\baiter\b",
    ),
    _sign(
        "argument", r"unrecognized arguments", r"invalid choice", r"expected (?:one|at least one) argument",
        r"is the correct path", r"trust_remote_code", r"(?:Can't|cannot) load (?:the )?(?:configuration|tokenizer)",
        r"Unrecognized (?:model|configuration)", r"No such file or directory", r"(?:must be|is not|not) divisible",
    ),
    _sign("argument", place=r"/(?:server_args|launch_server|arg_groups/\w+|parser/\w+|configs/\w+)\.py|/cli/"),
    _sign("size", r"\b(?:increase|reduce|raise|lower|decrease)\b[^.]{0,80}--[a-z][a-z0-9-]+"),
    _sign(
        "argument", r"--[a-z][a-z0-9-]{3,}[^.]{0,40}(?:must|should|cannot|is not|requires)",
        r"\b(?:set|use|using|specify|add|pass|enable|disable)\b[^.]{0,80}--[a-z][a-z0-9-]+",
    ),
    _sign("check", r"^TypeError: Unsupported\b", place=r"^(?:sglang|srt)/"),  # an object of SGLang's own
    _sign("check", r"^NotImplementedError:?$"),  # without a word: a branch that nobody wrote
    _sign("library", r"NotImplementedError", r"is not supported", r"Unsupported", r"not implemented"),
    _sign("check", r"^[\w.]*(?:Error|Exception)\b", place=r"^(?:sglang|srt)/"),
    _sign("check", r"memory leak detected", r"AssertionError"),
    _sign("kernel", r"^Fatal Python error", r"^terminate called", r"^(?:\S{1,80}: line \d+: *)?(?:\d+ )?(?:Aborted|Illegal instruction)"),
)  # fmt: skip
_WEAK = frozenset({"check", "unknown", "peer"})
_OF_A_START = frozenset({"argument", "model", "address", "proxy", "device"})


def class_of(texts: Sequence[str], place: str = "") -> str:
    """Return the class of an end by the texts of a chain of exceptions, the last one last, and the frame that raised it.

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


# Before the words of an exception of C++, or of a line of PyTorch's.
_WHAT = re.compile(r"^(?:- |what\(\): +|\[rank\d{1,5}\]:\[[EF][^\]\n]{1,120}\] )+")


def shortened(text: str, longest: int = LONGEST_WORDS) -> str:
    """Return a quotation cut at a word."""
    return text if len(text) <= longest else text[: longest - 2].rpartition(" ")[0] + " " + clean.CUT


# The line that explains an end is its event of the kind `words`, which has its class as word.


def denies_memory(said: Event) -> bool:
    """Whether its numbers show that no memory was short, whatever its words say."""
    return said.word == "check" and "out of memory" in said.text


def is_of_a_start(said: Event) -> bool:
    """Whether only a server that starts ends like this: what a transfer refuses is found by the first request."""
    return said.word in _OF_A_START and not said.place.startswith("srt/disaggregation/")


def is_sure(said: Event) -> bool:
    """Whether it did end a process."""
    return not said.figures.get("unsure")


def where(said: Event) -> str:
    """Return rank, line and file, as far as they are known."""
    line = f"line {said.figures['line']:,.0f}" if said.figures.get("line") else ""
    at = f"{line} of {said.file}" if line and said.file else line
    raised = said.place and f"raised {'below' if said.word == 'cut' else 'at'} {said.place}"
    return ", ".join(filter(None, (said.rank.words, at, raised)))


def is_better(said: Event, other: Event | None) -> bool:
    """Whether it explains an end better: more of the same, a heavier class, else the earlier one. What is marked is no better."""
    if other is None:
        return True
    mine, its = ((each.figures.get("chain"), each.file, each.rank) for each in (said, other))
    if mine[0] and mine == its:
        return True
    is_cause = CLASSES[other.word].weight > CAUSE and (is_sure(other) or not is_sure(said))
    if said.marked and not other.marked and is_cause:
        return False  # text of others does not outrank a cause, but what ended no process is none
    if other.time is not None and said.time is not None and said.time - other.time > EPISODE_SECONDS:
        return True
    return _strength(said) > _strength(other)


def _strength(said: Event) -> tuple[bool, bool, int]:
    weight = CLASSES[said.word].weight
    return weight >= CAUSE, is_sure(said), weight


def to_json(said: Event | None, now: float) -> dict[str, object] | None:
    """Return what explains an end as plain JSON, for a state file; an age in seconds stands in place of its time."""
    age = 0.0 if said is None or said.time is None else max(now - said.time, 0.0)
    return None if said is None else events.to_json(replace(said, time=age))


def from_json(saved: object, now: float) -> Event | None:
    """Return what `to_json` returned; None where it cannot be one. `now`: when it was saved."""
    said = events.from_json(saved)
    if said is None or said.word not in CLASSES:
        return None
    said.text, said.place, said.file = quoted(said.text), said.place[:200], said.file[:400]
    said.time, said.before = now - (said.time or 0.0), tuple(map(quoted, said.before[:10]))
    return said
