"""What a chapter publishes: the same bytes every time, readable by people, programs and journals."""

import json
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from made_up import run_of
from PIL import Image
from refusing import refusal

from kvbook import paths
from kvreport.publishing import BOOK_VARIABLE, CHAPTER_VARIABLE, FOLDER_VARIABLE, style
from kvreport.publishing import page as publish

ROWS = pd.DataFrame({"x": [1, 2], "y": [1 / 3, None]})


@pytest.fixture
def shown(monkeypatch):
    """Everything that a cell would show, as (data, metadata)."""
    outputs = []
    monkeypatch.setattr(publish, "show", lambda data, metadata: outputs.append((data, metadata)))
    return outputs


@pytest.fixture
def page(tmp_path, shown):
    return publish.Page("06_layer_drift", tmp_path)


@pytest.fixture
def fig():
    with plt.style.context(style.STYLE):
        fig, ax = plt.subplots()
        ax.plot([1, 2, 3], [1, 4, 2], marker="o", label="drift")
        ax.legend()
        yield fig
    plt.close(fig)


# Figures


def test_a_figure_is_four_files_that_name_it_and_its_rows_and_one_picture(page, fig, shown, tmp_path):
    page.figure(fig, "fig-drift", table=ROWS)
    ((data, metadata),) = shown
    assert data["text/plain"] == metadata["image/png"]["name"] == "fig-drift"
    files = metadata["image/png"]["files"]
    assert set(files) == {"svg", "pdf", "png", "csv"}
    assert {file.name for file in tmp_path.iterdir()} == {f"fig-drift.{kind}" for kind in files}
    assert not plt.fignum_exists(fig.number)
    title = f"{page.chapter}: fig-drift, rows {files['csv'][:8]}"
    assert title in (tmp_path / "fig-drift.svg").read_text("utf-8")
    assert Image.open(tmp_path / "fig-drift.png").text["Title"] == title
    # PDF keeps it in its own encoding.
    assert b"/Title" in (tmp_path / "fig-drift.pdf").read_bytes()


def draw(folder: str, height: float = 4) -> None:
    fig, ax = plt.subplots()
    ax.plot([1, 2, 3], [1, height, 2], marker="o")
    publish.Page("x", Path(folder)).figure(fig, "fig-x", table=ROWS)


@pytest.mark.slow
def test_a_figure_is_the_same_bytes_in_every_process_and_without_the_style_svg_differs(tmp_path, fig):
    first, here = tmp_path / "a", tmp_path / "b"
    script = f"from test_publish import draw, style; style.use(); draw({str(first)!r})"
    subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parent, check=True)
    with plt.style.context(style.STYLE, after_reset=True):
        draw(here)
    assert [file.name for file in first.iterdir() if file.read_bytes() != (here / file.name).read_bytes()] == []
    # Control: without its hash salt, SVG's ids come from a random number.
    with plt.rc_context({"svg.hashsalt": None}):
        assert publish._picture(fig, "svg", 300) != publish._picture(fig, "svg", 300)


def test_pdf_embeds_truetype_and_svg_needs_no_font(fig, tmp_path):
    with plt.style.context(style.STYLE):
        pdf, svg = publish._picture(fig, "pdf", 300), publish._picture(fig, "svg", 300)
    assert b"/Type3" not in pdf
    assert b"/FontFile2" in pdf
    assert b"<text" not in svg
    with plt.rc_context({"pdf.fonttype": 3, "svg.fonttype": "none"}):
        assert b"/Type3" in publish._picture(fig, "pdf", 300)
        assert b"<text" in publish._picture(fig, "svg", 300)


def test_the_book_draws_what_stands_beside_an_svg_once_and_control_another_svg_anew(monkeypatch, shown, tmp_path):
    drawn, picture = [], publish._picture
    monkeypatch.setattr(publish, "_picture", lambda fig, kind, **how: drawn.append(kind) or picture(fig, kind, **how))
    monkeypatch.setattr(publish, "BUILD", tmp_path / "build")
    draw(tmp_path)
    assert not (tmp_path / "build").exists(), "a run by hand"
    drawn.clear()
    monkeypatch.setenv("KVBOOK_FIGURES", str(tmp_path / "figures"))
    with plt.style.context(style.STYLE):
        for height in (4, 4, 3):
            draw(tmp_path, height)
    assert drawn == ["svg", "pdf", "png", "svg", "svg", "pdf", "png"]
    assert shown[1] == shown[2] != shown[3]


