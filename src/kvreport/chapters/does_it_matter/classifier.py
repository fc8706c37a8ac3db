"""A sequence classification head on a language model's trunk, for decisions that are not tokens.

The head is that of transformers' stock ``*ForSequenceClassification``: one linear map without a bias from the last
hidden state to two classes, of which the larger wins.  The stock class reads it at a text's last token; since the trunk
is causal, reading it at every token gives the decision on every beginning of the text from the same pass.

What it decides: whether a text has opened more brackets than it has closed.  The label comes from the characters alone.
The head is fitted by logistic regression on the frozen features of other texts.
"""

import numpy as np
import torch
from scipy import optimize, special
from torch.nn import functional

from kvbook import UserError
from kvbook.models import corpus
from kvreport.chapters.does_it_matter import DoesItMatterSettings, variants

# Of the squared weights, against the mean loss: enough to keep them finite where the classes can be told apart exactly.
_RIDGE = 1e-3


def labels(tokenizer, ids: list[int]) -> np.ndarray:
    """Tell for every beginning of a text whether a bracket is open behind it."""
    pieces = tokenizer.batch_decode([[token] for token in ids])
    return np.cumsum([sum(map(piece.count, "([{")) - sum(map(piece.count, ")]}")) for piece in pieces]) > 0


def logistic(features: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Fit the weights of a logistic regression without a bias."""
    sign = np.where(classes, 1.0, -1.0)

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        scores = sign * (features @ weights)
        slope = -sign * special.expit(-scores) / len(sign)
        value = np.logaddexp(0, -scores).mean() + _RIDGE * weights @ weights
        return float(value), features.T @ slope + 2 * _RIDGE * weights

    return optimize.minimize(loss, np.zeros(features.shape[1]), jac=True, method="L-BFGS-B").x


def fitting_texts(settings: DoesItMatterSettings, tokenizer) -> list[list[int]]:
    """Return ids of the texts that the head is fitted on, taken evenly through the corpus.

    The standard library's come from the part that is not scored.  A folder has no parts: its last files are taken,
    which are not scored where it has ``n_samples`` more.
    """
    documents = [document.text for document in corpus.documents(settings.corpus, "train")]
    if not documents:
        raise UserError(f"corpus {settings.corpus!r} holds no text: name a folder of text files, or 'stdlib'")
    evenly = documents[:: max(1, len(documents) // settings.n_fit)][: settings.n_fit]
    chosen = evenly if settings.corpus == "stdlib" else documents[-settings.n_fit :]
    # More characters than so many tokens have are not worth encoding.
    most = 16 * settings.n_tokens
    return [tokenizer(text[:most], truncation=True, max_length=settings.n_tokens)["input_ids"] for text in chosen]


def fit(model, tokenizer, texts: list[list[int]]) -> torch.Tensor:
    """Fit the head on a model's features."""
    features, classes = [], []
    with torch.inference_mode():
        for ids in texts:
            half = len(ids) // 2
            _, hidden = variants.read(model, torch.tensor([ids], device=model.device), use_cache=False)
            features.append(hidden[0, half:].double().cpu().numpy())
            classes.append(labels(tokenizer, ids)[half:])
    weights = logistic(np.concatenate(features), np.concatenate(classes))
    return torch.from_numpy(np.stack([-weights, weights]) / 2).float()


def decisions(hidden: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    """Decide as the stock class does."""
    return functional.linear(hidden, score.to(hidden)).argmax(-1)
