"""OpenAI's files and batches."""

from penstock.frontend.batches import answers
from penstock.frontend.batches.batches import BatchFields, cancel_batch, create_batch, list_batches, show_batch
from penstock.frontend.batches.files import (
    PURPOSES,
    SHORTEST,
    create_file,
    delete_file,
    list_files,
    show_content,
    show_file,
)
from penstock.frontend.describe import Operation
from penstock.frontend.error_body import encode_error
from penstock.frontend.requests.pages import QUERY

_PURPOSE = {"enum": list(PURPOSES)}
_FORM = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": _PURPOSE,
        "expires_after[anchor]": {"enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": SHORTEST},
    },
    "required": ["file", "purpose"],
    "dependentRequired": {
        "expires_after[anchor]": ["expires_after[seconds]"],
        "expires_after[seconds]": ["expires_after[anchor]"],
    },
    "additionalProperties": False,
}
OPERATIONS = {
    "create_file": Operation(summary="Upload a file of requests", shape=answers.FILE, form=_FORM),
    "list_files": Operation(summary="List files", shape=answers.FILES, query={**QUERY, "purpose": {"type": "string"}}),
    "show_file": Operation(summary="Show a file's name and size", shape=answers.FILE),
    "show_content": Operation(summary="Download a file", answer="application/octet-stream"),
    "delete_file": Operation(summary="Delete a file", shape=answers.DELETED),
    "create_batch": Operation(
        summary="Answer the requests of a file in the background",
        shape=answers.BATCH,
        request=BatchFields,
        example={"input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
    ),
    "list_batches": Operation(summary="List batches", shape=answers.BATCHES, query=QUERY),
    "show_batch": Operation(summary="Show a batch and its counts", shape=answers.BATCH),
    "cancel_batch": Operation(summary="End a batch early", shape=answers.BATCH),
}
