"""Turns text into tokens and back: tokenizers, incremental detokenisation, stop strings and chat templates."""

from penstock.text.detokenizer import Detokenizer
from penstock.text.errors import ChatTemplateError, TokenizerError
from penstock.text.grammars.checker import GrammarChecker
from penstock.text.grammars.schema import GrammarError
from penstock.text.output import OutputText, TextChunk
from penstock.text.sandbox import RenderLimits
from penstock.text.stops import StopStrings
from penstock.text.template import ChatTemplate
from penstock.text.tokenizer import TextTokens, Tokenizer, chat_template_sources
