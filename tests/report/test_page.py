"""The page in a real browser: its contents and controls, on a desktop and on a phone.

One file of more than 400 lines, because all tests share one browser and one report.
"""

import json
import re
import shutil
from importlib import resources

import pytest

from unflip.report import page as page_module
from unflip.report import report_data, write_report

DESK, PHONE = (1280, 900), (390, 844)
CHART = "document.querySelector('[data-curve={}] svg')"


@pytest.fixture(scope="module")
def report(study, tmp_path_factory):
    """The path of a report on the study, and its data."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    data = report_data([study])
    write_report(data, path)
    return path, json.loads(json.dumps(data))


@pytest.fixture
def desk(page, report):
    page.open(report[0], *DESK)
    return page


@pytest.fixture
def phone(page, report):
    page.open(report[0], *PHONE)
    return page


def shown_numbers(page, within="document"):
    """(text, path in the data, format) of every number."""
    return page.js(
        f"[...{within}.querySelectorAll('data')].map(d => [d.textContent, d.dataset.at, d.dataset.as])"
    )


def check(data, numbers):
    """Each number is the data's number, rounded according to its format."""
    for text, place, style in numbers:
        value = data
        for key in place.split("."):
            value = value[int(key) if isinstance(value, list) else key]
        shown = float(text.replace("−", "-").replace(",", ""))
        kind, digits = re.fullmatch(r"([a-z]+)(\d*)", style).groups()
        if kind == "sig":
            assert shown == pytest.approx(value, rel=0.51 * 10.0 ** (1 - int(digits))), place
        else:
            assert abs(shown - value) <= 0.501 * 10.0 ** -int(digits or 0), place


def test_every_script_is_in_the_page_and_formatted():
    folder = resources.files("unflip.report") / "js"
    scripts = {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}
    assert set(scripts) == {f"{name}.js" for name in page_module.SCRIPTS}
    for name, text in scripts.items():
        assert len(text.splitlines()) <= 300, name
        assert max(map(len, text.splitlines())) <= 100, name


def test_it_opens_without_errors_and_loads_nothing_else(page, report, tmp_path):
    page.requests.clear()
    for width, height in (DESK, PHONE):
        for dark in (False, True):
            page.open(report[0], width, height, dark)
            page.screenshot(tmp_path / f"{width}-{dark}.png")
    assert set(page.requests) == {report[0].as_uri()}
    assert page.problems == []
    assert page.js("document.title") == "A study of digits"


def test_every_number_comes_from_the_data(desk, report):
    numbers = shown_numbers(desk)
    assert len(numbers) > 100
    check(report[1], numbers)
    # No number in a table is written in any other way.
    others = desk.js(
        "[...document.querySelectorAll('td')].map(td => { const c = td.cloneNode(true); "
        "c.querySelectorAll('data, code').forEach(n => n.remove()); return c.textContent; })"
    )
    made_with = [f"torch {run['torch']}" for run in report[1]["sections"][0]["arms"][0]["runs"]]
    for text in others:
        assert not re.search(r"\d", text) or made_with[0] in text, text


def test_tables_contain_every_result_of_the_study(desk, report):
    [section] = report[1]["sections"]
    places = {place for _, place, _ in shown_numbers(desk)}
    for i, arm in enumerate(section["arms"]):
        for field in ("n", "mean", "best", *(["std"] if arm["std"] is not None else [])):
            assert f"sections.0.arms.{i}.{field}" in places
        for k, run in enumerate(arm["runs"]):
            assert (f"sections.0.arms.{i}.runs.{k}.accuracy" in places) == (not run["stopped"])
    assert {f"sections.0.tests.0.{f}" for f in ("difference", "t", "df", "p")} <= places
    commands = desk.js("[...document.querySelectorAll('.results code')].map(c => c.textContent)")
    assert commands == [arm["command"] for arm in section["arms"]]
    assert desk.js("document.querySelectorAll('.sweep-point').length") == 4
    assert "the loss is not finite" in desk.js(
        "[...document.querySelectorAll('.stopped')].map(s => s.textContent).join()"
    )
    recipes = desk.js("[...document.querySelectorAll('details pre')].map(p => p.textContent)")
    assert recipes == [arm["yaml"] for arm in section["arms"]]


