"""Studies: many runs as one resumable piece of work, and one table at the end.

arm.py         one line of a table: a recipe, trained for every seed
study.py       arms and seeds in a folder: what is left, and the engines that do it
task.py        jobs that are trained side by side, in this process or another
pool.py        engine: processes of this machine
cluster.py     engine: Ray
record.py      what came of one run
report.py      what a study leaves: study.json, table.md, figures
summary.py     study.json: every run, mean and standard deviation, Welch's t-tests
table.py       table.md
figures.py     curves, sweeps and differences as SVG
paper.py       the experiments of the LNS paper on CIFAR-10
methods.py     every method on one recipe
autobnn.py     AutoBNN's search of widths
"""
