"""From a configuration to a model runner. Nothing is imported here: `preload` must not import torch."""
