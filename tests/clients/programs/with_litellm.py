"""litellm with its providers for OpenAI's, Anthropic's and Ollama's wires.

Run by test_matrix.py in an environment of its own; its arguments are the server's URL and the model."""

import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else the import waits for a network

import litellm

URL, MODEL = sys.argv[1], sys.argv[2]
QUESTION = "What is the weather in Paris?"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
}


def with_litellm() -> None:
    messages = [{"role": "user", "content": QUESTION}]
    for model, base in ((f"anthropic/{MODEL}", URL), (f"ollama_chat/{MODEL}", URL), (f"openai/{MODEL}", URL + "/v1")):
        fields: dict[str, Any] = {"model": model, "api_base": base, "api_key": "unused", "messages": messages}
        fields |= {"max_tokens": 20, "temperature": 0}
        whole = litellm.completion(**fields)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**fields, stream=True))
        assert text == whole.choices[0].message.content != "", model
        assert whole.usage.completion_tokens == 20, model
    function = {"name": "get_weather", "parameters": PARAMETERS}
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


with_litellm()
