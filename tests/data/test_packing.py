"""Packing gives the same files for any number of workers and any interruption, and names what is damaged.

This file has more than 400 lines, because interruptions, changes and damage are tested with the same images.
"""

from __future__ import annotations

import errno
import io
import os
import random
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from unflip.data import packing, partial_pack
from unflip.data.errors import DataError
from unflip.data.pack_format import index_path
from unflip.data.packing import Encoding, pack_images
from unflip.data.store import open_any
from unflip.data.workers import WorkerError, results
from unflip.pictures import PixelError

RESIZED = Encoding(size=20)


class Killed(BaseException):
    """Ends the process that packs, as far as its files are concerned."""


def contents(out: Path) -> tuple[bytes, bytes]:
    return out.read_bytes(), index_path(out).read_bytes()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def source(write) -> Path:
    return write("folders")


@pytest.fixture
def expected(source, tmp_path) -> tuple[bytes, bytes]:
    out = tmp_path / "expected.pack"
    pack_images(open_any(source), out, RESIZED)
    return contents(out)


@pytest.fixture
def out(tmp_path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "a.pack"


@pytest.mark.parametrize("workers", [2, 3])
def test_any_number_of_workers_writes_the_same_bytes(source, expected, out, workers):
    reports = []
    pack_images(
        open_any(source),
        out,
        RESIZED,
        workers=workers,
        report=lambda *counts: reports.append(counts),
    )
    assert contents(out) == expected
    assert files(out.parent) == ["a.pack", "a.pack.index"]
    assert reports[0] == (0, 30)
    assert reports[-1] == (30, 30)


def test_packing_resumes_after_a_stop_at_every_image(source, expected, out, monkeypatch):
    """One image more each time, then the process ends, once in the middle of writing the image."""
    encode = Encoding.encode
    generator = random.Random(0)
    for _ in range(31):
        left = [1]

        def encode_one(self, data, name, left=left):
            if not left[0]:
                raise Killed
            left[0] -= 1
            return encode(self, data, name)

        monkeypatch.setattr(Encoding, "encode", encode_one)
        monkeypatch.setattr("unflip.data.listing.in_chunks.__defaults__", (1,))
        try:
            pack_images(open_any(source), out, RESIZED)
            break
        except Killed:
            for part in out.parent.iterdir():  # what a write in progress leaves
                with part.open("ab") as file:
                    file.write(generator.randbytes(generator.randrange(9)))
    assert contents(out) == expected
    assert files(out.parent) == ["a.pack", "a.pack.index"]


def test_a_kill_while_the_files_get_their_names_loses_nothing(source, expected, out, monkeypatch):
    replace = os.replace
    for number in (1, 2):
        seen = []

        def replace_or_die(*paths, number=number, seen=seen):
            seen.append(paths)
            if len(seen) == number:
                raise Killed
            replace(*paths)

        monkeypatch.setattr(os, "replace", replace_or_die)
        with pytest.raises(Killed):
            pack_images(open_any(source), out, RESIZED)
        assert not out.exists()  # not taken for finished
    monkeypatch.setattr(os, "replace", replace)
    pack_images(open_any(source), out, RESIZED)
    assert contents(out) == expected
    assert files(out.parent) == ["a.pack", "a.pack.index"]


def test_images_that_a_power_failure_lost_are_packed_again(source, expected, out):
    begun(source, out, 30)
    part = out.with_name("a.pack.part")
    whole = part.read_bytes()
    part.write_bytes(whole[:5000] + bytes(len(whole) - 5000))  # blocks that never reached the disk
    pack_images(open_any(source), out, RESIZED)
    assert contents(out) == expected


def test_zeros_in_the_journal_are_not_taken_for_skipped_images(source, expected, out):
    begun(source, out, 16)
    with out.with_name("a.pack.journal.part").open("ab") as journal:
        journal.write(bytes(16 * 5))
    pack_images(open_any(source), out, RESIZED, skip_damaged=True)
    assert contents(out) == expected


def begun(source: Path, out: Path, images: int, skip_damaged: bool = False) -> None:
    """Pack this many images, and stop."""

    def report(done: int, total: int) -> None:
        if done >= images:
            raise Killed

    with pytest.raises(Killed):
        pack_images(open_any(source), out, RESIZED, report=report, skip_damaged=skip_damaged)


def test_other_options_or_images_do_not_resume(source, expected, out, write):
    begun(source, out, 10)
    with pytest.raises(DataError, match=r"a\.pack\.part was begun.*size was 20 and is 21.*delete"):
        pack_images(open_any(source), out, Encoding(size=21))
    with pytest.raises(DataError, match=r"layout was 'class folders' and is 'WebDataset tars'"):
        pack_images(open_any(write("tars")), out, RESIZED)
    (source / "train/n01440764/extra.png").write_bytes(b"")
    with pytest.raises(DataError, match="training images was 24 and is 25"):
        pack_images(open_any(source), out, RESIZED)
    (source / "train/n01440764/extra.png").unlink()
    pack_images(open_any(source), out, RESIZED)
    assert contents(out) == expected


def longer(path: Path) -> None:
    """Another image with the same name: what follows a JPEG's end does not matter."""
    path.write_bytes(path.read_bytes() + b"x")


@pytest.mark.parametrize("layout", ["folders", "tars", "parquet", "pack"])
def test_another_source_with_the_same_names_is_not_mixed_in(write, samples, tmp_path, out, layout):
    others = [replace(sample, data=sample.data + b"x") for sample in samples]
    sources = []
    for number, images in enumerate((samples, others)):
        source = write("folders" if layout == "pack" else layout, images)
        if layout == "pack":
            source = pack_images(open_any(source), tmp_path / f"{number}.pack", Encoding()).path
        else:
            source = source.rename(tmp_path / str(number))
        sources.append(source)
    begun(sources[0], out, 10)
    with pytest.raises(DataError, match=r"begun with other images: .*n0.* has changed.*delete"):
        pack_images(open_any(sources[1]), out, RESIZED)
    pack_images(open_any(sources[0]), out, RESIZED)
    with pytest.raises(DataError, match="made from other images"):
        pack_images(open_any(sources[1]), out, RESIZED)


def test_an_image_that_changes_later_does_not_stop_packing_that_resumes(source, out):
    begun(source, out, 16)
    longer(source / "val/n03028079/ILSVRC2012_val_00000005.JPEG")  # not packed yet
    pack_images(open_any(source), out, RESIZED)
    assert pack_images(open_any(source), out, RESIZED).header.images == 30  # complete
    longer(source / "val/n03028079/ILSVRC2012_val_00000005.JPEG")
    with pytest.raises(DataError, match="made from other images"):
        pack_images(open_any(source), out, RESIZED)


def test_a_skipped_image_that_was_repaired_is_packed(source, expected, out):
    damaged = source / "train/n01440764/n01440764_002.JPEG"
    whole = damaged.read_bytes()
    damaged.write_bytes(b"damaged")
    begun(source, out, 16, skip_damaged=True)
    damaged.write_bytes(whole)
    pack_images(open_any(source), out, RESIZED, skip_damaged=True)
    assert contents(out) == expected


def test_a_name_does_not_run_into_a_key(write, out):
    """ab.png of class c, and a.png of class bc, would otherwise be one text."""
    store = open_any(write("folders"))
    jobs = [
        packing._job(replace(store, keys=keys, classes=("A", "B")), RESIZED, [["x"], [name]])
        for name, keys in (("a", ("bc", "d")), ("ab", ("c", "d")))
    ]
    assert jobs[0] != jobs[1]


def test_a_finished_pack_is_not_packed_again_or_overwritten(source, out):
    first = pack_images(open_any(source), out, RESIZED)
    before = out.stat().st_mtime_ns
    assert pack_images(open_any(source), out, RESIZED).checksum == first.checksum
    with pytest.raises(DataError, match=r"a\.pack exists, and was made from other images or with"):
        pack_images(open_any(source), out, Encoding(size=21))
    assert out.stat().st_mtime_ns == before


def test_two_processes_do_not_write_one_pack(source, out):
    store = open_any(source)

    def report(done: int, total: int) -> None:
        with pytest.raises(DataError, match="is being packed by another process"):
            pack_images(store, out, RESIZED)

    pack_images(store, out, RESIZED, report=report)


def test_a_full_disk_is_named_and_packing_resumes(source, expected, out, monkeypatch):
    """Every write in turn finds the disk full after some of its bytes."""
    write_all = partial_pack._write_all
    generator = random.Random(1)
    problems = []
    for number in range(1, 30):
        seen = []

        def write_or_fail(file, data, number=number, seen=seen):
            seen.append(data)
            if len(seen) == number:
                file.write(memoryview(data)[: generator.randrange(len(data))])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write_all(file, data)

        monkeypatch.setattr(partial_pack, "_write_all", write_or_fail)
        try:
            pack_images(open_any(source), out, RESIZED)
            break
        except DataError as error:
            problems.append(str(error))
            assert not out.exists()
    assert len(problems) > 5
    for problem in problems:
        assert "No space left on device" in problem
        assert "the same command resumes" in problem
    assert contents(out) == expected


def test_a_limit_on_the_size_of_files_is_named(source, expected, out):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, limits[1]))
    try:
        with pytest.raises(DataError, match=r"a\.pack\.part cannot be written: File too large"):
            pack_images(open_any(source), out, RESIZED)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    pack_images(open_any(source), out, RESIZED)
    assert contents(out) == expected


