"""A small GPT with learned positions, as the thread describes its own: written anew, with the cache outside the layers.

Pre-norm blocks, ReLU between the two halves of the feed-forward part, no bias in the three projections of attention,
and a table of positions longer than the block, of which training sees a random stretch.  A layer keeps no state: what
it may remember is handed to it as a memory, so that every scheme of the thread is another memory around the same
weights.

Shapes: ids ``(batch_size, seq_len)``; keys and values ``(batch_size, heads, seq_len, head_dim)``.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from kvreport.chapters.from_scratch.gpt.memory import RollingMemory


@dataclass(frozen=True)
class Shape:
    """Size of a model.

    Attributes
    ----------
    vocabulary_size : int
        Characters, the one for unknown characters included.
    layers, width, heads : int
        Of the stack.
    block : int
        Characters that training sees at once; no attention reaches further back.
    table : int
        Positions that have a vector, more than `block` where training draws a random offset.
    dropout : float
        Share of activations dropped in training.
    """

    vocabulary_size: int
    layers: int
    width: int
    heads: int
    block: int
    table: int
    dropout: float = 0.0


class Layer(nn.Module):
    """Attention and feed-forward part, each after a norm and added to the stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_attention = nn.LayerNorm(shape.width)
        self.projections = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.mix = nn.Linear(shape.width, shape.width)
        self.norm_feed = nn.LayerNorm(shape.width)
        self.widen = nn.Linear(shape.width, 4 * shape.width)
        self.narrow = nn.Linear(4 * shape.width, shape.width)
        self.drop = nn.Dropout(shape.dropout)

    def forward(self, stream: torch.Tensor, layer: int, memory: RollingMemory | None) -> torch.Tensor:
        """Run the layer; `memory` None means that what is fed is the whole text."""
        batch_size, seq_len, width = stream.shape
        projected = self.projections(self.norm_attention(stream))
        queries, keys, values = projected.view(batch_size, seq_len, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if memory is None:
            mixed = functional.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, dropout_p=self.drop.p if self.training else 0.0
            )
        else:
            keys, values, mask = memory.take(layer, keys, values)
            mixed = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        stream = stream + self.drop(self.mix(mixed.transpose(1, 2).reshape(batch_size, seq_len, width)))
        return stream + self.drop(self.narrow(functional.relu(self.widen(self.norm_feed(stream)))))


class ScratchGPT(nn.Module):
    """The model.

    Parameters
    ----------
    shape : Shape
        Its size.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.characters = nn.Embedding(shape.vocabulary_size, shape.width)
        self.positions = nn.Embedding(shape.table, shape.width)
        # torch's own start, a standard deviation of 1, drowns the first thousand steps of a small model in noise.
        for table in (self.characters, self.positions):
            nn.init.normal_(table.weight, std=0.1)
        self.layers = nn.ModuleList([Layer(shape) for _ in range(shape.layers)])
        self.norm = nn.LayerNorm(shape.width)
        self.scores = nn.Linear(shape.width, shape.vocabulary_size)

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self.scores.weight.device

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, memory: RollingMemory | None = None, last_only: bool = False
    ) -> torch.Tensor:
        """Score the character after each one that is fed."""
        stream = self.characters(ids) + self.positions(positions)
        for number, layer in enumerate(self.layers):
            stream = layer(stream, number, memory)
        return self.scores(self.norm(stream[:, -1:] if last_only else stream))
