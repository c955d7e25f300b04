"""One engine for several API processes: `hub` in the process that has the engine, `client` in the others."""
