"""Between an engine that has a process of its own (`penstock engine`) and its fronts: TCP, and who may connect."""
