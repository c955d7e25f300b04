"""A folder of models: their settings and versions, what loads and unloads them, and the processes that run them."""
