"""langchain-openai's bind_tools and with_structured_output, and instructor, against a server. Run by test_others.py in
an environment that has them; its arguments are the server's URL and the model."""

import sys
from typing import Literal

import instructor
import openai
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

URL, MODEL = sys.argv[1], sys.argv[2]
QUESTION = "What is the weather in Paris?"


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


@tool
def get_weather(city: Literal["Paris", "Rome"], unit: Literal["C", "F"]) -> str:
    """The weather of a city."""
    return f"It is 21 degrees {unit} and raining in {city}."


def langchain() -> None:
    chat = ChatOpenAI(model=MODEL, base_url=URL, api_key="unused", temperature=0, max_tokens=200, max_retries=0)
    for choice in ("any", "get_weather"):
        bound = chat.bind_tools([get_weather], tool_choice=choice)
        answer = bound.invoke(QUESTION)
        (call,) = answer.tool_calls
        assert call["name"] == "get_weather" and set(call["args"]) == {"city", "unit"}, answer
        streamed = None
        for chunk in bound.stream(QUESTION):
            streamed = chunk if streamed is None else streamed + chunk
        assert streamed is not None and streamed.tool_calls[0]["args"] == call["args"], streamed
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    final = chat.bind_tools([get_weather], tool_choice="none").invoke([HumanMessage(QUESTION), answer, result])
    assert isinstance(final, AIMessage) and "21" in str(final.content), final
    for method in ("function_calling", "json_schema"):
        person = chat.with_structured_output(Person, method=method).invoke("Anna is 31 years old.")
        assert isinstance(person, Person), person
    assert chat.bind_tools([get_weather]).invoke("Say hello.") is not None


def with_instructor() -> None:
    client = openai.OpenAI(base_url=URL, api_key="unused", max_retries=0)
    messages = [{"role": "user", "content": "Anna is 31 years old."}]
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA):
        patched = instructor.from_openai(client, mode=mode)
        person = patched.chat.completions.create(
            model=MODEL, response_model=Person, messages=messages, max_tokens=200, temperature=0, max_retries=3
        )
        assert isinstance(person, Person), person
    several = instructor.from_openai(client, mode=instructor.Mode.TOOLS).chat.completions.create_partial(
        model=MODEL, response_model=Person, messages=messages, max_tokens=200, temperature=0
    )
    assert isinstance(list(several)[-1], Person)


langchain()
with_instructor()
