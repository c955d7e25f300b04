"""The runtime: executes plans on this machine, with a persistent batch, paged KV and a sampler.

Nothing is imported here: a process that has groundwork to do need not wait for torch.
"""
