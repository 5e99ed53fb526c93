"""Engine ``ray``: the seeds of every arm are a task of a Ray cluster.

``RAY_ADDRESS`` names a cluster; without one Ray is started on this machine. The machines of a cluster must see the same
OUT and data folders. If the cluster has GPUs, each task gets one.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch

from unflip.study.task import Task
from unflip.train.signals import sigterm_interrupts


class Cluster:
    """Up to ``capacity`` tasks in flight."""

    def __init__(self, capacity: int) -> None:
        try:
            import ray  # type: ignore[import-not-found, import-untyped, unused-ignore]
        except ImportError:
            raise ValueError("--engine ray needs Ray: pip install 'unflip[ray]'") from None
        self.ray: Any = ray
        self.capacity = capacity
        self.mine = not ray.is_initialized()
        if self.mine and os.environ.get("RAY_ADDRESS"):
            ray.init()
        elif self.mine:
            ray.init(num_cpus=capacity, include_dashboard=False)
        gpus = 1 if ray.cluster_resources().get("GPU") else 0
        self.work = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(_work)
        self.running: dict[Any, str] = {}
        # Ray's own handler, set by init, ends the process silently.
        self.restore = sigterm_interrupts()

    def start(self, task: Task) -> None:
        jobs = tuple(
            replace(
                job,
                out=job.out.resolve(),
                start=job.start and job.start.resolve(),
                teacher=job.teacher and job.teacher.resolve(),
            )
            for job in task.jobs
        )
        data = task.data and task.data.resolve()
        options = replace(task.options, gpu_lock=None)  # Ray gives a task a GPU of its own
        sent = replace(task, jobs=jobs, data=data, options=options)
        self.running[self.work.remote(sent)] = task.name

    def wait(self) -> tuple[str, Exception | None]:
        [done], _ = self.ray.wait(list(self.running), num_returns=1)
        name = self.running.pop(done)
        try:
            self.ray.get(done)
        except self.ray.exceptions.RayTaskError as error:
            if not isinstance(error.cause, Exception):
                raise error.cause from error  # it was interrupted
            return name, error.cause
        return name, None

    def stop(self) -> None:
        for task in self.running:
            self.ray.cancel(task)  # Ctrl-C is noticed between two steps
        if self.running:
            self.ray.wait(list(self.running), num_returns=len(self.running))
        self.running.clear()
        self.restore()
        if self.mine:
            self.ray.shutdown()


def _work(task: Task) -> None:
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # what Ray reserves for a task
    task.run()
