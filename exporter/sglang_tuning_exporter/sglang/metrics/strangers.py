"""Whose page of metrics an address gave, where it is not SGLang's: known by the names of its series. Data, with one look-up. Pure."""

from __future__ import annotations

import re

_ITSELF = "that of sglang-tuning-exporter itself"
_OWNERS: tuple[tuple[str, str], ...] = (
    ("sglang_tuning_", _ITSELF),
    ("sgl_router_|smg_", "that of SGLang's router (model gateway)"),
    ("vllm[:_]", "vLLM's"),
    ("tgi_", "that of Text Generation Inference"),
    ("trtllm_|nv_inference_|nv_trt_llm_", "that of Triton or TensorRT-LLM"),
    ("lmdeploy[:_]", "LMDeploy's"),
    ("llamacpp[:_]", "that of llama.cpp"),
    ("dynamo_", "that of NVIDIA Dynamo"),
    ("litellm_", "LiteLLM's"),
    ("ray_", "Ray's"),
    ("DCGM_FI_", "that of NVIDIA's DCGM exporter"),
    ("node_", "that of the node exporter"),
    ("container_|cadvisor_", "cAdvisor's"),
    ("kube_|kubelet_|apiserver_", "that of Kubernetes"),
    ("nginx_", "that of an nginx exporter"),
    ("envoy_|istio_", "Envoy's"),
    ("alertmanager_", "Alertmanager's"),
    ("grafana_", "Grafana's"),
    ("prometheus_", "that of Prometheus"),
)
_SERIES = re.compile(
    r"^[ \t]*(?:" + "|".join(f"(?P<of{place}>{names})" for place, (names, _) in enumerate(_OWNERS)) + r")\w",
    re.MULTILINE,
)
_OWN_NAME = "sglang_tuning_build_info"  # every page of this exporter has it, beside the series that it passes on
_OWN = re.compile(rf"^[ \t]*{_OWN_NAME}\b", re.MULTILINE)
_SGLANGS = re.compile(r"^[ \t]*sglang(?::|_(?!tuning_))", re.MULTILINE)


def owner_of(page: str) -> str | None:
    """Return whose a page is, in words that complete "its /metrics is …"; empty for one of SGLang's, None where it is not known whose.

    This exporter's own page is its own, also where it passes SGLang's series on.
    """
    if _OWN_NAME in page and _OWN.search(page) is not None:
        return _ITSELF
    if _SGLANGS.search(page) is not None:
        return ""
    found = {int(match.lastgroup[2:]) for match in _SERIES.finditer(page) if match.lastgroup}
    return _OWNERS[min(found)][1] if found else None