def test_the_picture_in_the_page_is_light_even_when_the_figure_is_dense(page, shown):
    noise = np.random.default_rng(0)
    with plt.style.context(style.STYLE):
        fig, ax = plt.subplots()
        ax.scatter(noise.normal(size=3000), noise.normal(size=3000), c=noise.normal(size=3000), s=4)
        assert len(publish._picture(fig, "png", publish.INLINE_DPI[0])) > publish.INLINE_BYTES
        page.figure(fig, "fig-dense", table=ROWS)
    assert len(shown[0][0]["image/png"]) * 3 / 4 <= publish.INLINE_BYTES


@pytest.mark.parametrize("name", ["layer-drift", "fig_drift", "fig-Drift", "tab-drift", "fig-", "../fig-x"])
def test_a_name_that_no_link_could_use_is_refused(page, fig, name, tmp_path):
    assert name in refusal(page.figure, fig, name, table=ROWS)
    assert list(tmp_path.iterdir()) == []


# Tables


def test_quoted_text_is_shown_as_itself_and_other_text_is_markup(page, shown):
    quoted = pd.DataFrame({"text": ["<b>*x*</b> {measured}`y`"], "note": ["*x*"]})
    page.table(quoted, "tab-quoted", literal=["text"])
    ((data, metadata),) = shown
    assert metadata["text/html"]["kvbook_table"]["csv"].splitlines()[1] == "`` <b>*x*</b> {measured}`y` ``,*x*"
    assert "&lt;b&gt;" in data["text/html"]
    assert "<b>" not in data["text/html"]
    assert "no column 'z'" in refusal(page.table, quoted, "tab-quoted", literal=["z"])


def test_a_table_is_rounded_for_people_and_whole_for_programs(page, shown, tmp_path):
    page.table(ROWS, "tab-drift", {"y": "{:.2f}"})
    ((_, metadata),) = shown
    assert metadata["text/html"]["kvbook_table"]["csv"] == "x,y\n1,0.33\n2,\n"
    assert pd.read_csv(tmp_path / "tab-drift.csv")["y"][0] == 1 / 3
    assert json.loads(json.dumps(metadata)) == metadata
    assert "no column 'z'" in refusal(page.table, ROWS, "tab-x", {"z": "{:.2f}"})


# Where files go


def test_files_go_where_the_books_own_execution_says_else_beside_the_books(monkeypatch, tmp_path):
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    assert publish.Page("06_layer_drift").folder == publish.FIGURES / "own" / "06_layer_drift"
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    assert publish.Page("06_layer_drift").folder == tmp_path


def test_a_chapter_that_publishes_under_anothers_name_is_refused(monkeypatch):
    monkeypatch.setenv(CHAPTER_VARIABLE, "02_static")
    assert 'Page("02_static")' in refusal(publish.Page, "06_layer_drift")


# The look


def contrast_on_white(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 1.05 / (0.05 + 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])


def test_every_line_colour_stands_out_on_white():
    # WCAG 2.2, 1.4.11: 3 to 1 for graphical objects.
    assert min(map(contrast_on_white, (*style.PALETTE, style.GREY))) >= 3
    assert contrast_on_white("#F0E442") < 3


@pytest.mark.parametrize(("columns", "settings", "units", "dtypes"), [
    # Samples of one file are no further units.
    ({"sample": [1, 2, 3], "source": ["a", "a", "b"], "dtype": ["float32"] * 3}, {}, [2, "sources"], ["float32"]),
    # What warms up is no repeat.
    ({"repeat": [-1, 0, 1]}, {"dtype": "bfloat16"}, [2, "repeats"], ["bfloat16"]),
    ({"rows": [1]}, {"dtypes": ["float16", "float64"]}, None, ["float16", "float64"]),
    ({}, {}, None, []),
])
def test_a_figure_keeps_dtypes_and_independent_units_of_its_rows(columns, settings, units, dtypes):
    run = run_of(pd.DataFrame(columns), settings=settings, experiment="atlas", hash="0")
    (made,) = publish._made_by([run])["made_by"]
    assert (made.get("units"), made["dtypes"]) == (units, dtypes)


def test_rows_of_the_book_are_called_so_also_in_a_run_with_parameters_of_its_own(monkeypatch):
    folders = (of / "atlas" / "0" for of in (paths.RECORDED_RUNS, publish.RUNS))
    recorded, own = (run_of(pd.DataFrame(), folder, experiment="atlas", hash="0") for folder in folders)
    monkeypatch.delenv(BOOK_VARIABLE, raising=False)
    assert publish._made_by([recorded])["published"]
    assert not publish._made_by([own])["published"]
    assert not publish._made_by([recorded, own])["published"]
