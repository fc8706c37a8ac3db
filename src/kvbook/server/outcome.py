"""What a check of a server found: for programs as JSON with a schema, for people as a dozen lines."""

from typing import Literal

from pydantic import Field

from kvbook.server.comparisons import CONTROLS, REUSE
from kvbook.settings import Strict

Verdict = Literal["exact", "rounding", "fault", "cannot tell"]
STATUS: dict[Verdict, int] = {"exact": 0, "rounding": 0, "fault": 1, "cannot tell": 2}


class Compared(Strict):
    """Two answers to one prompt, compared token by token."""

    kind: Literal[CONTROLS + REUSE] = Field(description="The first three are controls, which reuse nothing.")
    prefix_tokens: int
    cached_tokens: int | None = Field(description="As the server counts them for the second answer.")
    compared: int = Field(description="Log-probabilities that both answers tell.")
    largest: float = Field(description="Largest |Δ log p|.")
    mean: float = Field(description="Mean |Δ log p|.")
    verdict: Verdict | None = Field(description="Null for controls.")


class Shortest(Strict):
    """The shortest requests that show the fault; the last is answered otherwise where nothing is reused."""

    kind: str
    prefix_tokens: int
    prompts: list[str]


class Outcome(Strict):
    """What a check of a server found."""

    schema_version: Literal[1] = 1
    address: str
    model: str
    verdict: Verdict
    status: Literal[0, 1, 2] = Field(description="Exit status: 0 exact or rounding, 1 fault, 2 cannot tell.")
    why: str
    cold: str = Field(description="How requests were asked to reuse nothing.")
    reused: int | None = Field(description="Most tokens that one request reused; null where the server does not say.")
    without_reuse: float | None = Field(description="Largest |Δ log p| between requests that reuse nothing.")
    comparisons: list[Compared]
    shortest: Shortest | None
    remedy: str
    not_tried: list[str]
    requests: int
    seconds: float

    @property
    def lines(self) -> list[str]:
        """Say it in about a dozen lines."""
        told = "the server does not say how much" if self.reused is None else f"up to {self.reused} tokens"
        compared = sum(each.compared for each in self.comparisons)
        asked = "request" if self.requests == 1 else "requests"
        rows = [
            ("server", f"{self.address}, {self.model}: {self.requests} {asked} in {self.seconds:.0f} s"),
            ("reuse", f"{told}; requests without reuse: {self.cold}"),
            ("compared", f"{compared} log-probabilities in {len(self.comparisons)} pairs of answers"),
            ("verdict", f"{self.verdict}: {self.why}"),
            ("controls", self._by_kind(CONTROLS)), ("reused", self._by_kind(REUSE)),
        ]
        if self.shortest:
            before = len(self.shortest.prompts) - 1
            after = f"after {before} other request{'s' * (before != 1)}; --json has the prompts"
            prefix = f"a prefix of {self.shortest.prefix_tokens} tokens"
            rows.append(("shortest", f"{self.shortest.kind}, {prefix}, {after}"))
        rows += [("remedy", self.remedy), ("not tried", "; ".join(self.not_tried))]
        return [f"{name:9s} {text}" for name, text in rows if text]

    def _by_kind(self, kinds: tuple[str, ...]) -> str:
        """Write the largest difference of each kind, over all lengths."""
        most = {kind: [each.largest for each in self.comparisons if each.kind == kind] for kind in kinds}
        told = (f"{kind} {max(found):.2g}" for kind, found in most.items() if found)
        return f"largest |Δ log p|: {line}" if (line := ", ".join(told)) else ""
