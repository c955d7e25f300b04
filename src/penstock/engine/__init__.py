"""The engine: the core loop (`core`), where it may live (`launch`), and the client that reaches it there (`client`).

Nothing is imported here: a process that starts an engine need not wait for what running one takes, nor the other way
round.
"""
