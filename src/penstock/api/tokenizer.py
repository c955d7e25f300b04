"""The tokenizer that the library gives: the model's own, with its chat template."""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.text import Tokenizer
from penstock.text.calls import ChatFormat


class ChatTokenizer:
    """A model's tokenizer, with `apply_chat_template` as transformers has it. The rest is `Tokenizer`'s."""

    def __init__(self, tokenizer: Tokenizer, chat_format: ChatFormat) -> None:
        self._tokenizer = tokenizer
        self._chat_format = chat_format

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> str | list[int]:
        """Returns the prompt of a conversation: its token ids, or its text if `tokenize` is false. `variables` go to
        the template. `chat` of the library makes the same prompt.

        Raises ChatTemplateError, a ValueError, if the model has no template or if it refuses the conversation.
        """
        options = {
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            **variables,
        }
        if not tokenize:
            return self._chat_format.render(conversation, **options)
        pieces = self._chat_format.render_pieces(conversation, **options)
        return self._tokenizer.encode_pieces(pieces, add_special_tokens=False)
