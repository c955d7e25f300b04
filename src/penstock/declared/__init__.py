"""Tables of what users may set: the sampling parameters, and the settings of a server.

This package imports only the standard library, since each start of the command line builds its flags from the tables,
also for --help and shell completion.
"""
