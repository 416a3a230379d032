"""The words that SGLang itself prints in the lines that the exporter reads; all others may be private.

The names of arguments and series are those of the released wheels (`flags`, `families`). The others are from the lines of
starts, batches, failures and health, the frames of tracebacks, and the values of arguments, in ten releases. Pure.
"""

from __future__ import annotations

import re
from functools import lru_cache

from sglang_tuning_exporter.sglang.args.flags import argument_names
from sglang_tuning_exporter.sglang.metrics.catalogue import FAMILIES

UNKNOWN = "scrubbed"
_TOKEN = re.compile(r"[^\W_]+")
# Figures with the letters that SGLang prints before or after them: 8GB, 60s, 1e6, TP0, 0.5.9.post1, fp8, sm90.
_FIGURE = re.compile(
    r"\d{1,24}(?:s|ms|us|[kmgt]i?b?|b|x|d|e\d{1,3})?|(?:tp|dp|pp|ep|cp|moe|attn|post|rc|dev|fp|bf|int|sm|v|h|a)?\d{1,4}"
)
_LINES = """
a aborted acceleratorerror accept after all alloc allocate allocated allocation allocator allreduce already an and app application applications
architecture are args asgi assertion assertionerror at attention attn attribute attributeerror avail available await backend background base batch be
because been before begin bfloat bind bits body bootstrap breakable bs but by bytes cache cached call called can cannot capture captured capturing
causing chained child chunk chunked client code command common communicator compile config context could couldn count cp cpu crashed cuda cudaerror
current custom data deadlock debug decode decoding default deps detokenizer detokenizermanager device dict did died direct direction disagg dispatch
does don done down draft draining dtype due dump during e elapsed elem empty encountered end ending engine enough ep error errors even event events
exc exceeded except exception exhausted exit exited expected extend failed failure false fastapi fd file filenotfounderror fill finished fired flash
flashinfer float for forward forwarded fragmentation frame free from full func function gained gb gen generate generation get gib gpu gpus graceful
graph graphs group h handle handled handler handling happened has have head headers health hip hit host http id idle if ignore illegal image impl
importerror in include included includedrouter increase index indexerror inf info init initialization initialize initializing inner input instead int
internal invalid io is it item items its kernel key keyboardinterrupt keyerror kill killed kv kvcache largest last launch layer layers leaving len
length lens less likely limit line list llamaforcausallm load loaded loader loading local loop low lower main make mamba manager master matmul max may
mb mem memory memoryerror message method mib middleware min minutes mixin mm mode model module more most move multi multiprocessing name nan nccl need
needed new next no node non none not notimplementederror npu num object of offload on one only op opt optimistic option or order oserror other out
outer outofmemoryerror output over own packages packed page paged param parameter parent part pass path peak pending per pid piecewise please pool
pools port post pre prealloc prefill prefix prepare previous priority process processed processes processing profile progress protocols proxy ptr pull
push py pynccl python pytorch q quant query queue quit raise ran rank ranks rate ratio reached read ready reason receive received recent recommended
recover recv reduce release req reqs request requests res reserved resource response restart result results retract retracted retracting retraction
retry return returned returns rocm roll route router run runner running runs runtime runtimeerror s safe sample sampler sampling scale schedule
scheduler scope second seconds self send sending sent seq sequence server set setting several sglang shape shared shm shutting sigint sigkill signal
signum sigquit sigterm size sizes slot slots small so socket space spawn spec speculative srt stack stage starlette start started starting startup
state status step still stop stopped stream subprocess success such super swa sync system t table take target task telemetry tensor tensors than that
the their them then there thread threads throughput time timed timeout times to token tokenizer tokenizermanager tokens took torch total tp traceback
track transfer transferring tree tried triton true try trying tuning type typeerror unable unbootstrapped unexpected unexpectedly unknown unload
unspecified until up update usage use used user using utilization utils uvicorn v value valueerror values verify version wait waiting warmup warning
was watchdog weight weights were when where which while will with within without worker workers workspace would write wrong x you zmq
"""
_VALUES = """
abort admin amd ascend asynchronous auto awq best bf bfs breadth cascade chain clip compressed coreweave cutlass deep deepep deepgemm deterministic
dfs direct disabled dummy dynamic e4m3 e4m3fn e5m2 eager eagle effort fa fa2 fa3 fa4 fcfs file first flash flashmla float16 float32 fp4 fp8 frozen
fused gguf gptq half hf hpu huggingface int4 int8 intel kv latency layer layerwise length llguidance lof lora low lpm lru marlin mha minimum mla
modelopt mooncake musa mxfp4 nextn ngram nixl none normal npu null nvfp4 off outlines packed pinned pytorch queue qwen random robin round routing
safetensors selective serial shortest sigmoid simple split standalone static tc through torchao total trivial trtllm trtllm_mha unified w8a8 write
xgrammar xpu zero
"""
_ANSWERS = """
accept aggregate available cache capacity code compute cp decode delete device disaggregation dp effective engine extend forward gb gen get graph head
hit host info input internal is kvcache last le loads memory method mode moe num output overlap phase pid pp prefill put quantile queues rank rate
ready reason reqs request running scheduler source speculative stage startup state states status step storage streaming swa throughput time timestamp
token tp type usage used utilization verify version waiting weight
"""


@lru_cache(maxsize=1)
def _words() -> frozenset[str]:
    names = (token for name in (*argument_names(), *FAMILIES) for token in _TOKEN.findall(name.lower()))
    return frozenset((*f"{_LINES} {_VALUES} {_ANSWERS}".split(), *names))


def is_known(text: str) -> bool:
    """Whether a text consists of SGLang's words and figures."""
    return all(map(_is_token, _TOKEN.findall(text)))


def only_known(text: str) -> str:
    """Return the text with every word that is not SGLang's written as `scrubbed`."""
    return _TOKEN.sub(lambda token: token[0] if _is_token(token[0]) else UNKNOWN, text)


@lru_cache(maxsize=4096)
def _is_token(token: str) -> bool:
    lowered = token.lower()
    return token.isascii() and (lowered in _words() or lowered == UNKNOWN or _FIGURE.fullmatch(lowered) is not None)
