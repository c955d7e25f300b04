"""A model in several processes, one for each rank: they are started, supervised and sent every plan."""
