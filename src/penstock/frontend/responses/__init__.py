"""OpenAI's Responses API."""

from penstock.frontend.describe import Operation
from penstock.frontend.requests.pages import QUERY
from penstock.frontend.responses import answers
from penstock.frontend.responses.create import count_input_tokens, create_response
from penstock.frontend.responses.errors import encode_error
from penstock.frontend.responses.fields import PromptFields, ResponseFields
from penstock.frontend.responses.socket import ResponseSocket
from penstock.frontend.responses.stored import cancel_response, delete_response, list_input_items, show_response

OPERATIONS = {
    "create_response": Operation(
        summary="Answer a text, or the items of a conversation",
        shape=answers.RESPONSE,
        request=ResponseFields,
        example={"input": "Why is the sky blue?", "max_output_tokens": 64},
        stream="text/event-stream",
    ),
    "count_input_tokens": Operation(
        summary="Count the tokens of a response's input",
        shape=answers.INPUT_TOKENS,
        request=PromptFields,
        example={"input": "Why?"},
    ),
    "show_response": Operation(summary="Show a stored response", shape=answers.RESPONSE),
    "delete_response": Operation(summary="Delete a stored response", shape=answers.DELETED),
    "cancel_response": Operation(summary="Refuse: no response runs in the background"),
    "list_input_items": Operation(
        summary="List the input items of a stored response", shape=answers.INPUT_ITEMS, query=QUERY
    ),
}
