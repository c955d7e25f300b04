"""The commands about tenants: their keys, the ledger, the audit log and the request log."""
