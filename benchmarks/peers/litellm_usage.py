"""Prints the prices of models in litellm's table, and the usage and cost that it finds in answers, as JSON.

Runs in an environment with litellm. Standard input: {"prices": [models]} or {"ask": [[model, URL], ...]}
"""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

PRICES = {"input": "input_cost_per_token", "output": "output_cost_per_token", "cached": "cache_read_input_token_cost"}
MESSAGES = [{"role": "user", "content": "hello"}]


def usage_of(model: str, url: str) -> dict[str, float]:
    """What litellm says of a streamed answer."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(litellm.completion(model=model, api_base=url, api_key="x", messages=MESSAGES, **options))
    answer = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    used, prompt = answer.usage, answer.usage.prompt_tokens_details
    cost = litellm.completion_cost(completion_response=answer, model=model)
    cached = (prompt.cached_tokens or 0) if prompt is not None else 0
    return {"prompt": used.prompt_tokens, "cached": cached, "output": used.completion_tokens, "cost": cost}


def main() -> None:
    wanted = json.load(sys.stdin)
    if "prices" in wanted:
        table = [litellm.model_cost[model.partition("/")[2]] for model in wanted["prices"]]
        found = [{name: row[key] * 1e6 for name, key in PRICES.items()} for row in table]
    else:
        found = [usage_of(model, url) for model, url in wanted["ask"]]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
