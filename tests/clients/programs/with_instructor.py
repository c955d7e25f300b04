"""instructor, whatever its version: its modes for tools and JSON, and partial answers.

Run by test_matrix.py in an environment of its own; its arguments are in arguments.py."""

import instructor
import openai
from arguments import MODEL, SERVER
from pydantic import BaseModel, Field

PATCH = getattr(instructor, "from_openai", None) or instructor.patch  # as version 0 has it


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


def new_client() -> openai.OpenAI:
    """A client of its own for each mode: version 0 changes it."""
    return openai.OpenAI(base_url=SERVER + "/v1", api_key="unused", max_retries=0)


def with_instructor() -> None:
    messages = [{"role": "user", "content": "Anna is 31 years old."}]
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA):
        patched = PATCH(new_client(), mode=mode)
        person = patched.chat.completions.create(
            model=MODEL, response_model=Person, messages=messages, max_tokens=200, temperature=0, max_retries=3
        )
        assert isinstance(person, Person), person
    if not hasattr(instructor, "from_openai"):
        return
    several = instructor.from_openai(new_client(), mode=instructor.Mode.TOOLS).chat.completions.create_partial(
        model=MODEL, response_model=Person, messages=messages, max_tokens=200, temperature=0
    )
    assert isinstance(list(several)[-1], Person)


with_instructor()
