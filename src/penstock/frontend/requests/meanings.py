"""What the parameters of requests mean, for the OpenAPI document and /docs.

A name means the same on every wire, unless the struct of a wire describes the field itself. The sampling parameters
have a table of their own, `penstock.declared.sampling`.
"""

from collections.abc import Mapping

MEANINGS: Mapping[str, str] = {
    # the request
    "messages": "The conversation so far, its oldest message first.",
    "prompt": "A text, token ids, or a list of either.",
    "input": "A text, token ids, or a list; of responses, the conversation.",
    "model": "A name of the served model. Default: the served model.",
    "system": "The system prompt.",
    "instructions": "The system prompt.",
    "inputs": "The prompt.",
    "text_input": "The prompt.",
    "context": "Token ids of an earlier answer, which this one continues.",
    "suffix": "The text after the gap that the answer fills.",
    "options": "Limits and sampling parameters, such as num_predict and temperature.",
    "parameters": "Limits and sampling parameters.",
    # the length of the answer
    "max_tokens": "Most tokens of the answer. Default of completions: 16; of a chat: what the context allows.",
    "max_completion_tokens": "Most tokens of the answer. Default: what the context allows.",
    "max_output_tokens": "Most tokens of the answer. Default: what the context allows.",
    "max_new_tokens": "Most tokens of the answer. Default: 100.",
    "num_predict": "Most tokens of the answer. Default: what the context allows.",
    "min_tokens": "The answer does not end before so many tokens. Default: 0.",
    "stop": "A text, or a list of texts, at which the answer ends.",
    "stop_sequences": "Texts at which the answer ends.",
    "stop_token_ids": "Token ids at which the answer ends.",
    "ignore_eos": "Go on after the model's end token. Default: false.",
    "include_stop_str_in_output": "The answer has the stop string at its end. Default: false.",
    # how it is chosen
    "n": "Number of answers. Default: 1.",
    "best_of": "The same number as n, if it is given.",
    "seed": "The same seed gives the same answer. Default: random.",
    "logit_bias": "What is added to the logits of tokens, by token id.",
    # its form
    "stream": "Send the answer in parts as it grows. Default: false; of Ollama's API true.",
    "stream_options": "What a stream has besides the text, such as the usage.",
    "echo": "The answer begins with the prompt. Default: false.",
    "skip_special_tokens": "Leave special tokens out of the text. Default: true.",
    "logprobs": "Return the log-probabilities of tokens: true for a chat, their number for a prompt. Default: none.",
    "top_logprobs": "Number of alternatives for each token. Default: 0.",
    "prompt_logprobs": "Number of alternatives for each token of the prompt. Default: none.",
    "response_format": "Text, any JSON, or JSON that fits a schema. Default: text.",
    "structured_outputs": "A JSON schema, regex, choice or grammar that the whole answer fits.",
    "format": "json, or a JSON schema that the answer fits.",
    "guided_json": "A JSON schema that the answer fits; vLLM's older name.",
    "guided_regex": "A regular expression that the answer fits; vLLM's older name.",
    "guided_choice": "Texts of which the answer is one; vLLM's older name.",
    "guided_grammar": "A grammar that the answer fits; vLLM's older name.",
    # tools and reasoning
    "tools": "Functions that the model may call.",
    "tool_choice": "auto, none, required, or the one function to call. Default: auto.",
    "parallel_tool_calls": "Allow several calls in an answer. Default: true.",
    "reasoning_effort": "How much the model thinks, for templates that know it.",
    "thinking": "Whether the model thinks, and for how many tokens.",
    "think": "Whether the model thinks, or how much.",
    "thinking_budget": "Most tokens of reasoning. Default: the server's.",
    "thinking_token_budget": "Most tokens of reasoning; vLLM's name. Default: the server's.",
    # how the prompt is made
    "add_special_tokens": "Add the tokenizer's special tokens. Default: true for a prompt, false for a chat.",
    "add_generation_prompt": "End the prompt where the assistant begins. Default: true.",
    "continue_final_message": "Go on with the last message instead of a new one. Default: false.",
    "chat_template_kwargs": "Variables for the chat template.",
    "raw": "Do not use the chat template. Default: false.",
    "prediction": "A text that the answer will resemble; it makes the answer faster.",
    # when it is run
    "priority": "Seconds: a lower one runs sooner. Default: 0.",
    "timeout": "Seconds until the last token, after which the request ends with an error. Default: the server's.",
    "first_token_timeout": "Seconds until the first token, after which the request ends. Default: the server's.",
    "cache_salt": "Only requests with the same salt share cached prompts. Default: all of a key.",
    "shift": "Accepted without effect.",
    "keep_alive": "How long the engine stays after this request, if it may sleep: seconds, or 5m.",
    # responses and batches
    "store": "Of responses: keep the answer, so that a later request can continue it.",
    "previous_response_id": "Continue the conversation of this response.",
    "metadata": "Names and values. Of responses and batches, they are stored with the answer.",
    "user": "Accepted without effect.",
    "safety_identifier": "Accepted without effect.",
    "prompt_cache_key": "Accepted without effect: equal prompts share the cache.",
    "prompt_cache_retention": "Accepted without effect.",
    # vectors
    "encoding_format": "float, or base64 of little-endian float32. Default: float.",
    "dimensions": "How many numbers of each vector are returned, from the first. Default: all.",
    "prompt_name": "Which prompt of the model's files stands before each text. Default: the model's.",
    "truncate_prompt_tokens": "Cut texts to so many tokens; -1: to the model's limit. Default: an error.",
    "truncate": "Cut what is too long: of TGI to so many tokens, of Ollama's embeddings by default.",
    "query": "The text that documents are compared with.",
    "documents": "The texts to put in order.",
    "top_n": "How many documents are returned, the best first. Default: all.",
    "return_documents": "Return the documents' texts, too.",
    "max_tokens_per_doc": "Documents are cut to so many tokens.",
    "text_1": "The first text of each pair, or of all.",
    "text_2": "The second text of each pair.",
}
