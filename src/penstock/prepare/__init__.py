"""Makes a running engine, and the model that it serves, from given settings. Shared by the commands and the library."""
