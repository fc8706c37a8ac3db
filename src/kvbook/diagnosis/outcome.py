"""What a check found: for programs as JSON with a schema, for people as a dozen lines."""

import json
from typing import Final, Literal

from pydantic import Field, ValidationError

from kvbook import UserError, refusing
from kvbook.diagnosis.verdict import Kind, count
from kvbook.settings import Strict

# Of what `--json` prints.
SCHEMA: Final = 2
# Exit statuses.
SOUND, BUG, COULD_NOT = 0, 1, 2
# Why a class is not judged after padding: no cache is at fault there.
PADDING_COUNTS: Final = "the full pass itself changes with padding"
# What a check says where the cache is meant to keep fewer bits, and its drift is theirs.
INTENDED: Final = "intended storage precision"
Verdict = Literal[Kind, "intended storage precision"]
STATUS: dict[Verdict, int] = {"exact": SOUND, "rounding": SOUND, INTENDED: SOUND, "bug": BUG, "undecided": COULD_NOT}


class Drift(Strict):
    """How far the cached pass is from the full pass in one dtype."""

    dtype: str
    mean: float | None = Field(description="Mean over texts, over the spread of the logits; null where infinite.")
    roundoffs: float | None = Field(description="Largest over texts, in unit roundoffs; null where infinite.")


class Slope(Strict):
    """Slope of log drift on log roundoff with its 95 % interval: rounding has 1, a bug has 0."""

    value: float
    low: float
    high: float


class PathFound(Strict):
    """One execution path, compared with the full pass."""

    path: str
    verdict: Literal[Verdict, "not supported"]
    detail: str = Field(description="The number that decides, or why the path is not supported.")


class Outcome(Strict):
    """What a check found."""

    schema_version: Literal[2] = SCHEMA
    model: str
    weights: str = Field(description="Where the weights come from: hub, local, gguf, package, stand-in or random.")
    layers: int
    parameters: int
    device: str
    threads: int
    texts: int
    tokens: int = Field(description="Tokens of the longest text.")
    verdict: Verdict
    status: Literal[0, 1, 2] = Field(
        description="Exit status: 0 exact, rounding or intended storage precision, 1 bug, 2 not decided."
    )
    why: str = Field(description="The rule that decided, with its number.")
    path: str = Field(description="The execution path on which the verdict rests: the worst one.")
    drift: list[Drift] = Field(description="By dtype, the finest first.")
    slope: Slope | None
    left_out: dict[str, str] = Field(description="Dtypes that could not be used, and why.")
    first_suspicious_layer: int | None = Field(
        description="0 is the embedding, l is layer l; null without a bug, or where all hidden states agree."
    )
    located: bool = Field(description="Whether the hidden states were compared on the path of the verdict.")
    paths: list[PathFound]
    wrong_pass: str | None = Field(None, description="Of a bug: which pass is wrong, or that nothing tells, and why.")
    cause: str | None = Field(description="Where the check knows the cause of a bug.")
    remedy: str
    not_tried: list[str]
    seconds: float
    versions: dict[str, str]

    @property
    def lines(self) -> list[str]:
        """Say it in about a dozen lines."""
        place = f"{self.device} with {self.threads} thread{'s' * (self.threads != 1)}"
        millions, layers = self.parameters / 1e6, f"layer{'s' * (self.layers != 1)}"
        rows = [
            ("model", f"{self.model}, {self.weights} weights: {self.layers} {layers}, {millions:,.1f} M parameters"),
            ("texts", f"{self.texts} of up to {self.tokens} tokens, on {place}, {self.seconds:.0f} s"),
            ("verdict", f"{self.verdict}: {self.why}"),
            ("drift", f"of the last token's logits over their spread, full pass against cache ({self.path})"),
            *(("", _numbers(drift)) for drift in self.drift),
            *(("", f"{dtype:9s} left out: {why}") for dtype, why in self.left_out.items()),
        ]
        if self.slope and "slope" not in self.why:
            said = "{value:.2f} [{low:.2f}, {high:.2f}] on log-log axes: rounding has 1, a bug has 0"
            rows.append(("slope", said.format(**self.slope.model_dump())))
        if self.verdict == "bug" and self.located:
            named = {None: "none, for the hidden states agree: the LM head", 0: "the embedding, before layer 1,"}
            layer = self.first_suspicious_layer
            place = named.get(layer, f"layer {layer} of {self.layers}")
            rows.append(("layer", f"{place} is the first beyond rounding"))
        # In line with one another where there are many; a word each where there are few.
        if len(self.paths) > _FEW:
            width = max(len(found.path) for found in self.paths)
            rows += [("path", f"{each.path:{width}s}  {each.verdict}: {_short(each.detail)}") for each in self.paths]
        else:
            rows.append(("paths", "; ".join(f"{found.path}: {found.verdict}" for found in self.paths)))
        rows += [("passes", self.wrong_pass), ("cause", self.cause), ("remedy", self.remedy)]
        rows.append(("not tried", "; ".join(self.not_tried)))
        return [f"{name:9s} {text}" for name, text in rows if text]


def read(text: str, name: str) -> Outcome:
    """Read what ``--json`` printed.

    Raises
    ------
    UserError
        When it is of another schema version, or none of ours.
    """
    with refusing(f"{name} is no report of `kvbook check --json`: name one", ValueError, KeyError, TypeError):
        told = json.loads(text)
        version = told["schema_version"]
    # Version 1 lacks a verdict that 2 has, and nothing else.
    if version not in (1, SCHEMA):
        known = f"and this kvbook reads 1 to {SCHEMA}: take the kvbook that wrote it"
        raise UserError(f"{name} has schema version {version}, {known}")
    with refusing(lambda bad: f"{name} is damaged ({bad.errors()[0]['loc'][0]}): run the check again", ValidationError):
        return Outcome.model_validate(told | {"schema_version": SCHEMA})


_FEW = 3


def _short(why: str) -> str:
    """Leave out the limit, which the verdict's own line says."""
    return why.partition(", no more than ")[0].partition(", more than ")[0]


def _numbers(drift: Drift) -> str:
    mean, most = (float("inf") if number is None else number for number in (drift.mean, drift.roundoffs))
    return f"{drift.dtype:9s} {mean:8.1e}   largest {count(most):>8s} roundoffs"
