"""Weights: where a model's files are (`hub`), what they hold (`checkpoint`), and how they get into memory (`load`).

Only `load` needs torch, so nothing is imported here: `penstock plan` finds a model without it.
"""
