"""The section of a study against its study.json: figures, tests, titles."""

import json
import math
import shutil

import torch

from unflip.report import report_data
from unflip.report.page import embedded


def with_tests(study, folder, reference=None, **more):
    """The study with a test of each two of its arms; Welch's are not paired and have no ``n``."""
    shutil.copytree(study, folder, ignore=shutil.ignore_patterns("checkpoint-*"))
    saved = json.loads((folder / "study.json").read_text())
    names = [arm["name"] for arm in saved["arms"]]
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    numbers = {"t": 2.5, "df": 3.0, "p": 0.04}
    tests = [{"a": a, "b": b, "difference": 1.5, **numbers} for a, b in pairs]
    saved.update(tests=tests, reference=reference, **more)
    (folder / "study.json").write_text(json.dumps(saved))
    return folder


def retitled(study, folder, **changes):
    """The study's summary alone, changed."""
    folder.mkdir(parents=True)
    saved = json.loads((study / "study.json").read_text())
    (folder / "study.json").write_text(json.dumps({**saved, **changes}))
    return folder


def test_a_study_keeps_its_figures(study, study_data):
    [section] = study_data["sections"]
    written = json.loads((study / "study.json").read_text())
    for shown, given in zip(section["arms"], written["arms"], strict=True):
        assert {k: shown[k] for k in ("label", "command", "mean", "std", "best", "x")} == {
            k: given[k] for k in ("label", "command", "mean", "std", "best", "x")
        }
    assert [arm["n"] for arm in section["arms"][:3]] == [2, 1, 2]  # one of fine-tuning's stopped
    assert section["tests"][0]["b"] == "baseline"
    assert section["arms"][0]["runs"][0]["torch"] == torch.__version__


def test_tests_with_the_reference_are_differences_from_it(study, tmp_path):
    folder = with_tests(study, tmp_path / "study", "digits-finetune")
    [section] = report_data([folder])["sections"]
    assert section["reference"] == "fine-tuning"
    found = [test for test in section["tests"] if test["with_reference"]]
    assert len(found) == 6
    assert {test["b"] for test in found} == {"fine-tuning"}
    # The first was baseline against fine-tuning, the others fine-tuning against something.
    assert [test["difference"] for test in found] == [1.5] + 5 * [-1.5]
    assert [test["t"] for test in found] == [2.5] + 5 * [-2.5]
    assert {(test["p"], test["df"]) for test in section["tests"]} == {(0.04, 3.0)}
    others = [test for test in section["tests"] if not test["with_reference"]]
    assert len(others) == 15
    assert {test["difference"] for test in others} == {1.5}


def test_holms_correction_is_that_of_the_summary(study, tmp_path):
    """The summary has it beside its tests, for the one of each pair that counts."""
    folder = with_tests(study, tmp_path / "study")
    path = folder / "study.json"
    saved = json.loads(path.read_text())
    first, *others = saved["tests"]
    entry = {"a": first["b"], "b": first["a"], "p": 0.01, "adjusted": 0.03}
    path.write_text(json.dumps({**saved, "holm": [{**entry, "test": "welch"}]}))
    found = [test["holm"] for test in report_data([folder])["sections"][0]["tests"]]
    assert found == [0.03] + [None] * len(others)
    path.write_text(json.dumps({**saved, "holm": [{**entry, "test": "paired"}]}))
    found = [test["holm"] for test in report_data([folder])["sections"][0]["tests"]]
    assert found == [None] * len(saved["tests"])


def test_a_reference_that_is_not_among_the_arms_is_left_out(study, tmp_path):
    """As after --only: the table has some arms of the study."""
    folder = with_tests(study, tmp_path / "study", "finetune-0.1")
    [section] = report_data([folder])["sections"]
    assert (section["reference"], section["reference_arm"]) == (None, None)
    assert not any(test["with_reference"] for test in section["tests"])
    assert {arm["against"] for arm in section["arms"]} == {None}


def test_overrides_are_listed_with_the_arms_that_ignore_them(study, tmp_path):
    folder = tmp_path / "study"
    shutil.copytree(study, folder)
    saved = json.loads((folder / "study.json").read_text())
    saved["overrides"] = ["model.shortcut=conv", "batch=64"]
    saved["arms"][2]["kept"] = ["model.shortcut=conv"]
    (folder / "study.json").write_text(json.dumps(saved))
    [section] = report_data([folder])["sections"]
    kept = f"model.shortcut=conv (own value kept: {saved['arms'][2]['label']})"
    assert section["changes"] == [kept, "batch=64"]


