"""Tool calls and reasoning: how models write them, and how their text is divided."""

from penstock.text.calls.chat_format import ChatFormat
from penstock.text.calls.formats import REASONING_FORMATS, TOOL_FORMATS
from penstock.text.calls.parser import MessageParser
from penstock.text.calls.parts import CallLimits, Part, ToolOutputError
