"""Implements the `penstock` command. Each subcommand imports what it needs when it runs, so that --help stays quick."""
