"""A step's budget: every millisecond is counted once, to the innermost part that ran."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from kvreport.benchmarks import budget


@pytest.fixture
def clock(monkeypatch):
    """Replace the clock by one that modules move on."""
    made = SimpleNamespace(now=0.0)
    monkeypatch.setattr(budget.time, "perf_counter", lambda: made.now)
    return made


class Takes(nn.Module):
    """Takes some seconds of its own, then runs what is inside."""

    def __init__(self, clock, seconds, inside=None):
        super().__init__()
        self.clock, self.seconds, self.inside = clock, seconds, inside

    def forward(self, x):
        self.clock.now += self.seconds
        return x if self.inside is None else self.inside(x)


class SlowLinear(Takes):
    """A product."""


class SlowAttention(Takes):
    """Attention."""


class Odd(Takes):
    """No part of its own."""


def test_each_part_has_its_own_time_and_together_they_are_the_step(clock):
    model = Takes(clock, 1, Odd(clock, 2, SlowAttention(clock, 4, SlowLinear(clock, 8))))
    with budget.kept(model) as seconds:
        model(torch.zeros(1))
        model(torch.zeros(1))
    model(torch.zeros(1))
    assert seconds == {"products": 16, "attention besides its products": 8, "the rest": 6}
