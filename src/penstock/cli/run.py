"""`penstock run`: a completion in the terminal."""

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
class Wanted:
    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    chat: bool


class Session:
    """Prompts sent to one engine, and with `chat` the conversation so far."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, wanted: Wanted) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.wanted = wanted
        self.messages: list[dict[str, str]] = []
        self.turn = 0

    def prompt_ids(self, text: str) -> list[int]:
        if not self.wanted.chat:
            return self.tokenizer.encode(text)
        if self.tokenizer.chat_template is None:
            raise ValueError("this model has no chat template; run without --chat")
        prompt = self.tokenizer.chat_template.render([*self.messages, {"role": "user", "content": text}])
        return self.tokenizer.encode(prompt, add_special_tokens=False)

    async def answer(self, text: str) -> None:
        """Stream the completion of `text` to standard output. Cancelling it aborts the request.

        A turn that fails or is cancelled is no part of the conversation.
        """
        ids = self.prompt_ids(text)
        room = self.client.info.max_model_len - len(ids)
        if not ids or room < 1:
            most = self.client.info.max_model_len - 1
            with_earlier = " with the conversation before it" if self.messages else ""
            raise ValueError(
                f"the prompt{with_earlier} has {len(ids)} tokens; it must have 1 to {most} (--max-model-len)"
            )
        sampling = SamplingParams(
            seed=self.wanted.seed,
            max_tokens=min(self.wanted.max_tokens, room),
            temperature=self.wanted.temperature,
            top_p=self.wanted.top_p,
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
        if self.wanted.chat:
            self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": "".join(said)}]


async def finished(work: Coroutine[None, None, None]) -> bool:
    """Whether `work` came to its end: Ctrl-C cancels it, and nothing else."""
    loop, task = asyncio.get_running_loop(), asyncio.create_task(work)
    before = signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        await asyncio.wait([task])
    finally:
        task.cancel()  # where this is cancelled itself
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)
    if task.cancelled():
        return False
    task.result()
    return True


async def _interactive(session: Session, name: str) -> None:
    """Read prompts until end of file. A line that ends in a backslash goes on; an error ends its turn only."""
    console = Console(stderr=True)
    keys = "A line ending in \\ goes on; Ctrl-C ends an answer, Ctrl-D leaves."
    console.print(f"{name}: type a prompt. {keys}", style="dim", markup=False)
    while True:
        lines = []
        try:
            while (line := await asyncio.to_thread(input, ">>> " if not lines else "... ")).endswith("\\"):
                lines.append(line[:-1])
        except EOFError:
            return
        lines.append(line)
        if not any(lines):
            continue
        try:
            if not await finished(session.answer("\n".join(lines))):
                print()
        except (ValueError, RequestRejected, ChatTemplateError) as error:
            console.print(str(error), style="red", markup=False)


async def _main(model: str | None, prompt: str | None, wanted: Wanted, flags: Flags) -> None:
    prepared = prepare(model, flags)
    tokenizer = Tokenizer.load(prepared.folder)
    async with own_engine(replace(prepared.resolved.engine, log_level="warning")) as client:
        session = Session(client, tokenizer, wanted)
        if prompt is None and sys.stdin.isatty():
            await _interactive(session, prepared.resolved.engine.name)
        else:
            await session.answer(sys.stdin.read() if prompt is None else prompt)


def run(model: str | None, prompt: str | None, wanted: Wanted, flags: Flags) -> None:
    if model is not None and prompt is None and any(map(str.isspace, model)) and not Path(model).exists():
        raise ValueError(f"{model!r} is no model: name one before the prompt, or give the prompt on standard input")
    asyncio.run(_main(model, prompt, wanted, flags))
