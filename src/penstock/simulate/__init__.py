"""Traffic on simulated replicas: the production scheduler on a virtual clock, and plans of fleets."""