def open_and_folded(page, key="tests"):
    """How many tests are visible, and how many are folded."""
    everything = page.js(
        f"[...document.querySelectorAll('[data-tests={key}] tbody tr')].map(r => !!r.closest('details'))"
    )
    return everything.count(False), everything.count(True)


def with_pairs(data, count, referring, **more):
    """The data with ``count`` tests; the first ``referring`` of them compare with the reference."""
    data = json.loads(json.dumps(data))
    [section] = data["sections"]
    section["reference"] = "fine-tuning" if referring else None
    one = {**section["tests"][0], **more}
    section["tests"] = [{**one, "with_reference": i < referring} for i in range(count)]
    return data, section


def test_tests_without_the_reference_are_folded(page, report, tmp_path):
    path = tmp_path / "report.html"
    for count, referring, expected in (
        (12, 3, (3, 9)),
        (3, 3, (3, 0)),
        (231, 0, (0, 231)),  # no reference, so no test comes first
        (10, 0, (10, 0)),  # few enough to read
    ):
        data, _ = with_pairs(report[1], count, referring)
        write_report(data, path)
        page.open(path, *PHONE)
        assert open_and_folded(page) == expected
        check(data, shown_numbers(page))
        page.js("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        assert page.js("document.documentElement.scrollWidth") == 390
    assert page.problems == []


def test_paired_tests_and_holms_correction_are_shown_if_present(page, report, tmp_path):
    heads = "[...document.querySelectorAll('[data-tests={}] thead th')].map(t => t.textContent)"
    page.open(report[0], *DESK)
    assert page.js(heads.format("tests")) == ["arm", "difference", "t", "df", "p"]
    assert open_and_folded(page, "paired") == (0, 0)
    assert "Holm" not in page.js("document.body.textContent.split('\"use strict\"')[0]")
    data, section = with_pairs(report[1], 4, 2, holm=0.0123)
    section["paired"] = [{**test, "n": 5, "t": 1.25} for test in section["tests"]]
    write_report(data, tmp_path / "report.html")
    page.open(tmp_path / "report.html", *DESK)
    assert open_and_folded(page, "paired") == (2, 2)
    titles = page.js("[...document.querySelectorAll('h3')].map(h => h.textContent)")
    assert "Paired t-tests" in titles
    columns = page.js(heads.format("paired"))[:7]
    arm = "arm against fine-tuning"  # in the heading only, not in every row
    assert columns == [arm, "difference", "n", "t", "df", "p", "p, Holm"]
    rows = page.js("[...document.querySelectorAll('.tests tbody th')].map(t => t.textContent)")
    assert [" against " in row for row in rows] == 2 * [False, False, True, True]
    numbers = shown_numbers(page)
    check(data, numbers)
    places = {place for _, place, _ in numbers}
    assert {f"sections.0.paired.0.{f}" for f in ("n", "difference", "t", "p", "holm")} <= places


@pytest.mark.parametrize(
    ("value", "style", "text"),
    [
        (5.8e-06, "sig2", "5.8e−6"),
        (0.00042, "sig2", "0.00042"),
        (0.0, "sig2", "0"),
        (1.5, "signed2", "+1.50"),
        (-1.5, "signed2", "−1.50"),
        (0.0, "signed2", "0.00"),
    ],
)
def test_how_a_number_is_written(desk, value, style, text):
    assert desk.js(f"written({value}, '{style}')") == text


def test_a_phone_has_room_for_a_tests_numbers(page, report, tmp_path):
    data, _ = with_pairs(report[1], 3, 3, holm=2.3e-05, p=5.8e-06, t=-117.44, df=5.4, n=5)
    write_report(data, tmp_path / "report.html")
    page.open(tmp_path / "report.html", *PHONE)
    boxes = page.js(
        "[...document.querySelectorAll('.tests td, .tests thead th')].map(c => [c.scrollWidth, c.clientWidth])"
    )
    assert all(needed <= there for needed, there in boxes)
    assert page.js(
        "(t => t.scrollWidth <= t.clientWidth)(document.querySelector('.tests').parentNode)"
    )


def test_a_label_is_text(desk, report):
    assert desk.js("document.querySelectorAll('main img, main b b').length") == 0
    label = report[1]["sections"][0]["arms"][2]["label"]
    assert label in desk.js("[...document.querySelectorAll('.toggle')].map(b => b.textContent)")


def test_no_sideways_scrolling_on_a_phone(phone):
    assert phone.js("innerWidth") == 390
    assert phone.js("document.documentElement.scrollWidth") == 390
    phone.js("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    phone.frame()
    assert phone.js("document.documentElement.scrollWidth") == 390


@pytest.mark.parametrize("curve", ["loss", "accuracy", "flips_percent"])
def test_pointing_at_a_curve_shows_every_arms_values(desk, report, curve):
    left, top, width, height = desk.place(CHART.format(curve))
    desk.move(left + width - 15, top + height / 2)  # the last epoch
    tip = f"document.querySelector('[data-curve={curve}] .tip')"
    assert desk.js(f"{tip}.hidden") is False
    assert desk.js(f"{tip}.querySelector('b').textContent") == "epoch 2"
    numbers = shown_numbers(desk, tip)
    check(report[1], numbers)
    found = {place for _, place, _ in numbers}
    for i, arm in enumerate(report[1]["sections"][0]["arms"]):
        reached = len(arm["curves"]["epochs"]) == 2  # fine-tuning has one epoch
        drawn = reached and arm["start"] is not None
        assert (f"sections.0.arms.{i}.curves.{curve}.mean.1" in found) == drawn
    desk.move(left - 20, top - 20)
    assert desk.js(f"{tip}.hidden") is True


def test_tapping_a_curve_shows_values(phone, report):
    left, top, _, height = phone.place(CHART.format("accuracy"))
    phone.tap(left + 50, top + height / 2)
    phone.frame()
    tip = "document.querySelector('[data-curve=accuracy] .tip')"
    assert phone.js(f"{tip}.querySelector('b').textContent") == "epoch 1"
    check(report[1], shown_numbers(phone, tip))
    box = phone.js(f"(b => [b.left, b.right])({tip}.getBoundingClientRect())")
    assert 0 <= box[0] < box[1] <= 390


def test_arrow_keys_move_along_the_epochs(desk):
    desk.js(f"{CHART.format('loss')}.focus()")
    heading = "document.querySelector('[data-curve=loss] .tip b').textContent"
    desk.key("Home")
    assert desk.js(heading) == "epoch 1"
    desk.key("ArrowRight")
    assert desk.js(heading) == "epoch 2"
    desk.key("Escape")
    assert desk.js("document.querySelector('[data-curve=loss] .tip').hidden") is True


def test_the_legend_hides_and_shows_lines(desk):
    lines = "[...document.querySelectorAll('[data-curve=loss] .line')].map(l => +l.dataset.arm)"
    desk.js("document.querySelectorAll('.toggle[aria-pressed=false]').forEach(b => b.click())")
    everything = desk.js(lines)
    assert len(everything) == 7
    button = "document.querySelectorAll('.toggle')[1]"
    desk.click(button)
    assert desk.js(lines) == [i for i in everything if i != 1]
    assert desk.js(f"{button}.getAttribute('aria-pressed')") == "false"
    desk.click(button)
    assert desk.js(lines) == everything
    desk.js("document.querySelectorAll('.toggle').forEach(b => b.click())")
    assert desk.js(lines) == []
    assert desk.problems == []


def test_arms_that_start_from_the_baseline_are_drawn_without_it(page, report, tmp_path):
    lines = "[...document.querySelectorAll('[data-curve=loss] .line')].map(l => +l.dataset.arm)"
    pressed = "[...document.querySelectorAll('.toggle')].map(b => b.ariaPressed === 'true')"
    page.open(report[0], *DESK)
    assert page.js(lines) == [1, 2]
    assert page.js(pressed) == [i in (1, 2) for i in range(7)]
    assert "hidden at first" in page.js("document.querySelector('.charts + p').textContent")
    page.click("document.querySelector('.toggle')")
    assert page.js(lines) == [0, 1, 2]
    data = json.loads(json.dumps(report[1]))
    data["sections"][0]["arms"][1]["start"] = (
        None  # a single arm with a start is drawn with the baseline
    )
    write_report(data, tmp_path / "report.html")
    page.open(tmp_path / "report.html", *DESK)
    assert len(page.js(lines)) == 7
    assert "hidden at first" not in page.js("document.querySelector('.charts + p').textContent")


def test_an_epoch_without_a_mean_is_skipped(page, report, tmp_path):
    data = json.loads(json.dumps(report[1]))
    [section] = data["sections"]
    section["signs"], section["arms"] = [], section["arms"][2:]  # those with a second epoch
    for arm in section["arms"]:
        for key in ("mean", "std"):
            arm["curves"]["accuracy"][key][0] = None
    write_report(data, tmp_path / "report.html")
    page.open(tmp_path / "report.html", *DESK)
    drawn = page.js("[...document.querySelectorAll('path, circle')].map(p => p.outerHTML).join()")
    assert "NaN" not in drawn
    left, top, _, height = page.place(CHART.format("accuracy"))
    page.move(left + 50, top + height / 2)
    assert shown_numbers(page, "document.querySelector('[data-curve=accuracy] .tip')") == []
    assert page.problems == []


def test_scales_and_ranges_can_be_changed(desk):
    drawn = "document.querySelector('[data-curve=loss] .line').getAttribute('d')"
    linear = desk.js(drawn)
    desk.click("document.querySelectorAll('[data-curve=loss] .switch button')[1]")
    assert desk.js(drawn) != linear
    assert "NaN" not in desk.js(drawn)
    desk.click(button("final half"))
    paths = desk.js("[...document.querySelectorAll('path, line')].map(p => p.outerHTML).join()")
    assert "NaN" not in paths
    assert "Infinity" not in paths


def button(text):
    return f"[...document.querySelectorAll('.legend button')].find(b => b.textContent === '{text}')"


DRAWN = "[...document.querySelectorAll('[data-curve={}] .line')].map(l => +l.dataset.arm)"
PRESSED = "[...document.querySelectorAll('.legend [aria-pressed=true]')].map(b => b.textContent)"


def with_arms(report, losses, accuracies, epochs=20):
    """The study with arms trained from scratch, with falling losses and rising accuracies."""
    data = json.loads(json.dumps(report[1]))
    [section] = data["sections"]
    arm, steps = section["arms"][0], range(1, epochs + 1)
    section["signs"] = []
    section["arms"] = []
    for i, (loss, accuracy) in enumerate(zip(losses, accuracies, strict=True)):
        curves = {
            "epochs": list(steps),
            "loss": {"mean": [loss + 1 / step**2 for step in steps], "std": [None] * epochs},
            "accuracy": {"mean": [accuracy - 50 / step**2 for step in steps]},
        }
        curves["accuracy"]["std"] = [None] * epochs
        own = {"name": f"arm-{i}", "label": f"arm {i}", "mean": accuracy, "curves": curves}
        section["arms"].append({**arm, **own})
    return data, section


def test_of_many_lines_the_best_and_the_worst_are_drawn_first(page, report, tmp_path):
    accuracies = [80, 81, 90, 83, 70, 91, 86, 92, 88, 93]
    data, section = with_arms(report, [0.5] * 10, accuracies)
    section.update(reference="arm 3", reference_arm=3)
    section["arms"].append({**section["arms"][0], "label": "unfinished", "mean": None})
    write_report(data, tmp_path / "report.html")
    page.open(tmp_path / "report.html", *DESK)
    first = [2, 3, 4, 5, 7, 9]  # the reference, the best four, the worst
    labels = [f"arm {i}" for i in first]
    assert page.js(DRAWN.format("accuracy")) == first
    assert page.js(PRESSED) == [*labels, "these lines", "final half"]
    caption = page.js("document.querySelector('.charts + p').textContent")
    assert "shown at first: the reference (arm 3), the 4 with the highest final accuracy" in caption
    page.click(button("all lines"))
    assert page.js(DRAWN.format("loss")) == list(range(11))
    assert page.js(PRESSED)[-2:] == ["all lines", "final half"]
    page.click(button("arm 0"))
    assert page.js(DRAWN.format("loss")) == list(range(1, 11))
    assert "all lines" not in page.js(PRESSED)
    page.click(button("these lines"))
    assert page.js(DRAWN.format("loss")) == first
    page.click(button("arm 0"))
    assert page.js(PRESSED) == ["arm 0", *labels, "final half"]
    assert page.problems == []


def test_of_many_lines_without_a_result_all_are_drawn(page, report, tmp_path):
    data, section = with_arms(report, [0.5] * 9, [80] * 9)
    for arm in section["arms"]:
        arm["mean"] = None
    write_report(data, tmp_path / "report.html")
    page.open(tmp_path / "report.html", *DESK)
    assert page.js(DRAWN.format("accuracy")) == list(range(9))


def test_few_lines_are_all_drawn(page, report, tmp_path):
    data, _ = with_arms(report, [0.5] * 8, range(80, 88))
    write_report(data, tmp_path / "report.html")
    page.open(tmp_path / "report.html", *DESK)
    assert page.js(DRAWN.format("accuracy")) == list(range(8))
    assert page.js(button("all lines")) is None
    assert "shown at first" not in page.js("document.querySelector('.charts + p').textContent")


def axis(page, curve):
    """The smallest and largest tick of a chart's vertical axis."""
    texts = page.js(
        f"[...document.querySelectorAll('[data-curve={curve}] text[text-anchor=end]')].map(t => t.textContent)"
    )
    ticks = [float(text) for text in texts if text != "epoch"]
    return min(ticks), max(ticks)


def test_axes_show_the_final_half_if_the_first_epochs_would_squash_it(page, report, tmp_path):
    data, section = with_arms(report, [0.5, 0.4], [84, 85])
    write_report(data, tmp_path / "report.html")
    page.open(tmp_path / "report.html", *DESK)
    assert "final half" in page.js(PRESSED)
    assert axis(page, "accuracy")[0] > 83
    assert axis(page, "loss")[1] < 0.6
    left, top, _, height = page.place(CHART.format("accuracy"))
    page.move(
        left + 50, top + height / 2
    )  # the first epoch is below the axis, but the tip shows its values
    assert page.js("document.querySelectorAll('[data-curve=accuracy] circle').length") == 0
    numbers = shown_numbers(page, "document.querySelector('[data-curve=accuracy] .tip')")
    assert len(numbers) == 2
    check(data, numbers)
    page.click(button("whole range"))
    assert axis(page, "accuracy")[0] <= 40
    assert axis(page, "loss")[1] >= 1
    for arm in section["arms"]:  # a narrow range: nothing to cut
        arm["curves"]["accuracy"]["mean"] = [arm["mean"] - 0.01 * k for k in range(20)]
        arm["curves"]["loss"]["mean"] = [0.5 - 0.01 * k for k in range(20)]
    write_report(data, tmp_path / "report.html")
    page.open(tmp_path / "report.html", *DESK)
    assert "whole range" in page.js(PRESSED)
    assert "final half" not in page.js("document.querySelector('.charts + p').textContent")


def test_a_final_half_without_values_shows_the_whole_range(page, report, tmp_path):
    data, section = with_arms(report, [0.5, 0.4], [84, 85])
    for arm in section["arms"]:  # stopped before the second measurement
        arm["curves"]["accuracy"]["mean"][1:] = [None] * 19
    write_report(data, tmp_path / "report.html")
    page.open(tmp_path / "report.html", *DESK)
    assert "final half" in page.js(PRESSED)
    assert "NaN" not in page.js("document.querySelector('.charts').outerHTML")
    assert axis(page, "accuracy")[0] < 36


def test_a_teachers_loss_does_not_flatten_the_others(page, report, tmp_path):
    data, _ = with_arms(report, [0.3, 0.4, 8.0], [84, 85, 86])
    write_report(data, tmp_path / "report.html")
    page.open(tmp_path / "report.html", *DESK)
    beyond = (
        "(p => p.hidden ? '' : p.textContent)(document.querySelector('[data-curve=loss] .beyond'))"
    )
    assert axis(page, "loss")[1] < 1
    assert page.js(beyond) == "Above this range: arm 2."
    assert page.js(DRAWN.format("accuracy")) == [0, 1, 2]
    page.click("document.querySelectorAll('[data-curve=loss] .switch button')[1]")
    assert axis(page, "loss")[1] > 4  # a logarithm has room for it
    assert page.js(beyond) == ""
    page.click("document.querySelectorAll('[data-curve=loss] .switch button')[0]")
    page.click(button("arm 0"))
    page.click(button("arm 1"))
    assert axis(page, "loss")[1] > 4  # alone it cannot be an outlier
    page.click(button("arm 1"))
    assert page.js(beyond) == "Above this range: arm 2."
    page.click(button("whole range"))
    assert axis(page, "loss")[1] > 4
    assert page.js(beyond) == ""


def choose(page, name, index):
    page.js(
        f"(s => {{ s.value = {index}; s.dispatchEvent(new Event('change')); }})"
        f"(document.querySelector('select[name={name}]'))"
    )


def test_pickers_change_the_filter_that_is_shown(desk, report):
    entry = report[1]["sections"][0]["signs"][1]  # LNS is shown first: it has f
    arm = desk.js("document.querySelector('select[name=arm]').selectedOptions[0].textContent")
    assert arm == report[1]["sections"][0]["arms"][2]["label"]
    pictures = set()
    for layer, filter_ in ((0, 0), (0, 3), (5, 3)):
        choose(desk, "layer", layer)
        choose(desk, "filter", filter_)
        one = entry["kernels"]["layers"][layer]["filters"][filter_]
        figures = desk.js("document.querySelectorAll('.panels figure').length")
        assert figures == 5
        cells = desk.js(
            "document.querySelector('.panels figure').querySelectorAll('rect[data-cell]').length"
        )
        assert cells == len(one["w"])
        last = "[...document.querySelectorAll('.panels figure')].at(-1)"
        assert desk.js(f"{last}.querySelectorAll('.mark-dot').length") == one["changed"]
        assert desk.js(f"{last}.querySelectorAll('.mark-ring').length") == one["off_sign"]
        kernels = [(one["before"][k : k + 9], one["after"][k : k + 9]) for k in range(0, cells, 9)]
        grounds = desk.js(f"{last}.querySelectorAll('.mark-ground').length")
        assert grounds == sum(before != after for before, after in kernels)
        assert "kernel with a changed sign" in desk.js(
            "document.querySelector('.key-line').textContent"
        )
        positive = (
            f"[...{last}.querySelectorAll('rect[data-cell]')]"
            ".map(r => r.style.fill.includes('--positive') ? '+' : '-').join('')"
        )
        assert desk.js(positive) == one["after"]
        pictures.add(desk.js("document.querySelector('.panels').innerHTML"))
    assert len(pictures) == 3
    check(report[1], shown_numbers(desk))
    choose(desk, "arm", 0)  # fine-tuning has no f
    assert desk.js("document.querySelectorAll('.panels figure').length") == 4
    check(report[1], shown_numbers(desk))


@pytest.mark.parametrize(
    ("names", "chosen"),
    [(["finetune", "mapping", "lns", "residual"], 2), (["finetune", "first", "second"], 2)],
)
def test_the_picker_opens_on_the_published_method_or_the_last_arm_with_a_mapping(
    page, report, tmp_path, names, chosen
):
    data = json.loads(json.dumps(report[1]))
    [section] = data["sections"]
    plain, mapped = section["signs"]
    arm = section["arms"][2]
    section["arms"] = [
        {**arm, "name": name, "label": f"arm {name}", "method": "lns"} for name in names
    ]
    section["signs"] = [{**(mapped if i else plain), "arm": i} for i in range(len(names))]
    write_report(data, tmp_path / "report.html")
    page.open(tmp_path / "report.html", *DESK)
    shown = page.js("document.querySelector('select[name=arm]').selectedOptions[0].textContent")
    assert shown == f"arm {names[chosen]}"
    assert page.js("document.querySelectorAll('.panels figure').length") == 5


def test_clicking_a_layers_name_selects_it(desk):
    desk.click("document.querySelectorAll('.layers button')[4]")
    name = desk.js("document.querySelectorAll('.layers button')[4].textContent")
    picked = "document.querySelector('select[name=layer]').selectedOptions[0].textContent"
    assert desk.js(picked) == name
    assert desk.js("document.querySelector('.layers .chosen').dataset.layer") == name


def test_pointing_at_a_weight_shows_its_values(desk, report):
    left, top, width, height = desk.place(
        "document.querySelectorAll('.panels rect[data-cell=\"4\"]')[0]"
    )
    desk.move(left + width / 2, top + height / 2)
    assert "row 2, column 2" in desk.js("document.querySelector('.readout').textContent")
    numbers = shown_numbers(desk, "document.querySelector('.readout')")
    assert len(numbers) == 3  # channel, W and f(W)
    check(report[1], numbers)
    desk.js("document.querySelector('.kernels').focus()")
    desk.key("ArrowRight")
    assert "row 2, column 3" in desk.js("document.querySelector('.readout').textContent")


def test_pointing_at_the_sweep_shows_values(desk, report):
    left, top, width, height = desk.place("document.querySelector('.sweep svg')")
    desk.move(left + width - 25, top + height / 2)
    tip = "document.querySelector('.sweep .tip')"
    assert desk.js(f"{tip}.querySelector('b').textContent") == "LNS, α = 10"
    check(report[1], shown_numbers(desk, tip))


def test_copying_a_command(desk, report):
    desk.call("Browser.grantPermissions", permissions=["clipboardReadWrite"])
    desk.click("document.querySelector('.copy')")
    desk.wait("document.querySelector('.copy').textContent === 'copied'")
    assert desk.js("document.querySelectorAll('.results details[open]').length") == 0
    copied = desk.js("navigator.clipboard.readText()")
    assert copied == report[1]["sections"][0]["arms"][0]["command"]


def test_a_command_is_folded_until_opened_or_printed(phone, report):
    unfolded = "[...document.querySelectorAll('.results details[open]')].length"
    seen = "document.querySelector('.results code').checkVisibility()"
    assert (phone.js(unfolded), phone.js(seen)) == (0, False)
    phone.js("document.querySelector('.results summary').focus()")
    phone.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", text="\r")
    assert (phone.js(unfolded), phone.js(seen)) == (1, True)
    assert phone.js("document.documentElement.scrollWidth") == 390
    phone.js(f"addEventListener('beforeprint', () => {{ window.printed = {unfolded}; }})")
    phone.call("Page.printToPDF")
    assert phone.js("window.printed") == len(report[1]["sections"][0]["arms"])
    assert phone.js(unfolded) == 1


def test_overrides_are_shown_above_the_results(page, report, tmp_path):
    data = json.loads(json.dumps(report[1]))
    data["sections"][0]["changes"] = ["model.shortcut=conv", "batch=64"]
    write_report(data, tmp_path / "report.html")
    page.open(tmp_path / "report.html", *DESK)
    meta = page.js("document.querySelector('section .meta').textContent")
    assert " · with model.shortcut=conv, batch=64 · " in meta


def test_a_difference_without_a_p_is_shown(page, report, tmp_path):
    data = json.loads(json.dumps(report[1]))
    [section] = data["sections"]
    heads = "[...document.querySelectorAll('.results thead th')].map(t => t.textContent)"
    cells = "[...document.querySelectorAll('.results td.difference')].map(c => c.textContent)"
    path = tmp_path / "report.html"
    page.open(report[0], *DESK)
    assert not any("difference" in head for head in page.js(heads))
    section.update(reference="fine-tuning", reference_arm=1)
    for i, arm in enumerate(section["arms"]):
        none = dict.fromkeys(("p", "paired_p", "paired_difference"))
        arm["against"] = {"difference": 0.5 - i, **none} if i != 1 else None
    section["arms"][2]["against"].update(p=0.0123)
    section["arms"][3]["against"].update(p=0.3, paired_p=0.04)
    section["arms"][4]["against"].update(p=0.3, paired_p=0.04, paired_difference=-0.2)
    write_report(data, path)
    for size in (DESK, (1010, 900), (800, 900), PHONE):
        page.open(path, *size)
        page.js("document.querySelector('.results details').open = true")
        assert "difference from fine-tuning" in page.js(heads)
        shown = ["+0.50", "–", "−1.50 (p 0.012)", "−2.50 (p 0.3; paired 0.04)"]
        assert page.js(cells)[:5] == [*shown, "−3.50 (p 0.3; paired −0.20, 0.04)"]
        check(data, shown_numbers(page, "document.querySelector('.results')"))
        assert page.js("document.documentElement.scrollWidth") == size[0]
    assert page.problems == []


def test_several_studies_have_distinct_links_and_headings(page, report, tmp_path):
    data = json.loads(json.dumps(report[1]))
    names = ["One (test images)", "One (held-out images)", "Two"]
    data["title"] = "3 studies on digits"
    data["sections"] = [{**data["sections"][0], "title": name, "signs": []} for name in names]
    write_report(data, tmp_path / "report.html")
    page.open(tmp_path / "report.html", *PHONE)
    for kind in ("nav a", "h2"):
        texts = page.js(f"[...document.querySelectorAll('{kind}')].map(n => n.textContent)")
        assert texts == names
    assert page.js("document.querySelector('h1').textContent") == "3 studies on digits"


def test_a_note_shared_by_several_arms_is_shown_once(page, report, tmp_path):
    data = json.loads(json.dumps(report[1]))
    [section] = data["sections"]
    lacking = "Seeds 0, 1: base has no checkpoint there."
    for label, arm in zip("abcdefg", section["arms"], strict=True):
        arm.update(label=label, notes=[])
    entry = {**section["signs"][0], "seeds": [], "kernels": None}
    notes = "[...document.querySelectorAll('.note')].map(n => n.textContent)"
    for said, expected in (
        ([lacking] * 3, [f"All arms with a baseline. {lacking}"]),
        ([lacking, "Another.", lacking], [f"b; d. {lacking}", "c. Another."]),
        ([lacking], [f"b. {lacking}"]),
    ):
        section["signs"] = [
            {**entry, "arm": i, "notes": [note]} for i, note in enumerate(said, start=1)
        ]
        write_report(data, tmp_path / "report.html")
        page.open(tmp_path / "report.html", *PHONE)
        assert page.js(notes)[1:] == expected  # after the note that weights are missing


def test_runs_without_checkpoints_say_so_in_place(page, study, tmp_path):
    kept = tmp_path / "study"
    shutil.copytree(study, kept, ignore=shutil.ignore_patterns("checkpoint-*"))
    write_report(report_data([kept]), tmp_path / "report.html")
    page.open(tmp_path / "report.html", *PHONE)
    notes = page.js("[...document.querySelectorAll('.note')].map(n => n.textContent).join('\\n')")
    assert "only its metrics were kept" in notes
    assert page.js("document.querySelectorAll('.panels').length") == 0
    assert page.js("document.documentElement.scrollWidth") == 390
    assert page.problems == []
