"""Settings that cannot be combined with each other, a model or a device."""
