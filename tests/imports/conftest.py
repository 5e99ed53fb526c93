"""The tests of this folder import ``plain`` and ``mxnet_writer``, which are beside them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
