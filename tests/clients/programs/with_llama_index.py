"""LlamaIndex with its openai-like packages, whatever their versions: chats, streams, embeddings, questions about texts.

Run by test_matrix.py in an environment of its own; its arguments are in arguments.py. The embedder cuts no text, so
chunks are short enough for it."""

from arguments import EMBEDDER, EMBEDDER_SERVER, EMBEDDINGS, MODEL, SERVER, TEXTS, far
from llama_index.core import Document, Settings, VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.node_parser import SentenceSplitter
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

STORY = "A penstock feeds a turbine. " * 60 + "My dog is called Rex. " + "The river is long and brown. " * 60


def main() -> None:
    chat = OpenAILike(
        model=MODEL,
        api_base=SERVER + "/v1",
        api_key="unused",
        is_chat_model=True,
        context_window=8192,
        temperature=0,
        max_tokens=60,
        max_retries=0,
    )
    turns = [ChatMessage(role="user", content="My name is Anna."), ChatMessage(role="assistant", content="Hello Anna!")]
    turns.append(ChatMessage(role="user", content="What is my name?"))
    answer = chat.chat(turns).message.content
    assert answer and "".join(part.delta or "" for part in chat.stream_chat(turns)) == answer
    assert chat.complete("The capital of France is").text

    embed = OpenAILikeEmbedding(model_name=EMBEDDER, api_base=EMBEDDER_SERVER + "/v1", api_key="unused", max_retries=0)
    assert far(embed.get_text_embedding_batch(TEXTS), EMBEDDINGS) < 1e-4

    Settings.llm, Settings.embed_model = chat, embed
    Settings.node_parser = SentenceSplitter(chunk_size=200, chunk_overlap=20)
    index = VectorStoreIndex.from_documents([Document(text=STORY)])
    engine = index.as_query_engine(similarity_top_k=1, streaming=True)
    found = engine.query("What is the dog called?")
    assert "Rex" in found.source_nodes[0].text, found.source_nodes[0].text
    assert "".join(found.response_gen)


main()
