"""Runs models of other frameworks in a child process for each framework. Tensors pass through shared memory."""
