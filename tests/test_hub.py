"""Loading from the hub, against a server on this machine that speaks its routes; nothing of ours or theirs is patched.

Each environment (token, cache, network) is a process of its own, for the libraries read theirs when they are imported.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest
from local_hub import COMMIT, LocalHub

from kvbook import UserError, fingerprint, paths
from kvbook.models import loading, registry

# What each family's name stands for.
HUB_IDS = {name: family.architectures[0].hub_id for name, family in registry.families().items()}


def state_of(loaded) -> str:
    return fingerprint.of_values({name: x.float().sum().item() for name, x in loaded.model.state_dict().items()})


def answer(requests: str) -> None:
    """Print what loading each model gives; a process of its own calls this."""
    for request in json.loads(requests):
        name, weights = request["model"], request.get("weights", "stand-in")
        found = {"model": name}
        try:
            found["revision"] = loading.identify(name, weights).get("revision")
            if not request.get("identify_only"):
                loaded = loading.load(name, weights=weights)
                found |= {"weights": loaded.weights, "state": state_of(loaded), "vocabulary": len(loaded.tokenizer)}
        except UserError as error:
            found["error"] = str(error)
        print(json.dumps(found))


@pytest.fixture(scope="module")
def server(family_folders, tmp_path_factory):
    marker = tmp_path_factory.mktemp("marker") / "code-of-the-repository-ran"
    some = {
        name: shutil.copytree(family_folders["gpt2"], tmp_path_factory.mktemp("some") / name)
        for name in ("pickles", "corrupt", "wordless", "shapeless", "code", "half-cached", "uncached")
    }
    (some["pickles"] / "model.safetensors").rename(some["pickles"] / "pytorch_model.bin")
    os.truncate(some["corrupt"] / "model.safetensors", 5000)
    for path in some["wordless"].glob("token*"):
        path.unlink()
    (some["shapeless"] / "config.json").unlink()
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (some["code"] / "config.json").write_text(json.dumps(config))
    (some["code"] / "own.py").write_text(f"from pathlib import Path\nPath({str(marker)!r}).touch()\n")
    families = {HUB_IDS[family]: folder for family, folder in family_folders.items()}
    hub = LocalHub(families | {f"some/{name}": folder for name, folder in some.items()})
    hub.marker, hub.home = marker, tmp_path_factory.mktemp("hf-home")
    yield hub
    hub.shutdown()


def ask(requests, home, endpoint, **environment):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    here = os.pathsep.join([str(paths.ROOT / "src"), str(paths.ROOT / "tests"), os.environ["PYTHONPATH"]])
    clean |= {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "PYTHONPATH": here, **environment}
    command = [sys.executable, "-c", "import sys, test_hub; test_hub.answer(sys.argv[1])", json.dumps(requests)]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    # What a person would see of retries or of remarks.
    assert done.stderr == ""
    return {answer["model"]: answer for answer in map(json.loads, done.stdout.splitlines())}


BAD = {
    "gated/model": "gated/model is gated: accept its licence",
    "gated-to-you/model": "gated-to-you/model is gated: accept its licence",
    "nobody/nothing": "nobody/nothing is not on the hub",
    "refused/model": "refused/model: the hub refuses the token in HF_TOKEN",
    "broken/model": "broken/model: the hub answers with error 503",
    "some/pickles": "some/pickles holds no weights in safetensors",
    "some/corrupt": "some/corrupt: the downloaded weights are damaged: delete ",
    "some/wordless": "some/wordless holds no tokenizer",
    "some/shapeless": "some/shapeless holds no config.json",
    "some/code": "some/code needs code of its own, which is never run",
}


@pytest.fixture(scope="module")
def online(server, family_folders):
    """Return answers and requests of a process without a token and with an empty cache."""
    requests = [{"model": family, "weights": "hub"} for family in family_folders]
    requests += [{"model": name} for name in BAD] + [{"model": "some/half-cached", "identify_only": True}]
    return ask(requests, server.home, server.address), list(server.requests)


def test_every_family_comes_from_the_hub_with_its_weights_and_its_commit(online, family_folders, bpe):
    for family, folder in family_folders.items():
        assert online[0][family] == {
            "model": family, "revision": COMMIT, "weights": "hub", "state": state_of(loading.load(str(folder))),
            "vocabulary": bpe.get_vocab_size(),
        }


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_loaded_is_said_in_one_line(online, name):
    error = online[0][name]["error"]
    assert error.startswith(BAD[name])
    assert "\n" not in error


def test_neither_pickles_nor_code_nor_a_conversion_of_pickles_is_asked_for(online, server):
    asked = [request["path"] for request in online[1]]
    assert any(path.endswith("model.safetensors") for path in asked)
    assert not [path for path in asked if path.endswith((".bin", ".py", "/discussions")) or "commits" in path]
    assert not server.marker.exists()


def test_weights_and_tokenizer_are_fetched_at_the_commit_that_is_recorded(online):
    at = f"/{HUB_IDS['gpt2']}/resolve"
    asked = [(request["method"], request["path"]) for request in online[1] if request["path"].startswith(at)]
    files = {path for _, path in asked}
    assert {path for path in files if "/main/" in path} == {f"{at}/main/config.json"}
    # One to see whether there is a hub, one that notes where the branch stands; a load after an identify asks no more.
    assert asked.count(("HEAD", f"{at}/main/config.json")) == 2
    assert {f"{at}/{COMMIT}/{name}" for name in ("model.safetensors", "tokenizer.json")} <= files


def test_the_token_is_sent_where_there_is_one_and_only_there(online, server, tmp_path):
    before = len(server.requests)
    answers = ask([{"model": HUB_IDS["llama"]}], tmp_path, server.address, HF_TOKEN="hf_of_a_test")
    own = [r for r in server.requests[before:] if HUB_IDS["llama"] in r["path"]]
    assert answers[HUB_IDS["llama"]]["weights"] == "hub"
    assert {request["authorization"] for request in own} == {"Bearer hf_of_a_test"}
    assert {request["authorization"] for request in online[1]} == {None}


@pytest.mark.parametrize("how", ["offline mode", "no network"])
def test_without_a_network_the_cache_serves_what_it_holds_and_the_rest_is_one_line(online, server, how):
    before = len(server.requests)
    # Nothing listens on port 9, the port for what is to be thrown away.
    endpoint, mode = (server.address, {"HF_HUB_OFFLINE": "1"}) if how == "offline mode" else ("http://127.0.0.1:9", {})
    wanted = [HUB_IDS["mpt"], "some/half-cached", "some/uncached"]
    answers = ask([{"model": name} for name in wanted], server.home, endpoint, **mode)
    assert answers[HUB_IDS["mpt"]] | {"model": "mpt"} == online[0]["mpt"]
    for name in wanted[1:]:
        assert answers[name]["error"].startswith(f"{name} is not in the local cache and the hub cannot be reached")
    assert len(server.requests) == before
