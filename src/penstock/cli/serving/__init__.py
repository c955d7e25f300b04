"""The processes of `penstock serve`: one that speaks HTTP, or a supervisor and several that do."""
