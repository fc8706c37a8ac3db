"""Every chapter is a thin notebook without outputs, and the checker would say so if one were not."""

import json

import mini_book
import papermill
import pytest
from notebook_rules import faults

from kvbook.paths import CHAPTERS, DOCUMENTS
from kvreport.running import planning

NOTEBOOKS = sorted(CHAPTERS.glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_chapter_is_as_it_must_be(path):
    assert faults(json.loads(path.read_text("utf-8"))) == []


def test_every_parameter_set_names_only_chapters_and_settings_that_exist_and_not_everything_is_one():
    profiles = ("default", "real", "smoke", "gpu", "trained")
    chapters = [chapter for profile in profiles for chapter in planning.plan(profile)]
    for chapter in chapters:
        known = chapter.setting_names()
        assert set(papermill.inspect_notebook(chapter.source)) | set(chapter.parameters) <= known, chapter.stem
        assert "n_smaples" not in known


def test_the_tests_own_parameter_set_says_something_of_every_chapter():
    set_of = {chapter.stem for chapter in planning.plan("smoke") if chapter.parameters}
    assert set_of == {path.stem for path in NOTEBOOKS} != set()


def test_a_chapter_names_every_document_that_its_code_reads():
    for chapter in planning.plan():
        code = "".join(path.read_text("utf-8") for path in (chapter.folders.code / chapter.name).rglob("*.py"))
        read = {path for path in DOCUMENTS.glob("*.yaml") if f'"{path.stem}"' in code}
        assert read <= set(chapter.data_files()), chapter.stem


def code(cell: str, source: str):
    return lambda cells, _: cells[cell].update(source=source)


def tagged(cell: str, *tags: str):
    return lambda cells, _: cells[cell]["metadata"].update(tags=list(tags))


HARM = {
    "holds outputs": lambda cells, _: cells["run"].update(outputs=[{"output_type": "stream"}]),
    "holds an execution count": lambda cells, _: cells["run"].update(execution_count=1),
    "one run's parameters": tagged("run", "injected-parameters"),
    "metadata of a run": lambda _, notebook: notebook["metadata"].update(papermill={}),
    "kernel is not python3": lambda _, notebook: notebook["metadata"].update(kernelspec={"name": "venv"}),
    "no proper id": lambda cells, _: cells["run"].pop("id"),
    "two cells have one id": lambda cells, _: cells["run"].update(id="table"),
    "0 cells are tagged": tagged("parameters"),
    "2 cells are tagged": tagged("run", "parameters"),
    "without type or comment: n: int = 4": code("parameters", "n: int = 4"),
    "without type or comment: n = 4": code("parameters", "n = 4  # how many"),
    "9 parameters": code("parameters", "".join(f"p{k}: int = {k}  # one of many\n" for k in range(9))),
    "defines f": code("run", "if n:\n    def f():\n        pass\n"),
    "defines F": code("run", "class F:\n    pass\n"),
    "kvreport.chapters.from_scratch.tables has no flat": code(
        "run", "from kvreport.chapters.from_scratch import tables\ntables.flat(1)\n"
    ),
    "magic": code("run", "x = 1\n%matplotlib inline\n"),
    "lines of code": code("run", "x = 1\n" * 80),
}


@pytest.mark.parametrize("fault", HARM)
def test_control_each_fault_is_found_and_named_in_a_notebook_that_has_none(fault):
    notebook = mini_book.notebook()
    assert faults(notebook) == []
    HARM[fault]({cell["id"]: cell for cell in notebook["cells"]}, notebook)
    found = faults(notebook)
    assert any(fault in line for line in found), found
