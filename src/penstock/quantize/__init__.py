"""Makes quantised checkpoints: one layer at a time, from the calibration's activations to codes in a file."""
