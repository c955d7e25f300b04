"""Scripts as users of vLLM write them, with the import changed and nothing else, each in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.encoders import add_tokenizer, tiny_encoder

PROMPTS = """
from vllm import LLM, SamplingParams

prompts = ["Hello, my name is", "The president of the United States is", "The capital of France is"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=16, seed=7)


def main():
    llm = LLM(
        model="smollm2-135m",
        tokenizer_mode="auto",
        trust_remote_code=False,
        tensor_parallel_size=1,
        dtype="auto",
        quantization=None,
        seed=0,
        gpu_memory_utilization=0.9,
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=4,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        disable_log_stats=True,
    )
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        generated_text = output.outputs[0].text
        print(f"Prompt: {output.prompt!r}, Generated text: {generated_text!r}")
        assert output.finished and len(output.outputs[0].token_ids) <= 16 and output.outputs[0].index == 0
        assert output.prompt_token_ids and output.outputs[0].finish_reason in ("length", "stop")


if __name__ == "__main__":
    main()
"""

CHAT = """
from vllm import LLM

llm = LLM(model="smollm2-135m", max_model_len=1024, runner="generate")
sampling_params = llm.get_default_sampling_params()
sampling_params.max_tokens = 40
sampling_params.temperature = 0
conversation = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "What is the capital of France?"},
]
outputs = llm.chat(conversation, sampling_params, use_tqdm=False)
for output in outputs:
    print(output.outputs[0].text)
outputs = llm.chat([conversation for _ in range(3)], sampling_params=sampling_params, use_tqdm=True)
assert len({output.outputs[0].text for output in outputs}) == 1
"""

STRUCTURED = """
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

llm = LLM(model="smollm2-135m", max_model_len=512)
params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["Positive", "Negative"]))
outputs = llm.generate(prompts="Classify this sentiment: it is wonderful!", sampling_params=params)
print(outputs[0].outputs[0].text)
"""

EMBED = """
from vllm import LLM

llm = LLM(model="all-minilm-l6-v2", runner="pooling", enforce_eager=True)
outputs = llm.embed(["Hello, my name is", "The capital of France is"], use_tqdm=False)
for output in outputs:
    embeds = output.outputs.embedding
    print(len(embeds))
(output,) = llm.score("What is a cat?", "A small animal that purrs.")
print(output.outputs.score > 0)
"""

CLASSIFY = """
from vllm import LLM

llm = LLM(model={model!r}, runner="pooling", enforce_eager=True)
(output,) = llm.classify("Hello, my name is")
probs = output.outputs.probs
print(len(probs), round(sum(probs), 3), output.outputs.num_classes)
"""


def run(script: str, folder: Path) -> str:
    """What a script of vLLM's prints with Penstock's name in its imports."""
    path = folder / "script.py"
    path.write_text(re.sub(r"from vllm(\.\w+)? import", "from penstock import", script))
    environment = {**os.environ, "PENSTOCK_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_prompts(tmp_path: Path) -> None:
    assert len(re.findall(r"Prompt: '.+', Generated text: .+", run(PROMPTS, tmp_path))) == 3


def test_a_chat(tmp_path: Path) -> None:
    assert "Paris" in run(CHAT, tmp_path)


def test_a_choice(tmp_path: Path) -> None:
    assert run(STRUCTURED, tmp_path) in ("Positive\n", "Negative\n")


def test_embeddings(tmp_path: Path) -> None:
    assert run(EMBED, tmp_path) == "384\n384\nTrue\n"


def test_classes(tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny_encoder("bert_labels").save_pretrained(model)
    add_tokenizer(model)
    assert run(CLASSIFY.format(model=str(model)), tmp_path).split()[1:] == ["1.0", "3"]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("trust_remote_code=True", "never run"),
        ("swap_space=4", "no setting swap_space"),
        ("task='draw'", "model decides"),
    ],
)
def test_what_penstock_does_not_have_is_named(argument: str, words: str, tmp_path: Path) -> None:
    code = f"from penstock import LLM\ntry:\n    LLM('smollm2-135m', {argument})\nexcept ValueError as e:\n    print(e)"
    assert words in run(code, tmp_path)
