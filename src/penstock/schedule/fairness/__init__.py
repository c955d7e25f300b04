"""Shares an engine among tenants: the order of their requests, and what each request has used."""
