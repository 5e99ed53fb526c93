"""What ``unflip bench --report`` prints: times of a network with all that they depend on, to paste into an issue."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
from pathlib import Path

from unflip import __version__
from unflip.networks.folder import digest
from unflip.printable import printable
from unflip.runtime import Model

CPUINFO = Path("/proc/cpuinfo")


def block(path: Path, network: Model, batch: int, seconds: list[float]) -> str:
    """A block of Markdown. The SHA-256 of the packed file tells which network was timed."""
    rows = [
        ("cpu", printable(cpu_name())),
        ("cores", str(os.cpu_count() or "unknown")),
        ("system", f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"),
        ("unflip", __version__),
        ("instruction set", network.isa),
        ("network", f"{printable(path.name)}, {path.stat().st_size:,} bytes"),
        ("sha256", digest(path)),
        ("threads, batch", f"{network.threads}, {batch}"),
        ("median", f"{statistics.median(seconds) * 1e3:.3f} ms of {len(seconds)} runs"),
        ("least", f"{min(seconds) * 1e3:.3f} ms"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(["```", *(f"{name:<{width}}  {value}" for name, value in rows), "```"])


def cpu_name() -> str:
    """As the system calls it; systems tell it in different ways."""
    if CPUINFO.exists():  # Linux; ARM has no such line
        for line in CPUINFO.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    if platform.system() == "Darwin":
        words = ["sysctl", "-n", "machdep.cpu.brand_string"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout.strip()
    return platform.processor() or platform.machine() or "unknown"
