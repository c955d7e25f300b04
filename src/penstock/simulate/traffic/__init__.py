"""The traffic of a simulation: when requests arrive, and what they are."""
