"""Caches of few bits on the same texts: the library's own, by backend and bits, and keys or values rounded alone.

The first half of a text fills the cache, which quantizes it; the second half is scored on top of it in one piece.  A
backend of the library's needs a package of its own, and is left out where that is missing: ``pip install
optimum-quanto`` or ``pip install hqq``.  Rows as those of `teacher_forced`.
"""

import importlib.metadata
from collections.abc import Iterator

from kvbook.runs.experiment import Experiment, Inputs, Work, Writer
from kvreport.chapters.does_it_matter import rows as named
from kvreport.chapters.does_it_matter import teacher_forced, variants
from kvreport.chapters.does_it_matter.settings import DoesItMatterSettings

_PACKAGES = ("optimum-quanto", "hqq")


def ways() -> Iterator[variants.Variant]:
    """List the caches, the plain one first."""
    makes = {named.PLAIN: variants.dynamic, named.KV_FP8: variants.fp8}
    makes |= {name: variants.library(backend, nbits=bits) for name, (backend, bits) in named.BACKENDS.items()}
    makes |= {name: variants.rounded(*bits) for name, bits in named.ROUNDED.items()}
    for name, make in makes.items():
        yield variants.Variant(name, variants.on_a_cache(make, None), makes=make)


def inputs(settings: DoesItMatterSettings) -> Inputs:
    """Name the model, the corpus and the backends' packages, and refuse what cannot be run."""
    return teacher_forced.inputs(settings) | {"packages": dict(_installed())}


def _installed() -> Iterator[tuple[str, str]]:
    for package in _PACKAGES:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue


def measure(settings: DoesItMatterSettings, made_of: Inputs, writer: Writer) -> None:
    """Score the texts on every cache."""
    teacher_forced.measure(settings, made_of, writer, tuple(ways()))


EXPERIMENT = Experiment(
    "quantized_caches", DoesItMatterSettings, inputs, measure, fields=teacher_forced.EXPERIMENT.fields,
    work=Work.per_text(passes=1 + len(list(ways()))),
)
