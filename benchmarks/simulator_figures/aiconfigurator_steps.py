"""Prints step times of five models on GPUs, by the measured tables of aiconfigurator-core, as JSON.

A decode step is an output of two tokens without its prompt.
"""

import json

from aiconfigurator_core.sdk import common, config
from aiconfigurator_core.sdk.backends.factory import get_backend
from aiconfigurator_core.sdk.models import get_model
from aiconfigurator_core.sdk.perf_database import get_database, get_latest_database_version

SYSTEMS = {"A100": "a100_sxm", "L40S": "l40s", "H100": "h100_sxm", "H200": "h200_sxm", "B200": "b200_sxm"}
MODELS = {
    "llama-3.1-8b": ("meta-llama/Meta-Llama-3.1-8B", (1,)),
    "llama-3.1-70b": ("meta-llama/Meta-Llama-3.1-70B", (4, 8)),
    "qwen3-8b": ("Qwen/Qwen3-8B", (1,)),
    "qwen3-32b": ("Qwen/Qwen3-32B", (2, 4)),
    "qwen3-30b-a3b": ("Qwen/Qwen3-30B-A3B", (1,)),
}
DECODES = ((1, 512), (8, 2048), (32, 1024), (64, 2048), (128, 1024), (256, 512))
PREFILLS = ((1, 512), (1, 2048), (1, 8192), (4, 2048))
GEMM, KV = common.GEMMQuantMode, common.KVCacheQuantMode


def main() -> None:
    found, missing = [], []
    for device, system in SYSTEMS.items():
        backend_name = "vllm"
        version = get_latest_database_version(system, backend_name)
        database = get_database(system, backend_name, version)
        backend = get_backend(backend_name)
        for name, (path, tensors) in MODELS.items():
            for quantization in ("none", "fp8"):
                if quantization == "fp8" and device == "A100":
                    continue
                for tensor in tensors:
                    settings = config.ModelConfig(tp_size=tensor, moe_tp_size=tensor, moe_ep_size=1)
                    if quantization == "fp8":
                        settings.gemm_quant_mode, settings.kvcache_quant_mode = GEMM.fp8, KV.fp8
                        settings.moe_quant_mode = common.MoEQuantMode.fp8
                    try:
                        model = get_model(path, settings, backend_name)
                        steps = [(True, *each) for each in DECODES] + [(False, *each) for each in PREFILLS]
                        for decodes, rows, tokens in steps:
                            runtime = config.RuntimeConfig(batch_size=rows, isl=tokens, osl=2 if decodes else 1)
                            mode = "static_gen" if decodes else "static_ctx"
                            ms = backend.run_static_latency_only(model, database, runtime, mode)
                            case = {"model": name, "device": device, "quantization": quantization, "tensor": tensor}
                            found.append(
                                {**case, "decode": decodes, "rows": rows, "tokens": tokens, "seconds": ms / 1e3}
                            )
                    except Exception as error:  # a table that it lacks
                        missing.append(f"{name} {quantization} {device}: {type(error).__name__}: {error}"[:200])
    print("\n".join(missing))
    print(json.dumps(found))


main()
