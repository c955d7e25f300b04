"""The items of a response's input, as the API shows them later."""

from collections.abc import Sequence
from typing import Any

from penstock.frontend.responses.fields import ContentPart, Item

_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def stored_items(items: Sequence[Item], answer_id: str) -> list[dict[str, Any]]:
    """Returns items that were checked, each with an id. `answer_id` is in the ids of those that have none."""
    return [_stored(item, f"{answer_id}in{i}") for i, item in enumerate(items)]


def _stored(item: Item, number: str) -> dict[str, Any]:
    kind = item.type or "message"
    shown: dict[str, Any] = {"id": item.id or f"{_PREFIXES[kind]}_{number}", "type": kind, "status": "completed"}
    match kind:
        case "message":
            written = item.role == "assistant"
            parts = [_part(part, written=written) for part in _parts(item.content)]
            return {**shown, "role": item.role, "content": parts}
        case "reasoning":
            content = [{"type": "reasoning_text", "text": part.text or ""} for part in _parts(item.content)]
            summary = [{"type": "summary_text", "text": part.text or ""} for part in item.summary or ()]
            return {**shown, "summary": summary, "content": content}
        case "function_call":
            return {**shown, "call_id": item.call_id, "name": item.name, "arguments": item.arguments or "{}"}
    output = item.output
    if output is not None and not isinstance(output, str):
        return {**shown, "call_id": item.call_id, "output": [_part(part, written=False) for part in output]}
    return {**shown, "call_id": item.call_id, "output": output}


def _parts(content: str | Sequence[ContentPart] | None) -> Sequence[ContentPart]:
    return [ContentPart("text", content)] if isinstance(content, str) else content or ()


def _part(part: ContentPart, *, written: bool) -> dict[str, Any]:
    """A part of a text that the model has written, or read."""
    if part.refusal is not None:
        return {"type": "refusal", "refusal": part.refusal}
    if written:
        return {"type": "output_text", "text": part.text or "", "annotations": [], "logprobs": []}
    return {"type": "input_text", "text": part.text or ""}
