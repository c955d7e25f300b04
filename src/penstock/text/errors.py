"""What can go wrong with text. Messages name the file or the value and are fit for a user."""


class TokenizerError(ValueError):
    """A tokenizer cannot be loaded, or cannot take this input."""


class ChatTemplateError(ValueError):
    """A chat template is broken, refuses these messages, or passes its limits."""
