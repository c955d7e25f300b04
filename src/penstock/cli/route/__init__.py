"""Implements `penstock route`: fits and judges what chooses between a small and a large model."""
