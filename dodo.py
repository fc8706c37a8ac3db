"""The task graph: chapters that are not fresh, then the site. `make book` runs it; `doit list` shows it.

Thin on purpose: what is fresh and how a chapter runs is kvreport.running.execution's business, so that the plain
`jupyter-book build .` does exactly the same.
"""

import sys

from doit.exceptions import TaskFailed, UnmetDependency
from doit.reporter import ConsoleReporter

from kvbook import paths
from kvbook.errors import UserError
from kvreport.running import execution
from kvreport.site import build


class OneLineReporter(ConsoleReporter):
    """Say what runs; of a failure only its own line, without doit's headings and traces."""

    desc = "one line a task"

    def skip_uptodate(self, task):
        self.write(f"{task.title()}: up to date\n")

    def execute_task(self, task):
        # Tasks say themselves what they do, and better.
        pass

    def _write_failure(self, result, write_exception=True):
        if isinstance(result["exception"], TaskFailed):
            self.write(f"kvbook: {result['exception'].message}\n")
        elif isinstance(result["exception"], UnmetDependency):
            if result["task"].name == "html":
                self.write("kvbook: the site was not rendered; what is in _build/html is from an earlier build\n")
        else:
            super()._write_failure(result, write_exception)


try:
    paths.BUILD.mkdir(parents=True, exist_ok=True)
except OSError as error:
    sys.exit(f"kvbook: cannot make {paths.BUILD}: {error.strerror}; allow it, or name another folder in KVBOOK_BUILD")

DOIT_CONFIG = {
    "default_tasks": ["html"],
    # Nothing is kept from one run to the next: what is fresh, the executed copies say themselves. So two at once share no
    # file, and a full disk cannot damage one.
    "backend": "sqlite3",
    "dep_file": ":memory:",
    "reporter": OneLineReporter,
    # A failed chapter does not keep the others from being executed; the site needs them all.
    "continue": True,
    "verbosity": 2,
}

try:
    PLAN = execution.plan()
except UserError as error:
    sys.exit(f"kvbook: {error}")


def attempt(function, *arguments):
    try:
        function(*arguments)
    except UserError as error:
        return TaskFailed("\nkvbook: ".join(str(error).splitlines()))
    except KeyboardInterrupt:
        sys.exit("kvbook: interrupted; what was finished is kept, and the next `make book` goes on from there")


def task_chapters():
    """Execute all chapters whose inputs have changed, two at a time where the machine allows it."""
    return {
        "actions": [(attempt, (execution.bring_up_to_date, PLAN))],
        "uptodate": [lambda: all(chapter.is_fresh() for chapter in PLAN)],
    }


def task_chapter():
    """Execute a chapter whose inputs have changed."""
    for chapter in PLAN:
        yield {
            "name": chapter.stem,
            "actions": [(attempt, (execution.bring_up_to_date, [chapter]))],
            "uptodate": [chapter.is_fresh],
        }


def task_html():
    """Render the site into _build/html, with warnings as errors."""
    # Always run: Sphinx itself knows which pages have changed, and says so in a second or two.
    return {"actions": [(attempt, (build.build_html,))], "task_dep": ["chapters"]}
