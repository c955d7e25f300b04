"""The settings of an engine, by the headings of their flags in the help. See `settings.py`."""

from collections.abc import Mapping
from types import MappingProxyType

from penstock.declared.setting import COUNT, RANKS, SIZE, SWITCH, Kind, Setting, choice, text, whole

ENGINE: Mapping[str, tuple[Setting, ...]] = MappingProxyType(
    {
        "Model": (
            Setting(
                "revision",
                text("NAME"),
                "Branch, tag or commit of a Hugging Face model",
                "",
                "the hub's main branch, or the folder as it is",
                words="the hub's main branch",
            ),
            Setting(
                "generation_config",
                choice("model", "none"),
                "Whose sampling values hold for requests that set none",
                "model",
                "the values that the model recommends",
            ),
            Setting(
                "device", choice("auto", "cpu", "cuda"), "Device that computes", words="`auto`, a GPU if there is one"
            ),
            Setting(
                "dtype",
                choice("auto", "float32", "bfloat16"),
                "Dtype of weights, activations and KV cache",
                words="`auto`, the checkpoint's if it is one of these, else `bfloat16`",
            ),
            Setting(
                "quantization",
                choice("none", "int8", "int4", "fp8"),
                "Quantise the weights while loading, fp8 only on a GPU",
                "none",
                "weights in the dtype lose nothing",
            ),
            Setting(
                "quantization_group",
                choice("32", "64", "128")._replace(metavar="N"),
                "Values that share a scale in int4",
                32,
                "the smallest: in int4, quality comes from small groups",
            ),
        ),
        "Memory and batches": (
            Setting(
                "max_model_len",
                COUNT,
                "Most tokens of a prompt and its output together",
                words="the model's limit, if memory allows",
            ),
            Setting(
                "max_num_seqs", COUNT, "Most sequences that run at a time", words="64 to 256, by the vocabulary's size"
            ),
            Setting(
                "max_num_batched_tokens",
                COUNT,
                "Most tokens in one step; longer prompts are prefilled in chunks",
                words="512, on a GPU 2048",
            ),
            Setting(
                "kv_cache_memory",
                SIZE,
                "Memory for the KV cache of each rank: 4GiB, 500MB",
                words="a share of the free memory",
            ),
            Setting(
                "kv_cache_dtype",
                choice("auto", "int8", "fp8"),
                "Dtype of the KV cache, int8 on a CPU or fp8 on a GPU for half the size",
                "auto",
                "keys and values in the dtype lose nothing",
                words="`auto`, as --dtype",
            ),
            Setting(
                "gpu_memory_utilization",
                Kind("number", "SHARE", above=0, most=1),
                "Share of a GPU's memory that the engine may use",
                0.9,
                "the rest is for what CUDA and other programs take beside it",
            ),
            Setting("enable_prefix_caching", SWITCH, "Reuse the KV cache of equal prefixes", words="on"),
            Setting(
                "block_size",
                whole(1, 1024),
                "Tokens in a KV block",
                16,
                "small blocks waste little at a sequence's end",
            ),
        ),
        "Execution": (
            Setting(
                "threads", COUNT, "CPU: threads that compute, for each rank", words="all cores, divided among the ranks"
            ),
            Setting(
                "speculation",
                choice("auto", "off", "ngram", "suffix"),
                "Source of the guessed tokens that a step verifies, ngram for the request, suffix also for recent "
                "outputs of the same tenant",
                words="`auto`, `suffix` on a CPU with one pipeline stage, else `off`",
                more="[speculation.md](speculation.md)",
            ),
            Setting(
                "num_speculative_tokens",
                whole(1, 64),
                "Most guessed tokens of a sequence in a step",
                words="31 with speculation",
            ),
            Setting(
                "attention_backend",
                choice("auto", "triton", "flashinfer"),
                "Kernels of attention on a GPU",
                words="`auto`, `triton`",
            ),
            Setting(
                "enforce_eager",
                SWITCH,
                "GPU: do not capture CUDA graphs",
                False,
                "CUDA graphs save the launches of a step",
            ),
            Setting(
                "deterministic",
                SWITCH,
                "GPU: tokens do not depend on the other requests in the batch; slower. A CPU's never do",
                False,
                "on a GPU the fast path; on a CPU tokens never depend on the batch",
            ),
            Setting("tensor_parallel_size", RANKS, "Ranks that each layer is split over", 1, "layers are not divided"),
            Setting(
                "pipeline_parallel_size", RANKS, "Stages that the layers are divided into", 1, "layers stay together"
            ),
            Setting(
                "expert_parallel",
                SWITCH,
                "Give each tensor rank whole experts",
                False,
                "each tensor rank has a part of every expert, so that all have equal work",
            ),
            Setting(
                "distributed_executor",
                choice("auto", "process", "ray"),
                "How ranks are started",
                "auto",
                "ranks are processes of this machine",
                words="`auto`, processes on this machine",
            ),
        ),
    }
)
