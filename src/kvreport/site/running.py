"""What the page on running the book elsewhere computes: memory by model, and the way to Colab."""

import pandas as pd
import yaml

# Not by its own name, which a function here has.
from kvbook import paths as places
from kvbook.diagnosis import execution_paths
from kvbook.models import registry
from kvbook.settings import read_yaml
from kvreport.publishing import checkout
from kvreport.running import planning
from kvreport.site.overlay import csv_table

GIB = 2**30
# The number of tokens whose keys and values are given: what fits most of the documents' models.
TOKENS = 1024


def memory() -> str:
    """Write the bytes of weights, keys and values of every model in the registry."""
    # Imports torch, which a page without this table need not wait for.
    import torch

    from kvbook.measuring.memory import kv_bytes_per_token
    from kvbook.models import sources

    header = ["model", "used by", "weights fp32, GiB", "weights 16-bit, GiB", "KV a token, 16-bit, KiB"]
    rows = [[*header, f"KV of {TOKENS:,} tokens, GiB"]]
    for family in registry.families().values():
        for model in family.architectures:
            kept = kv_bytes_per_token(sources.configuration(model), torch.bfloat16)
            weights = [f"{model.parameters * n_bytes / GIB:.1f}" for n_bytes in (4, 2)]
            row = [f"`{model.hub_id}`", ", ".join(model.documents), *weights, f"{kept / 1024:g}"]
            rows.append([*row, f"{kept * TOKENS / GIB:.2f}"])
    caption = "Memory that the documents' models take, computed from their shapes for a batch of one; not measured."
    return csv_table("tab-memory-needed", caption, rows)


def cards() -> str:
    """Write the least time of a token on common cards for every model: in a decode step each weight is read once."""
    known = read_yaml(places.DATA / "cards.yaml")
    rows = [["model", *(f"{name}, ms" for name in known)]]
    for model in (model for family in registry.families().values() for model in family.architectures):
        n_bytes = 2 * model.parameters
        least = (
            f"{n_bytes / (1e6 * card['bandwidth_gb_s']):.1f}" if n_bytes < 1e9 * card["memory_gb"] else "does not fit"
            for card in known.values()
        )
        rows.append([f"`{model.hub_id}`", *least])
    sources = ", ".join(card["source"] for card in known.values())
    caption = (
        "Least milliseconds of a decode step with weights in 16 bits, which are all read once: predicted from each "
        f"card's published bandwidth ({sources}), and not measured."
    )
    return csv_table("tab-cards", caption, rows)


def large_checks() -> str:
    """Write what checks of models took that do not fit into memory, each in a process of its own."""
    made = pd.read_csv(places.DATA / "check" / "large.csv", dtype=str, keep_default_na=False)
    made["billions"] = (made["parameters"].astype(float) / 1e9).map("{:.2f}".format)
    kept = {
        "model": "model", "billion parameters": "billions", "texts": "texts", "tokens of each": "tokens",
        "minutes": "minutes", "GB, peak": "peak_gb", "GB, predicted": "predicted_gb", "verdict": "verdict",
    }
    rows = pd.DataFrame({title: made[name] for title, name in kept.items()})
    on, threads, torch = (", ".join(made[name].unique()) for name in ("processor", "threads", "torch"))
    caption = (
        "Checks with `--memory`, random weights, fp64, fp32 and bf16 at once; a layer's work is finished before the "
        f"next is read. {on}, {threads} threads, torch {torch}; once each."
    )
    return csv_table("tab-large-checks", caption, rows)


def paths() -> str:
    """List the execution paths of the check, by what ``--thorough`` calls them."""
    lines = ["| path | tried by | if it is wrong |", "|---|---|---|"]
    for path in execution_paths.PATHS:
        # As code, or a page would print the two hyphens of an option as a dash.
        tools = ", ".join(f"`{tool}`" for tool in path.tools)
        lines.append(f"| {path.called.get(execution_paths.THOROUGH, path.name)} | {tools} | {path.remedy} |")
    return "\n".join(lines)


# The folder must not be called kvbook: the running kernel would take it for the package.
SETUP = """\
!git clone -q {address} kv-cache-book
!pip install -q -e kv-cache-book -e kv-cache-book/src/kvreport
%cd kv-cache-book/chapters
import os, sys
sys.path.insert(0, os.path.abspath("../src"))"""

# Of a book that does not know its address the reader has a checkout: its pages lie nowhere else.
_CHECKOUT = "."


def _source() -> str:
    address = checkout.of(places.ROOT).repository
    return f"'kvbook @ git+{address}'" if address else _CHECKOUT


def install_line() -> str:
    """Write the one command that installs the library: from its address, where that is known, else from a checkout."""
    source = _source()
    where = "   # in a checkout of this book, whose address this copy does not know" if source == _CHECKOUT else ""
    return f"```text\npip install {source}{where}\n```"


def install() -> str:
    """Write all ways to install the library, from its address and from a checkout."""
    sources = dict.fromkeys((_source(), _CHECKOUT))
    commands = [f"{how} {source}{what}" for how, what in (("pip install", ""), ("uvx --from", " kvbook check MODEL"))
                for source in sources]
    return "```text\n" + "\n".join(commands) + "\n```"


def colab() -> str:
    """Write how a chapter's notebook comes to Colab or Kaggle, as far as it is known where the book comes from."""
    book = checkout.of(places.ROOT)
    known = (
        "Every chapter's page has a button with a rocket that opens its notebook there."
        if book.repository and "github.com" in book.repository
        else "This copy of the book does not know which repository it comes from, so its pages have no button for "
        "Colab; put the address in yourself."
    )
    cell = SETUP.format(address=book.repository or "ADDRESS-OF-THIS-REPOSITORY")
    return f"{known}\nChoose a GPU as the runtime. Run this cell first:\n\n```text\n{cell}\n```"


def gpu_parameters() -> str:
    """Write what every chapter runs with on a GPU, as YAML."""
    differing = {
        gpu.stem: {name: value for name, value in gpu.parameters.items() if default.parameters.get(name) != value}
        for default, gpu in zip(planning.plan("default"), planning.plan("gpu"), strict=True)
    }
    return f"```yaml\n{yaml.safe_dump(differing, sort_keys=False, default_flow_style=None, width=100)}```"


def never_on_cuda() -> str:
    """List the experiments of which no run on CUDA is recorded."""
    from kvbook.runs import records
    from kvreport.running import catalogue, selftest

    runs = [records.load(file.parent) for file in places.RECORDED_RUNS.glob("*/*/run.json")]
    ran = {run.folder.parent.name for run in runs if str(run.about["machine"]["device"]).startswith("cuda")}
    never = [name for name in (*catalogue.EXPERIMENTS, selftest.EXPERIMENT.name) if name not in ran]
    return ", ".join(f"`{name}`" for name in never) or "none"
