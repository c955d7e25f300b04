"""A model in a GGUF file as Hugging Face has it: the metadata as a config.json, the tensors by their names there."""
