"""An experiment of a paper: arms declared once, and the study that they make in a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unflip.recipes.load import checked, load_recipe, read_values
from unflip.recipes.schema import Recipe
from unflip.runs.run import Run
from unflip.study.arm import Arm, Draft, make_arms, options
from unflip.study.pack import Pack
from unflip.study.study import Study
from unflip.study.summary import Summary

BASELINE = "baseline"
TEACHER = "cifar10-resnet20-teacher"
OPEN = ("shortcut", "order", "pixels")  # options of ResNet-20 that the paper leaves open


def distill(temperature: float, weight: float) -> str:
    """The change of a recipe that lets it learn from the teacher."""
    return f"distill={{teacher: {TEACHER}, temperature: {temperature:g}, weight: {weight:g}}}"


@dataclass(frozen=True)
class Experiment:
    """One table or figure of the paper. ``defaults`` change every recipe; ``about`` is for the command's help;
    ``seeds`` is the default of --seeds; ``losses`` adds a column with the training loss."""

    name: str
    title: str
    about: str
    drafts: tuple[Draft, ...]
    defaults: tuple[str, ...] = ()
    reference: str | None = None
    pack: Pack | None = None  # the images, if they are not CIFAR-10
    seeds: int = 5
    losses: bool = False

    def study(
        self,
        out: Path,
        seeds: int | None = None,
        *,
        epochs_scale: float = 1.0,
        overrides: Sequence[str] = (),
        baseline: Path | None = None,
        teacher: Path | None = None,
        tables_only: bool = False,
    ) -> Study:
        """The experiment in a folder. ``baseline`` is a folder with finished runs of the baseline, seed-0 and so on;
        with ``tables_only`` some seeds may be missing. ``teacher`` is the finished run that arms with distill use,
        instead of one that the study trains."""
        seeds = self.seeds if seeds is None else seeds
        drafts = _with_teacher(self.drafts) if teacher else self.drafts
        arms = make_arms(drafts, self.defaults, overrides, epochs_scale)
        if baseline is not None:
            if BASELINE not in (draft.name for draft in drafts):
                raise ValueError(
                    f"study {self.name} has no baseline: leave out --baseline {baseline}"
                )
            least = 1 if tables_only else seeds
            arms = [
                _given(arm, baseline, 1 if arm.once else seeds, 1 if arm.once else least)
                if arm.name == BASELINE
                else arm
                for arm in arms
            ]
        words = options(arms[0].recipe.data.name, seeds, overrides, epochs_scale)
        if teacher and drafts != self.drafts:
            words.append("--teacher DIR")
        if any(arm.trained_otherwise for arm in arms):  # else the command trains the same one
            words.append("--baseline DIR")
        return Study(
            self.name,
            tuple(_comparable(*pair) for pair in zip(arms, drafts, strict=True)),
            out,
            tuple(range(seeds)),
            self.title,
            " ".join([f"unflip study {self.name}", *words]),
            _epochs_note(arms, epochs_scale),
            self.reference,
            teacher,
            tuple(overrides),
            epochs_scale,
            self.pack,
            self.losses,
        )

    def help(self) -> str:
        """The command's help; its example can be run as it is."""
        values = {draft.name: read_values(draft.source, draft.changes) for draft in self.drafts}
        given = [
            draft.name
            for draft in self.drafts
            if values[draft.name].get("distill") and not draft.teacher
        ]
        train = " ".join(["unflip train", TEACHER, *self.defaults])
        needed = f"With a teacher: {', '.join(given)}; --teacher ({train})."
        parts = [
            self.about,
            f"Arms: {', '.join(draft.name for draft in self.drafts)}.",
            *([needed] if given else []),
            *(self._help_on_time(self.pack, values) if self.pack else []),
            f"Leaves study.json, table.md and figures (SVG) beside the runs. A first look: {self._first_look(given)}",
        ]
        return "\n\n".join(parts)

    def _first_look(self, given_a_teacher: Sequence[str]) -> str:
        seeds, data = (1, self.pack.file) if self.pack else (2, "DIR")
        words = f"unflip study {self.name} --epochs-scale 0.05 --seeds {seeds} --data {data}"
        return f"{words} --only {self.reference}" if given_a_teacher or self.pack else words

    def _help_on_time(self, pack: Pack, recipes: Mapping[str, Mapping[str, Any]]) -> list[str]:
        each = {name: pack.hours(recipe) for name, recipe in recipes.items()}
        unit, times = ("Hours", 1) if max(each.values()) >= 1 else ("Minutes", 60)
        listed = ", ".join(f"{name} {needed * times:.1f}" for name, needed in each.items())
        return [
            f"--data takes the pack of the images ({pack.command}) or their folder.",
            f"{unit} per run at {pack.images_per_second:,} images/s: {listed}; "
            f"together {sum(each.values()) * times:.1f}. "
            "--only ARM trains one arm and the arms that it needs. --seeds N trains N seeds of each arm; a teacher has "
            "one. The same command resumes after a stop.",
        ]