def test_an_arm_has_its_difference_from_the_reference(study, tmp_path):
    """With the p of each test, as in table.md; without tests (one seed), only the difference."""
    pair = {"a": "digits-dorefa", "b": "digits-lns", "difference": -1.5, "p": 0.2}
    folder = with_tests(study, tmp_path / "study", "digits-dorefa", paired=[{**pair, "n": 2}])
    path = folder / "study.json"
    [section] = report_data([folder])["sections"]
    assert section["reference_arm"] == 0
    reference = section["arms"][0]["mean"]
    for i, arm in enumerate(section["arms"]):
        if i == 0:
            assert arm["against"] is None
        else:
            more = {"p": 0.04, "paired_p": 0.2 if i == 2 else None, "paired_difference": None}
            assert arm["against"] == {"difference": arm["mean"] - reference, **more}
    saved = json.loads(path.read_text())
    path.write_text(json.dumps({**saved, "paired": [{**pair, "n": 1}]}))  # each arm has two seeds
    [section] = report_data([folder])["sections"]
    assert section["arms"][2]["against"]["paired_difference"] == 1.5, "from the reference"
    path.write_text(json.dumps({**saved, "tests": [], "paired": []}))
    [section] = report_data([folder])["sections"]
    assert [arm["against"] and arm["against"]["p"] for arm in section["arms"]] == [None] * 7
    assert section["arms"][2]["against"]["difference"] == section["arms"][2]["mean"] - reference
    saved["arms"][0]["mean"] = None  # it stopped, so there is nothing to compare with
    path.write_text(json.dumps(saved))
    assert {arm["against"] for arm in report_data([folder])["sections"][0]["arms"]} == {None}


def test_the_title_of_many_studies_is_short(study, runs, tmp_path):
    a, b, c = (retitled(study, tmp_path / x, title=f"Study {x}") for x in "abc")
    other = retitled(study, tmp_path / "other", title="Another", data="cifar10")
    assert report_data([a, b])["title"] == "Study a; Study b"
    assert report_data([a, b, c])["title"] == "3 studies on digits"
    assert report_data([a, b, c], title="Mine")["title"] == "Mine"
    several = report_data([a, other, runs / "digits-dorefa"])
    assert several["title"] == "2 studies and runs on digits, cifar10"


def test_a_study_without_a_title_has_its_name(study, tmp_path):
    """As one of given recipes: an empty heading and link would lead nowhere."""
    name = json.loads((study / "study.json").read_text())["study"]
    data = report_data([retitled(study, tmp_path / "mine", title="")])
    assert [data["title"], data["sections"][0]["title"]] == [name, name]


def test_a_study_without_runs_has_no_notes_about_weights(study, tmp_path):
    saved = json.loads((study / "study.json").read_text())
    nothing = {"runs": [], "mean": None, "std": None, "best": None}
    arms = [{**arm, **nothing} for arm in saved["arms"]]
    [section] = report_data([retitled(study, tmp_path / "new", arms=arms, tests=[])])["sections"]
    assert section["signs"] == []


def test_sections_of_one_title_are_told_apart(study, runs, tmp_path):
    def titles(*sources):
        return [section["title"] for section in report_data(sources)["sections"]]

    held_out = retitled(study, tmp_path / "held-out", evaluated_on="validation")
    cifar = retitled(study, tmp_path / "cifar", data="cifar10")
    own = retitled(study, tmp_path / "own", title="Its own")
    title = "A study of digits"
    assert titles(study, held_out, own) == [
        f"{title} (test images)",
        f"{title} (held-out images)",
        "Its own",
    ]
    assert titles(study, cifar) == [f"{title} (digits)", f"{title} (cifar10)"]
    assert titles(study, cifar, held_out)[2] == f"{title} (digits, held-out images)"
    assert titles(study, own) == [title, "Its own"]
    again = retitled(study, tmp_path / "again")
    assert titles(study, again, own) == [f"{title} ({study.name})", f"{title} (again)", "Its own"]
    below = retitled(study, tmp_path / "below" / "again")
    assert titles(again, below) == [f"{title} ({tmp_path.name}/again)", f"{title} (below/again)"]
    assert titles(study, study) == [title, title]  # nothing tells them apart


def test_a_recipe_that_was_edited_does_not_break_the_page(study, tmp_path):
    saved = json.loads((study / "study.json").read_text())
    for arm, recipe in zip(saved["arms"], ({}, {"method": {}}, {"method": None}), strict=False):
        arm["recipe"] = recipe
    section = report_data([retitled(study, tmp_path / "edited", arms=saved["arms"])])["sections"][0]
    assert [arm["method"] for arm in section["arms"][:3]] == ["float", "None", "None"]
    assert not any(arm["own_recipe"] for arm in section["arms"])


def test_numbers_that_are_not_finite(study, tmp_path):
    folder = tmp_path / "study"
    shutil.copytree(study, folder)
    saved = json.loads((folder / "study.json").read_text())
    saved["arms"][0].update(mean=math.nan, std=math.inf, best=None)
    (folder / "study.json").write_text(json.dumps(saved))
    data = report_data([folder])
    assert data["sections"][0]["arms"][0]["mean"] is None
    assert "NaN" not in embedded(data)
