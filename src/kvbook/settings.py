"""One validated settings class an experiment; what cannot be compared is refused before anything is loaded.

The field names are the names of the notebooks' parameters.
"""

from collections.abc import Mapping
from types import ModuleType
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from kvbook.errors import UserError

DType = Literal["float64", "float32", "float16", "bfloat16"]
Weights = Literal["stand-in", "hub", "random", "untrained"]

# What people type for the four.
_DTYPE_NAMES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}


def _dtype(value: Any) -> Any:
    return _DTYPE_NAMES.get(value, value) if isinstance(value, str) else value


def _several(value: Any) -> Any:
    # `papermill -p dtypes float32,bfloat16` can only pass a string.
    return value.replace(",", " ").split() if isinstance(value, str) else value


DTypeName = Annotated[DType, BeforeValidator(_dtype)]
# Those that quantized weights run in.
SmallDType = Annotated[Literal["float32", "float16", "bfloat16"], BeforeValidator(_dtype)]
DTypes = Annotated[tuple[DTypeName, ...], BeforeValidator(_several), Field(min_length=1)]


class Settings(BaseModel):
    """What every experiment takes.

    Attributes
    ----------
    model : str
        A family's name, a hub id, or a local folder.
    weights : {"stand-in", "hub", "random", "untrained"}
        For a family's name: its stand-in, its first hub id, or its true architecture with seeded random weights. A
        folder and a hub id bring their own; ``"random"`` then keeps the architecture and draws the weights.
        ``"untrained"`` is a family's stand-in with random weights.
    device : str
        ``"cpu"``, ``"cuda"``, ``"cuda:1"``, ``"mps"``.
    seed : int
        Of random weights and of whatever else is drawn.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: Annotated[str, Field(min_length=1)] = "llama"
    weights: Weights = "stand-in"
    device: Annotated[str, Field(min_length=1)] = "cpu"
    seed: Annotated[int, Field(ge=0)] = 0

    @classmethod
    def checked(cls, **values: Any) -> Self:
        """Build the settings, or raise one line that names what is wrong.

        Raises
        ------
        UserError
            For an unknown name, a value of the wrong kind or out of range.
        """
        try:
            return cls(**values)
        except ValidationError as error:
            known = ", ".join(cls.model_fields)
            faults = []
            for fault in error.errors():
                name = ".".join(map(str, fault["loc"])) or "settings"
                if fault["type"] == "extra_forbidden":
                    faults.append(f"unknown parameter {name!r} (choose from: {known})")
                else:
                    faults.append(f"{name} = {fault['input']!r}: {fault['msg']}")
            raise UserError("; ".join(faults)) from None

    @classmethod
    def from_notebook(cls, namespace: Mapping[str, Any]) -> Self:
        """Build the settings from a notebook's own names, refusing a parameter that it does not have.

        papermill injects unknown parameters without complaint; here each name that is neither a module, a function, nor
        one of IPython's own must be a field.

        Parameters
        ----------
        namespace : mapping
            The notebook's ``globals()``.

        Raises
        ------
        UserError
            As `checked`.
        """
        shell_names = {"In", "Out", "exit", "quit", "open", "get_ipython"}
        values = {
            name: value
            for name, value in namespace.items()
            if not name.startswith("_")
            and name not in shell_names
            and not isinstance(value, ModuleType | type)
            and not callable(value)
        }
        return cls.checked(**values)


def _numbers(value: Any) -> Any:
    return [int(part) for part in _several(value)] if isinstance(value, str) else value


Counts = Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(_numbers), Field(min_length=1)]


class TextSettings(Settings):
    """What experiments on texts take besides.

    Attributes
    ----------
    dtypes : tuple of str
        Among float64, float32, float16, bfloat16.
    corpus : str
        ``"stdlib"`` or a folder of text files.
    """

    dtypes: DTypes = ("float32", "float16", "bfloat16")
    corpus: Annotated[str, Field(min_length=1)] = "stdlib"


class WhereDriftBeginsSettings(TextSettings):
    """Settings of the chapter on where drift begins.

    Attributes
    ----------
    families : tuple of str
        Further models, beside `model`, whose operations are replayed; may be empty. With the same `weights`.
    n_samples : int
        Texts of the factorial.
    n_replayed : int
        How many of them are replayed operation by operation: bits decide, and each text has every layer and chunk.
    n_tokens : int
        Tokens of a text; the factorial also runs on one token more.
    max_rows : int
        The map of the matrix product goes from one row to this many.
    chunks : tuple of int
        Rows of the replayed passes, beside all rows; those that do not lie below `n_tokens` are left out.
    inner_sizes : tuple of int
        Inner sizes of the mapped matrix product.
    outer_size : int
        Its number of columns.
    threads : tuple of int
        With how many threads of a CPU the product is mapped.
    key_lengths : tuple of int
        Numbers of keys of the attention that is taken apart.
    """

    families: Annotated[tuple[str, ...], BeforeValidator(_several)] = ("gpt2", "qwen2", "mpt", "falcon", "smollm2")
    n_samples: Annotated[int, Field(ge=1)] = 6
    n_replayed: Annotated[int, Field(ge=1)] = 1
    n_tokens: Annotated[int, Field(ge=3)] = 64
    max_rows: Annotated[int, Field(ge=2)] = 256
    chunks: Counts = (1, 3, 16)
    inner_sizes: Counts = (64, 320, 1536)
    outer_size: Annotated[int, Field(ge=1)] = 192
    threads: Counts = (1, 2)
    key_lengths: Counts = (5, 17, 63, 64, 65, 200, 513)

    @property
    def longest(self) -> int:
        """Tokens up to which the sweep over lengths goes: half as far again as the texts, to see what comes behind them."""
        return self.n_tokens * 3 // 2 + 2


class LayerDriftSettings(TextSettings):
    """Settings of the chapter on issue 25420.

    Attributes
    ----------
    reference_model : str
        A second model, drawn beside the first, with the same `weights`; the document's was GPT-2.
    n_samples : int
        How many samples.
    n_tokens : int
        Tokens of a sample; the last one is the one that is scored with and without a cache.
    prompt : str
        Of the greedy decoding; the document's.
    n_new_tokens : int
        Tokens that the greedy decoding writes; the document's number.
    """

    reference_model: Annotated[str, Field(min_length=1)] = "gpt2"
    n_samples: Annotated[int, Field(ge=1)] = 50
    n_tokens: Annotated[int, Field(ge=2)] = 64
    prompt: Annotated[str, Field(min_length=1)] = "This is a "
    n_new_tokens: Annotated[int, Field(ge=1)] = 40

    @property
    def n_mitigation_samples(self) -> int:
        """Samples that go through the mitigations: half, since each of them goes through six variants."""
        return max(1, self.n_samples // 2)


class ModelsSettings(Settings):
    """Settings of the page on the models.

    Attributes
    ----------
    model : str
        ``"all"`` for every family of the registry (every stand-in that ships); or names as elsewhere, with commas between them.
    dtype : str
        Of weights and arithmetic.
    prompt : str
        What every model goes on from.
    n_new_tokens : int
        Tokens that each writes.
    """

    model: Annotated[str, Field(min_length=1)] = "all"
    dtype: DTypeName = "float32"
    prompt: Annotated[str, Field(min_length=1)] = "def read_lines(path):\n"
    n_new_tokens: Annotated[int, Field(ge=1)] = 32


class PromptReuseSettings(TextSettings):
    """Settings of the chapter on the forum thread about reusing a prompt's cache.

    Attributes
    ----------
    second_model : str
        A second model, with the same `weights`; the document's were Llama-3.1 and Qwen2.5, both instruct.
    corpus : str
        ``"stdlib"`` or a folder of text files; where texts are cut in two.
    n_samples : int
        Texts that are cut in two and continued with and without the first part's cache.
    n_positions : int
        Places in each file at which it is asked whether a cut changes the ids.
    dtypes : tuple of str
        Among float64, float32, float16, bfloat16; the document used the library's default and bfloat16.
    n_new_tokens : int
        Tokens that the greedy decoding writes; the document's number.
    """

    second_model: Annotated[str, Field(min_length=1)] = "qwen2"
    n_samples: Annotated[int, Field(ge=1)] = 10
    n_positions: Annotated[int, Field(ge=1)] = 40
    dtypes: DTypes = ("float32", "bfloat16")
    n_new_tokens: Annotated[int, Field(ge=1)] = 20


class ExactCachesSettings(TextSettings):
    """Settings of the chapter on exact caches.

    Attributes
    ----------
    families : tuple of str
        Models that go through every way of feeding the same tokens; ``"all"`` for every causal family whose weights are
        here.
    n_samples : int
        Texts.
    n_tokens : int
        Length of each.
    dtypes : tuple of str
        Among float32, float16, bfloat16.
    cost_shape : str
        Family whose true shape, with random weights, is timed.
    cost_dtype : str
        In which it is timed.
    n_prefill, n_context, n_steps : int
        Tokens of the timed prefill; tokens in the cache before the timed decode steps; how many steps.
    n_repeats : int
        How often each of the two arithmetics is timed.
    """

    model: Annotated[str, Field(min_length=1)] = "llama"
    families: Annotated[tuple[str, ...], BeforeValidator(_several), Field(min_length=1)] = ("all",)
    n_samples: Annotated[int, Field(ge=1)] = 3
    n_tokens: Annotated[int, Field(ge=8)] = 45
    dtypes: Annotated[tuple[Literal["float32", "float16", "bfloat16"], ...], BeforeValidator(_several), Field(min_length=1)] = (
        "float32", "bfloat16", "float16",
    )  # fmt: skip
    cost_shape: Annotated[str, Field(min_length=1)] = "smollm2"
    cost_dtype: DTypeName = "bfloat16"
    n_prefill: Annotated[int, Field(ge=2)] = 512
    n_context: Annotated[int, Field(ge=1)] = 200
    n_steps: Annotated[int, Field(ge=1)] = 8
    n_repeats: Annotated[int, Field(ge=1)] = 6


class ScratchSettings(TextSettings):
    """Settings of the chapter on the forum thread about a model from scratch.

    Attributes
    ----------
    model : str
        ``"small"`` or ``"thread"``, the thread's size, which ship, the latter trained anew for another corpus; or a folder
        that ``python -m kvbook models train-scratch`` wrote.
    weights : {"stand-in", "random"}
        ``"random"`` keeps the model's shape and draws its weights.
    corpus : str
        ``"stdlib"``, a folder, or one text file: what ``"thread"`` is trained on, and whose held-out part is read.
    n_samples : int
        How many texts are scored.
    n_blocks : int
        Length of each, in the model's blocks; the table of positions must reach so far.
    dtypes : tuple of str
        In which logits are compared; losses, texts and times are in the first.
    n_timed : int
        Repetitions of everything that is timed.
    """

    model: Annotated[str, Field(min_length=1)] = "small"
    weights: Literal["stand-in", "random"] = "stand-in"
    n_samples: Annotated[int, Field(ge=2)] = 24
    n_blocks: Annotated[int, Field(ge=2)] = 8
    dtypes: DTypes = ("float32", "float64")
    n_timed: Annotated[int, Field(ge=2)] = 4


class PastTablesSettings(Settings):
    """Settings of the chapter on the blog post about past_key_values.

    Attributes
    ----------
    model : str
        The baseline; the document's was GPT-2.
    families : tuple of str
        The other models: families, hub ids or folders.
    dtype : str
        Of weights and arithmetic; what quantization leaves alone has it.
    quantizations : tuple of str
        Among none, 8bit, 4bit.
    corpus : str
        ``"stdlib"`` or a folder of text files.
    n_samples : int
        Texts besides the posted one.
    n_tokens : int
        Tokens of each.
    """

    model: Annotated[str, Field(min_length=1)] = "gpt2"
    families: Annotated[tuple[str, ...], BeforeValidator(_several)] = ("roberta", "mpt", "falcon")
    dtype: DTypeName = "float32"
    quantizations: Annotated[
        tuple[Literal["none", "8bit", "4bit"], ...], BeforeValidator(_several), Field(min_length=1)
    ] = (
        "none",
        "8bit",
        "4bit",
    )
    corpus: Annotated[str, Field(min_length=1)] = "stdlib"
    n_samples: Annotated[int, Field(ge=1)] = 20
    n_tokens: Annotated[int, Field(ge=3)] = 32


class StaticCacheSettings(Settings):
    """Settings of the chapter on the notebook about static and dynamic caches.

    Attributes
    ----------
    weights : {"random", "stand-in", "hub", "untrained"}
        As elsewhere, for a family's name; by default the true shape, since speed does not depend on what weights have learnt.
    dtype : str
        Of weights and arithmetic; the document's was bfloat16.
    n_new_tokens : int
        Tokens that each way writes, no fewer and no more; the document's number.
    n_repeats : int
        How often each way is timed, the ways by turns.
    scope : {"layer", "model"}
        What is compiled: the layer, once for all layers, or the whole forward pass, which takes a minute.
    prompt : str
        The document's.
    text_model : str
        With weights that have learnt something; it writes the texts that are compared.
    """

    model: Annotated[str, Field(min_length=1)] = "smollm2"
    weights: Weights = "random"
    dtype: DTypeName = "bfloat16"
    n_new_tokens: Annotated[int, Field(ge=4)] = 200
    n_repeats: Annotated[int, Field(ge=1)] = 2
    scope: Literal["layer", "model"] = "layer"
    prompt: Annotated[str, Field(min_length=1)] = "The theory of special relativity states "
    text_model: Annotated[str, Field(min_length=1)] = "smollm2"


class BugOrRoundingSettings(TextSettings):
    """Settings of the chapter on bug or rounding.

    Attributes
    ----------
    model : str
        Repeats the symptoms that need no particular family.
    families : tuple of str
        Models, beside `model`, into which bugs are planted; those of the blog post also repeat its call.
    n_samples, n_tokens : int
        Texts, and tokens of each.
    dtypes : tuple of str
        Among float64, float32, float16, bfloat16; the finest decides most.
    """

    families: Annotated[tuple[str, ...], BeforeValidator(_several)] = (
        "gpt2", "llama", "qwen2", "smollm2", "mpt", "falcon", "roberta",
    )  # fmt: skip
    n_samples: Annotated[int, Field(ge=1)] = 3
    n_tokens: Annotated[int, Field(ge=4)] = 32
    dtypes: DTypes = ("float64", "float32", "float16", "bfloat16")


class CheckSettings(TextSettings):
    """Settings of ``python -m kvbook check``.

    Attributes
    ----------
    dtypes : tuple of str
        Among float64, float32, float16, bfloat16; the finest decides most.
    n_samples, n_tokens : int
        Texts, and tokens of each at most.
    """

    dtypes: DTypes = ("float64", "float32", "float16", "bfloat16")
    n_samples: Annotated[int, Field(ge=1)] = 4
    n_tokens: Annotated[int, Field(ge=4)] = 32


class DoesItMatterSettings(TextSettings):
    """Settings of the chapter on whether the difference matters.

    Attributes
    ----------
    n_samples : int
        Texts, and prompts that are continued.
    n_tokens : int
        Tokens that are read of each text: the first half is a prompt, the second half is scored; or written, where the
        model continues the prompt.
    longest : int
        Tokens of the texts along which drift is followed; no more than the model's context is used.
    dtypes : tuple of str
        Among float32, float16, bfloat16.
    n_long : int
        Texts of that length.
    n_fit : int
        Texts that the classification head is fitted on.
    """

    n_samples: Annotated[int, Field(ge=1)] = 12
    n_tokens: Annotated[int, Field(ge=8)] = 96
    longest: Annotated[int, Field(ge=16)] = 1024
    dtypes: Annotated[tuple[SmallDType, ...], BeforeValidator(_several), Field(min_length=1)] = ("float32", "bfloat16")
    n_long: Annotated[int, Field(ge=1)] = 3
    n_fit: Annotated[int, Field(ge=2)] = 24


class WhichPathSettings(TextSettings):
    """Settings of the chapter on which path is right.

    Attributes
    ----------
    families : tuple of str
        Further models, beside `model`, with the same `weights`; may be empty.
    n_samples : int
        Texts; the unit of resampling is the file that a text is from.
    n_tokens : int
        Length of each; the first half is the prompt, the second is decoded from a cache.
    """

    families: Annotated[tuple[str, ...], BeforeValidator(_several)] = ("gpt2", "qwen2")
    n_samples: Annotated[int, Field(ge=1)] = 10
    n_tokens: Annotated[int, Field(ge=8)] = 72

    @property
    def n_decoded(self) -> int:
        """Tokens that are fed one by one, and scored."""
        return self.n_tokens // 2
