"""What a request for a model leads to: which weights, which files, which configuration."""

import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

from transformers import AutoConfig, PretrainedConfig

from kvbook import UserError, fingerprint, paths, refusing
from kvbook.models import gguf_files, hub, packages, placement, registry, standins, unpacked

Source = Literal["stand-in", "hub", "package", "gguf", "random", "untrained", "local"]

# Sources whose weights are drawn, not read.
DRAWN = ("random", "untrained")
# Wide enough that attention tells tokens apart without training, so that a missing context shows.
_UNTRAINED_RANGE = 0.1


class Where(NamedTuple):
    """A request, resolved.

    Attributes
    ----------
    source : Source
        Where its weights come from.
    name : str
        As it was asked for, a folder or file by its last part; a package's model by its own name.
    path : str
        The folder or hub id of its weights.
    config : PretrainedConfig
        Of its architecture.
    tokenizer_path : str
        The folder or hub id of its tokenizer; empty where it is made on the spot.
    repository : Repository or None
        Of the hub.
    adapter : str
        The folder of an adapter of PEFT that is merged into those weights; empty without one.
    """

    source: Source
    name: str
    path: str
    config: PretrainedConfig
    tokenizer_path: str
    repository: hub.Repository | None = None
    adapter: str = ""

    @property
    def revision(self) -> str | None:
        """The commit at which the hub's files are fetched."""
        return self.repository.revision if self.repository else None


# What to do, by what transformers says of a configuration.
_ADVICE = {
    "custom code": "code that comes with a model is not run; name a model that transformers knows by itself",
    "does not recognize this architecture": "name a model that this version of transformers knows, or upgrade it",
}


def _weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def refuse_lacking(folder: str | Path, missing: list[str]) -> None:
    """Refuse a checkpoint that lacks weights, if any are missing."""
    if missing:
        lacks = f"lacks weights of its language model ({missing[0]}, {len(missing)} in all)"
        raise UserError(f"{folder} {lacks}: save the whole model there, with its head")


def _folder(path: Path, source: Source, name: str, needs_weights: bool = True) -> Where:
    if not (path / "config.json").is_file():
        raise UserError(f"{path} holds no config.json: name the folder that `save_pretrained` wrote")
    if needs_weights and not _weight_files(path):
        raise UserError(f"{path} holds no weights (*.safetensors): save the model there with `save_pretrained`")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    # A configuration that is not one raises whatever its class makes of it.
    except Exception as error:
        advice = next((advice for said, advice in _ADVICE.items() if said in str(error)), "save the model again")
        raise UserError(f"{path}/config.json cannot be read ({hub.first_line(error)}): {advice}") from error
    return Where(source, name, str(path), config, str(path if needs_weights else _words_for(path)))


def _adapted(path: Path) -> Where:
    """Find the model of an adapter by the name that PEFT wrote into its folder."""
    merged = "(`model.merge_and_unload()`), save that with `save_pretrained`, and name its folder"
    placement.need(f"{path}, an adapter,", "peft", otherwise=f", or merge it into its model {merged}")
    file = path / "adapter_config.json"
    with refusing(f"{file} cannot be read: save the adapter again", ValueError, KeyError, TypeError):
        base = json.loads(file.read_text("utf-8"))["base_model_name_or_path"]
    if not base or not (Path(base).is_dir() or str(base).count("/") == 1):
        remedy = 'write its folder or hub id into adapter_config.json ("base_model_name_or_path")'
        raise UserError(f"{path} holds an adapter of PEFT, and its model {base!r} is not there: {remedy}")
    return resolve(str(base), "local")._replace(name=path.name, adapter=str(path))


def _words_for(path: Path) -> Path:
    # Random weights need no words of their own.
    return path if any(path.glob("tokenizer*.json")) else paths.STANDINS / "gpt2"


