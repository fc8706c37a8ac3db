"""The engines: one entry each, with what is installed, how it starts, and what it lacks on a processor.

They stand in ``listed.tables.yaml``: to add one, add an entry; what cannot be started by a command of its own has a
script beside this file.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kvbook.settings import read_yaml

# The dtypes of weights, arithmetic and cache in which an engine is asked to compute, and the modes that one may have.
FP32, BF16 = "float32", "bfloat16"
SPECULATION, QUANTIZED, UNFUSED = "speculation", "quantized cache", "attention in parts"


class Engine(NamedTuple):
    """An engine.

    Attributes
    ----------
    title : str
        Its name, as pages write it.
    packages : sequence of str
        What is installed, exactly.
    command : str
        What follows the environment's Python, with what is asked in braces: ``{model}``, a folder of transformers or a
        file in GGUF where the engine reads these, ``{port}`` on 127.0.0.1, ``{dtype}`` of weights, arithmetic and
        cache, as far as the engine lets itself be told, or ``{asked}``, all of it as JSON for a script in
        ``{scripts}``.
    lacks : str
        What it does not have on a processor, or does not tell.
    unwanted : sequence of str
        Packages that come with it and are removed.
    variables : mapping
        Set in its environment.
    dtypes : sequence of str
        In which it can compute here.
    cold : sequence of str
        Fields of a request that keep it from reusing a prefix.
    modes : mapping
        Speculation, quantized caches and the like that it has, by the name that rows give them, with what they add to
        the command; a script knows them by name.
    gguf : mapping
        Where it reads a file in GGUF: the dtype of its weights, by the dtype that is asked for.
    beside : bool
        Whether its environment sees the book's own packages.
    scored : bool
        Whether it returns log-probabilities.
    """

    title: str
    packages: Sequence[str]
    command: str
    lacks: str
    unwanted: Sequence[str] = ()
    variables: Mapping[str, str] = {}
    dtypes: Sequence[str] = (FP32,)
    cold: Sequence[str] = ()
    modes: Mapping[str, str] = {}
    gguf: Mapping[str, str] = {}
    beside: bool = False
    scored: bool = True


ENGINES = {name: Engine(**about) for name, about in read_yaml(Path(__file__).with_suffix(".tables.yaml")).items()}
