"""Pipelines: graphs of models, tokenizers and small operations on tensors that answer like one model."""
