"""Checks of a tokenizer and a chat template against the model's stop tokens. No engine is needed."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.cli.verify.finding import Finding
from penstock.text import ChatTemplate, ChatTemplateError, Tokenizer
from penstock.text.calls import ChatFormat

ASKED, ANSWER = "What is 2 + 2?", "It is 4, mon café."
SYSTEM = {"role": "system", "content": "Be brief."}
TURN = [{"role": "user", "content": ASKED}]
ANSWERED = [*TURN, {"role": "assistant", "content": ANSWER}]
TOOL, PLACE, RESULT = "get_weather", "Ghent", "11 degrees and rain"
SAMPLES = ("Plain English.", "naïve café 東京 🇫🇷 🧑‍🚀", "def f(x):\n\treturn {'a': [x, 1]}  # 100%")
MARKERS = re.compile(r"<\|[^|<>\s]{1,60}\|>|<(?:start|end)_of_turn>|\[/?INST\]|<｜[^｜<>]{1,60}｜>")


def check_text(tokenizer: Tokenizer, stop_ids: Sequence[int], logits: int) -> list[Finding]:
    """Checks the vocabulary, and the chat template if there is one.

    `stop_ids` end an answer; the model has `logits` scores for a token.
    """
    findings = [*_vocabulary(tokenizer, logits), *_round_trip(tokenizer)]
    template = tokenizer.chat_template
    if template is None:
        return [
            *findings,
            Finding(
                "chat template",
                "warning",
                "the model has none, so /v1/chat/completions answers 400",
                "use /v1/completions, or a model that was trained to chat",
            ),
        ]
    try:
        prompt = template.render(TURN)
    except ChatTemplateError as error:
        return [*findings, Finding("chat template", "problem", str(error), "use another version of the model's files")]
    findings.append(Finding("chat template", "ok", "renders a conversation"))
    findings += [*_system(template), *_begin(tokenizer, prompt), *_markers(tokenizer, template)]
    findings += [*_end_of_turn(tokenizer, template, stop_ids), *_prefix(template, prompt)]
    return [*findings, *_tools(tokenizer)]


def _vocabulary(tokenizer: Tokenizer, logits: int) -> Iterator[Finding]:
    if tokenizer.vocab_size > logits:
        yield Finding(
            "vocabulary",
            "problem",
            f"the tokenizer has {tokenizer.vocab_size} ids, but the model has scores for {logits}",
            "use the tokenizer that belongs to this model: prompts with the ids above are refused",
        )
    else:
        yield Finding("vocabulary", "ok", f"{tokenizer.vocab_size:,} ids, {logits:,} scores")


def _round_trip(tokenizer: Tokenizer) -> Iterator[Finding]:
    for text in SAMPLES:
        ids = tokenizer.encode(text, add_special_tokens=False)
        back = tokenizer.decode(ids)
        if back.strip() != text:
            yield Finding(
                "round trip",
                "warning",
                f"{text!r} becomes {back!r} after encoding and decoding",
                "if clients need such text unchanged, use another model: its vocabulary cannot hold it",
            )
            return
    yield Finding("round trip", "ok", "code, accents, Chinese and emoji decode to what was encoded")


def _system(template: ChatTemplate) -> Iterator[Finding]:
    try:
        prompt = template.render([SYSTEM, *TURN])
    except ChatTemplateError as error:
        yield Finding("system prompt", "warning", str(error), "nothing to change: the first user message has it")
        return
    if SYSTEM["content"] in prompt:
        yield Finding("system prompt", "ok", "is part of the prompt")
    else:
        yield Finding(
            "system prompt",
            "warning",
            "the template leaves it out without an error",
            "nothing to change: the first user message has it",
        )


def _begin(tokenizer: Tokenizer, prompt: str) -> Iterator[Finding]:
    bos = tokenizer.bos_token_id
    if bos is None or tokenizer.encode("a")[0] != bos:
        return  # the tokenizer adds none
    count = tokenizer.encode(prompt, add_special_tokens=False).count(bos)
    if count == 1:
        yield Finding("begin token", "ok", f"one {tokenizer.token(bos)} begins a conversation")
    else:
        yield Finding(
            "begin token",
            "warning",
            f"the template writes {tokenizer.token(bos)} {count} times, but the model expects it once",
            "correct the template: the model's answers are worse than they could be",
        )


def _markers(tokenizer: Tokenizer, template: ChatTemplate) -> Iterator[Finding]:
    markers = sorted(set(MARKERS.findall(template.render(ANSWERED))))
    broken = [marker for marker in markers if len(tokenizer.encode(marker, add_special_tokens=False)) != 1]
    if broken:
        yield Finding(
            "markers",
            "warning",
            f"{', '.join(broken)} of the template {'is' if len(broken) == 1 else 'are'} several tokens each",
            "use the tokenizer that belongs to this template: the model does not recognise its turns",
        )
    elif markers:
        yield Finding("markers", "ok", f"{', '.join(markers)} {'is' if len(markers) == 1 else 'are'} one token each")


def _end_of_turn(tokenizer: Tokenizer, template: ChatTemplate, stop_ids: Sequence[int]) -> Iterator[Finding]:
    rendered = template.render(ANSWERED, add_generation_prompt=False)
    after = rendered.rpartition(ANSWER)[2] if ANSWER in rendered else ""
    ids = tokenizer.encode(after.lstrip(), add_special_tokens=False)
    if not ids:
        yield Finding(
            "end of turn",
            "warning",
            "the template writes nothing after an answer, so the model may not stop",
            "clients should set max_tokens or stop",
        )
        return
    end = tokenizer.token(ids[0])
    if ids[0] in stop_ids:
        yield Finding("end of turn", "ok", f"{end} ends an answer, in the template and in the engine")
        return
    stops = ", ".join(tokenizer.token(each) for each in stop_ids) or "no token"
    yield Finding(
        "end of turn",
        "problem",
        f"the template ends an answer with {end}, but {stops} ends it in the engine: answers will run on",
        f"add {ids[0]} to eos_token_id in generation_config.json, or have clients send stop_token_ids [{ids[0]}]",
    )


def _tools(tokenizer: Tokenizer) -> Iterator[Finding]:
    chat_format = ChatFormat(tokenizer)
    name = chat_format.tools.name if chat_format.tools is not None else "json"
    own = "the template's own format" if name != "json" else "plain JSON, which Penstock describes in the prompt"
    call = {"id": "call_1", "type": "function", "function": {"name": TOOL, "arguments": json.dumps({"place": PLACE})}}
    history: list[dict[str, Any]] = [
        *TURN,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": RESULT},
        *TURN,
    ]
    try:
        prompt = chat_format.render(history, tools=[{"type": "function", "function": {"name": TOOL, "parameters": {}}}])
    except ChatTemplateError as error:
        yield Finding(
            "tools", "warning", f"the template refuses a tool's result: {error}", "send no tools to this model"
        )
        return
    lost = [text for text in (TOOL, PLACE, RESULT) if text not in prompt]
    if lost:
        yield Finding(
            "tools",
            "warning",
            f"the template leaves out {', '.join(map(repr, lost))} of a tool's call and result",
            "use --tool-format json, or another version of the template",
        )
    else:
        yield Finding("tools", "ok", f"{own} ({name}); calls and results are part of the prompt")
    if chat_format.reasoning is not None:
        yield Finding("reasoning", "ok", f"{chat_format.reasoning.name}: it goes to reasoning_content")


def _prefix(template: ChatTemplate, prompt: str) -> Iterator[Finding]:
    later = template.render([*ANSWERED, *TURN])
    if later.startswith(prompt):
        yield Finding("later turns", "ok", "a conversation's next prompt begins with the last, so its cache is reused")
    else:
        yield Finding(
            "later turns",
            "warning",
            "the next prompt of a conversation does not begin with the last one",
            "nothing to change: each turn computes a part of the conversation again",
        )
