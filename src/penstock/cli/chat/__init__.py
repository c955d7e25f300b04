"""`penstock run`: a conversation with a model in the terminal. It imports nothing, as `--help` must be fast."""
