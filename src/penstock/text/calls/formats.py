"""The formats in which models write tool calls and reasoning. A format is a row of data, and one parser reads all.

A group of calls consists of these pieces, in this order:

    begin  [  head  name  mid  arguments  tail  separator  head ...  ]  end

The texts are as the models' own templates write them. The parser accepts other blanks between the pieces.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JsonObject:
    """Name and arguments are values of one JSON object."""

    name_key: str = "name"
    arguments_key: str = "arguments"


@dataclass(frozen=True, slots=True)
class JsonArguments:
    """The name is text, and the arguments are a JSON object after it."""


@dataclass(frozen=True, slots=True)
class TaggedArguments:
    """The name is text, and every argument has its own tags: key_open KEY key_close value_open VALUE value_close.

    A value that the tool's schema declares as a string is plain text; any other value is JSON.
    """

    key_open: str
    key_close: str
    value_open: str
    value_close: str
    line_breaks: bool = False  # a line break follows value_open and precedes value_close; it is not part of the value
    between: str = "\n"  # text after each argument

    def opening(self, key: str) -> str:
        """Returns the text before a value."""
        return f"{self.key_open}{key}{self.key_close}{self.value_open}"


@dataclass(frozen=True, slots=True)
class PythonCall:
    """Name and arguments are a call in Python's syntax: name(key=value, ...)."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How one family of models writes tool calls."""

    name: str
    body: JsonObject | JsonArguments | TaggedArguments | PythonCall
    begin: str = ""  # text before the first call
    end: str = ""  # text after the last call
    listed: bool = False  # the calls are in brackets, with commas between them
    head: tuple[str, ...] = ()  # texts before each call; a model may leave out the first ones
    name_end: tuple[str, ...] = ()  # texts that end the name
    name_parts: tuple[str, ...] = ()  # texts that may stand between the name and name_end, such as the one before an id
    mid: str = ""  # text between name and arguments; the model may leave it out
    tail: tuple[str, ...] = ()  # texts after each call; a model may leave them out
    separator: str = ""  # text between calls
    optional_begin: bool = False  # `begin` may be missing: then the calls are the whole answer
    name_pattern: str = r"(?P<name>\S+)"  # matches the text up to name_end; it may have a group `id`
    written_name: str = "{name}"  # text that stands for the name; {index} is the call's number
    # Ids that clients get: "call" (call_...), "short" (nine letters and digits), "written" (as the model wrote it).
    id_style: str = "call"
    one_call: bool = False  # grammars allow one call in an answer: the model was not trained to stop after calls
    found_by: tuple[tuple[str, ...], ...] = ()  # a chat template has this format if it contains all texts of a group

    @property
    def whole_answer(self) -> bool:
        """True if no marker begins the calls: the answer consists of them."""
        return not (self.begin or self.head) or self.optional_begin

    @property
    def triggers(self) -> tuple[str, ...]:
        """The texts that begin calls."""
        return (self.begin.strip(),) if self.begin else tuple(text.strip() for text in self.head)

    @property
    def after_value(self) -> tuple[str, ...]:
        """The texts of which one follows the last tag of a tagged argument: another argument, or the call's end. A
        model may leave out the end, and begin another call."""
        assert isinstance(self.body, TaggedArguments)
        texts = (self.body.key_open, *self.tail, self.end, *self.head)
        return tuple(text.strip() for text in texts if text.strip())

    @property
    def markers(self) -> tuple[str, ...]:
        """All fixed texts of the format that may be special tokens."""
        body = self.body
        tags = (
            (body.key_open, body.key_close, body.value_open, body.value_close)
            if isinstance(body, TaggedArguments)
            else ()
        )
        several = (self.begin, self.end, *self.head, *self.name_end, *self.name_parts, self.mid, *self.tail, *tags)
        return tuple(text.strip() for text in several if text.strip())


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model marks its reasoning: text between two markers, before the answer or between its parts."""

    name: str
    begin: str
    end: str
    found_by: tuple[tuple[str, ...], ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.begin, self.end)


@dataclass(frozen=True, slots=True)
class ChannelFormat:
    """Messages with headers, as gpt-oss writes them (harmony). The header of a message says what its text is.

    It holds both reasoning and tool calls: it is a tool format and a reasoning format.
    """

    name: str
    starts: tuple[str, ...]  # texts that begin a header
    message: str  # text that ends the header and begins the text
    ends: tuple[str, ...]  # texts that end a message
    call: str  # pattern of a header of a tool call, with the group `name`
    reasoning: str  # pattern of a header of reasoning
    call_header: str  # the header of a call to {name}, without `message`
    thoughts: str = "analysis"  # the channels' names
    calls: str = "commentary"
    answer: str = "final"
    id_style: str = "call"
    found_by: tuple[tuple[str, ...], ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.starts, self.message, *self.ends, "<|constrain|>")


HARMONY = ChannelFormat(
    "harmony",
    starts=("<|start|>", "<|channel|>"),
    message="<|message|>",
    ends=("<|end|>", "<|call|>", "<|return|>"),
    call=r"to=(?:functions\.)?(?P<name>[^\s<]+)",
    reasoning=r"(?:^|<\|channel\|>)\s*analysis",
    call_header="<|channel|>commentary to=functions.{name} <|constrain|>json",
    found_by=(("<|channel|>", "<|message|>"),),
)

_LIST = (
    # The first format whose texts are in the template is chosen. So a format precedes those with a part of its texts.
    HARMONY,
    ToolFormat(
        "deepseek-v3",
        JsonArguments(),
        begin="<｜tool▁calls▁begin｜>",
        head=("<｜tool▁call▁begin｜>", "function<｜tool▁sep｜>"),
        name_end=("```json",),
        mid="\n```json\n",
        tail=("\n```", "<｜tool▁call▁end｜>"),
        separator="\n",
        end="<｜tool▁calls▁end｜>",
        found_by=(("<｜tool▁calls▁begin｜>", "```json"),),
    ),
    ToolFormat(
        "deepseek-v3.1",
        JsonArguments(),
        begin="<｜tool▁calls▁begin｜>",
        head=("<｜tool▁call▁begin｜>",),
        name_end=("<｜tool▁sep｜>",),
        mid="<｜tool▁sep｜>",
        tail=("<｜tool▁call▁end｜>",),
        end="<｜tool▁calls▁end｜>",
        found_by=(("<｜tool▁calls▁begin｜>",),),
    ),
    ToolFormat(
        "kimi-k2",
        JsonArguments(),
        begin="<|tool_calls_section_begin|>",
        head=("<|tool_call_begin|>",),
        name_end=("<|tool_call_argument_begin|>",),
        mid="<|tool_call_argument_begin|>",
        tail=("<|tool_call_end|>",),
        end="<|tool_calls_section_end|>",
        name_pattern=r"(?P<id>(?:functions\.)?(?P<name>[^\s:]+?)(?::\d+)?)",
        written_name="functions.{name}:{index}",
        id_style="written",
        found_by=(("<|tool_calls_section_begin|>",),),
    ),
    ToolFormat(
        "mistral",
        JsonArguments(),
        head=("[TOOL_CALLS]",),
        name_end=("[ARGS]",),
        name_parts=("[CALL_ID]",),
        mid="[ARGS]",
        name_pattern=r"(?P<name>[^\s\[]+)(?:\[CALL_ID\](?P<id>[A-Za-z0-9]{9}))?",
        id_style="short",
        found_by=(("[TOOL_CALLS]", "[ARGS]"),),
    ),
    ToolFormat(
        "mistral-list",
        JsonObject(),
        begin="[TOOL_CALLS]",
        listed=True,
        separator=", ",
        id_style="short",
        found_by=(("[TOOL_CALLS]",),),
    ),
    ToolFormat(
        "glm",
        TaggedArguments("<arg_key>", "</arg_key>\n", "<arg_value>", "</arg_value>"),
        head=("<tool_call>",),
        name_end=("<arg_key>", "</tool_call>"),
        mid="\n",
        tail=("</tool_call>",),
        separator="\n",
        found_by=(("<arg_key>", "<tool_call>"),),
    ),
    ToolFormat(
        "qwen3-coder",
        TaggedArguments("<parameter=", ">", "", "</parameter>", line_breaks=True),
        head=("<tool_call>\n", "<function="),
        name_end=(">",),
        mid=">\n",
        tail=("</function>\n", "</tool_call>"),
        separator="\n",
        found_by=(("<function=", "<parameter=", "<tool_call>"),),
    ),
    ToolFormat(
        "hermes",
        JsonObject(),
        head=("<tool_call>\n",),
        tail=("\n</tool_call>",),
        separator="\n",
        found_by=(("<tool_call>", '"arguments"'),),
    ),
    ToolFormat(
        "seed-oss",
        TaggedArguments("<parameter=", ">", "", "</parameter>"),
        head=("<seed:tool_call>\n", "<function="),
        name_end=(">",),
        mid=">\n",
        tail=("</function>\n", "</seed:tool_call>"),
        separator="\n",
        found_by=(("seed:tool_call>", "<function="),),
    ),
    ToolFormat(
        "minimax",
        TaggedArguments('<parameter name="', '">', "", "</parameter>"),
        begin="<minimax:tool_call>\n",
        head=('<invoke name="',),
        name_end=('">',),
        mid='">\n',
        tail=("</invoke>\n",),
        end="</minimax:tool_call>",
        found_by=(("<minimax:tool_call>", "<invoke name="),),
    ),
    ToolFormat(
        "nemotron",
        JsonObject(),
        begin="<TOOLCALL>",
        listed=True,
        separator=", ",
        end="</TOOLCALL>",
        found_by=(("<TOOLCALL>[",),),
    ),
    ToolFormat(
        "lfm2",
        PythonCall(),
        begin="<|tool_call_start|>",
        listed=True,
        separator=", ",
        end="<|tool_call_end|>",
        found_by=(("<|tool_call_start|>",),),
    ),
    ToolFormat(
        "llama3-json",
        JsonObject(arguments_key="parameters"),
        begin="<|python_tag|>",
        optional_begin=True,
        separator="; ",
        found_by=(("<|python_tag|>", '"parameters"'), ("ipython", '"parameters"')),
    ),
    ToolFormat(
        "pythonic",
        PythonCall(),
        begin="<|python_start|>",
        end="<|python_end|>",
        optional_begin=True,
        listed=True,
        separator=", ",
        found_by=(("[func_name1(",), ("<|python_start|>",)),
    ),
)
# For models whose template has no format: the server's own instruction describes it.
PLAIN_JSON = ToolFormat("json", JsonObject(), separator="\n", one_call=True)

TOOL_FORMATS: Mapping[str, ToolFormat | ChannelFormat] = {item.name: item for item in (*_LIST, PLAIN_JSON)}
REASONING_FORMATS: Mapping[str, ReasoningFormat | ChannelFormat] = {
    item.name: item
    for item in (
        HARMONY,
        ReasoningFormat("mistral", "[THINK]", "[/THINK]", (("[THINK]", "[/THINK]"),)),
        ReasoningFormat("seed", "<seed:think>", "</seed:think>", (("seed:think>",),)),
        ReasoningFormat("think", "<think>", "</think>", (("</think>",),)),
    )
}


def find_tool_format(template: str) -> ToolFormat | ChannelFormat:
    """Returns the format whose texts a chat template contains, or plain JSON if there is none."""
    return next((item for item in _LIST if _found(item.found_by, template)), PLAIN_JSON)


def find_reasoning_format(template: str) -> ReasoningFormat | ChannelFormat | None:
    """Returns the format whose texts a chat template contains."""
    return next((item for item in REASONING_FORMATS.values() if _found(item.found_by, template)), None)


def _found(groups: tuple[tuple[str, ...], ...], template: str) -> bool:
    spelled = re.sub(r"\\(['\"])", r"\1", template)  # a template escapes quotes within its strings
    return any(all(text in spelled for text in group) for group in groups)
