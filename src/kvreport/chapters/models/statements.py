"""The numbers and statements of the page on the models."""

from collections.abc import Callable

from kvbook.models import loading, sources
from kvreport.chapters.models import results, tables
from kvreport.chapters.models.results import Results
from kvreport.publishing.judging import Measured, facts
from kvreport.publishing.rules import Bound, Quantity, every
from kvreport.publishing.statements import Statement

EXPERIMENTS = results.EXPERIMENTS
_GIB = 2**30
_BITS = Quantity("bits per byte on held-out text over those of the bigram model", "", "family", census="all families")
_LESS = Bound(0.75, "ours", "a quarter fewer bits", "ratio")


def _over_bigram(found: Results) -> list[Measured]:
    causal = found.scores[found.scores["objective"] == "next token"].set_index("family")
    return facts(causal["model"] / causal["bigram_backoff"])


STATEMENTS: dict[str, Statement[Results]] = {
    "stand-ins-have-learnt": Statement(every(_BITS, "below", _LESS), _over_bigram, headline=True),
}


def _of_7b(stored: str) -> Callable[[Results], str]:
    """Write what the weights of the larger models take."""

    def give(found: Results) -> str:
        large = found.memory.loc[found.memory["fp32"] > 20 * _GIB, stored] / _GIB
        return f"{large.min():.0f} to {large.max():.0f} GiB"

    return give


def _held_out(what: str, form: str) -> Callable[[Results], str]:
    return lambda _: form.format(loading.standin_facts(sources.families_with("stand-in")[0])["held_out"][what])


def _tokens(_: Results) -> str:
    counts = {loading.standin_facts(name)["trained_tokens"] for name in sources.families_with("stand-in")}
    return " and ".join(f"{count / 1e6:.1f}" for count in sorted(counts))


NUMBERS: dict[str, Callable[[Results], str]] = {
    "families": lambda found: str(len(found.scores)),
    "sizes": lambda found: (
        f"{found.scores['parameters'].min() / 1e6:.1f} to {found.scores['parameters'].max() / 1e6:.1f} million"
    ),
    "seven_fp32": _of_7b("fp32"),
    "seven_16": _of_7b("16-bit"),
    "seven_4": _of_7b("4-bit"),
    "held_out_files": _held_out("files", "{}"),
    "trained_tokens": _tokens,
    "n_new_tokens": lambda found: str(found.greedy.about["settings"]["n_new_tokens"]),
    "prompt": lambda found: tables.as_code(tables.on_one_line(found.greedy.about["settings"]["prompt"])),
}
