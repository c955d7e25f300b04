"""Implements `penstock verify`: what clients will meet when they use a model as it is loaded."""

from penstock.cli.verify.command import verify
