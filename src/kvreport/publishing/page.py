"""A figure or a table of a chapter: written to files and shown, in one place.

A chapter's page shows what its cells published::

    page = publish.Page("06_layer_drift")
    page.figure(fig, name="fig-layer-drift", table=rows)  # one to a cell
    page.table(summary, name="tab-layer-drift", formats={"rms": "{:.2e}"})

Words and numbers stand in the notebook's markdown: see :mod:`kvreport.publishing.captions`.

Files go to ``_build/figures/<chapter>/<name>.{svg,pdf,png,csv}``. When the book itself runs the chapter
(:mod:`kvreport.running.execution`), they are put there only after the whole chapter succeeded; a run of your own, from
papermill or from Jupyter, writes to ``_build/figures/own/<chapter>/``, so that it never changes what the
book's pages offer.

The output's metadata carries name and the files' digests;
:mod:`kvreport.site.overlay` makes numbered figures, tables and download links of them. Everything here works
without Sphinx and without Jupyter Book.
"""

import base64
import hashlib
import io
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import pandas as pd
from fontTools import subset
from matplotlib.figure import Figure

from kvbook import UserError, fingerprint
from kvbook.paths import BUILD, FIGURES, RUNS, keep
from kvbook.runs.records import Run
from kvreport import publishing
from kvreport.publishing import chapter_name, found, pictures, processors
from kvreport.publishing.wording import csv_of, model_said, quoted

# The picture in the page: the sharpest of these that weighs no more than the limit. The 300 dpi file is for
# download.
INLINE_DPI = (200, 150, 110)
INLINE_BYTES = 120_000

# Left out of the files, so that the same figure is the same bytes on any day and with any patch release.
_NO_DATES = {
    "svg": {"Date": None, "Creator": None}, "png": {"Software": None},
    "pdf": {"CreationDate": None, "Producer": None, "Creator": None},
}

# How letters join is settled once they are drawn: cutting a font's tables of that down to the glyphs of a figure would
# take half of the time that its PDF takes.
subset.Options._drop_tables_default = [*subset.Options._drop_tables_default, "GDEF", "GPOS", "GSUB"]

Format = str | Callable[[Any], str]


