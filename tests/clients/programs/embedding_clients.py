"""langchain-openai's embeddings from a server, against sentence-transformers with the same model.

Run by test_embedding_clients.py in an environment that has both; its arguments are the server's URL, the model's name
and its folder."""

import sys

import numpy as np
from langchain_openai import OpenAIEmbeddings
from sentence_transformers import SentenceTransformer

URL, MODEL, FOLDER = sys.argv[1], sys.argv[2], sys.argv[3]
TEXTS = [
    "A penstock is a pipe.",
    "The pipe that feeds a turbine under full head. " * 9,
    "My dog is brown.",
    "x",
    "Ünïcode 你好",
]


def main() -> None:
    # Otherwise it sends token ids of OpenAI's own vocabulary.
    client = OpenAIEmbeddings(model=MODEL, base_url=URL, api_key="unused", check_embedding_ctx_length=False)
    exact = SentenceTransformer(FOLDER, device="cpu").encode(TEXTS)
    furthest = np.abs(np.array(client.embed_documents(TEXTS)) - exact).max()
    assert furthest < 1e-4, furthest
    assert np.abs(np.array(client.embed_query(TEXTS[0])) - exact[0]).max() < 1e-4
    print("furthest", furthest)


if __name__ == "__main__":
    main()
