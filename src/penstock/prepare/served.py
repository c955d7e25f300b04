"""Makes the model that a frontend serves from an engine and the settings that answers depend on."""

import asyncio
import hashlib
import time
from pathlib import Path

from penstock.frontend.served import ServedModel
from penstock.gguf import is_gguf
from penstock.messages import EngineClient, EngineInfo
from penstock.observe.costs import CostModel
from penstock.prepare.model import AnswerSettings
from penstock.text import Tokenizer
from penstock.weights.files import model_bytes, text_files


def served_model(
    answers: AnswerSettings,
    client: EngineClient,
    tokenizer: Tokenizer | None = None,
    costs: CostModel | None = None,
    texts: str | None = None,
    created: int | None = None,
) -> ServedModel:
    """Returns what answers requests with an engine of the model. `costs` are those of its steps, `texts` is
    what `text_digest` returns, if that has been called before."""
    server, path = answers.server, Path(answers.path)
    texts = text_digest(answers) if texts is None else texts
    return ServedModel(
        name=server.served_model_name,
        aliases=server.aliases,
        client=client,
        tokenizer=tokenizer or Tokenizer.load(path),
        created=int(time.time()) if created is None else created,
        fingerprint=fingerprint_of(client.info, texts),
        tool_format=server.tool_format,
        reasoning_format=server.reasoning_format,
        thinking_budget=server.thinking_budget,
        defaults=answers.generation,
        pooling=answers.pooling,
        truncate_embeddings=server.truncate_embeddings,
        costs=costs,
        texts=texts,
        path=path,
        file_bytes=model_bytes(path),
        family=answers.family,
        parameters=answers.parameters,
        quantization=answers.quantization,
        file_format="gguf" if is_gguf(path) else "safetensors",
    )


async def load_tokenizer(answers: AnswerSettings, texts: str, before: ServedModel) -> Tokenizer:
    """Returns the tokenizer of a new version: that of the version before if their texts are the same. To make one takes
    0.1 s or more, in which it holds Python's lock, and with it all streams."""
    if texts == before.texts:
        return before.tokenizer
    return await asyncio.to_thread(Tokenizer.load, Path(answers.path))


def text_digest(answers: AnswerSettings) -> str:
    """Returns a digest of what answers depend on besides the engine: tokenizer, chat template, and the settings of
    formats and defaults."""
    digest = hashlib.sha256()
    for path, size in text_files(Path(answers.path)):
        with path.open("rb") as file:
            digest.update(file.read(size))
    server = answers.server
    defaults = sorted(answers.generation.items())
    digest.update(repr((defaults, server.tool_format, server.reasoning_format, server.thinking_budget)).encode())
    return digest.hexdigest()


def fingerprint_of(info: EngineInfo, texts: str) -> str:
    """Returns a short name for all that answers depend on besides the request. Equal servers have equal names."""
    return f"fp_{hashlib.sha256(f'{info.identity.fingerprint} {texts}'.encode()).hexdigest()[:12]}"
