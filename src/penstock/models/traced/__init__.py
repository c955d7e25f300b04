"""Recognises a decoder of torch's modules by one forward of it, and executes it with our kernels."""
