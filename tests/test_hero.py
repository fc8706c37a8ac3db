"""The front page's figure: its values stand where the picture shows them."""

import json

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from kvreport.publishing import page as publish
from kvreport.publishing import published, style
from kvreport.site import hero

POINTS = [(1e-16, 2e-15), (6e-8, 3e-6), (4e-3, 2e-2)]
ROWS = [
    {"model": model, "symptom": symptom, "dtype": dtype, "roundoff": str(x), "drift": str(drift)}
    for model, symptom, shift in (("a", "a bug", 0), ("real", "a bug", 1), ("real", "clean", 2))
    for dtype, (x, y) in zip(("float64", "float32", "bfloat16"), POINTS, strict=True)
    for drift in [y * 10**-shift]
]


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Return the frame of a figure with one red point, and where the point is in its picture, in per cent."""
    shown = []
    monkeypatch.setattr(publish, "_show", lambda data, metadata: shown.append(metadata))

    def draw(x: float, y: float):
        with plt.style.context(style.STYLE):
            fig, ax = plt.subplots()
            ax.set(xscale="log", yscale="log", xlim=(1e-17, 1e-1), ylim=(1e-17, 10))
            ax.grid(visible=False)
            ax.plot(x, y, "s", color="red", markersize=8, markeredgewidth=0)
            page = publish.Page("06_layer_drift", tmp_path)
            page.figure(fig, "fig-drift", table=pd.DataFrame({"x": [x]}))
        picture = plt.imread(tmp_path / "fig-drift.png")
        red = np.argwhere((picture[..., 0] > 0.9) & (picture[..., 1] < 0.2))
        down, across = red.mean(axis=0) / picture.shape[:2] * 100
        return shown[-1]["image/png"]["frame"], across, down

    return draw


@pytest.mark.parametrize(("x", "y"), POINTS)
def test_a_value_lies_where_the_picture_shows_it_and_another_elsewhere(drawn, x, y):
    frame, across, down = drawn(x, y)
    assert 100 * published.place(frame["x"], x) == pytest.approx(across, abs=0.3)
    assert 100 * published.place(frame["y"], y) == pytest.approx(down, abs=0.3)
    assert 100 * published.place(frame["x"], 10 * x) - across > 3, "the control"


def test_bold_lines_come_first_and_among_them_the_clean_one(drawn):
    frame, *_ = drawn(*POINTS[0])
    found = hero.lines(ROWS, frame, ("real",))
    assert [(line["model"], line["line"]) for line in found] == [("real", "clean"), ("real", "a bug"), ("a", "a bug")]
    assert [point[:2] for point in found[0]["points"]] == [
        ["fp64", "2.0 × 10⁻¹⁷"], ["fp32", "3.0 × 10⁻⁸"], ["bf16", "2.0 × 10⁻⁴"]
    ]
    json.dumps(found)


def test_what_a_logarithmic_axis_cannot_show_is_no_point(drawn):
    frame, *_ = drawn(*POINTS[0])
    rows = [row | {"drift": drift} for row, drift in zip(ROWS[:3], ("0.0", "inf", "1e-3"), strict=True)]
    (line,) = hero.lines(rows, frame, ("a",))
    assert [point[0] for point in line["points"]] == ["bf16"]


def test_a_figure_of_several_panels_has_no_frame():
    fig, _ = plt.subplots(2)
    assert publish._frame(fig) == {}
    plt.close(fig)
