"""Studies: many runs as one resumable piece of work, and one table at the end.

arm.py          one row of a table: a recipe, trained for every seed
study.py        arms and seeds in a folder, and which runs are left to train
runner.py       run_study: trains the runs that are left, in this process or in others
task.py         jobs that are trained side by side
pool.py         processes of this machine
cluster.py      a Ray cluster
needs.py        checks of a given baseline or teacher
summary.py      study.json, the one schema that is written and read
comparison.py   t-tests between arms, Holm's correction
output.py       writes study.json, table.md and figures
table.py        table.md
figures.py      curves, sweeps and differences as SVG
experiment.py   an experiment of a paper as a study
paper.py        the paper's experiments on CIFAR-10
imagenet.py     the paper's tables on ImageNet, and the same on Imagenette
pack.py         the packs of these, and the hours of their recipes
counting.py     memory and FLOPs of an arm's network
compare.py      given recipes as a study
methods.py      every method on one recipe
autobnn.py      AutoBNN's search of widths
"""
