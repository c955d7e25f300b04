"""The tenants file: teams that share a server, with their keys, shares, limits and prices."""
