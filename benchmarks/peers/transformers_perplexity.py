"""Measures the perplexity of checkpoints with transformers in fp32, over ids that `penstock bench quality --tokens-out`
wrote. Runs in an environment with what decodes them, such as compressed-tensors or gptqmodel.

    python transformers_perplexity.py PIECES.json MODEL_DIR...

Prints a JSON line for each checkpoint: "windows" has the mean of -log p of each window, of its tokens but the first.
"""

import json
import sys
from pathlib import Path

import torch
import transformers


def main() -> None:
    windows_file, *models = sys.argv[1:]
    windows = json.loads(Path(windows_file).read_text())
    for folder in models:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu").eval()
        found = []
        with torch.inference_mode():
            for window in windows:
                ids = torch.tensor(window)
                logits = model(ids[None]).logits[0, :-1].float()
                found.append(torch.nn.functional.cross_entropy(logits, ids[1:]).item())
        row = {"peer": "transformers", "version": transformers.__version__, "model": folder, "windows": found}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
