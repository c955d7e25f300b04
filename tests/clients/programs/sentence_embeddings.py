"""Writes sentence-transformers' embeddings of the texts on standard input, a JSON list, to standard output.

Its argument is the model's folder."""

import json
import sys

from sentence_transformers import SentenceTransformer


def main() -> None:
    model = SentenceTransformer(sys.argv[1], device="cpu")
    print(json.dumps(model.encode(json.load(sys.stdin)).tolist()))


if __name__ == "__main__":
    main()
