"""What the page on the models says in words: captions, the cells of its tables, and the numbers of its prose."""

import re

import pandas as pd

from kvbook.models import listing, loading, registry
from kvbook.runs.records import Run
from kvreport.chapters.models import tables
from kvreport.chapters.models.results import Results
from kvreport.publishing import wording

_GIB = 2**30
_COUNTS = {"parameters": lambda count: f"{count / 1e6:,.{1 if count < 1e8 else 0}f} M", "vocabulary": "{:,}"}
# How each column is written, by table.
FORMATS = {
    "tab-models-documents": _COUNTS,
    "tab-models-memory": {name: lambda n_bytes: _gib(n_bytes) for name, _, _ in tables.STORED},
    "tab-models-stand-ins": _COUNTS,
    "tab-models-bits": dict.fromkeys(("stand-in", "unigram", "bigram, backoff", "xz -9"), "{:.2f}"),
    "tab-models-samples": {"text": lambda text: _code(tables.on_one_line(text)), "probability": "{:.2f}"},
}


def _gib(n_bytes: float) -> str:
    return f"{n_bytes / _GIB:.{1 if n_bytes >= _GIB else 2}f}"


def _code(text: str) -> str:
    """Mark text as code, between more backticks than stand together anywhere in it."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    # The blanks are Markdown's own, for text that begins or ends with a backtick.
    return f"{'`' * (longest + 1)} {text} {'`' * (longest + 1)}"


def _kinds(run: Run) -> str:
    kinds = dict.fromkeys(model["weights"] for model in run.about["models"])
    return "; ".join(wording.WEIGHTS[kind] for kind in kinds)


def captions(results: Results) -> dict[str, dict[str, str]]:
    """Write name, caption and alternative text of the figure and the tables, as `Page.figure` and `Page.table` take them."""
    run, scores = results.greedy, results.scores
    facts = [loading.standin_facts(name) for name in listing.shipped()]
    trained = sorted({fact["trained_tokens"] for fact in facts})
    seeds = sorted({fact["recipe"]["seed"] for fact in facts})
    machines = sorted({f"{f['machine']['processor']}, torch {f['versions']['torch']}" for f in facts})
    training = (
        f"Stand-ins trained for this book, one run each (seed {_several(seeds)}), "
        f"{_several([f'{n / 1e6:.1f}' for n in trained])} million tokens, CPU {_several(machines)}"
    )
    held_out = facts[0]["held_out"]
    text = f"{held_out['files']} held-out files of Python {held_out['python']}'s standard library, {held_out['bytes']:,} bytes"
    settings = run.about["settings"]
    dtype = wording.DTYPES[settings["dtype"]]
    said = {
        "tab-models-documents": (
            "The models of the documents: the true architectures, from their public configurations. No weights were loaded.",
            "",
        ),
        "tab-models-memory": (
            "GiB that the true architectures' weights take, counted from their shapes. 8-bit and 4-bit: bitsandbytes, with "
            "embeddings and output head in 16 bits.",
            "",
        ),
        "tab-models-stand-ins": (f"Shapes of the {len(scores)} stand-ins, which ship with the book in bf16.", ""),
        "tab-models-bits": (
            f"Bits per byte on {text}; bf16 weights, fp32 arithmetic. RoBERTa's is a pseudo-likelihood of masked tokens. "
            f"{training}.",
            "",
        ),
        "fig-models-training": (
            f"{_training_found(scores)} Training loss in bits per byte (running mean), and the held-out score (dots). {training}; "
            "bf16 arithmetic with fp32 weights. Dotted: what needs no network, on the held-out text. RoBERTa's "
            "loss is of masked tokens, which see both sides.",
            f"Curves of the loss of {len(scores)} stand-ins against the tokens seen, a dot each for the held-out score at the "
            "end, and three horizontal lines for unigram, bigram and xz.",
        ),
        "tab-models-samples": (
            f"The first choice of every model, {settings['n_new_tokens']} tokens after "
            f"{_code(tables.on_one_line(settings['prompt']))}, one run each; ⏎ is a line break. "
            "Probability: that the model gives a token of its own, geometric mean. "
            f"Weights: {_kinds(run)}; {dtype}; {wording.machine(run)}.",
            "",
        ),
    }
    return wording.published(said)


def _training_found(scores: pd.DataFrame) -> str:
    """Say what the causal stand-ins reach on held-out text, and how many of them are below xz."""
    causal = scores[scores["objective"] == "next token"]
    below = int((causal["model"] < causal["xz_9"]).sum())
    return (
        f"On held-out text the causal stand-ins reach {causal['model'].min():.2f} to {causal['model'].max():.2f} bits per byte; "
        f"{below} of {len(causal)} need fewer than the {causal['xz_9'].iloc[0]:.2f} of `xz -9` alone."
    )


def _several(values: list) -> str:
    return " and ".join(map(str, values)) if len(values) < 3 else ", ".join(map(str, values))


def bits_table(scores: pd.DataFrame) -> pd.DataFrame:
    """Cut the stand-ins' scores out of their table, under the names that a reader knows."""
    names = {"model": "stand-in", "bigram_backoff": "bigram, backoff", "xz_9": "xz -9"}
    return scores[["family", "objective", "tokenizer", "model", "unigram", "bigram_backoff", "xz_9"]].rename(
        columns=names
    )


def documents_table(architectures: pd.DataFrame) -> pd.DataFrame:
    """Cut what a hub id itself says out of the table of architectures."""
    return architectures[["hub id", "used by", "parameters", "layers", "width", "heads", "KV heads", "vocabulary"]]


def shape_table(scores: pd.DataFrame) -> pd.DataFrame:
    """Cut the stand-ins' shapes out of their table."""
    return scores.drop(columns=["model", "unigram", "bigram_backoff", "xz_9", "objective"])


def _missing(families: list[str], there: list[str]) -> str:
    missing = [family for family in families if family not in there]
    return f"{_several(missing)} has none in this copy of the book" if missing else "every family has one"


def numbers(results: Results) -> dict[str, str]:
    """Write every number that the page's prose quotes, by its glue key."""
    scores, memory = results.scores, results.memory
    causal = scores[scores["objective"] == "next token"]
    of_7b = memory[memory["fp32"] > 20 * _GIB]
    span = {
        name: f"{of_7b[name].min() / _GIB:.0f} to {of_7b[name].max() / _GIB:.0f} GiB" for name, _, _ in tables.STORED
    }
    return {
        "families": str(len(scores)),
        "missing": _missing([family.title for family in registry.families().values()], list(scores["family"])),
        "sizes": f"{scores['parameters'].min() / 1e6:.1f} to {scores['parameters'].max() / 1e6:.1f} million",
        "best_family": str(causal.loc[causal["model"].idxmin(), "family"]),
        "worst_family": str(causal.loc[causal["model"].idxmax(), "family"]),
        "below_bigram": f"{(1 - causal['model'] / causal['bigram_backoff']).min():.0%}",
        "seven_fp32": span["fp32"],
        "seven_16": span["16-bit"],
        "seven_4": span["4-bit"],
    }
