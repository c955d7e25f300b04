"""The committed model folder: its size, tokenizer, card, and that it compresses unseen code better than xz."""

import importlib.util
import json
import lzma
import math
import struct
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

ASSETS = Path(__file__).parents[2] / "src" / "penstock" / "assets"
MAIN = ASSETS / "python-8m"
ODD_TEXTS = [
    "",
    " ",
    "\n",
    "\r\n\t \r\n",
    "def f(x):\n\n    return x  \n",
    "\ttabs\t and  spaces   \n   ",
    "naïve café — “quotes” … ½",
    "漢字かな交じり文 한국어 العربية עברית हिन्दी",
    "👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u200b\u200d\ufeff",
    "\x00\x01\x7f\x85\xa0\u2028\u2029",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0010ffff",
    "0x1F 1_000_000 3.14159e-10 __init__ a_b1c2",
    "<|endoftext|> <|im_start|>user<|im_end|>",
]


def tensor_header(folder: Path) -> dict[str, Any]:
    with (folder / "model.safetensors").open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return header


def test_parameters_are_bf16_and_as_many_as_promised() -> None:
    header = tensor_header(MAIN)
    assert {entry["dtype"] for entry in header.values()} == {"BF16"}
    count = sum(math.prod(entry["shape"]) for entry in header.values())
    assert 8e6 <= count <= 12e6
    assert json.loads((MAIN / "training.json").read_text())["parameters"] == count


def test_the_folder_takes_at_most_22_mb() -> None:
    assert sum(file.stat().st_size for file in MAIN.iterdir()) <= 22e6


def test_config_is_qwen3_with_tied_embeddings() -> None:
    config = json.loads((MAIN / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in tensor_header(MAIN)
    assert tensor_header(MAIN)["model.embed_tokens.weight"]["shape"] == [config["vocab_size"], config["hidden_size"]]


def test_tokenizer_is_lossless_and_adds_nothing() -> None:
    tokenizer = Tokenizer.from_file(str(MAIN / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == json.loads((MAIN / "config.json").read_text())["vocab_size"]
    for text in ODD_TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_transformers_reads_the_same_tokenizer() -> None:
    ours = Tokenizer.from_file(str(MAIN / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(str(MAIN))
    for text in ODD_TEXTS:
        assert theirs(text).input_ids == ours.encode(text).ids
    assert (theirs.eos_token_id, theirs.pad_token_id, theirs.bos_token_id) == (0, 0, None)


def test_line_end_and_indentation_are_one_token() -> None:
    tokenizer = Tokenizer.from_file(str(MAIN / "tokenizer.json"))
    pieces = tokenizer.encode("if x:\n        return y").tokens
    assert "Ċ" + "Ġ" * 8 in pieces


def test_chat_is_a_commented_program() -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(MAIN))
    messages = [
        {"role": "system", "content": "Plain code."},
        {"role": "user", "content": [{"type": "text", "text": "The sum\n\nof a list"}]},
        {"role": "assistant", "content": "total = sum(xs)"},
        {"role": "user", "content": "again\n"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "# Plain code.\n# The sum\n#\n# of a list\ntotal = sum(xs)\n# again\n"


def test_card_states_the_recorded_figures_and_the_held_out_modules() -> None:
    card = (MAIN / "README.md").read_text()
    figures = json.loads((MAIN / "evaluation.json").read_text())
    compression, completions = figures["compression"], figures["completions"]
    assert all(f"`{module}`" in card for module in compression["modules"])
    assert f"**{compression['model_bits_per_byte']:.3f}**" in card
    assert f"{completions['parsed']} of {completions['headers']}" in card
    assert "not** a chat model" in " ".join(card.split())
    assert "PYTHON SOFTWARE FOUNDATION LICENSE" in (MAIN / "LICENSE-PSF.txt").read_text()


def test_recorded_figures_beat_xz_and_add_up() -> None:
    figures = json.loads((MAIN / "evaluation.json").read_text())
    compression, completions = figures["compression"], figures["completions"]
    assert compression["model_bits_per_byte"] < compression["xz_bits_per_byte_of_all_in_one"]
    results = completions["results"]
    assert completions["headers"] == len(results) == 20
    assert completions["parsed"] == sum(result["ended"] and result["parses"] for result in results) > 0
    assert completions["parsed"] >= 12  # as the project promises of it


@torch.inference_mode()
def test_a_module_it_has_not_seen_takes_fewer_bits_than_with_xz() -> None:
    spec = importlib.util.find_spec("textwrap")
    assert spec is not None and spec.origin is not None
    data = Path(spec.origin).read_bytes()
    model = AutoModelForCausalLM.from_pretrained(str(MAIN), dtype=torch.float32).eval()
    context = model.config.max_position_embeddings
    # One end-of-text token stands before the module, so that every byte of it is predicted.
    ids = torch.tensor([0, *Tokenizer.from_file(str(MAIN / "tokenizer.json")).encode(data.decode()).ids])
    nats = 0.0
    for begin in range(0, len(ids) - 1, context):
        window = ids[begin : begin + context + 1]
        logits = model(window[None, :-1]).logits[0]
        nats += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
    assert nats / math.log(2) / 8 < len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))
