"""Sampling: logits to tokens, for a whole batch at once, each row as if it were alone.

The order of processing is

    raw logits -> logit_bias -> repetition, then presence and frequency penalties -> min_tokens
               -> temperature -> top_k -> top_p -> min_p -> argmax of log p + noise

as in transformers, whose filters also see what the earlier ones left: top_p takes its share of the top_k tokens' mass.
(vLLM applies min_p before top_k and top_p. It compares with the most likely token, which every filter keeps, so the
order changes only what top_p takes its share of.) Logprobs are those of the raw logits. Equal logits rank by ascending
token id everywhere: top_k keeps exactly k tokens, and a greedy row takes the lowest id.

`reference.py` defines the tokens. The native and the Triton kernels choose the same ones.
"""
