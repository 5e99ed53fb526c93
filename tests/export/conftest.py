"""The tests of this folder import modules that are beside them, such as ``onnx_net``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
