"""Implements `penstock embed`: the vectors of texts, as lines of JSON."""

import asyncio
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from penstock.cli.options import Flags
from penstock.weights.packaged import MINILM

if TYPE_CHECKING:
    from penstock.config import EngineConfig
    from penstock.messages import EngineClient
    from penstock.text import TextTokens

AT_ONCE = 64  # texts that are in the engine at a time
MAX_CHARS = 1 << 20  # of a text


def embed(model: str | None, texts: Sequence[str], flags: Flags) -> None:
    """Prints the embedding of each text or, for a classifier, its logits. Raises ValueError for a text that cannot be
    embedded, and what `prepare` raises."""
    from msgspec.structs import replace

    from penstock.prepare.model import prepare
    from penstock.text import Tokenizer
    from penstock.weights.gguf_choice import HubError

    for number, text in enumerate(texts, 1):
        if text != "-":
            _check(number, text)
    try:
        prepared = prepare(MINILM.name if model is None else model, flags, pools=True)
    except HubError as error:
        if model is None or "/" in model or list(texts) != ["-"]:
            raise
        raise type(error)(f"{error}. If it is a text, name the model too: penstock embed {MINILM.name} TEXT") from None
    pooling = prepared.spec.pooling
    assert pooling is not None
    prompt = pooling.prompts.get(pooling.default_prompt, "")
    tokenizer = Tokenizer.load(prepared.path)
    config = replace(prepared.resolved.engine, log_level="warning")

    def tokens() -> Iterator["TextTokens"]:
        for number, text in enumerate(_texts(texts), 1):
            _check(number, text)
            whole = tokenizer.encode_text(prompt + text)
            if len(whole.ids) > config.max_model_len:
                print(
                    f"penstock: text {number} is cut from {len(whole.ids)} to {config.max_model_len} tokens",
                    file=sys.stderr,
                )
            yield whole.cut(config.max_model_len)

    try:
        asyncio.run(_print(config, tokens()))
    except BrokenPipeError:  # the reader has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _check(number: int, text: str) -> None:
    if not text.strip() or len(text) > MAX_CHARS:
        raise ValueError(
            f"text {number} is {text[:20]!r}, of {len(text)} characters; it must have 1 to {MAX_CHARS}, not only blanks"
        )


def _texts(given: Sequence[str]) -> Iterator[str]:
    for text in given:
        if text == "-":
            yield from (line.rstrip("\n") for line in sys.stdin)
        else:
            yield text


async def _print(config: "EngineConfig", texts: Iterable["TextTokens"]) -> None:
    import numpy as np
    import orjson

    from penstock.prepare.engine import own_engine

    async with own_engine(config) as client:
        running: deque[asyncio.Task[bytes]] = deque()

        async def put_next() -> None:
            vector = np.frombuffer(await running.popleft(), np.float32)
            sys.stdout.write(orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY).decode() + "\n")

        try:
            for number, text in enumerate(texts):
                running.append(asyncio.create_task(_vector(client, number, text)))
                if len(running) == AT_ONCE:
                    await put_next()
            while running:
                await put_next()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


async def _vector(client: "EngineClient", number: int, text: "TextTokens") -> bytes:
    from penstock.messages import GenerateRequest, PoolingParams, SamplingParams

    request = GenerateRequest(
        request_id=str(number),
        prompt_ids=text.ids,
        sampling=SamplingParams(seed=0, max_tokens=1),
        pooling=PoolingParams(text.second),
    )
    async for delta in client.generate(request):
        if delta.pooled:
            return delta.pooled
        raise ValueError(f"text {number + 1} failed: {delta.error or 'the engine ended it'}")
    raise ValueError(f"text {number + 1} failed: the engine ended it")
