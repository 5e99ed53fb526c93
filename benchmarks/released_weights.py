"""The weights of a checkpoint that authors of a method released, to train it further with `unflip train`.

    python benchmarks/released_weights.py CHECKPOINT START.safetensors --layout adabin-resnet20

In contrast to a packed file, a checkpoint has latent weights, so signs can change. `unflip import torch --help` names
the layouts.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from safetensors.torch import save_file

from unflip.imports import checkpoints
from unflip.imports.layouts import LAYOUTS


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    parser.add_argument("out", type=Path, metavar="START.safetensors")
    parser.add_argument("--layout", choices=sorted(LAYOUTS), required=True)
    given = parser.parse_args()
    model = checkpoints.load(given.checkpoint, given.layout).model
    save_file({key: value.contiguous() for key, value in model.state_dict().items()}, given.out)


if __name__ == "__main__":
    main()