class Page:
    """What a chapter shows.

    Parameters
    ----------
    chapter
        The notebook's file name without its suffix, such as ``"06_layer_drift"``.
    folder
        Where files go; chosen as the module's docstring says when left out.
    """

    def __init__(self, chapter: str, folder: Path | None = None) -> None:
        # It names a folder, and nothing may be written beside that.
        if not re.fullmatch(r"\w[\w-]*", chapter):
            raise UserError(f'"{chapter}" cannot name a chapter: write its file name without the suffix')
        if (running := os.environ.get(publishing.CHAPTER_VARIABLE, chapter)) != chapter:
            raise UserError(f'this chapter is {running}, but it publishes as "{chapter}": write Page("{running}")')
        self.chapter = chapter
        self.folder = Path(folder or os.environ.get(publishing.FOLDER_VARIABLE) or FIGURES / "own" / chapter)

    def measured(self, runs: Mapping[str, Run | None]) -> None:
        """Say which runs of this machine the chapter has: its page holds its statements against them.

        Parameters
        ----------
        runs
            By experiment; None for one that these settings leave out.
        """
        folders = {name: run.folder.relative_to(RUNS).as_posix() for name, run in runs.items() if run is not None}
        show({"text/plain": ""}, {"kvbook_runs": folders})

    def figure(self, fig: Figure, name: str, *, table: pd.DataFrame, runs: Iterable[Run] = ()) -> None:
        """Save a figure as SVG, PDF and PNG, save the rows behind it as CSV, and show it.

        Parameters
        ----------
        fig
            The figure; it is closed, so that the notebook does not show it a second time.
        name
            ``fig-`` and lower-case words; the target of ``{numref}`` in the prose.
        table
            The rows that the figure was drawn from.
        runs
            Those that made the rows.
        """
        _check_name(name, "fig-")
        # Laid out once, for all files alike: at every one anew takes as long as drawing it.
        fig.draw_without_rendering()
        # No layout at all from here on: with the engine of no effect that "none" stands for, each file would be drawn
        # twice.
        with plt.rc_context({"figure.constrained_layout.use": False, "figure.autolayout": False}):
            fig.set_layout_engine(None)
            rows = csv_of(table)
            title = f"{self.chapter}: {name}, rows {hashlib.sha256(rows).hexdigest()[:8]}"
            files = {"svg": _picture(fig, "svg", dpi=300, title=title)}
            before = _drawn_from(files["svg"])
            for kind in ("pdf", "png"):
                files[kind] = _once(before and before / kind, partial(_picture, fig, kind, dpi=300, title=title))
        inch = fig.get_figwidth()
        inline = _once(before and before / "inline", partial(_picture_for_the_page, files["png"], inch))
        # Pixels of the page to an inch of the figure: 11 pt type comes out at the size of the text around it.
        width = round(inch * 110)
        plt.close(fig)
        metadata = {"name": name, "files": self._write(name, files | {"csv": rows}), "width": width} | _made_by(runs)
        show({"image/png": base64.b64encode(inline).decode(), "text/plain": name}, {"image/png": metadata})

    def table(
        self, df: pd.DataFrame, name: str, formats: Mapping[str, Format] | None = None, literal: Collection[str] = (),
        filtered: bool = False, runs: Iterable[Run] = (),
    ) -> None:
        """Save a table's rows as CSV in full precision, and show them rounded.

        Parameters
        ----------
        df
            The rows; its index is not shown. Column names are the header, so give them a reader's names.
        name
            ``tab-`` and lower-case words; the target of ``{numref}`` in the prose.
        formats
            How to write a column's values: ``"{:.2e}"`` or a function. Others are written as they are.
        literal
            Columns that quote text from elsewhere, a model's for one: shown as code, every character as itself.
            Others are MyST.
        filtered
            Whether readers can search it and choose by its columns.
        runs
            Those that made the rows.
        """
        _check_name(name, "tab-")
        if unknown := sorted({*(formats or {}), *literal} - set(map(str, df.columns))):
            raise UserError(f"table {name} has no column {unknown[0]!r} to format; it has {', '.join(map(str, df))}")
        shown = pd.DataFrame({str(c): _written(df[c], (formats or {}).get(str(c))) for c in df.columns})
        metadata = {"name": name, "files": self._write(name, {"csv": csv_of(df)})} | _made_by(runs)
        metadata |= {"filtered": True} if filtered else {}
        rows = shown.assign(**{column: [quoted(text) for text in shown[column]] for column in literal})
        data = {"text/html": shown.to_html(index=False, border=0), "text/plain": shown.to_string(index=False)}
        show(data, {"text/html": {"kvbook_table": metadata | {"csv": rows.to_csv(index=False)}}})

    def claims(self, results: Any, runs: Iterable[Run] = ()) -> None:
        """Show the verdicts on the claims that the chapter answers, as its ``CLAIMS`` judge them.

        Parameters
        ----------
        results
            The chapter's results.
        runs
            Those that made the rows.
        """
        if (claims := getattr(found.measures_of(chapter_name(self.chapter)), "CLAIMS", None)) is None:
            raise UserError(f"chapter {self.chapter} answers no document: give it CLAIMS in measures.py")
        self.table(claims.shown({"": results}), claims.table, runs=runs)

    def _write(self, name: str, files: Mapping[str, bytes]) -> dict[str, str]:
        for kind, content in files.items():
            keep(self.folder / f"{name}.{kind}", content)
        return {kind: hashlib.sha256(content).hexdigest() for kind, content in files.items()}


def shows_published() -> bool:
    """Tell whether figures and tables are drawn from published rows: in the book, run with its own parameters.

    A re-execution with other parameters, or by hand, draws its own rows.
    """
    return bool(os.environ.get(publishing.BOOK_VARIABLE))


