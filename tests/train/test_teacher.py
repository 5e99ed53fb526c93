"""Distillation: the table of a teacher's logits, the loss against its formula, and errors."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from unflip.data import ImageSet
from unflip.recipes.build import build_model
from unflip.recipes.schema import Distill, Recipe
from unflip.runs.run import Run
from unflip.train import Job, RunOptions, load_recipe, teacher, train, train_together
from unflip.train.learner import Learner, Objective, divergence
from unflip.train.teacher import NetworkTeacher, TableTeacher, fits_in_table, load_teacher

CPU = torch.device("cpu")
QUIET = RunOptions(device="cpu", quiet=True)
SMALL = ["data.validation=1200", "model.width=4", "batch_size=32", "epochs=2"]


@pytest.fixture(scope="module")
def teacher_run(tmp_path_factory: pytest.TempPathFactory, digits: ImageSet) -> Path:
    out = tmp_path_factory.mktemp("teacher")
    train(load_recipe("digits-float", SMALL), digits, out, options=QUIET)
    return out


@pytest.fixture(scope="module")
def student() -> Recipe:
    return load_recipe("digits-dorefa", [*SMALL, "distill={teacher: digits-float, weight: 0.5}"])


def test_the_table_has_the_logits_of_every_picture(digits: ImageSet) -> None:
    few = replace(digits.split(1000), crop_padding=1, flip=True)
    few = replace(few, train_images=few.train_images[:37], train_labels=few.train_labels[:37])
    images = few.source(CPU)
    model = build_model(load_recipe("digits-float", SMALL), few.spec, seed=0).eval()
    found = TableTeacher(model, images, CPU, half=False)
    assert found.table.shape == (37, 3, 3, 2, 10)
    plan = images.plan(seed=3, epoch=1, batch_size=37)[0]
    with torch.no_grad():
        pictures = images.batch(plan)[0]
        expected = model(pictures)
    logits = found.logits(plan, pictures)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert (logits != found.logits(plan.roll(1, 0), pictures)).any()
    torch.testing.assert_close(
        NetworkTeacher(model, CPU, half=False).logits(plan, pictures), expected
    )


def test_the_divergence_is_its_formula() -> None:
    logits = torch.randn(5, 7, dtype=torch.float64)
    taught = torch.randn(5, 7, dtype=torch.float64)
    p, q = (F.softmax(z / 3, 1) for z in (taught, logits))
    expected = 9 * (p * (p / q).log()).sum(1).mean()
    torch.testing.assert_close(divergence(logits, taught, 3.0), expected)
    assert divergence(taught, taught, 3.0).abs() < 1e-12


def test_the_loss_is_a_mixture(student: Recipe, digits: ImageSet) -> None:
    model = build_model(student, digits.spec, seed=0).eval()
    images, labels = torch.randn(6, 1, 8, 8), torch.arange(6)
    taught = torch.randn(6, 10)
    mixed, _ = Objective(model, Distill(teacher="t", temperature=2, weight=0.25))(
        images, labels, taught
    )
    hard, _ = Objective(model)(images, labels)
    soft = divergence(model(images), taught, 2)
    torch.testing.assert_close(mixed, 0.75 * hard + 0.25 * soft)


def test_smooth_labels(student: Recipe, digits: ImageSet) -> None:
    """A share of a label is spread over all ten classes, its own among them."""
    model = build_model(student, digits.spec, seed=0).eval()
    images, labels = torch.randn(6, 1, 8, 8), torch.arange(6)
    found, _ = Objective(model, smoothing=0.3)(images, labels)
    targets = 0.7 * F.one_hot(labels, 10) + 0.03
    expected = -(targets * F.log_softmax(model(images), 1)).sum(1).mean()
    torch.testing.assert_close(found, expected)


def test_a_student_learns_from_its_teacher_and_resumes(
    teacher_run: Path, student: Recipe, digits: ImageSet, tmp_path: Path
) -> None:
    [result] = train(student, digits, tmp_path, teacher=teacher_run, options=QUIET)
    plain = student.model_copy(update={"distill": None, "name": "plain"})
    [alone] = train(plain, digits, tmp_path / "plain", options=QUIET)
    assert result["loss"] != alone["loss"]
    again = train(student, digits, tmp_path, options=QUIET)
    assert again == [result], "finished: the teacher is not needed any more"


def test_a_teacher_in_the_step_teaches_the_same(
    teacher_run: Path,
    student: Recipe,
    digits: ImageSet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the table would be too large, the network runs on the images of the step."""
    monkeypatch.setattr(teacher, "MAX_PICTURES", 9)  # two epochs are too few for a table
    source = student.data.of(digits).source(CPU)
    assert fits_in_table(source, half=False, epochs=student.epochs)
    [table] = train(student, digits, tmp_path / "table", teacher=teacher_run, options=QUIET)
    monkeypatch.setattr(teacher, "MAX_TABLE_BYTES", 1000)
    assert not fits_in_table(source, half=False, epochs=student.epochs)
    loaded = load_teacher(
        Run(teacher_run / "seed-0"), student, student.data.of(digits), source, CPU
    )
    assert isinstance(loaded, NetworkTeacher)
    assert not any(p.requires_grad for p in loaded.model.parameters())
    [step] = train(student, digits, tmp_path / "step", teacher=teacher_run, options=QUIET)
    assert step["loss"] == pytest.approx(table["loss"], rel=1e-3)