@pytest.mark.parametrize("workers", [1, 2])
def test_a_damaged_image_is_named_and_skipped_only_when_asked(source, out, samples, workers):
    damaged = source / "train/n02102040/n02102040_002.JPEG"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError) as raised:
        pack_images(open_any(source), out, RESIZED, workers=workers)
    assert str(damaged) in str(raised.value)
    assert "11 images are packed; the same command resumes" in str(raised.value)
    assert "--skip-damaged" in str(raised.value)
    packed = pack_images(open_any(source), out, RESIZED, skip_damaged=True, workers=workers)
    assert len(packed.train) == 23
    assert packed.header.skipped == 1
    assert packed.header.skipped_names == ("train/n02102040/n02102040_002.JPEG",)
    assert packed.train.name(11) == "train/n02102040/n02102040_003.JPEG"


def test_a_repaired_image_is_packed_where_packing_stopped(source, expected, out):
    damaged = source / "train/n02102040/n02102040_002.JPEG"
    whole = damaged.read_bytes()
    damaged.write_bytes(b"")
    with pytest.raises(DataError, match="is not an image of a known format"):
        pack_images(open_any(source), out, RESIZED)
    damaged.write_bytes(whole)
    pack_images(open_any(source), out, RESIZED)
    assert contents(out) == expected


