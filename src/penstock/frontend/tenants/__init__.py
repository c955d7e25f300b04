"""Tenants of a server: their keys, quotas, ledger and audit log."""
