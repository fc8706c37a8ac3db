"""What an experiment on a model will take, in memory and time, said before it starts.

The time comes from the matrix products alone, tried here and now at the model's own widths for a second or so: a guess
that tells seconds from hours, too low where passes are so short that what stands around the products counts.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from kvbook import UserError
from kvbook.measuring import timing
from kvbook.measuring.memory import kv_bytes_per_token
from kvbook.models import loading, placement, streamed

# Weights of this many numbers are multiplied once through: more than a processor's caches hold.
_TRIED = 16_000_000
# What Python, torch and transformers take themselves.
_LIBRARIES = 0.6e9
# Bytes of a number in a checkpoint of 16 bits.
_SOURCE = 2


@dataclass(frozen=True)
class Cost:
    """A prediction.

    Attributes
    ----------
    n_bytes : float
        At the peak: the weights in the largest dtype, keys and values, logits, and the libraries.
    seconds : float
        Of all passes, loading apart.
    """

    n_bytes: float
    seconds: float

    def line(self) -> str:
        """Say it in one line, minutes rounded up."""
        return f"about {self.n_bytes / 1e9:.1f} GB and {max(1, -(-self.seconds // 60)):.0f} min"


def predict(
    config: PretrainedConfig, dtypes: Iterable[str], n_tokens: int, *, n_passes: float, n_steps: float = 0,
    device: str = "cpu", n_copies: int = 1,
) -> Cost:
    """Predict what passes of a causal model take, one dtype after the other.

    Parameters
    ----------
    config : PretrainedConfig
        Of the model; see `loading.config_of`.
    dtypes : iterable of str
        In each of which everything runs once.
    n_tokens : int
        Tokens of a pass.
    n_passes : float
        How many passes of so many tokens, in each dtype.
    n_steps : float
        How many further passes of one token.
    device : str
        Where.
    n_copies : int
        How many copies of the weights are held at a time.

    Raises
    ------
    UserError
        For a device or dtype that is not there.
    """
    place = placement.device_of(device)
    n_bytes = seconds = 0.0
    for name in dtypes:
        dtype = placement.dtype_on(name, place)
        weights = n_copies * loading.parameter_count(config) * dtype.itemsize
        logits = 2 * n_tokens * config.get_text_config().vocab_size * max(dtype.itemsize, 4)
        n_bytes = max(n_bytes, weights + logits + kv_bytes_per_token(config, dtype) * n_tokens)
        seconds += n_passes * pass_seconds(config, dtype, n_tokens, place)
        if n_steps:
            seconds += n_steps * pass_seconds(config, dtype, 1, place)
    return Cost(n_bytes + _LIBRARIES, seconds)


def streamed_bytes(config: PretrainedConfig, dtypes: Iterable[str], n_tokens: int) -> float:
    """Predict the peak of a check whose weights are streamed: the largest part, and what every call has computed.

    Parameters
    ----------
    config : PretrainedConfig
        Of the model.
    dtypes : iterable of str
        Measured at once.
    n_tokens : int
        Of all texts.
    """
    text, sizes = config.get_text_config(), [getattr(torch, name).itemsize for name in dtypes]
    parts = streamed.parts_of(loading.shape(config)).values()
    largest = max(sum(value.numel() for value in part.parameters()) for part in parts)
    # As it is read or drawn, and in the widest dtype.
    weights = largest * (_SOURCE + max(sizes))
    # A full pass, token by token, and in two parts: what each layer gave, and keys and values.
    values = n_tokens * text.num_hidden_layers * (3 * text.hidden_size) * sum(sizes)
    # Some recurrent models have no heads.
    of_a_token = kv_bytes_per_token(config, torch.int8) if hasattr(text, "num_attention_heads") else 0
    cached = 2 * n_tokens * of_a_token * sum(sizes)
    return weights + values + cached + 3 * n_tokens * text.vocab_size * max(*sizes, 4) + _LIBRARIES


def check_streamed(config: PretrainedConfig, dtypes: list[str], n_tokens: int, memory: float) -> None:
    """Refuse dtypes, the last of them, in which a streamed model takes too much.

    Parameters
    ----------
    config, dtypes, n_tokens
        As for `streamed_bytes`.
    memory : float
        How many bytes there are.

    Raises
    ------
    UserError
        With the bytes that it takes.
    """
    if (needed := streamed_bytes(config, dtypes, n_tokens)) > memory:
        takes = f"the largest part in {dtypes[-1]} takes about {needed / 1e9:.1f} GB"
        raise UserError(f"{takes}, more than memory allows: leave {dtypes[-1]} out, or allow more")


def operations(config: PretrainedConfig, n_tokens: int) -> float:
    """Count the multiplications of a pass: each token's with every weight, and each pair of tokens' in every layer.

    Parameters
    ----------
    config : PretrainedConfig
        Of the model.
    n_tokens : int
        Tokens of the pass.
    """
    text, blank = config.get_text_config(), loading.shape(config)
    # Tables are looked up; the head, tied to one or not, is multiplied.
    tables = {id(module.weight) for module in blank.modules() if isinstance(module, torch.nn.Embedding)}
    products = sum(p.numel() for p in blank.parameters() if id(p) not in tables)
    head = blank.get_output_embeddings()
    if head is not None and id(head.weight) in tables:
        products += head.weight.numel()
    return n_tokens * products + 2 * n_tokens**2 * text.hidden_size * text.num_hidden_layers


def pass_seconds(config: PretrainedConfig, dtype: torch.dtype, n_tokens: int, device: torch.device) -> float:
    """Predict the seconds of a pass from products of its widths.

    Parameters
    ----------
    config : PretrainedConfig
        Of the model.
    dtype : torch.dtype
        Of weights and arithmetic.
    n_tokens : int
        Tokens of the pass.
    device : torch.device
        Where.
    """
    width = config.get_text_config().hidden_size
    inner = getattr(config.get_text_config(), "intermediate_size", None) or 4 * width
    matrices = torch.ones(max(1, _TRIED // (width * inner)), inner, width, dtype=dtype, device=device)
    rows = torch.ones(n_tokens, width, dtype=dtype, device=device)

    def through() -> None:
        for matrix in matrices:
            torch.nn.functional.linear(rows, matrix)

    # The first time pays for what is set up once.
    taken = min(timing.timed(through, device)[1] for _ in range(2))
    return taken * operations(config, n_tokens) / (n_tokens * matrices.numel())
