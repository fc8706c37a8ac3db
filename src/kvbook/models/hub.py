"""The hub: which revision a name leads to, and in one line what went wrong on the way.

transformers and huggingface_hub read ``HF_HOME``, ``HF_TOKEN``, ``HF_ENDPOINT`` and ``HF_HUB_OFFLINE`` themselves.
"""

import errno
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple
from unittest.mock import patch

from huggingface_hub import constants, errors, get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
from safetensors import SafetensorError

from kvbook import UserError, refusing

try:
    from huggingface_hub.utils import httpx

    _TRANSPORT: tuple[type[Exception], ...] = (httpx.TransportError,)
except ImportError:
    # Before its release 1, on which transformers 4 depends.
    from huggingface_hub.utils._http import requests

    _TRANSPORT = (requests.ConnectionError, requests.Timeout)

# What was being fetched when it went wrong.
Stage = Literal["configuration", "weights", "tokenizer"]
_UNREACHABLE = (
    " is not in the local cache and the hub cannot be reached: go online, or name a local folder, "
    "or use weights='stand-in' with a family's name"
)


class Repository(NamedTuple):
    """A repository of the hub at one commit.

    Configuration, weights and tokenizer are all asked for at this commit: they belong together even if the repository
    moves on meanwhile, and transformers then never asks the hub to convert pickles, which it does for the branch
    ``main``.

    Attributes
    ----------
    hub_id : str
        ``owner/name``.
    revision : str
        The commit.
    reached : bool
        Whether the hub named the commit, or the local cache did.
    """

    hub_id: str
    revision: str
    reached: bool

    @contextmanager
    def open(self, stage: Stage) -> Iterator[None]:
        """Say in one line what goes wrong while this is open; ask the cache alone if the hub could not be reached.

        Otherwise every file that is looked for would be retried for half a minute.
        """
        offline = patch.object(constants, "HF_HUB_OFFLINE", constants.HF_HUB_OFFLINE or not self.reached)
        with offline, refusing(lambda error: explain(self.hub_id, stage, error, self.reached)):
            yield


@functools.cache
def resolve(hub_id: str) -> Repository:
    """Find the commit at which the branch ``main`` stands, or stood when it was last cached.

    Found once in a process, so that the weights of a run are all of the commit that its record names.
    """
    with refusing(lambda error: explain(hub_id, "configuration", error)):
        if not constants.is_offline_mode() and _reachable(hub_id):
            # By the branch's name, so that the cache learns where the branch stands, for a day without network.
            return Repository(hub_id, Path(hf_hub_download(hub_id, "config.json")).parent.name, reached=True)
        cached = try_to_load_from_cache(hub_id, "config.json")
    if not isinstance(cached, str):
        raise UserError(hub_id + _UNREACHABLE)
    return Repository(hub_id, Path(cached).parent.name, reached=False)


def _reachable(hub_id: str) -> bool:
    """Ask once, without the library's retries, whether the hub answers at all; what it answers may be an error."""
    try:
        get_hf_file_metadata(hf_hub_url(hub_id, "config.json"))
    except errors.HfHubHTTPError:
        raise
    except (*_TRANSPORT, OSError):
        return False
    return True


def first_line(error: BaseException) -> str:
    """Cut an error's message to its first line, and to the next one where that only announces it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])


def _chain(error: BaseException | None) -> list[BaseException]:
    """List an error and what led to it: transformers wraps the hub's errors, and the cause tells more."""
    links: list[BaseException] = []
    while error is not None and error not in links:
        links.append(error)
        error = error.__cause__ or error.__context__
    return links


def explain(hub_id: str, stage: Stage, error: Exception, reached: bool = True) -> str:
    """Say in one line what went wrong between us and the hub."""
    chain = _chain(error)

    def among(*kinds: type[BaseException]) -> bool:
        return any(isinstance(link, kinds) for link in chain)

    answers = [link.response.status_code for link in chain if isinstance(link, errors.HfHubHTTPError)]
    full = any(isinstance(link, OSError) and link.errno == errno.ENOSPC for link in chain)
    folder = Path(constants.HF_HUB_CACHE) / f"models--{hub_id.replace('/', '--')}"
    # Network trouble of any kind ends in one of these, for the cache is asked last; and transformers words a file that
    # the cache lacks as if the repository lacked it.
    network = (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError, *_TRANSPORT)
    # The first that holds.
    cases = (
        (among(errors.GatedRepoError),
         " is gated: accept its licence on the hub, then set HF_TOKEN to a token of yours"),
        (among(errors.RepositoryNotFoundError, errors.HFValidationError),
         " is not on the hub (or private): check owner/name, or set HF_TOKEN"),
        (among(SafetensorError), f": the downloaded weights are damaged: delete {folder} and run again"),
        (any(code in (401, 403) for code in answers),
         ": the hub refuses the token in HF_TOKEN: set a valid one, or unset it"),
        (any(code >= 500 for code in answers),
         f": the hub answers with error {max(answers, default=0)}: try again later, or name a local folder"),
        (full, f": no room left in {constants.HF_HUB_CACHE}: free some, or set HF_HOME to another disk"),
        (among(*network) or not reached, _UNREACHABLE),
        ("trust_remote_code" in str(error),
         " needs code of its own, which is never run: choose an architecture of transformers"),
        (among(errors.EntryNotFoundError) and stage == "configuration",
         " holds no config.json, so it is no model of transformers: choose another repository"),
        (stage != "weights", f" holds no {stage} that can be read: {first_line(error)}"),
        (isinstance(error, OSError), " holds no weights in safetensors, and pickles are never read: "
                                     "choose another repository, or convert the weights and name the folder"),
        (True, f" cannot be loaded: {first_line(error)}"),
    )
    return hub_id + next(words for holds, words in cases if holds)
