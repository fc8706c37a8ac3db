"""The hub: which revision a name leads to, and in one line what went wrong on the way.

transformers and huggingface_hub read ``HF_HOME``, ``HF_TOKEN``, ``HF_ENDPOINT`` and ``HF_HUB_OFFLINE`` themselves.
"""

import errno
from pathlib import Path
from typing import Literal

from huggingface_hub import constants, errors
from safetensors import SafetensorError
from transformers import AutoConfig, PretrainedConfig

from kvbook.errors import UserError

# What was being fetched when it went wrong.
Stage = Literal["configuration", "weights", "tokenizer"]


def config(hub_id: str) -> PretrainedConfig:
    """Fetch a configuration; no code of the repository is run.

    Raises
    ------
    UserError
        As `explain` words it.
    """
    try:
        return AutoConfig.from_pretrained(hub_id, trust_remote_code=False)
    except Exception as error:
        raise explain(hub_id, "configuration", error) from error


def revision(config: PretrainedConfig) -> str | None:
    """Give the commit that a configuration was fetched from, or None where the hub named none.

    Weights and tokenizer are asked for at the same commit: all three belong together even if the repository moves on
    meanwhile, and transformers then never asks the hub to convert pickles, which it does for the branch ``main``.
    """
    return getattr(config, "_commit_hash", None)


def first_line(error: BaseException) -> str:
    """Cut an error's message to its first line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _chain(error: BaseException | None) -> list[BaseException]:
    """List an error and what led to it; transformers wraps the hub's errors, and the cause tells more than the wrapper."""
    links: list[BaseException] = []
    while error is not None and error not in links:
        links.append(error)
        error = error.__cause__ or error.__context__
    return links


def explain(hub_id: str, stage: Stage, error: Exception) -> UserError:
    """Say in one line what went wrong between us and the hub.

    Parameters
    ----------
    hub_id : str
        ``owner/name``.
    stage : {"configuration", "weights", "tokenizer"}
        What was being fetched.
    error : Exception
        As it was raised.
    """
    chain = _chain(error)

    def among(*kinds: type[BaseException]) -> bool:
        return any(isinstance(link, kinds) for link in chain)

    if among(errors.GatedRepoError):
        return UserError(f"{hub_id} is gated: accept its licence on the hub, then set HF_TOKEN to a token of yours")
    if among(errors.RepositoryNotFoundError, errors.HFValidationError):
        return UserError(f"{hub_id!r} is not on the hub (or private): check owner/name, or set HF_TOKEN")
    if among(SafetensorError):
        folder = Path(constants.HF_HUB_CACHE) / f"models--{hub_id.replace('/', '--')}"
        return UserError(f"{hub_id}: the downloaded weights are damaged: delete {folder} and run again")
    answers = [link.response.status_code for link in chain if isinstance(link, errors.HfHubHTTPError)]
    if any(code in (401, 403) for code in answers):
        return UserError(f"{hub_id}: the hub refuses the token in HF_TOKEN: set a valid one, or unset it")
    if any(code >= 500 for code in answers):
        return UserError(
            f"{hub_id}: the hub answers with error {max(answers)}: try again later, or name a local folder"
        )
    if any(isinstance(link, OSError) and link.errno == errno.ENOSPC for link in chain):
        return UserError(
            f"{hub_id}: no room left in {constants.HF_HUB_CACHE}: free some, or set HF_HOME to another disk"
        )
    # Network trouble of any kind ends in one of these, for the cache is asked last.
    if among(errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError):
        return UserError(
            f"{hub_id} is not in the local cache and the hub cannot be reached: go online, or name a local folder, "
            "or use weights='stand-in' with a family's name"
        )
    if stage == "weights":
        return UserError(f"{hub_id} cannot be loaded from safetensors, all that is read here: {first_line(error)}")
    if stage == "tokenizer":
        return UserError(f"{hub_id} holds no tokenizer that can be read: {first_line(error)}")
    return UserError(f"{hub_id} holds no model that can be read: {first_line(error)}")
