"""The time of a step: from a model's sizes and a device's speed, or fitted to measured steps."""
