"""Compares checkpoints with an original, all executed by transformers in fp32. Runs in an environment with
compressed-tensors, which decodes quantised ones.

    python transformers_quality.py WINDOWS.json ORIGINAL_DIR MODEL_DIR...

WINDOWS.json has the windows of token ids by class of text. Prints a JSON line for each model and class: the tokens, and
for each window the mean of -log p, of the original's, of KL(original || model) and the share of equal greedy tokens.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def load(folder: str) -> Any:
    """The model in fp32, with the values of its codes."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    decode = getattr(getattr(model, "hf_quantizer", None), "compressor", None)
    if decode is not None:
        decode.decompress_model(model)
    return model


def log_probabilities(model: Any, window: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([window])).logits[0, :-1]
    return logits.float().log_softmax(-1)


def main() -> None:
    windows_file, original, *others = sys.argv[1:]
    classes: dict[str, list[list[int]]] = json.loads(Path(windows_file).read_text())
    with torch.inference_mode():
        base = load(original)
        for folder in others:
            model = load(folder)
            for name, windows in classes.items():
                row: dict[str, Any] = {"model": folder, "class": name, "tokens": 0}
                row |= {"nats": [], "base_nats": [], "kl": [], "agreement": []}
                for window in windows:
                    p, q = log_probabilities(base, window), log_probabilities(model, window)
                    targets = torch.tensor(window[1:])[:, None]
                    row["tokens"] += len(targets)
                    row["nats"].append(-q.gather(1, targets).mean(dtype=torch.float64).item())
                    row["base_nats"].append(-p.gather(1, targets).mean(dtype=torch.float64).item())
                    row["kl"].append((p.exp() * (p - q)).sum(-1).mean(dtype=torch.float64).item())
                    row["agreement"].append((p.argmax(-1) == q.argmax(-1)).double().mean().item())
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
