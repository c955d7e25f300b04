"""What penstock.engine.process is for a model, for the simulated executor."""

import sys

from penstock.engine.process import serve
from tests.engine.simulated import BACKEND

if __name__ == "__main__":
    sys.exit(serve(BACKEND))