def test_skipped_images_are_not_forgotten_when_packing_resumes(source, out):
    (source / "train/n01440764/n01440764_002.JPEG").write_bytes(b"damaged")
    begun(source, out, 16, skip_damaged=True)
    with pytest.raises(
        DataError, match=r"has skipped 1 as damaged \(train/n01440764/n01440764_002"
    ):
        pack_images(open_any(source), out, RESIZED)
    packed = pack_images(open_any(source), out, RESIZED, skip_damaged=True)
    assert packed.header.skipped == 1


def test_a_part_without_any_image_is_refused(source, out):
    for path in (source / "val").rglob("*.JPEG"):
        path.write_bytes(b"damaged")
    with pytest.raises(DataError, match="has no test image that can be decoded"):
        pack_images(open_any(source), out, RESIZED, skip_damaged=True)
    assert not out.exists()


def test_a_class_without_any_training_image_is_refused(source, out):
    for path in (source / "train/n02102040").iterdir():
        path.write_bytes(b"damaged")
    with pytest.raises(DataError, match="no training image of class n02102040 that can be decoded"):
        pack_images(open_any(source), out, RESIZED, skip_damaged=True)
    assert not out.exists()


def test_an_out_that_cannot_be_written_says_what_to_do(source, out, tmp_path):
    pack_images(open_any(source), out, RESIZED)
    index_path(out).unlink()
    with pytest.raises(DataError, match=r"index does not exist.*delete a\.pack first"):
        pack_images(open_any(source), out, RESIZED)
    (tmp_path / "folder.pack").mkdir()
    with pytest.raises(DataError, match=r"folder\.pack is a folder\. Give the pack to write"):
        pack_images(open_any(source), tmp_path / "folder.pack", RESIZED)
    with pytest.raises(
        DataError, match=r"cannot be made: (Not a directory|File exists).*another OUT"
    ):
        pack_images(open_any(source), out / "b.pack", RESIZED)


