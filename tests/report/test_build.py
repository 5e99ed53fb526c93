"""The report of runs, the whole page as a file, and what is refused."""

import json
import re
import shutil
import subprocess
import sys

import pytest

from unflip import flips_by_layer
from unflip.recipes.load import load_recipe
from unflip.report import render, report_data, write_report
from unflip.report.page import embedded
from unflip.runs.files import REMEDIES
from unflip.runs.load import load_run as network


def refused(*sources, **options):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - callers check the message
        report_data(list(sources), **options)
    return str(caught.value)


def test_single_runs_find_their_start(runs):
    data = report_data([runs / "digits-dorefa", runs / "digits-lns" / "seed-1"])
    [section] = data["sections"]
    assert section["title"] == "Runs on digits"
    assert [arm["n"] for arm in section["arms"]] == [2, 1]
    [entry] = section["signs"]
    assert entry["baseline"] == "digits-dorefa"
    assert [seed["seed"] for seed in entry["seeds"]] == [1]
    given = report_data([runs / "digits-lns"], baseline=runs / "digits-finetune" / "seed-0")
    [entry] = given["sections"][0]["signs"]
    other = network(runs / "digits-finetune" / "seed-0")
    flips = flips_by_layer(other, network(runs / "digits-lns" / "seed-0"))
    assert entry["seeds"][0]["changed"] == sum(f for f, _ in flips.values())
    itself = report_data([runs / "digits-dorefa"], baseline=runs / "digits-dorefa")
    assert itself["sections"][0]["signs"] == []


def test_runs_on_the_images_of_a_user(runs, tmp_path):
    shutil.copytree(runs / "digits-dorefa", tmp_path / "mine")
    for path in (tmp_path / "mine").glob("seed-*/recipe.json"):
        path.write_text(path.read_text().replace('"name": "digits"', '"name": "folder"'))
    [section] = report_data([tmp_path / "mine"])["sections"]
    assert section["title"] == "Runs on folders of images"


def test_a_start_that_is_not_beside_the_run_is_found_where_the_run_recorded_it(runs, tmp_path):
    shutil.copytree(runs / "digits-lns", tmp_path / "digits-lns")
    [section] = report_data([tmp_path / "digits-lns"])["sections"]
    [entry] = section["signs"]
    assert entry["baseline"] == "digits-dorefa"
    assert [seed["seed"] for seed in entry["seeds"]] == [0, 1]


def test_command_and_recipe_repeat_the_run(runs, tmp_path):
    [section] = report_data([runs / "digits-lns"])["sections"]
    [arm] = section["arms"]
    words = arm["command"].split()
    assert words[:3] == ["unflip", "train", "digits-lns"]
    assert words[-4:] == ["--start", str(runs / "digits-dorefa"), "--seeds", "2"]
    for row in arm["runs"]:
        assert row["given"].startswith("training images 1,347 of 1 × 8 × 8 (")
        assert row["given"].endswith(f", start {runs / 'digits-dorefa'}")
    saved = json.loads((runs / "digits-lns" / "seed-0" / "recipe.json").read_text())["recipe"]
    assert load_recipe("digits-lns", words[3:-4]).plain() == saved
    (tmp_path / "own.yaml").write_text(arm["yaml"])
    assert load_recipe(tmp_path / "own.yaml").plain() == saved


def test_the_command_of_a_recipe_file(runs, tmp_path):
    shutil.copytree(runs / "digits-lns", tmp_path / "mine")
    for seed in (0, 1):
        path = tmp_path / "mine" / f"seed-{seed}" / "recipe.json"
        saved = json.loads(path.read_text())
        saved["recipe"]["name"] = "mine"
        saved["command"] = "unflip train mine.yaml"
        path.write_text(json.dumps(saved))
    [arm] = report_data([tmp_path / "mine"])["sections"][0]["arms"]
    assert arm["command"] == "unflip train mine.yaml --seeds 2"
    assert arm["own_recipe"] is True


def test_two_runs_of_one_recipe_are_told_apart(runs, tmp_path):
    shutil.copytree(runs / "digits-dorefa", tmp_path / "again")
    data = report_data([runs / "digits-dorefa", tmp_path / "again"])
    labels = [arm["label"] for arm in data["sections"][0]["arms"]]
    assert labels == [str(runs / "digits-dorefa"), str(tmp_path / "again")]


def test_a_run_that_was_interrupted(runs, tmp_path):
    folder = tmp_path / "digits-dorefa" / "seed-0"
    shutil.copytree(runs / "digits-dorefa" / "seed-0", folder)
    (folder / "result.json").unlink()
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text[:-20])  # a kill in the middle of a line
    [arm] = report_data([folder])["sections"][0]["arms"]
    assert (arm["n"], arm["mean"], arm["best"]) == (0, None, None)
    assert arm["runs"][0]["stopped"] == "not finished: 1 of 2 epochs"
    (folder / "stopped.json").write_text('{"reason": "no sign flips"}')
    [arm] = report_data([folder])["sections"][0]["arms"]
    assert arm["runs"][0]["stopped"] == "no sign flips"


def test_the_same_folders_give_the_same_bytes(study, tmp_path):
    first, second = tmp_path / "a.html", tmp_path / "b.html"
    size = write_report(report_data([study]), first)
    write_report(report_data([study]), second)
    assert first.read_bytes() == second.read_bytes()
    assert len(first.read_bytes()) == size
    assert "2031-05-06" in render(report_data([study], date="2031-05-06"))


