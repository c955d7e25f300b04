"""Weights: finding a model's files (`hub`), checking their content (`checkpoint`), reading them into memory (`load`).

Only `load` needs torch, so nothing is imported here: `penstock plan` finds a model without it.
"""
