"""langchain-anthropic, langchain-ollama, litellm and tritonclient against a server. Run by test_others.py in an
environment that has them; its arguments are the server's URL and the model."""

import json
import sys
from typing import Any, Literal

import litellm
import numpy
import tritonclient.http
from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaLLM
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


def streamed(model: Any, question: str) -> Any:
    total = None
    for chunk in model.stream(question):
        total = chunk if total is None else total + chunk
    return total


def talks(chat: BaseChatModel) -> None:
    answer = chat.invoke(QUESTION)
    assert answer.text and streamed(chat, QUESTION).text == answer.text
    assert answer.usage_metadata["output_tokens"] > 0 and answer.usage_metadata["input_tokens"] > 0


def with_anthropic() -> None:
    chat = ChatAnthropic(model=MODEL, base_url=URL, api_key="unused", max_tokens=100, max_retries=0, temperature=0)
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
    assert chat.get_num_tokens_from_messages([HumanMessage(QUESTION)]) > 5


def with_ollama() -> None:
    chat = ChatOllama(model=MODEL, base_url=URL, temperature=0, num_predict=60, validate_model_on_init=True)
    talks(chat)
    assert isinstance(chat.with_structured_output(Person, method="json_schema").invoke("Anna is 31."), Person)
    call = {"name": "get_weather", "args": {"city": "Paris", "unit": "C"}, "id": "1"}
    result = ToolMessage("It is 21 degrees.", tool_call_id="1", name="get_weather")
    history = [HumanMessage(QUESTION), AIMessage("", tool_calls=[call]), result]
    assert chat.bind_tools([get_weather]).invoke(history) is not None
    assert OllamaLLM(model=MODEL, base_url=URL, num_predict=20).invoke("The capital of France is")


def with_litellm() -> None:
    messages = [{"role": "user", "content": QUESTION}]
    for model, base in ((f"anthropic/{MODEL}", URL), (f"ollama_chat/{MODEL}", URL), (f"openai/{MODEL}", URL + "/v1")):
        fields: dict[str, Any] = {"model": model, "api_base": base, "api_key": "unused", "messages": messages}
        fields |= {"max_tokens": 20, "temperature": 0}
        whole = litellm.completion(**fields)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**fields, stream=True))
        assert text == whole.choices[0].message.content != "", model
        assert whole.usage.completion_tokens == 20, model
    function = {"name": "get_weather", "parameters": get_weather.args_schema.model_json_schema()}
    answer = litellm.completion(
        model=f"anthropic/{MODEL}",
        api_base=URL,
        api_key="unused",
        messages=messages,
        tools=[{"type": "function", "function": function}],
        tool_choice="required",
        max_tokens=100,
    )
    assert set(json.loads(answer.choices[0].message.tool_calls[0].function.arguments)) == {"city", "unit"}


def with_triton() -> None:
    client = tritonclient.http.InferenceServerClient(URL.removeprefix("http://"))
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready(MODEL)
    assert client.get_model_metadata(MODEL)["name"] == MODEL and client.get_server_metadata()["name"] == "penstock"
    assert client.get_model_repository_index()[0]["state"] == "READY"
    assert client.get_inference_statistics(MODEL)["model_stats"]
    client.load_model(MODEL)
    text = tritonclient.http.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(numpy.array([b"The capital of France is"], dtype=object), binary_data=False)
    wanted = [tritonclient.http.InferRequestedOutput("text_output", binary_data=False)]
    result = client.infer(MODEL, [text], outputs=wanted, parameters={"max_tokens": 12, "temperature": 0})
    assert "Paris" in str(result.as_numpy("text_output")[0])


with_anthropic()
with_ollama()
with_litellm()
with_triton()
