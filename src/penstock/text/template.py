"""Renders chat messages as a prompt with the model's template."""

from collections.abc import Mapping, Sequence, Set
from typing import Any

from jinja2 import TemplateError, meta, nodes

from penstock.text.errors import ChatTemplateError
from penstock.text.sandbox import RenderEnvironment, RenderLimits

_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "  # transformers' mark; its blank shows whether the template strips messages
_REASONING = (
    "reasoning_content",
    "thinking",
    "reasoning",
)  # names of the same field; templates read the first or the second


class ChatTemplate:
    """A Jinja template in a sandbox, rendered as transformers' `apply_chat_template` does.

    `special_tokens` are variables of the template, such as "bos_token". `tool_source` is the template for requests with
    tools, for models that have a separate one.
    """

    takes_parts: bool  # whether the template itself reads content given as a list of parts
    takes_tools: bool  # whether the template shows the tools that it gets
    source: str  # the text of the template; of both if requests with tools have a separate one
    plain_source: str  # without the separate one

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        tool_source: str | None = None,
        limits: RenderLimits = RenderLimits(),
    ) -> None:
        """Raises ChatTemplateError if a template does not compile."""
        self._special_tokens = dict(special_tokens)
        self._environment = RenderEnvironment(limits)
        self._plain = _CompiledTemplate(self._environment, source)
        self._with_tools = self._plain if tool_source is None else _CompiledTemplate(self._environment, tool_source)
        self.takes_parts = self._plain.takes_parts
        self.takes_tools = self._with_tools.takes_tools
        self.plain_source = source
        self.source = source if tool_source is None else f"{tool_source}\n{source}"

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Returns the prompt, which is to be encoded without special tokens. All arguments are JSON values.

        Content that is a list of text parts is joined by line breaks, unless the template reads parts itself. With
        `continue_final_message` the prompt ends inside the last message, so that the model continues it. Raises
        ChatTemplateError with the template's message if the template refuses the messages.
        """
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError(
                "continue_final_message and add_generation_prompt exclude each other; set one of them to false"
            )
        compiled = self._with_tools if tools else self._plain
        try:
            chat = [_message(message, flatten=not compiled.takes_parts) for message in messages]
            if not chat:
                raise ChatTemplateError("there are no messages; send at least one")
            final = _mark_final(chat[-1], compiled.source) if continue_final_message else None
            context = {"documents": None, **self._special_tokens, **_json(variables)}
            context |= {"messages": chat, "tools": _json(tools), "add_generation_prompt": add_generation_prompt}
            prompt = self._environment.render(compiled.template, context)
        except ChatTemplateError:
            raise
        except TemplateError as error:  # raise_exception, the sandbox, an undefined variable
            raise ChatTemplateError(f"the chat template refuses these messages: {error.message}") from error
        except RecursionError as error:
            raise ChatTemplateError("the messages, or the chat template's calls, are nested too deeply") from error
        except Exception as error:  # a template is a program: it can fail in any way an expression can
            raise ChatTemplateError(f"the chat template fails on these messages: {error!r}") from error
        return prompt if final is None else _cut_at_mark(prompt, final)


class _CompiledTemplate:
    """A compiled template. Raises ChatTemplateError if the source does not compile."""

    def __init__(self, environment: RenderEnvironment, source: str) -> None:
        self.source = source
        try:
            tree = environment.parse(source)
            self.takes_parts = _loops_over_content(tree)
            self.takes_tools = "tools" in meta.find_undeclared_variables(tree)
            self.template = environment.compile_tree(tree)
        except TemplateError as error:
            line = getattr(error, "lineno", None)
            where = f" in line {line}" if line else ""
            raise ChatTemplateError(f"the chat template is not valid Jinja{where}: {error.message}") from error
        except (SyntaxError, RecursionError, MemoryError) as error:  # nested beyond what Python compiles
            raise ChatTemplateError(f"the chat template is nested too deeply to compile: {error}") from error


def _message(message: Mapping[str, Any], *, flatten: bool) -> dict[str, Any]:
    """Returns a copy for the template. Keys with null are left out, because templates test for presence."""
    plain = _json(message)
    if not isinstance(plain, dict):
        raise ChatTemplateError(f"a message is an object with role and content, not {message!r}")
    plain = {key: value for key, value in plain.items() if value is not None}
    if flatten and isinstance(plain.get("content"), list):
        plain["content"] = _join_parts(plain["content"])
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _join_parts(parts: list[Any]) -> str:
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ChatTemplateError(
                f"a content part is of type {kind!r}, but this model reads only text; send text parts"
            )
        texts.append(text)
    return "\n".join(texts)


def _json(value: Any) -> Any:
    """Returns a deep copy of plain JSON values. Other objects could have methods that the sandbox does not check."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_json(key): _json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    raise ChatTemplateError(f"a chat template got a value of type {type(value).__name__}; pass JSON values only")


def _mark_final(message: dict[str, Any], source: str) -> str:
    """Marks the end of the last message's content. Returns that content."""
    content = message.get("content")
    if content is None or "content" not in source:
        raise ChatTemplateError(
            "continue_final_message needs content in the last message, and a chat template that shows it"
        )
    if isinstance(content, str):
        message["content"] = content + _CONTINUE
        return content
    for part in reversed(content):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            text: str = part["text"]
            part["text"] = text + _CONTINUE
            return text
    raise ChatTemplateError("continue_final_message needs text in the last message, which has none")


def _cut_at_mark(prompt: str, final: str) -> str:
    at = prompt.rfind(_CONTINUE.strip())
    if at < 0 or final.strip() not in prompt:
        raise ChatTemplateError(
            "continue_final_message: the chat template leaves out or changes the last message's text"
        )
    # A template that strips messages removes the mark's blank. Then the message's trailing blanks are removed, too.
    return prompt[:at] if prompt.startswith(_CONTINUE, at) else prompt[:at].rstrip()


def _loops_over_content(tree: nodes.Template) -> bool:
    """True if a loop runs over a message's content: `message.content`, a variable set to it, or a macro's argument."""
    names = {
        assign.target.name
        for assign in tree.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and _reads_content(assign.node, frozenset())
    }
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    for call in tree.find_all(nodes.Call):
        macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
        given = zip(macro.args, call.args, strict=False) if macro is not None else ()
        names |= {parameter.name for parameter, argument in given if _reads_content(argument, names)}
    return any(_reads_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _reads_content(node: nodes.Node | None, names: Set[str]) -> bool:
    while isinstance(node, nodes.Filter):
        node = node.node
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Name):
        return node.name in names
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"
