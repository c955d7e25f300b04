"""All tests, and what they share."""

import os
import sys

# Each process that tests start imports our modules compiled. Images forbid to write them, and a server would compile
# for 5 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
