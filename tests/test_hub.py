"""Loading from the hub, against a server on this machine that speaks the hub's routes; nothing of ours or theirs is patched.

Each environment (token, cache, network) is a process of its own, for the libraries read theirs when they are imported.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest
from local_hub import COMMIT, LocalHub

from kvbook import fingerprint, paths
from kvbook.models import loading, registry

SCRIPT = """
import json, sys
from kvbook import fingerprint
from kvbook.errors import UserError
from kvbook.models import loading

for request in json.loads(sys.argv[1]):
    name, weights = request["model"], request.get("weights", "stand-in")
    found = {"model": name}
    try:
        found["revision"] = loading.identify(name, weights).get("revision")
        if not request.get("identify_only"):
            loaded = loading.load(name, weights=weights)
            state = {key: value.float().sum().item() for key, value in loaded.model.state_dict().items()}
            found |= {"weights": loaded.weights, "state": fingerprint.of_values(state), "vocabulary": len(loaded.tokenizer)}
    except UserError as error:
        found["error"] = str(error)
    print(json.dumps(found))
"""

CODE = "from pathlib import Path\nPath({marker!r}).touch()\n"


def state_of(folder) -> str:
    state = loading.load(str(folder)).model.state_dict()
    return fingerprint.of_values({key: value.float().sum().item() for key, value in state.items()})


@pytest.fixture(scope="module")
def hub_ids(family_folders):
    """Give the hub id that each family's name stands for."""
    return {family: registry.families()[family].architectures[0].hub_id for family in family_folders}


@pytest.fixture(scope="module")
def marker(tmp_path_factory):
    return tmp_path_factory.mktemp("marker") / "code-of-the-repository-ran"


@pytest.fixture(scope="module")
def server(family_folders, hub_ids, marker, tmp_path_factory):
    repositories = {hub_ids[family]: folder for family, folder in family_folders.items()}
    for name in ("pickles", "corrupt", "wordless", "shapeless", "code", "half-cached", "uncached"):
        repositories[f"some/{name}"] = shutil.copytree(family_folders["gpt2"], tmp_path_factory.mktemp("some") / name)
    pickles, corrupt, wordless, shapeless, code = (
        repositories[f"some/{name}"] for name in ("pickles", "corrupt", "wordless", "shapeless", "code")
    )
    (pickles / "model.safetensors").rename(pickles / "pytorch_model.bin")
    weights = (corrupt / "model.safetensors").read_bytes()
    (corrupt / "model.safetensors").write_bytes(weights[:5000])
    for path in wordless.glob("token*"):
        path.unlink()
    (shapeless / "config.json").unlink()
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (code / "config.json").write_text(json.dumps(config))
    (code / "own.py").write_text(CODE.format(marker=str(marker)))
    hub = LocalHub(repositories)
    yield hub
    hub.shutdown()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("hf-home")


def ask(requests, home, endpoint, **environment):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    clean |= {
        "HF_HOME": str(home),
        "HF_ENDPOINT": endpoint,
        "PYTHONPATH": os.pathsep.join([str(paths.ROOT / "src"), os.environ["PYTHONPATH"]]),
        **environment,
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(requests)], env=clean, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    # What a person would see of retries or of remarks.
    assert done.stderr == ""
    return {answer["model"]: answer for answer in map(json.loads, done.stdout.splitlines())}


BAD = {
    "gated/model": "gated/model is gated: accept its licence",
    "gated-to-you/model": "gated-to-you/model is gated: accept its licence",
    "nobody/nothing": "'nobody/nothing' is not on the hub",
    "refused/model": "the hub refuses the token in HF_TOKEN",
    "broken/model": "the hub answers with error 503",
    "some/pickles": "some/pickles holds no weights in safetensors",
    "some/corrupt": "some/corrupt: the downloaded weights are damaged: delete ",
    "some/wordless": "some/wordless holds no tokenizer",
    "some/shapeless": "some/shapeless holds no config.json",
    "some/code": "some/code needs code of its own, which is never run",
}


