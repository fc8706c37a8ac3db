"""Two streams of next-token logits, compared token by token as they come.

Nothing of the size of the vocabulary is kept: of each pair of rows a handful of numbers stays, from which every
statistic of llama.cpp's Kullback-Leibler tool (mean and percentiles of divergence and of the change in the true token's
probability, share of equal first choices, perplexity both ways) follows without a second pass.

How small differences are kept
------------------------------
With p the reference's probabilities, d the difference of logits and c = d - E_p[d], the divergence of the other
distribution from the reference is log E_p[exp(c)], and the true token's log probability changes by c less that.  Both
follow from d, which is as good as exact, so that a divergence of 1e-13 nats comes out right in 32 bits, where two
logarithms of softmax would leave nothing but their rounding.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch

# Below this, exp(c) - 1 - c by its series: the subtraction would cancel more digits than the series leaves out.
_SMALL = 0.03
# Logits that are compared at once: what is computed on the way is as large as they are, several times over, and is
# fastest where it stays in a processor's cache.
_AT_ONCE = 1 << 20
# Beyond this, exp(c) times a tiny probability leaves the range in which 32 bits are to be trusted.
_LARGE = 30.0


@dataclass(frozen=True)
class Scores:
    """What is kept of each pair of rows.

    Attributes
    ----------
    nll : Tensor, shape (rows,)
        Negative log likelihood of the true token in the reference, nats.
    dlogp : Tensor, shape (rows,)
        Change of the true token's log probability, nats; positive where the other predicts better.
    kl : Tensor, shape (rows,)
        Kullback-Leibler divergence of the other distribution from the reference, nats.
    flip : Tensor, shape (rows,)
        1 where the first choice is another token, else 0.
    margin : Tensor, shape (rows,)
        Reference logit of its first choice minus that of its second.
    shift : Tensor, shape (rows,)
        By how much the other's logits change that margin; below ``-margin`` the second overtakes the first.
    ulp : Tensor, shape (rows,)
        Distance between representable numbers at the reference's largest logit.
    """

    nll: torch.Tensor
    dlogp: torch.Tensor
    kl: torch.Tensor
    flip: torch.Tensor
    margin: torch.Tensor
    shift: torch.Tensor
    ulp: torch.Tensor

    def rows(self) -> list[dict[str, float]]:
        """Return one mapping a row of logits, with six significant digits, which is more than any figure shows."""
        columns = {name: values.double().tolist() for name, values in vars(self).items()}
        rows = zip(*columns.values(), strict=True)
        return [{name: float(f"{x:.6g}") for name, x in zip(columns, row, strict=True)} for row in rows]


def compare(reference: torch.Tensor, other: torch.Tensor, targets: torch.Tensor) -> Scores:
    """Compare rows of logits."""
    if reference.shape != other.shape or targets.shape != reference.shape[:1]:
        raise ValueError(f"{tuple(reference.shape)} against {tuple(other.shape)} for {tuple(targets.shape)} targets")
    rows = max(2, _AT_ONCE // reference.shape[-1])
    parts = [_compare(*part) for part in zip(*(x.split(rows) for x in (reference, other, targets)), strict=True)]
    return Scores(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Scores)))


def _compare(reference: torch.Tensor, other: torch.Tensor, targets: torch.Tensor) -> Scores:
    ulp = spacing(reference.amax(-1))
    exact = torch.float64 if reference.dtype == torch.float64 else torch.float32
    flip = reference.argmax(-1) != other.argmax(-1)
    first, second = reference.to(exact), other.to(exact)
    top = first.topk(2)
    logp = torch.log_softmax(first, -1)
    p = logp.exp()
    difference = second - first
    c = difference - (p * difference).sum(-1, keepdim=True)
    # E_p[c] is 0 but for rounding, which is carried along so that it cancels.
    rest = (p * c).sum(-1)
    grown = torch.log1p((p * _exp_less_line(c)).sum(-1) + rest)
    at = targets[:, None]
    kl, dlogp = grown - rest, c.gather(1, at)[:, 0] - grown
    if (far := c.abs().amax(-1) > _LARGE).any():
        one, two = (torch.log_softmax(x[far].double(), -1) for x in (first, second))
        kl[far] = (one.exp() * (one - two)).sum(-1).to(exact)
        dlogp[far] = (two - one).gather(1, at[far])[:, 0].to(exact)
    chosen = difference.gather(1, top.indices)
    return Scores(
        nll=-logp.gather(1, at)[:, 0], dlogp=dlogp,
        # What is left of rounding can put equal distributions a hair below zero.
        kl=kl.clamp(min=0), flip=flip.to(exact),
        margin=top.values[:, 0] - top.values[:, 1], shift=chosen[:, 0] - chosen[:, 1], ulp=ulp.to(exact),
    )


def _exp_less_line(c: torch.Tensor) -> torch.Tensor:
    """Return exp(c) - 1 - c, which near zero is c squared over two."""
    series = c * c / 2 * (1 + c / 3 * (1 + c / 4 * (1 + c / 5)))
    return torch.where(c.abs() < _SMALL, series, torch.expm1(c.clamp(max=_LARGE)) - c)


def spacing(values: torch.Tensor) -> torch.Tensor:
    """Return the distance from each value to the next larger number of its dtype, by its exponent (one ulp)."""
    info = torch.finfo(values.dtype)
    size = values.double().abs().clamp(min=info.tiny)
    # frexp writes x as m * 2 ** e with m in [0.5, 1): the leading bit is worth 2 ** (e - 1).
    return torch.ldexp(torch.full_like(size, info.eps), torch.frexp(size).exponent - 1)


def noisy(logits: torch.Tensor, seed: int, texts: Iterable[int], step: int) -> torch.Tensor:
    """Add to each text's row of logits its noise of a step; the largest number is then a sample at temperature 1."""
    noise = torch.stack([gumbel(seed, text, step, logits.shape[-1]) for text in texts])
    # 16-bit logits plus the noise have to be told apart in more than 16 bits.
    return logits.float() + noise.to(logits.device)


def gumbel(seed: int, text: int, step: int, size: int) -> torch.Tensor:
    """Draw the noise under which the largest of logit + noise is a sample from softmax (Gumbel-max).

    It depends on seed, text and step alone, so two paths that use it draw with common random numbers: they choose the
    same token unless their distributions, and not their luck, differ.
    """
    # Odd multipliers keep neighbouring names apart; the generator mixes the rest.
    generator = torch.Generator().manual_seed((seed * 1_000_003 + text) * 1_000_003 + step)
    uniform = torch.rand(size, generator=generator, dtype=torch.float64)
    # 0 can be drawn, and its logarithm is no number to go on with.
    return -torch.log(-torch.log(uniform.clamp(1e-300, 1 - 1e-16))).float()
