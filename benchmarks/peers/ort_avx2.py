"""A copy of the installed ONNX Runtime that does not use AVX-512, for comparisons with AVX2 only.

    python benchmarks/peers/ort_avx2.py FOLDER
    PYTHONPATH=FOLDER UNFLIP_ISA=avx2 ONEDNN_MAX_CPU_ISA=AVX2 python benchmarks/inference.py ...

ONNX Runtime has no switch for its instruction set. Its kernel library, MLAS, asks the CPU (XGETBV) which registers the
operating system saves, and uses AVX-512 only if bits 5 to 7 of the answer are set. The copy clears bits 3 to 7. It may
still use AVX-VNNI for int8 where the CPU has it, so leave out int8 (``--peers``) if the comparison is about AVX2 alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
from pathlib import Path

XGETBV, ONLY_AVX = b"\x0f\x01\xd0", b"\x24\x07"  # and al, 7
MOVE = b"\x89\xc0"  # mov eax, eax: without effect, because XGETBV clears the upper half of rax
REST = b"\x48\xc1\xe2\x20\x48\x09\xc2\x48\xf7\xd0"  # rdx = rdx << 32 | rax; rax = ~rax
KNOWN, PATCHED = XGETBV + MOVE + REST, XGETBV + ONLY_AVX + REST


def copy_without_avx512(folder: Path) -> int:
    """Copy onnxruntime to the folder; the number of changed places."""
    spec = importlib.util.find_spec("onnxruntime")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("onnxruntime is not installed: pip install -r benchmarks/requirements.txt")
    target = folder / "onnxruntime"
    if target.exists():
        raise SystemExit(f"{target} exists: name another folder, or delete it")
    shutil.copytree(spec.submodule_search_locations[0], target)
    count = 0
    for library in target.glob("capi/*.so*"):
        code = library.read_bytes()
        count += code.count(KNOWN)
        library.write_bytes(code.replace(KNOWN, PATCHED))
    if not count:
        raise SystemExit(
            "this version of onnxruntime asks for AVX-512 in another way; written for 1.31.1 on x86-64 Linux"
        )
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="for PYTHONPATH")
    folder = parser.parse_args().folder
    print(f"{folder / 'onnxruntime'}: {copy_without_avx512(folder)} places changed")


if __name__ == "__main__":
    main()
