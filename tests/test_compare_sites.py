"""Two builds of the site are held against each other: text, data, and what only one of them has."""

import compare_sites
import pytest

PAGE = "<article><h1>Drift</h1><p>It grows by <b>{}</b>.</p><section><h2>Your run</h2><p>{}</p></section></article>"


@pytest.fixture
def sites(tmp_path):
    for site in ("old", "new"):
        (tmp_path / site / "data").mkdir(parents=True)
        (tmp_path / site / "index.html").write_text(PAGE.format("10 %", site))
        (tmp_path / site / "data" / "fig-drift.csv").write_text("layer,drift\n1,0.5\n")
        (tmp_path / site / "data" / "fig-your-drift.csv").write_text(site)
    return tmp_path / "old", tmp_path / "new"


def test_sites_that_differ_in_the_readers_own_run_alone_do_not_differ(sites):
    assert list(compare_sites.differences(*sites)) == []


@pytest.mark.parametrize(("file", "text", "found"), [
    ("index.html", PAGE.format("11 %", "new"), "+ It grows by 11 %."),
    ("data/fig-drift.csv", "layer,drift\n1,0.25\n", "- 1,0.5\n+ 1,0.25"),
    ("more.html", "<article></article>", "page more.html: not in "),
])
def test_control_another_number_value_or_page_is_named(sites, file, text, found):
    (sites[1] / file).write_text(text)
    (said,) = compare_sites.differences(*sites)
    assert found in said


def test_a_folder_that_is_no_site_is_refused_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["compare_sites.py", str(tmp_path), str(tmp_path)])
    assert compare_sites.main() == 2
    assert "has no index.html" in capsys.readouterr().err
