"""`penstock run`: a conversation with a model in the terminal. Nothing is imported here, so that `--help` stays fast."""
