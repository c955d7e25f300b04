"""Errors of tokenizers and templates. Messages are for users: they name the file or the value."""


class TokenizerError(ValueError):
    """A tokenizer cannot be loaded, or it cannot process this input."""


class ChatTemplateError(ValueError):
    """A chat template is broken, refuses these messages, or exceeds its limits."""
