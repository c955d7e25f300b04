"""Grammars that outputs must match: checked in the API process, turned into masks of tokens in the engine."""
