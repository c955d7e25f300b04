"""Implements `penstock run`: streams completions to the terminal."""

import asyncio
import signal
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console

from penstock.cli.engine import own_engine
from penstock.cli.options import Flags
from penstock.cli.prepare import prepare
from penstock.messages import EngineClient, GenerateRequest, RequestRejected, SamplingParams
from penstock.text import ChatTemplateError, OutputText, Tokenizer


@dataclass(frozen=True)
class RunOptions:
    """Holds the flags of `penstock run` that are not the engine's."""

    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    chat: bool


class ChatSession:
    """Sends prompts to an engine. With `chat` it keeps the conversation."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, options: RunOptions) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.options = options
        self.messages: list[dict[str, str]] = []
        self.turn = 0

    def prompt_ids(self, text: str) -> list[int]:
        """Returns the token ids of a prompt. With `chat` they include the conversation so far."""
        if not self.options.chat:
            return self.tokenizer.encode(text)
        if self.tokenizer.chat_template is None:
            raise ValueError("--chat: this model has no chat template; run without --chat")
        prompt = self.tokenizer.chat_template.render([*self.messages, {"role": "user", "content": text}])
        return self.tokenizer.encode(prompt, add_special_tokens=False)

    async def answer(self, text: str) -> None:
        """Streams the completion of `text` to standard output. Cancelling it aborts the request.

        A prompt whose answer fails or is cancelled does not become part of the conversation.
        """
        ids = self.prompt_ids(text)
        left = self.client.info.max_model_len - len(ids)
        if not ids or left < 1:
            most = self.client.info.max_model_len - 1
            with_earlier = " with the conversation before it" if self.messages else ""
            raise ValueError(
                f"the prompt{with_earlier} has {len(ids)} tokens; it must have 1 to {most} (--max-model-len)"
            )
        sampling = SamplingParams(
            seed=self.options.seed,
            max_tokens=min(self.options.max_tokens, left),
            temperature=self.options.temperature,
            top_p=self.options.top_p,
            eos_token_ids=self.client.info.eos_token_ids,
        )
        self.turn += 1
        output, said = OutputText(self.tokenizer, ids), []
        request = GenerateRequest(request_id=f"run-{self.turn}", prompt_ids=tuple(ids), sampling=sampling)
        async for delta in self.client.generate(request):
            if delta.error:
                raise ValueError(delta.error)
            shown = delta.token_ids if delta.stop_token is None else delta.token_ids[:-1]
            said.append(output.push(shown).text)
            print(said[-1], end="", flush=True)
        said.append(output.finish().text)
        print(said[-1], flush=True)
        if self.options.chat:
            self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": "".join(said)}]


async def runs_to_end(work: Coroutine[None, None, None]) -> bool:
    """Runs `work` and returns True, or returns False if Ctrl-C cancelled it."""
    loop, task = asyncio.get_running_loop(), asyncio.create_task(work)
    before = signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        await asyncio.wait([task])
    finally:
        task.cancel()  # this coroutine may have been cancelled
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)
    if task.cancelled():
        return False
    task.result()
    return True


async def _interactive(session: ChatSession, name: str) -> None:
    """Reads prompts until end of file. A line that ends in a backslash continues. An error ends only its own answer."""
    console = Console(stderr=True)
    keys = "A line that ends in \\ continues. Ctrl-C stops an answer, Ctrl-D exits."
    console.print(f"{name}: type a prompt. {keys}", style="dim", markup=False)
    while True:
        lines: list[str] = []
        try:
            while (line := await asyncio.to_thread(input, ">>> " if not lines else "... ")).endswith("\\"):
                lines.append(line[:-1])
        except EOFError:
            return
        lines.append(line)
        if not any(lines):
            continue
        try:
            if not await runs_to_end(session.answer("\n".join(lines))):
                print()
        except (ValueError, RequestRejected, ChatTemplateError) as error:
            console.print(str(error), style="red", markup=False)


async def _main(model: str | None, prompt: str | None, options: RunOptions, flags: Flags) -> None:
    prepared = prepare(model, flags)
    tokenizer = Tokenizer.load(prepared.path)
    async with own_engine(replace(prepared.resolved.engine, log_level="warning")) as client:
        session = ChatSession(client, tokenizer, options)
        if prompt is None and sys.stdin.isatty():
            await _interactive(session, prepared.resolved.engine.name)
        else:
            await session.answer(sys.stdin.read() if prompt is None else prompt)


def run(model: str | None, prompt: str | None, options: RunOptions, flags: Flags) -> None:
    """Completes one prompt. Without a prompt, completes standard input, or reads prompts from a terminal."""
    if model is not None and prompt is None and any(map(str.isspace, model)) and not Path(model).exists():
        raise ValueError(
            f"{model!r} is not a model: name the model before the prompt, or send the prompt on standard input"
        )
    asyncio.run(_main(model, prompt, options, flags))