def test_what_is_embedded_cannot_leave_its_element(study_data):
    text = render(study_data)
    [inside] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert json.loads(inside) == study_data
    assert text.count("</script>") == 2
    assert "<img" not in text
    for odd in ("<!--", "<script", "\u2029", "/*DATA*/", "/*SCRIPT*/", "\ud800"):
        escaped = embedded({"label": odd})
        assert json.loads(escaped) == {"label": odd}
        assert not re.search("[<>&\u2028\u2029]", escaped)
        assert escaped in render({"label": odd})


def test_the_page_names_nothing_outside_itself(study_data):
    text = render({**study_data, "sections": []})
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\b(innerHTML|outerHTML|insertAdjacentHTML|document\.write)\b", text)
    assert not re.search(r"<(link|img|iframe)|src=|@import|url\((?!#)", text)


def test_what_is_neither_run_nor_study_is_refused_by_name(runs, tmp_path):
    assert "no folder given" in refused()
    assert str(tmp_path / "none") in refused(tmp_path / "none")
    message = refused(runs / "digits-lns", tmp_path)
    assert message.startswith(f"{tmp_path} is neither a study")
    (tmp_path / "search.json").write_text("{}")  # which 'unflip study autobnn' wrote with --out
    assert f"a report cannot show: its table is {tmp_path / 'table.md'}" in refused(tmp_path)
    (tmp_path / "search.json").unlink()
    assert "neither a recipe.json nor seed-N folders" in message
    assert "is not a run" in refused(runs / "digits-lns", baseline=tmp_path)


def test_a_result_without_its_recipe_is_not_passed_over(runs, tmp_path):
    shutil.copytree(runs / "digits-dorefa", tmp_path / "run")
    (tmp_path / "run" / "seed-0" / "recipe.json").unlink()
    message = refused(tmp_path / "run")
    assert message.startswith(f"{tmp_path / 'run' / 'seed-0'} has a result.json but no recipe.json")


def test_a_baseline_that_nothing_would_be_compared_with_is_refused(study, runs):
    assert "leave it out" in refused(study, baseline=runs / "digits-finetune")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "Invalid JSON"),
        ("[]", "Input should be an object"),
        ('{"recipe": {}, "rows": []}', "title: Field required; and 6 more"),
        ('{"study": "s", "unflip": "1", "title": "t", "data": "d", "evaluated_on": "test", '
         '"seeds": [0], "arms": [{"name": "a"}]}', "arms.0.label: Field required"),
    ],
)  # fmt: skip
def test_a_broken_summary_is_named(tmp_path, text, named):
    (tmp_path / "study.json").write_text(text)
    message = refused(tmp_path)
    assert message.startswith(str(tmp_path / "study.json"))
    assert named in message
    assert message.endswith("it rewrites the file from the runs")


def test_arms_of_one_name_or_from_nowhere_are_refused(study, tmp_path):
    saved = json.loads((study / "study.json").read_text())
    saved["arms"][1]["start"] = "nowhere"
    (tmp_path / "study.json").write_text(json.dumps(saved))
    assert "starts from 'nowhere'" in refused(tmp_path)
    saved["arms"][1]["name"] = saved["arms"][0]["name"]
    (tmp_path / "study.json").write_text(json.dumps(saved))
    assert "two arms are called 'digits-dorefa'" in refused(tmp_path)


@pytest.mark.parametrize(
    ("file", "text", "named"),
    [
        ("recipe.json", "{}", "it has no recipe"),
        ("recipe.json", "nothing", "Expecting value"),
        ("result.json", "{}", "it has no accuracy, epochs, seconds"),
        ("metrics.jsonl", '\n{"ep\n{"epoch": 3}\n', "line 2"),
        ("provenance.json", '{"images": {}}', "misstates 'training images'"),
    ],
)
def test_a_broken_file_of_a_run_is_named(runs, tmp_path, file, text, named):
    folder = tmp_path / "seed-0"
    shutil.copytree(runs / "digits-dorefa" / "seed-0", folder)
    (folder / file).write_text(text)
    message = refused(folder)
    assert str(folder / file) in message
    assert named in message
    assert message.endswith(REMEDIES[file])


def test_the_command(unflip, study, tmp_path):
    out = tmp_path / "page.html"
    done = unflip("report", study, "-o", out, "--filters", 1, "--title", "Mine")
    assert done.code == 0, done.err
    assert str(out) in done.out
    assert '"title":"Mine"' in out.read_text()
    shutil.copytree(study, tmp_path / "mine")
    done = unflip("report", tmp_path / "mine", "-o", out, "--keep-signs")
    assert done.code == 0, done.err
    assert str(tmp_path / "mine" / "digits-lns" / "seed-0" / "signs.json.gz") in done.out
    failed = unflip("report", tmp_path, "-o", out)
    assert failed.code == 1
    assert failed.err.startswith(f"unflip: {tmp_path} is neither")


def test_a_report_without_checkpoints_does_not_import_torch(kept, tmp_path):
    """A laptop without torch can show results; signs come from the kept files."""
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path\n"
        "from unflip.report import report_data, write_report\n"
        "data = report_data([Path(sys.argv[1]), Path(sys.argv[1]) / 'digits-lns' / 'seed-0'])\n"
        "assert [len(section['signs'][-1]['seeds']) for section in data['sections']] == [1, 1]\n"
        "write_report(data, Path(sys.argv[2]))\n"
    )
    words = [sys.executable, "-c", script, str(kept), str(tmp_path / "page.html")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "page.html").stat().st_size > 10_000
