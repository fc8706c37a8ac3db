"""For the tests of a model: its cache agrees with its full pass, within what rounding was seen to do."""

import warnings

import numpy as np
import torch
from transformers import PreTrainedModel

from kvbook import UserError, refusing
from kvbook.diagnosis import probe, tolerance
from kvbook.measuring import UNIT_ROUNDOFF

_TEXTS, _TOKENS = 2, 20


def assert_cache_matches(
    model: PreTrainedModel, ids: torch.Tensor | None = None, *, within: float | None = None, seed: int = 0
) -> None:
    """Fail where a model's cached pass drifts from its full pass by more than rounding.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model of transformers, in the dtype in which it is to be tested; float64 sees most.
    ids : Tensor of int64, shape (n_texts, seq_len) or (seq_len,), or list of int, optional
        The texts; random ids where left out.
    within : float, optional
        Largest difference of the last token's logits over their spread.  By default from dtype and depth, as
        `kvbook.diagnosis.tolerance` takes it from a recorded run.
    seed : int
        Of the random ids, and of the place where texts are cut.

    Raises
    ------
    AssertionError
        With the execution path, the drift, the tolerance, and the first layer that is beyond it.
    UserError
        When the model is none, or none that is called as a causal language model is, when its dtype is not a
        floating-point one, or when the texts are too short to be cut.

    Examples
    --------
    >>> import kvbook
    >>> def test_the_cache_of_my_model():
    ...     kvbook.assert_cache_matches(MyModel(config).eval().double())
    """
    name = type(model).__name__
    if not hasattr(model, "config"):
        raise UserError(f"{name} is no model of transformers: a loop of your own goes to assert_step_matches")
    if model.config.is_encoder_decoder:
        raise UserError(f"{name} is an encoder-decoder: save it, and check its folder with `kvbook check`")
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype not in UNIT_ROUNDOFF:
        raise UserError(f"a model in {dtype} has no roundoff: use float64, float32, float16 or bfloat16")
    if dtype in ("float16", "bfloat16"):
        missed = "rounding hides faults there, such as positions that stay 0; test in float64, or float32"
        warnings.warn(f"assert_cache_matches in {dtype} can pass a wrong cache: {missed}", stacklevel=2)
    config = model.config.get_text_config()
    if ids is None:
        n_tokens = min(_TOKENS, getattr(config, "max_position_embeddings", None) or _TOKENS)
        ids = torch.randint(config.vocab_size, (_TEXTS, n_tokens), generator=torch.Generator().manual_seed(seed))
    ids = torch.atleast_2d(torch.as_tensor(ids, device=model.device))
    if ids.shape[1] < probe.SHORTEST:
        raise UserError(f"texts of {ids.shape[1]} tokens cannot be cut: give {probe.SHORTEST} or more")
    limit = tolerance.of(dtype, config.num_hidden_layers) if within is None else within
    wanted = "give a causal language model, with its head"
    with refusing(lambda error: f"{name} cannot be compared ({error}): {wanted}", AttributeError):
        readings = [*probe.readings(model, ids, ids, np.random.default_rng(seed))]
    for rows in readings:
        for text, row in enumerate(rows):
            # A drift that is NaN, because the full pass is, is no agreement either.
            if not row.drift <= limit:
                first = next((layer for layer, drift in enumerate(row.layers) if not drift <= limit), None)
                after = f"layer {first}" if first else "the embedding"
                place = "no hidden state is" if first is None else f"first after {after}"
                held = "" if row.held == row.fed else f"; the cache held {row.held} tokens where {row.fed} had been fed"
                held += "; the model is in training mode: try it after .eval()" * model.training
                raise AssertionError(
                    f"cached and full pass differ by {row.drift:.2g} of the logits' spread in {dtype}, more than "
                    f"{limit:.2g} ({row.way}, text {text}; {place} beyond it{held})"
                )
