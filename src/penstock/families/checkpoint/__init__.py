"""The tensors of a checkpoint, as the headers of its files list them."""
