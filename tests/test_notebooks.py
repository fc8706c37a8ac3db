"""Every chapter is a thin notebook without outputs, and the checker would say so if one were not."""

import copy
import json

import mini_book
import pytest
from notebook_rules import faults

from kvbook.paths import CHAPTERS, DOCUMENTS
from kvreport.running import planning

NOTEBOOKS = sorted(CHAPTERS.glob("*.ipynb"))


def test_there_are_chapters():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_chapter_is_as_it_must_be(path):
    assert faults(json.loads(path.read_text("utf-8"))) == []


@pytest.mark.parametrize("profile", ["default", "smoke", "gpu"])
def test_every_parameter_set_names_only_chapters_and_parameters_that_exist(profile):
    import papermill

    for chapter in planning.plan(profile):
        known = {*papermill.inspect_notebook(chapter.source), *chapter.setting_names()}
        assert set(chapter.parameters) <= known, chapter.stem


def test_control_a_chapters_settings_hold_its_notebooks_parameters_and_not_everything():
    import papermill

    for chapter in planning.plan():
        assert set(papermill.inspect_notebook(chapter.source)) <= chapter.setting_names()
        assert "n_smaples" not in chapter.setting_names()


def test_the_tests_own_parameter_set_says_something_of_every_chapter():
    assert {chapter.stem for chapter in planning.plan("smoke") if chapter.parameters} == {
        path.stem for path in NOTEBOOKS
    }


def test_a_chapter_names_every_document_that_its_code_reads():
    for chapter in planning.plan():
        code = "".join(path.read_text("utf-8") for path in (chapter.folders.code / chapter.name).rglob("*.py"))
        read = {path for path in DOCUMENTS.glob("*.yaml") if f'"{path.stem}"' in code}
        assert read <= set(chapter.data_files()), chapter.stem


def test_control_a_proper_notebook_has_no_faults():
    assert faults(mini_book.notebook()) == []


def harmed(change) -> dict:
    notebook = copy.deepcopy(mini_book.notebook())
    change({cell["id"]: cell for cell in notebook["cells"]}, notebook)
    return notebook


HARM = {
    "holds outputs": lambda cells, _: cells["run"].update(outputs=[{"output_type": "stream"}]),
    "holds an execution count": lambda cells, _: cells["run"].update(execution_count=1),
    "one run's parameters": lambda cells, _: cells["run"]["metadata"].update(tags=["injected-parameters"]),
    "metadata of a run": lambda _, notebook: notebook["metadata"].update(papermill={}),
    "kernel is not python3": lambda _, notebook: notebook["metadata"].update(kernelspec={"name": "venv"}),
    "no proper id": lambda cells, _: cells["run"].pop("id"),
    "two cells have one id": lambda cells, _: cells["run"].update(id="table"),
    "0 cells are tagged": lambda cells, _: cells["parameters"].update(metadata={}),
    "2 cells are tagged": lambda cells, _: cells["run"]["metadata"].update(tags=["parameters"]),
    "without type or comment: n: int = 4": lambda cells, _: cells["parameters"].update(source="n: int = 4"),
    "without type or comment: n = 4": lambda cells, _: cells["parameters"].update(source="n = 4  # how many"),
    "9 parameters": lambda cells, _: cells["parameters"].update(
        source="".join(f"p{k}: int = {k}  # one of many\n" for k in range(9))
    ),
    "defines f": lambda cells, _: cells["run"].update(source="if n:\n    def f():\n        pass\n"),
    "defines F": lambda cells, _: cells["run"].update(source="class F:\n    pass\n"),
    "kvreport.chapters.from_scratch.tables has no flat": lambda cells, _: cells["run"].update(
        source="from kvreport.chapters.from_scratch import tables\ntables.flat(1)\n"
    ),
    "magic": lambda cells, _: cells["run"].update(source="x = 1\n%matplotlib inline\n"),
    "lines of code": lambda cells, _: cells["run"].update(source="x = 1\n" * 80),
}


@pytest.mark.parametrize("fault", HARM)
def test_control_each_fault_is_found_and_named(fault):
    found = faults(harmed(HARM[fault]))
    assert any(fault in line for line in found), found
