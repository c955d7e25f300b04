"""Models of providers beside those of the server, and models that answer in the place of others."""
