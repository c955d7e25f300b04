"""The engine: the core loop (`core`), the ways to start it (`launch`), and the client that reaches it there (`client`).

Nothing is imported here, so that a process which only starts an engine does not import what running one takes.
"""
