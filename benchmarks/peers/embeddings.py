"""Embeds texts with another engine. Runs in an environment that has it; benchmarks/embeddings.py starts it.

Each line of standard input is a JSON list of texts; the answer has the seconds, and the first numbers of the vectors.
Arguments: engine (sentence-transformers, onnxruntime, openvino), folder of the model, threads, dtype.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

BATCH = 32  # sentence-transformers' default


def sentence_transformers(folder: str, dtype: str) -> Callable[[list[str]], Any]:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
    return lambda texts: model.encode(texts, batch_size=BATCH, convert_to_numpy=True, show_progress_bar=False)


def padded(folder: str, run: Callable[[dict[str, np.ndarray]], np.ndarray]) -> Callable[[list[str]], Any]:
    """What sentence-transformers does around a model: batches of similar length, mean and norm."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)

    def encode(texts: list[str]) -> np.ndarray:
        every = tokenizer.encode_batch_fast(texts)
        order = sorted(range(len(texts)), key=lambda i: -len(every[i].ids))
        found = np.empty((len(texts), 384), np.float32)
        for begin in range(0, len(order), BATCH):
            part = order[begin : begin + BATCH]
            ids = np.zeros((len(part), len(every[part[0]].ids)), np.int64)
            mask = np.zeros_like(ids)
            for row, i in enumerate(part):
                ids[row, : len(every[i].ids)] = every[i].ids
                mask[row, : len(every[i].ids)] = 1
            states = run({"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)})
            mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
            found[part] = mean / np.linalg.norm(mean, axis=-1, keepdims=True)
        return found

    return encode


class LastState(torch.nn.Module):
    def __init__(self, folder: str) -> None:
        super().__init__()
        from transformers import AutoModel

        self.model = AutoModel.from_pretrained(folder, attn_implementation="sdpa").eval()

    def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> Any:
        return self.model(input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids).last_hidden_state


EXAMPLE = {name: torch.ones(2, 9, dtype=torch.int64) for name in ("input_ids", "attention_mask", "token_type_ids")}


def onnxruntime(folder: str, threads: int) -> Callable[[list[str]], Any]:
    import onnxruntime as ort

    axes = {name: {0: "batch", 1: "length"} for name in (*EXAMPLE, "states")}
    with tempfile.TemporaryDirectory() as place:
        path = str(Path(place) / "model.onnx")
        torch.onnx.export(
            LastState(folder),
            tuple(EXAMPLE.values()),
            path,
            input_names=list(EXAMPLE),
            output_names=["states"],
            dynamic_axes=axes,
            opset_version=17,
            dynamo=False,
        )
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        # The fused attention and GELU that ONNX Runtime has for transformers.
        from onnxruntime.transformers import optimizer

        fused = optimizer.optimize_model(path, "bert", num_heads=12, hidden_size=384)
        fused.save_model_to_file(path)
        session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return padded(folder, lambda inputs: session.run(["states"], inputs)[0])


def openvino(folder: str, threads: int, dtype: str) -> Callable[[list[str]], Any]:
    import openvino as ov

    converted = ov.convert_model(LastState(folder), example_input=EXAMPLE)
    hint = ov.Type.f32 if dtype == "float32" else ov.Type.bf16
    config = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1}
    compiled = ov.Core().compile_model(converted, "CPU", config)
    return padded(folder, lambda inputs: compiled(list(inputs.values()))[0])


def main() -> None:
    engine, folder, threads, dtype = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(threads)
    with torch.inference_mode():
        if engine == "sentence-transformers":
            encode = sentence_transformers(folder, dtype)
        else:
            encode = onnxruntime(folder, threads) if engine == "onnxruntime" else openvino(folder, threads, dtype)
        for line in sys.stdin:
            texts = json.loads(line)
            began = time.perf_counter()
            found = np.asarray(encode(texts), np.float32)
            seconds = time.perf_counter() - began
            print(json.dumps({"seconds": seconds, "vectors": found[:, :4].tolist()}), flush=True)


if __name__ == "__main__":
    main()
