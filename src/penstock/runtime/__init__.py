"""The runtime: executes plans on this machine, with a resident batch, a paged KV cache and a sampler.

Nothing is imported here: the preloading of weights must not wait for torch.
"""