def best_of(folder: Path, study: Study, count: int = 3) -> list[str]:
    """The arms of ``study`` that are controls, and the ``count`` others that are best in the study in ``folder``.

    That study must have been measured on held-out images: nothing is chosen on test images. Of equal means, the arm
    that comes first wins. Arms with fewer finished seeds than others are not compared.
    """
    found = Summary.read(folder)
    if found.evaluated_on != "validation":
        raise ValueError(
            f"--best-of {folder} was measured on test images, and nothing may be chosen on them: give a study with "
            "held-out images, such as 'unflip study interpretations'"
        )
    controls = [arm.name for arm in study.arms if arm.control]
    names = {arm.name for arm in study.arms} - set(controls)
    seeds = max((len(arm.accuracies) for arm in found.arms), default=0)
    able = [a for a in found.arms if a.name in names and seeds and len(a.accuracies) == seeds]
    if not able:
        raise ValueError(
            f"--best-of {folder} has no finished arm of study {study.name}: {', '.join(sorted(names))}"
        )
    ranked = sorted(able, key=lambda arm: -(arm.mean or 0.0))
    return [*controls, *(arm.name for arm in ranked[:count])]


def _with_teacher(drafts: Sequence[Draft]) -> tuple[Draft, ...]:
    """The drafts for a study whose teacher is given: it does not train one."""
    trained = {draft.teacher for draft in drafts}
    return tuple(replace(draft, teacher=None) for draft in drafts if draft.name not in trained)


def _given(arm: Arm, folder: Path, seeds: int, least: int) -> Arm:
    """The arm with finished runs of another folder, of ``least`` seeds or more. They must have the same images, network
    and method."""
    runs = [Run.of_seed(folder, seed) for seed in range(seeds)]
    missing = [run for run in runs if not run.finished]
    if seeds - len(missing) < least:
        raise ValueError(f"--baseline {folder}: {missing[0]} is not a finished run")
    otherwise = []
    for run in (run for run in runs if run not in missing):
        differs = [d for d in run.difference(arm.recipe.plain()) if not d.startswith("name ")]
        wrong = [d for d in differs if d.startswith(("data", "model", "method"))]
        if wrong:
            raise ValueError(
                f"--baseline {folder} is of another network or other images: {'; '.join(wrong)}. Give one of this "
                "network and these images, or leave out --baseline to train it"
            )
        if differs:
            print(f"the baseline in {run} was trained differently: {'; '.join(differs)}")
            otherwise.append(run)
    given = replace(arm, finished_in=folder)
    return _as_trained(given, otherwise[0]) if otherwise else given


def _as_trained(arm: Arm, run: Run) -> Arm:
    """The arm with the recipe of its runs: its own recipe was not trained."""
    recipe = checked(run.recipe, f"of {run}").model_copy(update={"name": arm.recipe.name})
    return replace(arm, recipe=recipe, trained_otherwise=True)


def _comparable(arm: Arm, draft: Draft) -> Arm:
    """Drop the paper's figures unless the arm has its test images, size of network and number of epochs."""
    meant = load_recipe(draft.source, list(draft.changes))
    same = (
        arm.recipe.data == meant.data
        and arm.recipe.epochs == meant.epochs
        and _size(arm.recipe) == _size(meant)
    )
    return arm if same else replace(arm, paper=None)


def _size(recipe: Recipe) -> dict[str, Any]:
    """The network without the options that the paper leaves open."""
    return {k: v for k, v in recipe.model.model_dump().items() if k not in OPEN}


def _epochs_note(arms: Sequence[Arm], scale: float) -> str:
    text = "Epochs: " + ", ".join(
        f"{epochs} ({kind})"
        for kind, epochs in (
            ("from scratch", _epochs(arms, None)),
            ("from the baseline", _epochs(arms, BASELINE)),
            ("from another arm", _epochs(arms, *_other_starts(arms))),
        )
        if epochs
    )
    if scale == 1:
        return f"{text}."
    given = any(arm.finished_in for arm in arms)
    return f"{text}; {'the latter ' if given else ''}{scale:g} × those of the recipes."


def _other_starts(arms: Sequence[Arm]) -> set[str]:
    return {arm.start for arm in arms if arm.start not in (None, BASELINE)}


def _epochs(arms: Sequence[Arm], *starts: str | None) -> str:
    found = {epochs for arm in arms if arm.start in starts for epochs in _trained(arm)}
    return " or ".join(map(str, sorted(found)))


def _trained(arm: Arm) -> set[int]:
    """The epochs of an arm: its recipe's, or those of runs that were trained elsewhere."""
    if arm.finished_in is None:
        return {arm.recipe.epochs}
    results = [run.result for run in Run.seeds_of(arm.finished_in)]
    return {result["epochs"] for result in results if result}
