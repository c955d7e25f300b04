"""Reads the grammar of a request: `response_format`, vLLM's `structured_outputs`, and the `guided_` parameters."""

from collections.abc import Iterator

import msgspec

from penstock.frontend.errors import invalid
from penstock.frontend.openai.fields import ResponseFormat, SamplingFields, StructuredOutputs
from penstock.frontend.requests.grammar import ANY_OBJECT, GrammarSource


def read_grammar(fields: SamplingFields) -> GrammarSource | None:
    """Returns the grammar of a request, not yet checked. Raises APIError 400 for more than one."""
    found = [source for source in _sources(fields) if source is not None]
    if len(found) > 1:
        raise invalid(f"{found[0].param} excludes {found[1].param}; send one of them", found[1].param)
    if not found:
        return None
    if fields.ignore_eos:
        raise invalid(
            f"ignore_eos excludes {found[0].param}, which ends with an end-of-sequence token; leave it out",
            "ignore_eos",
        )
    return found[0]


def _sources(fields: SamplingFields) -> Iterator[GrammarSource | None]:
    if fields.response_format is not None:
        yield _response_format(fields.response_format)
    guided = StructuredOutputs(fields.guided_json, fields.guided_regex, fields.guided_choice, fields.guided_grammar)
    yield from _structured(guided, "guided_")
    if fields.structured_outputs is not None:
        found = list(_structured(fields.structured_outputs, "structured_outputs."))
        if not found:
            raise invalid(
                "structured_outputs is empty; send one of json, regex, choice, grammar, json_object",
                "structured_outputs",
            )
        yield from found


def _response_format(wanted: ResponseFormat) -> GrammarSource | None:
    if wanted.type != "json_schema" and wanted.json_schema is not None:
        raise invalid('response_format.json_schema needs the type "json_schema"', "response_format.type")
    schema = b"" if bytes(wanted.schema) == b"null" else bytes(wanted.schema)
    if schema and wanted.type != "json_object":
        raise invalid('response_format.schema needs the type "json_object"', "response_format.type")
    match wanted.type:
        case "text":
            return None
        case "json_object" if schema:
            return GrammarSource("json_schema", _schema_text(schema), "response_format.schema")
        case "json_object":
            return GrammarSource("json_schema", ANY_OBJECT, "response_format")
        case "json_schema":
            param = "response_format.json_schema"
            schema = b"" if wanted.json_schema is None else bytes(wanted.json_schema.schema)
            if not schema:
                raise invalid(f"{param}.schema is missing; send a JSON schema", f"{param}.schema", "missing_parameter")
            return GrammarSource("json_schema", _schema_text(schema), f"{param}.schema")
    kind = wanted.type[:40]
    raise invalid(
        f"response_format.type is {kind!r}; it must be text, json_object or json_schema", "response_format.type"
    )


def _structured(wanted: StructuredOutputs, prefix: str) -> Iterator[GrammarSource]:
    schema = bytes(wanted.json)
    if schema and schema != b"null":
        yield GrammarSource("json_schema", _schema_text(schema), f"{prefix}json")
    if wanted.regex is not None:
        yield GrammarSource("regex", wanted.regex, f"{prefix}regex")
    if wanted.choice is not None:
        if not wanted.choice or "" in wanted.choice:
            raise invalid(f"{prefix}choice must have at least one text, and none that is empty", f"{prefix}choice")
        yield GrammarSource("choice", msgspec.json.encode(wanted.choice).decode(), f"{prefix}choice")
    if wanted.grammar is not None:
        yield GrammarSource("grammar", wanted.grammar, f"{prefix}grammar")
    if wanted.json_object:
        yield GrammarSource("json_schema", ANY_OBJECT, f"{prefix}json_object")


def _schema_text(raw: bytes) -> str:
    """A schema as JSON; vLLM's clients may send it in a string."""
    return msgspec.json.decode(raw, type=str) if raw.lstrip()[:1] == b'"' else raw.decode()
