"""The frame of an experiment: what its rows are made of, and the run that these inputs make."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from kvbook import fingerprint
from kvbook.runs import machine, records, threads
from kvbook.settings import Settings


def recorded(
    name: str,
    module: str,
    settings: Settings,
    measure: Callable[[records.Writer], None],
    fields: Collection[str] | None = None,
    **inputs: Any,
) -> records.Run:
    """Give the run of an experiment with these inputs: read it if it is there, else make it or finish it.

    It has its share of the cores (`kvbook.runs.threads`), and all of them when it measures time.

    Parameters
    ----------
    name : str
        The experiment's name, which the run carries; moving its module renames no run.
    module : str
        Where it is measured: the source of this module, and of what it imports, is one of the inputs.
    settings : Settings
        What was asked for.
    measure : callable
        Appends every unit that ``writer.done`` does not hold yet.
    fields : collection of str, optional
        The settings on which the rows depend; all of them by default.
    **inputs
        Whatever else they depend on: ``models``, ``corpus``, ...

    Raises
    ------
    UserError
        As `records.run`.
    """
    with threads.share(whole=measures_time(module)):
        made_of = _made_of(module, settings, fields, inputs)
        return records.run(name, made_of, measure, note={"commit": machine.commit()})


def is_recorded(
    name: str, module: str, settings: Settings, fields: Collection[str] | None = None, **inputs: Any
) -> bool:
    """Tell whether `recorded` with the same arguments would find a finished run.

    Parameters as for `recorded`.
    """
    with threads.share(whole=measures_time(module)):
        return records.exists(name, _made_of(module, settings, fields, inputs))


def _made_of(
    module: str, settings: Settings, fields: Collection[str] | None, inputs: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "settings": settings.model_dump(mode="json", include=None if fields is None else set(fields)),
        "source": fingerprint.of_source([module]),
        **inputs,
        "machine": machine.describe(settings.device),
    }


def measures_time(module: str) -> bool:
    """Tell whether an experiment measures time: whether it, or what it imports, imports `kvbook.measuring.timing`.

    Parameters
    ----------
    module : str
        The experiment's dotted name.
    """
    return "kvbook.measuring.timing" in fingerprint.reached(module)
