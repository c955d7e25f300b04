"""Loads a model runner from a configuration. This file imports nothing, because `preload` must not import torch."""
