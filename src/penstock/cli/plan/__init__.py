"""Implements `penstock plan`: what a model needs, without loading it."""

from penstock.cli.plan.command import plan
