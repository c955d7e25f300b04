"""The formats of quantised tensors, and the files that hold them."""
