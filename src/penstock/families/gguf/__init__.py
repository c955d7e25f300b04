"""A model in a GGUF file as a Hugging Face model: its metadata as a config.json, its tensors by Hugging Face's names."""