def identity(where: Where, seed: int) -> dict[str, Any]:
    """Return what tells a request's weights from all others."""
    if where.source in DRAWN:
        values = {name: value for name, value in where.config.to_dict().items() if not name.startswith("_")}
        # A folder is named by its last part: where it lies is its owner's affair.
        named = where.name if Path(where.path).is_dir() else where.path
        return {"shape_of": named, "shape_sha256": fingerprint.of_values(values), "seed": seed}
    if where.adapter:
        digests = [fingerprint.of_large_file(file) for file in _weight_files(Path(where.adapter))]
        return identity(where._replace(adapter=""), seed) | {"adapter_sha256": fingerprint.of_values(digests)}
    if where.source == "hub":
        return {"hub_id": where.path, "revision": where.revision}
    folder = Path(where.path)
    # Read for the record alone, never to load: a large checkpoint takes its time.
    digests = [fingerprint.of_large_file(file) for file in _weight_files(folder)]
    sha256 = digests[0] if len(digests) == 1 else fingerprint.of_values(digests)
    if where.source not in ("package", "gguf"):
        return {"sha256": sha256}
    origin = unpacked.origin(folder)
    if sha256 != origin["weights_sha256"]:
        remedy = "delete the folder, then run `python -m kvbook models fetch`, or name the GGUF file again"
        raise UserError(f"{folder}: the weights are not those that were unpacked there: {remedy}")
    return {"sha256": sha256, "gguf_sha256": origin["gguf_sha256"]}


def configuration(architecture: registry.Architecture) -> PretrainedConfig:
    """Build the configuration of a registered architecture."""
    values = dict(architecture.config)
    return AutoConfig.for_model(values.pop("model_type"), **values)


def _hub(name: str, hub_id: str) -> Where:
    repository = hub.resolve(hub_id)
    with repository.open("configuration"):
        config = AutoConfig.from_pretrained(hub_id, revision=repository.revision, trust_remote_code=False)
    return Where("hub", name, hub_id, config, hub_id, repository)


def resolve(model: str, weights: str) -> Where:
    """Find what a request leads to."""
    families = registry.families()
    path = Path(model).expanduser()
    known = ((family, each) for family in families.values() for each in family.architectures if each.hub_id == model)
    if weights == "random" and (found := next(known, None)):
        # Its shape is known here: nothing is fetched for it.
        return _random(found[0].name, model, found[1])
    if model in families and not path.joinpath("config.json").is_file():
        return _family(families[model], weights)
    if path.suffix.lower() == ".gguf":
        found = _folder(gguf_files.unpack(path), "gguf", path.stem)
    elif path.is_dir() and (path / "adapter_config.json").is_file():
        found = _adapted(path.resolve())
    elif path.is_dir():
        found = _folder(path.resolve(), "local", path.resolve().name, weights != "random")
    elif model.count("/") == 1 and not model.startswith((".", "/", "~")):
        found = _hub(model, model)
    else:
        others = "nor an existing folder or GGUF file, nor a hub id (owner/name)"
        raise UserError(f"model {model!r} is neither a family ({', '.join(families)}), {others}")
    return found._replace(source="random") if weights == "random" else found


def families_with(weights: str) -> list[str]:
    """Name the families that have weights of a kind, in the registry's order; of the stand-ins those that ship."""
    families = list(registry.families())
    if weights == "stand-in":
        return [name for name in families if (paths.STANDINS / name / "config.json").is_file()]
    return packages.with_package() if weights == "package" else families


def _family(family: registry.Family, weights: str) -> Where:
    name = family.name
    standin = paths.STANDINS / name
    if weights == "stand-in":
        if not standin.is_dir():
            remedy = "run this in the book's checkout, which ships most stand-ins, or name a folder or hub id"
            raise UserError(f"{standin} is missing: {remedy}")
        return _folder(standin, "stand-in", name)
    if weights == "package":
        return _folder(packages.folder(name), "package", packages.of_family(name).title)
    if weights == "untrained":
        config = standins.config(name)
        config.initializer_range = _UNTRAINED_RANGE
        return Where("untrained", name, f"stand-in {name}", config, "")
    architecture = family.architectures[0]
    return _random(name, name, architecture) if weights == "random" else _hub(name, architecture.hub_id)


def _random(family: str, name: str, architecture: registry.Architecture) -> Where:
    tokenizer = _words_for(paths.STANDINS / family)
    return Where("random", name, architecture.hub_id, configuration(architecture), str(tokenizer))
