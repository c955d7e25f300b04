"""Measures the two figures of the model card with transformers: bits per byte, and functions completed."""

import ast
import itertools
import lzma
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from .vocabulary import END_OF_TEXT, load_tokenizer

HEADERS = 20
COMPLETION_TOKENS = 400
MIN_BODY_STATEMENTS = 3
POSITION_BUCKETS = (0, 128, 512, 1024, 1536, 2048)


@dataclass(frozen=True)
class Header:
    """A function to complete: the module's text up to its body, and the position of its ``def``."""

    module: str
    name: str
    prompt: str
    start: int  # character of the def line's beginning in the prompt
    column: int


def load_model(directory: Path) -> tuple[PreTrainedModel, Tokenizer]:
    """Load the bf16 weights for fp32 arithmetic: CPUs without AVX-512 emulate bf16."""
    model = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32).eval()
    return model, load_tokenizer(directory)


@torch.inference_mode()
def token_losses(model: PreTrainedModel, tokenizer: Tokenizer, text: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's loss in nats and the position it was predicted from.

    The text follows an end-of-text token, as in training. The window is the model's context and slides by its half, so
    that every token is scored once, with at least half a context before it where the text has one.
    """
    context = model.config.max_position_embeddings
    ids = torch.tensor([tokenizer.token_to_id(END_OF_TEXT), *tokenizer.encode(text).ids])
    losses, positions = [], []
    scored = 0  # predictions so far: prediction i is for ids[i + 1]
    while scored < len(ids) - 1:
        begin = max(0, scored - context // 2)
        end = min(begin + context, len(ids) - 1)
        logits = model(ids[None, begin:end]).logits[0, scored - begin :]
        losses.append(F.cross_entropy(logits, ids[scored + 1 : end + 1], reduction="none"))
        positions.append(torch.arange(scored - begin, end - begin))
        scored = end
    return torch.cat(losses), torch.cat(positions)


def xz_bits_per_byte(data: bytes) -> float:
    """Return the bits per byte of ``xz -9e``."""
    return 8 * len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)) / len(data)


def measure_compression(model: PreTrainedModel, tokenizer: Tokenizer, sources: dict[str, str]) -> dict[str, object]:
    """Return bits per byte of the model and of xz, per module and in total, and the loss by position."""
    modules = {}
    losses, positions = [], []
    for name, text in sources.items():
        loss, position = token_losses(model, tokenizer, text)
        size = len(text.encode())
        modules[name] = {
            "bytes": size,
            "tokens": len(loss),
            "model": round(loss.sum().item() / math.log(2) / size, 4),
            "xz": round(xz_bits_per_byte(text.encode()), 4),
        }
        losses.append(loss)
        positions.append(position)
    everything = "".join(sources.values()).encode()
    loss, position = torch.cat(losses), torch.cat(positions)
    by_position = {
        f"{low}-{high - 1}": round(loss[(position >= low) & (position < high)].mean().item(), 4)
        for low, high in itertools.pairwise(POSITION_BUCKETS)
    }
    return {
        "bytes": len(everything),
        "tokens": len(loss),
        "model_bits_per_byte": round(loss.sum().item() / math.log(2) / len(everything), 4),
        "xz_bits_per_byte_of_all_in_one": round(xz_bits_per_byte(everything), 4),
        "xz_bits_per_byte_each_alone": round(
            sum(xz_bits_per_byte(text.encode()) * len(text.encode()) for text in sources.values()) / len(everything), 4
        ),
        "nats_per_token": round(loss.mean().item(), 4),
        "nats_per_token_by_position": by_position,
        "modules": modules,
    }


def _headers_of(module: str, source: str) -> list[Header]:
    """Return the eligible functions of one module, top-level ones and methods, in source order."""
    lines = source.splitlines(keepends=True)
    tree = ast.parse(source)
    scopes = [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]
    functions = [node for scope in scopes for node in scope.body if isinstance(node, ast.FunctionDef)]
    headers = []
    for node in sorted(functions, key=lambda function: function.lineno):
        has_docstring = ast.get_docstring(node, clean=False) is not None
        body = node.body[1:] if has_docstring else node.body
        if len(body) < MIN_BODY_STATEMENTS:
            continue
        last = node.body[0].end_lineno if has_docstring else _signature_end(lines, node)
        prompt = "".join(lines[:last]).rstrip("\n")
        headers.append(Header(module, node.name, prompt, len("".join(lines[: node.lineno - 1])), node.col_offset))
    return headers


def _signature_end(lines: list[str], node: ast.FunctionDef) -> int:
    """Return the number of the line that ends the signature: the first one after which ``pass`` makes a function."""
    margin = " " * node.col_offset
    for end in range(node.lineno, node.end_lineno + 1):
        function = "".join(lines[node.lineno - 1 : end]) + f"{margin} pass\n"
        try:
            ast.parse(f"if 1:\n{function}" if margin else function)
        except SyntaxError:
            continue
        return end
    raise ValueError(f"no end of the signature of {node.name} found")


def choose_headers(sources: dict[str, str]) -> list[Header]:
    """Return the fixed list: of each module in turn its first eligible function, then its second, until there are 20.

    Eligible are top-level functions and methods of top-level classes, in source order, whose body has at least three
    statements after the docstring.
    """
    eligible = [_headers_of(name, source) for name, source in sources.items()]
    rounds = max(map(len, eligible))
    in_turn = [headers[i] for i in range(rounds) for headers in eligible if i < len(headers)]
    return in_turn[:HEADERS]


def end_of_function(completion: str, column: int) -> int | None:
    """Return where the first line dedented to ``column`` or less begins, if there is one."""
    offset = 0
    for i, line in enumerate(completion.splitlines(keepends=True)):
        stripped = line.lstrip(" \t")
        # An unfinished line may still be blank.
        if i and stripped.strip() and len(line) - len(stripped) <= column:
            return offset
        offset += len(line)
    return None


@torch.inference_mode()
def complete(model: PreTrainedModel, tokenizer: Tokenizer, header: Header) -> tuple[str, bool]:
    """Return the greedy completion to the function's end, and whether it came within ``COMPLETION_TOKENS``.

    The prompt is the module's source up to the body, cut on the left at a line to fit the model's context.
    """
    room = model.config.max_position_embeddings - COMPLETION_TOKENS
    prompt = header.prompt
    while len(tokenizer.encode(prompt).ids) > room:
        prompt = prompt[prompt.index("\n") + 1 :]
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    cache, step = None, torch.tensor([tokenizer.encode(prompt).ids])
    written: list[int] = []
    while len(written) < COMPLETION_TOKENS:
        out = model(step, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        token = int(out.logits[0, -1].argmax())
        if token == end_of_text:
            return tokenizer.decode(written), True
        written.append(token)
        text = tokenizer.decode(written)
        end = end_of_function(text, header.column)
        if end is not None:
            return text[:end], True
        step = torch.tensor([[token]])
    return tokenizer.decode(written), False


def parses(header: Header, completion: str) -> bool:
    """Return whether the header and its completion, indented as they are, are valid Python."""
    text = header.prompt[header.start :] + completion
    try:
        ast.parse(f"if 1:\n{text}\n" if header.column else text)
    except (SyntaxError, ValueError):
        return False
    return True


def measure_completions(model: PreTrainedModel, tokenizer: Tokenizer, sources: dict[str, str]) -> dict[str, object]:
    """Complete the fixed headers; a function counts when it came to its end within the limit and parses."""
    results = []
    for header in choose_headers(sources):
        completion, ended = complete(model, tokenizer, header)
        results.append(
            {
                "module": header.module,
                "function": header.name,
                "ended": ended,
                "parses": parses(header, completion),
                "completion": completion,
            }
        )
    return {
        "headers": len(results),
        "parsed": sum(result["ended"] and result["parses"] for result in results),
        "limit_tokens": COMPLETION_TOKENS,
        "results": results,
    }


def evaluate(directory: Path, sources: dict[str, str]) -> dict[str, object]:
    """Return both measurements of the model in ``directory``."""
    model, tokenizer = load_model(directory)
    return {
        "compression": measure_compression(model, tokenizer, sources),
        "completions": measure_completions(model, tokenizer, sources),
    }
