"""The first operation that depends on the number of tokens: found on a model into which one was planted."""

import pytest
import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from kvbook.atlas import columns, configurations
from kvbook.exact import row_invariant
from kvbook.measuring.first_operation import first_operation

COUNTS = (1, 5, 23)
IDS = configurations.text(24)


def llama():
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


def test_where_nothing_depends_on_the_number_of_tokens_there_is_none():
    with torch.inference_mode(), row_invariant():
        assert first_operation(llama(), IDS, COUNTS) is None


@pytest.mark.parametrize(
    ("place", "operation", "kind"),
    [("layers.1.mlp.up_proj", "mlp.up_proj", "linear"), ("layers.1.input_layernorm", "input_layernorm", "norm")],
)
def test_a_planted_operation_is_found_by_layer_name_and_kind(place, operation, kind):
    model = llama()
    module = model.get_submodule(f"model.{place}")
    weight, other = module.weight.detach(), module.weight.detach() * (1 + 2**-10)

    def by_rows(x):
        # As a library that has another kernel for fewer rows.
        used = weight if x.shape[1] == IDS.shape[1] else other
        return functional.linear(x, used) if kind == "linear" else torch.mul(x, used)

    module.forward = by_rows
    with torch.inference_mode(), row_invariant():
        found = first_operation(model, IDS, COUNTS)
    assert (found.layer, found.operation, found.kind, found.on_equal_inputs) == (1, operation, kind, True)
    assert found.function in ("linear", "mul")


def test_what_only_carries_a_difference_on_is_not_named():
    model = llama()
    honest = model.model.layers[0].mlp.down_proj.forward
    model.model.layers[0].mlp.down_proj.forward = lambda x: torch.mul(honest(x), 1.0 + (x.shape[1] == 24) * 2**-10)
    with torch.inference_mode(), row_invariant():
        found = first_operation(model, IDS, COUNTS)
    assert (found.layer, found.operation) == (0, "mlp.down_proj")


def test_padding_ahead_of_a_convolution_is_not_taken_for_a_difference():
    with torch.inference_mode(), row_invariant():
        assert first_operation(configurations.build("mamba"), IDS, COUNTS) is None


def test_the_atlas_names_it_in_both_dtypes():
    with torch.inference_mode():
        found = columns._first_operations("mixtral", "cpu", IDS)
    assert set(found) == {f"first {what}, {dtype}" for what in ("operation", "kind") for dtype in columns.SWITCHED}
    assert set(found.values()).isdisjoint({"fails"})
