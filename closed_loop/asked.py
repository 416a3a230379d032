"""Ask one release's own argument parser and checks, as if on a GPU of 80 GB: run by SGLang's Python with a wheel on its path.

It reads one command line (a JSON list of words) a line and writes one answer a line: empty where the server would start, else
why it would not. Nothing is started.
"""

import argparse
import contextlib
import io
import json
import logging
import os
import stat
import sys
import tempfile
import types
import warnings

warnings.filterwarnings("ignore")
logging.disable(logging.CRITICAL)
OUT = os.dup(1)
os.dup2(2, 1)  # what imports print goes elsewhere
GPU_MEGABYTES = 81920


def pretend_a_gpu():
    """Make torch and nvidia-smi report eight GPUs of 80 GB."""
    import torch

    properties = types.SimpleNamespace(
        total_memory=GPU_MEGABYTES << 20, multi_processor_count=132, name="NVIDIA H100", major=9, minor=0
    )
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 8
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: properties
    torch.cuda.get_device_name = lambda *_: properties.name
    torch.cuda.mem_get_info = lambda *_: (GPU_MEGABYTES << 20, GPU_MEGABYTES << 20)
    torch.version.cuda = "12.8"
    folder = tempfile.mkdtemp()
    tool = os.path.join(folder, "nvidia-smi")
    with open(tool, "w") as file:
        file.write(f"#!/bin/sh\necho {GPU_MEGABYTES}\n")
    os.chmod(tool, stat.S_IRWXU)
    os.environ["PATH"] = folder + os.pathsep + os.environ["PATH"]


def bridge_versions():
    """Let older wheels import names that the installed torch, triton and transformers have renamed."""
    from triton.runtime import cache

    for name in ("default_cache_dir", "default_dump_dir", "default_override_dir"):
        if not hasattr(cache, name):
            setattr(cache, name, tempfile.gettempdir)
    import transformers
    import transformers.image_utils as images

    registered = transformers.AutoConfig.register
    transformers.AutoConfig.register = staticmethod(lambda *a, **k: registered(*a, **{**k, "exist_ok": True}))
    for known in (transformers.AutoImageProcessor, transformers.AutoProcessor):
        known.register = staticmethod(lambda *_, **__: None)
    if not hasattr(images, "VideoInput"):
        images.VideoInput = object
    import torch

    if not hasattr(torch._C._cpu, "_is_amx_tile_supported"):
        torch._C._cpu._is_amx_tile_supported = lambda: False
    # Kernels of other builds are not here; what only describes them is not needed.
    register = torch.library.register_fake

    def described(operator, function=None, /, **options):
        def described_here(body):
            with contextlib.suppress(RuntimeError):
                register(operator, body, **options)
            return body

        return described_here if function is None else described_here(function)

    torch.library.register_fake = described


def refused(parser, known, words):
    """Return why the release refuses these words; empty if it accepts them."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            raw = parser.parse_args(words)
            made = known.from_cli_args(raw)
            for name in ("resolve_once", "check_server_args"):
                step = getattr(made, name, None)
                if step is not None:
                    step()
    except SystemExit:
        return "parser: " + said.getvalue().strip().rpartition("\n")[2]
    except Exception as error:
        last = error.__traceback__
        while last.tb_next is not None:
            last = last.tb_next
        return f"{type(error).__name__} in {last.tb_frame.f_code.co_name}: {error}"
    return ""


def main():
    bridge_versions()
    pretend_a_gpu()
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    with os.fdopen(OUT, "w") as out:
        for line in sys.stdin:
            out.write(json.dumps(refused(parser, ServerArgs, json.loads(line))) + "\n")
            out.flush()


main()
