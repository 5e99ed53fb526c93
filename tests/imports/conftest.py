"""The tests of this folder import modules that are beside them, such as ``plain``, and beside those of ``export``."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "export")]
