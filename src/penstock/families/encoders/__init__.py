"""Encoders: models that give vectors."""
