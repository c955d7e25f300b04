"""Checks that need an engine: does the model answer, stop, and write its language."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.bench.quality import Score, cut_windows, english, score, scored_bytes
from penstock.bench.quality import figures as quality_figures
from penstock.cli.verify.finding import Finding
from penstock.messages import EngineClient, GenerateRequest, Grammar, SamplingParams
from penstock.text import OutputText, Tokenizer

QUESTIONS = ("What is the capital of Germany?", "Write one sentence about the sea.", "Say hello.")
EXTRACT = "Ada is a 36 year old engineer. Write her data as JSON."
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 199},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
LONGEST = 256  # tokens of an answer; a longer one counts as one that does not end
WINDOWS, WINDOW_TOKENS = 4, 256
# Bits per byte of English text. Working models of 0.1 to 100 billion parameters have 1.2 to 0.5.
UNUSUAL, BROKEN = 1.8, 3.0


@dataclass(frozen=True)
class ModelAnswer:
    """A model's answer to one question. `reason` is why it ended."""

    question: str
    text: str
    special: tuple[str, ...]  # special tokens inside the answer
    reason: str


async def ask(
    client: EngineClient,
    tokenizer: Tokenizer,
    question: str,
    sampling: Mapping[str, Any],
    name: str,
    grammar: Grammar | None = None,
) -> ModelAnswer:
    """Returns the answer to a question, through the chat template if there is one. Raises ValueError if the engine
    refuses it."""
    template = tokenizer.chat_template
    if template is None:
        ids = tokenizer.encode(question)
    else:
        prompt = template.render([{"role": "user", "content": question}])
        ids = tokenizer.encode(prompt, add_special_tokens=False)
    values = {"temperature": 0.0, **sampling}
    params = SamplingParams(**values, seed=0, max_tokens=LONGEST, eos_token_ids=client.info.eos_token_ids)
    output, text, special, reason = OutputText(tokenizer, ids), [], [], ""
    request = GenerateRequest(request_id=name, prompt_ids=tuple(ids), sampling=params, grammar=grammar)
    async for delta in client.generate(request):
        if delta.error:
            raise ValueError(delta.error)
        shown = delta.token_ids if delta.stop_token is None else delta.token_ids[:-1]
        special += [tokenizer.token(each) for each in shown if each in tokenizer.special_ids]
        text.append(output.push(shown).text)
        reason = delta.finish_reason or reason
    text.append(output.finish().text)
    return ModelAnswer(question, "".join(text).strip(), tuple(special), reason)


async def check_answers(
    client: EngineClient, tokenizer: Tokenizer, sampling: Mapping[str, Any], advance: Callable[[int], None]
) -> tuple[list[Finding], list[ModelAnswer]]:
    """Sends the questions, and scores English text. Returns what was found, and the answers."""
    answers = []
    for number, question in enumerate(QUESTIONS):
        answers.append(await ask(client, tokenizer, question, sampling, f"verify-{number}"))
        advance(1)
    findings = list(judge_answers(answers, chats=tokenizer.chat_template is not None))
    grammar = Grammar("json_schema", json.dumps(SCHEMA))
    findings.append(judge_schema(await ask(client, tokenizer, EXTRACT, sampling, "verify-schema", grammar)))
    advance(1)
    windows = cut_windows(tokenizer, english(), min(WINDOW_TOKENS, client.info.max_model_len - 1), WINDOWS)
    result = await score(client, windows, advance)
    findings.append(judge_quality(result, scored_bytes(tokenizer, windows)))
    return findings, answers


def judge_answers(answers: list[ModelAnswer], *, chats: bool) -> Iterator[Finding]:
    """Judges whether answers have text, end by themselves and hold nothing but text."""
    empty = [answer for answer in answers if not answer.text]
    if empty:
        yield Finding(
            "answers", "problem", f"the answer to {empty[0].question!r} is empty", "check the template and the weights"
        )
    else:
        yield Finding("answers", "ok", f"{answers[0].question} {_short(answers[0].text)}")
    long = [answer for answer in answers if answer.reason == "length"]
    if not chats:
        yield Finding("end of answers", "ok", "the model completes text, which has no end of its own")
    elif len(long) == len(answers):
        yield Finding(
            "end of answers",
            "problem",
            f"none of {len(answers)} answers ended within {LONGEST} tokens",
            "see end of turn; have clients set max_tokens or stop",
        )
    else:
        status = f"{len(answers) - len(long)} of {len(answers)} answers ended by themselves"
        yield Finding("end of answers", "ok", status)
    special = sorted({token for answer in answers for token in answer.special})
    if special:
        yield Finding(
            "special tokens",
            "warning",
            f"answers hold {', '.join(special[:5])}, which clients do not see unless they ask for it",
            "if one of them ends a turn, add it to eos_token_id in generation_config.json",
        )
    torn = next((answer for answer in answers if "\ufffd" in answer.text), None)
    if torn is not None:
        yield Finding(
            "characters",
            "warning",
            f"the answer to {torn.question!r} has bytes that are not a character",
            "use a lower temperature or a less quantised file",
        )


def judge_schema(answer: ModelAnswer) -> Finding:
    """Judges whether an answer obeys SCHEMA."""
    try:
        value = json.loads(answer.text)
        obeys = set(value) == set(SCHEMA["required"]) and isinstance(value["age"], int)
    except (ValueError, TypeError, KeyError):
        obeys = False
    if obeys:
        return Finding("schema", "ok", f"an answer with a JSON schema: {_short(answer.text)}")
    ended = "it was cut" if answer.reason == "length" else f"it ended by {answer.reason!r}"
    return Finding(
        "schema",
        "problem",
        f"an answer does not obey its JSON schema ({ended}): {_short(answer.text)}",
        "the tokenizer may not be the model's: see vocabulary and round trip",
    )


def judge_quality(result: Score, text_bytes: int) -> Finding:
    """Judges how well the model predicts English."""
    bits = quality_figures(result, None, text_bytes)["bits_per_byte"] or 0.0
    found = f"{bits:.2f} bits per byte of English, perplexity {result.perplexity:,.1f}"
    if not bits < BROKEN:
        return Finding(
            "quality",
            "problem",
            f"{found}; a model that works has {UNUSUAL} or fewer",
            "the weights or their quantisation are damaged: compare with penstock bench quality of another file",
        )
    if bits > UNUSUAL:
        return Finding(
            "quality",
            "warning",
            f"{found}; a model of English has {UNUSUAL} or fewer",
            "nothing to change if the model is for code or another language; else use a less quantised file",
        )
    return Finding("quality", "ok", found)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 80 else line[:77] + "..."
