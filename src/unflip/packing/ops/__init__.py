"""One handler per torch operation that can be packed.

A handler has the signature of its operation, after the converter and the operation's result in torch. It adds ops to
the converter's graph, or raises the converter's refusal.
"""

from unflip.packing.binary import binary_layer
from unflip.packing.ops import elementwise, norms, pools, products, shapes  # noqa: F401  (each registers its handlers)
from unflip.packing.ops.registry import HANDLERS, handles

__all__ = ["HANDLERS"]

handles("unflip::binary_layer")(binary_layer)
