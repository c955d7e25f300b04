"""What users may set, as plain tables: the parameters of sampling, and the settings of a server. The standard library
alone is imported here, since every start of the command line, also for --help and for a Tab, makes its flags of them.
"""
