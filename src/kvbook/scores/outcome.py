"""What the comparison of two tables found: for programs as JSON with a schema, for people as lines."""

from typing import Literal

import numpy as np
from pydantic import Field

from kvbook.scores import measures, signatures, tables, verdict
from kvbook.settings import Strict

STATUS: dict[verdict.Kind, int] = {"exact": 0, "rounding": 0, "fault": 1, "undecided": 2}
_SHOWN = 5
_NO_FAULT = "none needed; truncated importance sampling, or a fp32 trainer and LM head, make what is left smaller"
_UNKNOWN = "none of the signatures fits: compare weights first, then one prompt in fp32 layer by layer"
_UNDECIDED = "dump a control: one full pass in another batch size, in the rollout's dtype, without a cache"


class Cause(Strict):
    """A signature that is seen."""

    key: str
    name: str
    saw: str
    remedy: str
    not_apart_from: str = Field(description="What gives the same pattern.")


class Token(Strict):
    """A token whose gap is larger than rounding's."""

    id: str
    position: int
    token: str
    rollout: float
    trainer: float


class Outcome(Strict):
    """What the comparison found."""

    schema_version: Literal[1] = tables.SCHEMA_VERSION
    verdict: verdict.Kind
    status: Literal[0, 1, 2] = Field(description="Exit status: 0 exact or rounding, 1 fault, 2 not decided.")
    why: str = Field(description="The part of the rule that decided, with its numbers.")
    tokens: int
    sequences: int
    controls: int
    left_out: int = Field(description="Rows of B that A lacks; they are not compared.")
    measures: dict[str, float | None] = Field(description="By name, in nats or as shares; null where infinite.")
    control_mean_abs: float | None = Field(description="Mean gap of the controls; null without one.")
    control_largest: float | None
    causes: list[Cause] = Field(description="Signatures that are seen, the most specific first.")
    suspicious: list[Token] = Field(description="The first tokens with a gap beyond rounding.")
    n_suspicious: int
    remedy: str

    @property
    def lines(self) -> list[str]:
        """Say it in a dozen lines or two."""
        many, more = ("s" * (number != 1) for number in (self.sequences, self.controls))
        of = {name: float("inf") if value is None else value for name, value in self.measures.items()}
        low, high = 1 - measures.PPO_CLIP, 1 + measures.PPO_CLIP
        rows = [
            ("tokens", f"{self.tokens:,} of {self.sequences:,} sequence{many}, {self.controls} control{more}"),
            ("verdict", f"{self.verdict}: {self.why}"),
            ("|Δ log p|", f"mean {of['mean_abs']:.2e}, largest {of['largest']:.2e}; mean exp {of['mean_exp_abs']:.5f}"),
            ("KL", f"k1 {of['k1']:.2e}, k2 {of['k2']:.2e}, k3 {of['k3']:.2e}; χ² {of['chi_squared']:.2e}"),
            ("ratio", f"{of['outside_narrow']:.2%} of tokens outside [0.9, 1.1], "
                      f"{of['outside_ppo_clip']:.2%} outside [{low:g}, {high:g}]"),
            ("sequences", f"ratios {of['sequence_ratio_lowest']:.3g} to {of['sequence_ratio_highest']:.3g}, median "
                          f"{of['sequence_ratio_median']:.3g}; effective {of['sequence_effective_share']:.1%}"),
        ]
        if self.control_mean_abs is not None:
            rows.append(("controls", f"mean {self.control_mean_abs:.2e}, largest {self.control_largest:.2e}"))
        if self.left_out:
            rows.append(("left out", f"{self.left_out:,} rows of B that A lacks"))
        for number, cause in enumerate(self.causes):
            rows += [("also fits" if number else "cause", f"{cause.name}: {cause.saw}"),
                     ("", f"cannot be told apart from: {cause.not_apart_from}")]
        rows += [("token", f"id {token.id}, position {token.position}, token {token.token}: "
                           f"A {token.rollout:.4f}, B {token.trainer:.4f}") for token in self.suspicious]
        if self.n_suspicious > len(self.suspicious):
            rows.append(("", f"and {self.n_suspicious - len(self.suspicious):,} more"))
        return [f"{name:9s} {text}" for name, text in [*rows, ("remedy", self.remedy)]]

    def __str__(self) -> str:
        return "\n".join(self.lines)


def of(joined: tables.Joined) -> Outcome:
    """Judge joined tables, and name what is seen."""
    found = verdict.gaps(joined)
    kind, why = verdict.judge(found)
    # The values of other tokens say nothing.
    other = bool((joined.token != joined.other_token).any())
    seen = signatures.named(found) if other or kind in ("fault", "undecided") else []
    if other:
        seen = seen[:1]
    plain = next((each for each in seen if each[0].decides(found)), None)
    if plain and (kind == "undecided" or other):
        kind, why = "fault", f"{plain[0].name}, which rounding cannot look like"
    seen = seen if kind == "fault" else []
    large = (found.size > found.limit) | (joined.token != joined.other_token)
    beyond = np.flatnonzero(large) if kind == "fault" else []
    numbers = measures.summary(found.log_ratio, joined.sequence)
    remedy = {"fault": seen[0][0].remedy if seen else _UNKNOWN, "undecided": _UNDECIDED}.get(kind, _NO_FAULT)
    return Outcome(
        verdict=kind, status=STATUS[kind], why=why, tokens=len(found.size), sequences=found.n,
        controls=len(joined.controls), left_out=joined.left_out,
        measures={name: value if np.isfinite(value) else None for name, value in numbers.items()},
        control_mean_abs=None if found.controls is None else float(np.abs(found.controls).mean()),
        control_largest=found.largest_of_controls,
        causes=[Cause(key=each.key, name=each.name, saw=saw, remedy=each.remedy, not_apart_from=each.not_apart_from)
                for each, saw in seen],
        suspicious=[Token(id=str(joined.ids[joined.sequence[at]]), position=int(joined.position[at]),
                          token=str(joined.token[at]), rollout=float(joined.rollout[at]),
                          trainer=float(joined.trainer[at])) for at in beyond[:_SHOWN]],
        n_suspicious=len(beyond), remedy=remedy,
    )
