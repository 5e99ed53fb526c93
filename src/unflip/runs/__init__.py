"""Runs on disk. Reading one does not import torch.

run.py          Run: the one class that reads and writes a run's files
files.py        atomic writes, JSON, metrics lines, and errors that say how to repair a file
checkpoint.py   checkpoints that survive a kill, a full disk and a flipped bit
provenance.py   what a run was made from: images, start, teacher, code; and the version of unflip
folders.py      making and locking the folders of runs in training
load.py         load_run: the model of a run (needs torch)
"""

from unflip.runs.files import DamagedFile, RunError
from unflip.runs.run import Outcome, Run

__all__ = ["DamagedFile", "Outcome", "Run", "RunError"]
