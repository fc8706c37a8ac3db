"""Every experiment chooses a token by one rule: the largest logit, and on an exact tie the lowest index."""

import ast
from types import SimpleNamespace

import pytest
import small_models
import torch
from transformers import LlamaForCausalLM

from kvbook import paths
from kvbook.measuring import choosing
from kvreport.chapters.does_it_matter import writing
from kvreport.chapters.does_it_matter.rows import NO_CACHE
from kvreport.chapters.layer_drift import greedy_paths
from kvreport.chapters.layer_drift.rows import LOOPS
from kvreport.chapters.models import greedy_samples
from kvreport.chapters.static_cache import kinds

# A row in which several numbers are the largest; torch.topk puts another one first.
TIED = torch.zeros(2000).index_fill(0, torch.arange(7, 2000, 3), 4.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_on_an_exact_tie_the_lowest_index_is_chosen_however_the_numbers_lie(dtype):
    row = TIED.to(dtype)
    apart = torch.stack([row, torch.full_like(row, 9)], 1)[:, 0]
    assert not apart.is_contiguous()
    for of in (row, apart, row.expand(3, 1, -1)):
        assert (choosing.greedy(of) == 7).all()
    assert choosing.margin(row) == 0
    assert (choosing.tied(row, 7, 10), choosing.tied(row, 7, 8)) == (1, 0)
    assert row.topk(2).indices[0] != 7, "control"


class OnATie(LlamaForCausalLM):
    """Has the largest logit three times over at every step; the end token is the lowest of them."""

    def forward(self, *args, **options):
        output = super().forward(*args, **options)
        output.logits = TIED[: output.logits.shape[-1]].expand_as(output.logits).clone()
        return output


def test_each_experiments_own_loop_takes_the_lowest_index_though_it_ends_a_text_and_so_does_generate(llama):
    on_a_tie = OnATie(llama.config).eval()
    on_a_tie.generation_config.eos_token_id = 7
    ids, choose = torch.tensor([[3, 4, 5]]), writing.Chooser("greedy", 0)
    with torch.inference_mode():
        loops = {loop: list(greedy_paths.decode_cached(on_a_tie, ids, 5, loop)) for loop in LOOPS}
        others = (greedy_paths.decode_uncached, greedy_paths.decode_by_generate)
        loops |= {decode.__name__: list(decode(on_a_tie, ids, 5)) for decode in others}
        written = {
            "uncached": [one for (one,) in writing.write(on_a_tie, ids, [0], 5, choose, NO_CACHE)],
            "cached": [one for (one,) in writing.write(on_a_tie, ids, [0], 5, choose)],
            **{way: [SimpleNamespace(**row) for row in kinds._write(on_a_tie, ids, way, 5)] for way in kinds.KINDS},
            "samples": [SimpleNamespace(token=token) for token, _ in greedy_samples.write(on_a_tie, ids, 5)],
        }
        forbidden = small_models.generated(on_a_tie, ids, 5).sequences
    for name, steps in [*loops.items(), *written.items()]:
        assert [step.token for step in steps] == [7] * 5, name
    assert all(step.row()["margin"] == 0 for steps in loops.values() for step in steps)
    # Control: a least number of tokens keeps `generate` alone from the end token.
    assert 7 not in forbidden[0, 3:].tolist()


def choices(source: str) -> list[str]:
    """List what a module calls that finds the largest numbers in an order of its own."""
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [call.attr for call in calls if isinstance(call, ast.Attribute) and call.attr in ("topk", "kthvalue")]


def test_no_experiment_takes_topk():
    source = paths.ROOT / "src"
    files = [*(source / "kvreport" / "chapters").rglob("*.py"), *(source / "kvbook" / "measuring").rglob("*.py")]
    # The two candidates of a margin, and what stands beside a chosen token: nothing is written from either.
    beside = {"choosing.py", "predictions.py", "measuring.py"}
    assert {file.name for file in files if choices(file.read_text("utf-8"))} == beside
    # Control: the loop that this book once had.
    assert choices("best = logits.topk(2)\ntoken = best.indices[0]") == ["topk"]
