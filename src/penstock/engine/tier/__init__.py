"""The disk tier of the prefix cache (docs/kv-tiers.md)."""
