"""The families of decoders: a file each, or one for several that are nearly the same."""