def test_a_file_that_cannot_be_read_is_not_skipped_as_damaged(source, out):
    """A network that fails for a moment must not cost half of the images."""
    path = source / "train/n01440764/n01440764_002.JPEG"

    def report(done: int, total: int) -> None:
        path.unlink(missing_ok=True)

    with pytest.raises(DataError, match=r"n01440764_002\.JPEG cannot be read: .*No such file"):
        pack_images(open_any(source), out, RESIZED, skip_damaged=True, report=report)


def test_a_broken_link_is_named_with_its_target(source, out):
    path = source / "train/n01440764/n01440764_002.JPEG"
    path.unlink()
    path.symlink_to("/absent/a.jpg")
    with pytest.raises(
        DataError, match=r"002\.JPEG cannot be read.*link to /absent/a\.jpg.*remove"
    ):
        pack_images(open_any(source), out, RESIZED)
    with pytest.raises(DataError, match="remove the link"):
        open_any(source).fingerprint  # noqa: B018


@pytest.mark.parametrize("workers", [1, 2])
def test_a_lack_of_memory_stops_packing_also_with_skip_damaged(workers):
    with pytest.raises(WorkerError, match=r"memory ran out\. Use fewer workers"):
        list(results(eval, "bytes(2**62)", [{}], workers))


def test_an_image_too_wide_for_a_jpeg_is_named(monkeypatch):
    monkeypatch.setattr("unflip.pictures.MOST_RATIO", 10**6)
    file = io.BytesIO()
    Image.new("RGB", (65_600, 1)).save(file, "PNG")
    with pytest.raises(
        PixelError, match=r"x/a\.png cannot be encoded as a JPEG of 65600 × 1.*--size"
    ):
        RESIZED.encode(file.getvalue(), "x/a.png")


@pytest.mark.parametrize("options", [{"size": 0}, {"size": 20, "quality": 0}, {"quality": 101}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(DataError, match="must be"):
        Encoding(**options)


def test_another_suffix_is_refused(source, tmp_path):
    with pytest.raises(DataError, match=r"x\.bin should end in \.pack, such as .*x\.pack"):
        pack_images(open_any(source), tmp_path / "x.bin", RESIZED)


def test_results_come_in_order_and_errors_come_through():
    """The function is eval: workers need not import this file."""

    def values(expression: str, count: int = 12) -> list[int]:
        return list(results(eval, expression, ({"n": n} for n in range(count)), 2))

    assert values("n * n") == [n * n for n in range(12)]
    assert values("n", 1) == [0]
    with pytest.raises(ValueError, match=r"invalid literal.*'x5'"):
        values("int('x5') if n == 5 else n")
    with pytest.raises(WorkerError, match="ZeroDivisionError"):
        values("1 // (n - 3)")
    with pytest.raises(WorkerError, match="ended with exit code 3"):
        values("__import__('os')._exit(3) if n == 2 else n")


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "unflip", "data", *map(str, arguments)]


def processes_of(group: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                found.append(int(entry.name))
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_command_resumes_after_a_signal_and_leaves_no_process(tmp_path, samples, out, number):
    source = tmp_path / "many"
    for part in ("train", "val"):
        for key in ("cat", "dog"):
            (source / part / key).mkdir(parents=True)
            for copy in range(150):
                (source / part / key / f"{copy}.jpg").write_bytes(samples[copy % 9].data)
    arguments = command("pack", source, out, "--size", 20, "--workers", 2)
    journal = out.with_name("a.pack.journal.part")
    process = subprocess.Popen(
        arguments,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell lets its background jobs, and all that they start, ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    end = time.monotonic() + 60
    while not (journal.exists() and journal.stat().st_size > 3000):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.002)
    os.kill(process.pid, number)
    _, err = process.communicate(timeout=30)
    assert not out.exists()
    assert process.returncode == (-9 if number == signal.SIGKILL else 130), err
    end = time.monotonic() + 20
    while processes_of(process.pid):
        assert time.monotonic() < end
        time.sleep(0.01)
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert "resuming after" in done.stdout
    assert "300 training and 300 test images of 2 classes" in done.stdout
    pack_images(open_any(source), tmp_path / "whole.pack", RESIZED)
    assert contents(out) == contents(tmp_path / "whole.pack")
