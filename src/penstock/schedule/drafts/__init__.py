"""Drafts: tokens guessed from texts at hand, and how many of them a step should verify."""
