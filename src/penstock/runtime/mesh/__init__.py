"""The mesh: the ranks that share a model, and how they exchange tensors. This file imports nothing."""