def _made_by(runs: Iterable[Run]) -> dict[str, Any]:
    """Keep of each run what a reader asks for, and whether these are the book's rows."""
    runs = list(runs)
    # A run with parameters of its own can show the book's all the same, as the atlas does of all architectures.
    is_published = shows_published() or not any(run.folder.is_relative_to(RUNS) for run in runs)
    return {"made_by": [_about(run) for run in runs], "published": is_published} if runs else {}


def _about(run: Run) -> dict[str, Any]:
    settings = run.about["settings"]
    return processors.of_run(run) | _units(run.rows) | {
        "experiment": run.about["experiment"], "settings": settings, "dtypes": _dtypes(run.rows, settings),
        "models": [model_said(model) for model in run.about.get("models", ())],
        "seeds": run.about.get("seeds", [settings.get("seed", 0)]),
    }


# What tells the independent units of an experiment's rows apart, and what a unit is called.
_UNITS = {
    "source": "sources", "item": "prompts", "architecture": "architectures", "repetition": "repetitions",
    "repeat": "repeats",
}


def _units(rows: pd.DataFrame) -> dict[str, list[int | str]]:
    """Count the independent units of rows: files rather than samples, which resemble each other within a file."""
    column = next((column for column in _UNITS if column in rows), None)
    if column is None:
        return {}
    # What ran before the first repeat is none.
    counted = rows[column][rows[column] >= 0] if column == "repeat" else rows[column]
    return {"units": [counted.nunique(), _UNITS[column]]}


def _dtypes(rows: pd.DataFrame, settings: Mapping[str, Any]) -> list[str]:
    """List the dtypes of rows; an experiment in one dtype has it among its settings alone."""
    asked = settings.get("dtypes", [settings["dtype"]] if "dtype" in settings else [])
    return rows["dtype"].unique().tolist() if "dtype" in rows else list(asked)


def _check_name(name: str, prefix: str) -> None:
    if not re.fullmatch(rf"{prefix}[a-z0-9]+(-[a-z0-9]+)*", name):
        raise UserError(f'"{name}" cannot name this: write {prefix} and lower-case words joined by hyphens')


def _picture(fig: Figure, kind: str, dpi: int, title: str = "") -> bytes:
    buffer = io.BytesIO()
    # A file that was taken elsewhere still says which figure it is, and of which rows.
    fig.savefig(buffer, format=kind, dpi=dpi, metadata=_NO_DATES[kind] | ({"Title": title} if title else {}))
    return buffer.getvalue()


def _drawn_from(svg: bytes) -> Path | None:
    """Name where the book keeps what it drew beside an SVG; a run by hand keeps nothing.

    An equal SVG is an equal figure: of a chapter that is drawn again, most are as they were.
    """
    if publishing.FOLDER_VARIABLE not in os.environ:
        return None
    code = map(fingerprint.of_file, (Path(__file__), Path(pictures.__file__)))
    return BUILD / "pictures" / fingerprint.of_values([svg.decode(), matplotlib.__version__, *code])[:16]


def _once(file: Path | None, draw: Callable[[], bytes]) -> bytes:
    """Draw a picture, or read the one that is kept."""
    if file is None:
        return draw()
    return (file if file.is_file() else keep(file, draw())).read_bytes()


def _picture_for_the_page(sharp: bytes, inches: float) -> bytes:
    """Scale the picture for download down, which takes half as long as drawing another one."""
    for dpi in INLINE_DPI:
        if len(candidate := pictures.reduced(sharp, colours=256, width=round(inches * dpi))) <= INLINE_BYTES:
            return candidate
    # Better a coarse picture than a page that a telephone gives up on; the sharp files are a click away.
    return candidate


def _written(values: pd.Series, how: Format | None) -> list[str]:
    write = how.format if isinstance(how, str) else (how or str)
    return ["" if pd.isna(value) else write(value) for value in values]


def show(data: dict[str, str], metadata: dict[str, Any]) -> None:
    """Show what a cell publishes, where there is a notebook."""
    from IPython import get_ipython
    from IPython.display import display

    # Outside a notebook (a script, a test) the files are all there is to make; printing the bundle would be
    # noise.
    if get_ipython() is not None:
        display(data, raw=True, metadata=metadata)
