"""Checks requests and makes them ready for the engine, and reads their answers. All wires share it."""