@pytest.fixture(scope="module")
def online(server, home, family_folders):
    """Give answers and requests of a process without a token and with an empty cache."""
    requests = [{"model": family, "weights": "hub"} for family in family_folders]
    requests += [{"model": name} for name in BAD] + [{"model": "some/half-cached", "identify_only": True}]
    before = len(server.requests)
    return ask(requests, home, server.address), server.requests[before:]


def test_every_family_comes_from_the_hub_with_its_weights_and_its_commit(online, family_folders, bpe):
    answers, _ = online
    for family, folder in family_folders.items():
        assert answers[family] | {"state": None} == {
            "model": family, "revision": COMMIT, "weights": "hub", "state": None, "vocabulary": bpe.get_vocab_size(),
        }
        assert answers[family]["state"] == state_of(folder), family
    assert len({answers[family]["state"] for family in family_folders}) == len(family_folders)


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_loaded_is_said_in_one_line(online, name):
    answers, _ = online
    assert answers[name]["error"].startswith(f"{name}: {BAD[name]}" if "hub " in BAD[name][:8] else BAD[name])
    assert "\n" not in answers[name]["error"]


def test_neither_pickles_nor_code_nor_a_conversion_of_pickles_is_asked_for(online, marker):
    _, requests = online
    asked = [request["path"] for request in requests]
    assert any(path.endswith("model.safetensors") for path in asked)
    assert not [path for path in asked if path.endswith((".bin", ".py", "/discussions")) or "commits" in path]
    assert not marker.exists()


def test_weights_and_tokenizer_are_fetched_at_the_commit_that_is_recorded(online, hub_ids):
    _, requests = online
    files = [r["path"] for r in requests if r["path"].startswith(f"/{hub_ids['gpt2']}/resolve/")]
    at_main = {path for path in files if "/resolve/main/" in path}
    assert at_main == {f"/{hub_ids['gpt2']}/resolve/main/config.json"}
    # One to see whether there is a hub, one that notes where the branch stands; a load after an identify asks no more.
    asked = [r for r in requests if r["method"] == "HEAD" and r["path"].startswith(f"/{hub_ids['gpt2']}/resolve/main/")]
    assert len(asked) == 2
    assert {f"/{hub_ids['gpt2']}/resolve/{COMMIT}/{name}" for name in ("model.safetensors", "tokenizer.json")} <= set(
        files
    )


def test_the_token_is_sent_where_there_is_one_and_only_there(online, server, hub_ids, tmp_path):
    _, without = online
    before = len(server.requests)
    answers = ask([{"model": hub_ids["llama"]}], tmp_path, server.address, HF_TOKEN="hf_of_a_test")
    own = [r for r in server.requests[before:] if hub_ids["llama"] in r["path"]]
    assert answers[hub_ids["llama"]]["weights"] == "hub"
    assert {request["authorization"] for request in own} == {"Bearer hf_of_a_test"}
    assert {request["authorization"] for request in without} == {None}


@pytest.mark.parametrize("how", ["offline mode", "no network"])
def test_without_a_network_the_cache_serves_what_it_holds_and_the_rest_is_one_line(online, server, home, hub_ids, how):
    before = len(server.requests)
    # Nothing listens on port 9, the port for what is to be thrown away.
    endpoint, mode = (server.address, {"HF_HUB_OFFLINE": "1"}) if how == "offline mode" else ("http://127.0.0.1:9", {})
    answers = ask(
        [{"model": hub_ids["mpt"]}, {"model": "some/half-cached"}, {"model": "some/uncached"}], home, endpoint, **mode
    )
    assert answers[hub_ids["mpt"]]["revision"] == COMMIT
    assert answers[hub_ids["mpt"]]["state"] == online[0]["mpt"]["state"]
    for name in ("some/half-cached", "some/uncached"):
        assert answers[name]["error"].startswith(f"{name} is not in the local cache and the hub cannot be reached")
    assert len(server.requests) == before
