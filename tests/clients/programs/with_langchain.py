"""langchain-openai, -anthropic and -ollama, whatever their versions: chats, tools, schemas, embeddings.

Run by test_matrix.py in an environment of its own; its arguments are in arguments.py."""

from typing import Any, Literal

from arguments import EMBEDDER, EMBEDDER_SERVER, EMBEDDINGS, GATEWAY, MODEL, SERVER, TEXTS, far
from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

QUESTION = "What is the weather in Paris?"


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


@tool
def get_weather(city: Literal["Paris", "Rome"], unit: Literal["C", "F"]) -> str:
    """The weather of a city."""
    return f"It is 21 degrees {unit} and raining in {city}."


def streamed(model: Any, question: str) -> Any:
    total = None
    for chunk in model.stream(question):
        total = chunk if total is None else total + chunk
    return total


def text_of(message: Any) -> str:
    """The text of a message, whose content is a list of parts with the API of responses."""
    content = message.content
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def talks(chat: BaseChatModel) -> None:
    answer = chat.invoke(QUESTION)
    assert text_of(answer) and text_of(streamed(chat, QUESTION)) == text_of(answer)
    assert answer.usage_metadata["output_tokens"] > 0 and answer.usage_metadata["input_tokens"] > 0


def with_openai() -> None:
    fields: dict[str, Any] = {"model": MODEL, "base_url": SERVER + "/v1", "api_key": "unused", "max_retries": 0}
    fields |= {"temperature": 0, "max_tokens": 200}
    chat = ChatOpenAI(**fields)
    talks(chat)
    talks(ChatOpenAI(**fields, use_responses_api=True))
    assert "Paris" in OpenAI(**fields).invoke("The capital of France is")
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
    assert isinstance(final, AIMessage) and final.content, final
    for method in ("function_calling", "json_schema"):
        person = chat.with_structured_output(Person, method=method).invoke("Anna is 31 years old.")
        assert isinstance(person, Person), person
    assert chat.bind_tools([get_weather]).invoke("Say hello.") is not None


def with_anthropic() -> None:
    chat = ChatAnthropic(model=MODEL, base_url=SERVER, api_key="unused", max_tokens=100, max_retries=0, temperature=0)
    talks(chat)
    bound = chat.bind_tools([get_weather], tool_choice="any")
    answer = bound.invoke(QUESTION)
    (call,) = answer.tool_calls
    assert call["name"] == "get_weather" and set(call["args"]) == {"city", "unit"}, answer
    assert streamed(bound, QUESTION).tool_calls[0]["args"] == call["args"]
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    final = chat.bind_tools([get_weather]).invoke([HumanMessage(QUESTION), answer, result])
    assert isinstance(final, AIMessage)
    assert isinstance(chat.with_structured_output(Person).invoke("Anna is 31 years old."), Person)
    assert GATEWAY or chat.get_num_tokens_from_messages([HumanMessage(QUESTION)]) > 5


def with_ollama() -> None:
    chat = ChatOllama(model=MODEL, base_url=SERVER, temperature=0, num_predict=60, validate_model_on_init=True)
    talks(chat)
    assert isinstance(chat.with_structured_output(Person, method="json_schema").invoke("Anna is 31."), Person)
    call = {"name": "get_weather", "args": {"city": "Paris", "unit": "C"}, "id": "1"}
    result = ToolMessage("It is 21 degrees.", tool_call_id="1", name="get_weather")
    history = [HumanMessage(QUESTION), AIMessage("", tool_calls=[call]), result]
    assert chat.bind_tools([get_weather]).invoke(history) is not None
    assert OllamaLLM(model=MODEL, base_url=SERVER, num_predict=20).invoke("The capital of France is")


def embeddings() -> None:
    fields: dict[str, Any] = {"model": EMBEDDER, "base_url": EMBEDDER_SERVER + "/v1", "api_key": "unused"}
    # Otherwise it sends token ids of OpenAI's own vocabulary.
    for client in (
        OpenAIEmbeddings(**fields, check_embedding_ctx_length=False),
        OllamaEmbeddings(model=EMBEDDER, base_url=EMBEDDER_SERVER),
    ):
        assert far(client.embed_documents(TEXTS), EMBEDDINGS) < 1e-4
        assert far([client.embed_query(TEXTS[0])], EMBEDDINGS[:1]) < 1e-4


with_openai()
with_anthropic()
with_ollama()
embeddings()