def test_no_table_is_computed_that_is_hardly_read(digits: ImageSet) -> None:
    """A photo of 128 pixels has 33 × 33 crops, mirrored or not: more than a run of 500 epochs sees."""
    source = replace(digits, crop_padding=16, flip=True).source(CPU)
    assert math.prod(source.pictures()[1:]) == 2178
    assert not fits_in_table(source, half=False, epochs=500)
    assert fits_in_table(source, half=False, epochs=1000)


def test_labels_are_not_used_with_a_weight_of_one(student: Recipe, digits: ImageSet) -> None:
    """ReActNet's loss: the divergence from the teacher's probabilities alone."""
    model = build_model(student, digits.spec, seed=0).eval()
    objective = Objective(model, Distill(teacher="t", temperature=1, weight=1))
    images, taught = torch.randn(6, 1, 8, 8), torch.randn(6, 10)
    loss, _ = objective(images, torch.arange(6), taught)
    other, _ = objective(images, torch.zeros(6, dtype=torch.int64), taught)
    assert torch.equal(loss, other)
    p = F.softmax(taught, 1)
    entropy = -(p * p.log()).sum(1).mean()
    soft = -(p * F.log_softmax(model(images), 1)).sum(1).mean()
    torch.testing.assert_close(loss, soft - entropy)


def test_what_is_refused(
    teacher_run: Path,
    student: Recipe,
    digits: ImageSet,
    tmp_path: Path,
) -> None:
    plain = student.model_copy(update={"distill": None})
    with pytest.raises(ValueError, match=r"learns from a run of digits-float: give --teacher"):
        train_together([Job(student, 0, tmp_path / "a")], digits, QUIET)
    with pytest.raises(ValueError, match=r"has no teacher, but --teacher is"):
        train(plain, digits, tmp_path / "a", teacher=teacher_run, options=QUIET)
    with pytest.raises(ValueError, match=r"is not one\. Run: unflip train digits-float"):
        train(student, digits, tmp_path / "a", teacher=tmp_path, options=QUIET)
    assert not (tmp_path / "a").exists()
    images = digits.source(CPU)
    more = student.model_copy(update={"data": student.data.model_copy(update={"validation": 0})})
    with pytest.raises(
        ValueError, match=r"0 images held out, but its teacher .* 1,200 images held"
    ):
        load_teacher(Run(teacher_run / "seed-0"), more, digits, images, CPU)
    with pytest.raises(ValueError, match="needs its teacher here"):
        Learner(student, build_model(student, digits.spec, 0), images, CPU)
