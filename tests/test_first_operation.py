"""The first operation that depends on the number of tokens: found on a model into which one was injected."""

import pytest
import torch
from torch.nn import functional

from kvbook.atlas import configurations, invariance
from kvbook.exact import row_invariant
from kvbook.measuring.first_operation import first_operation

IDS = configurations.text(24)


def first(model):
    with torch.inference_mode(), row_invariant():
        return first_operation(model, IDS, (1, 5, 23))


# The second: padding before a convolution is no difference.
@pytest.mark.parametrize("architecture", ["llama", "mamba"])
def test_where_nothing_depends_on_the_number_of_tokens_there_is_none(architecture):
    assert first(configurations.build(architecture)) is None


@pytest.mark.parametrize(
    ("layer", "operation", "kind"),
    # What the second of these changes is carried on by all later operations, which are not named.
    [(1, "mlp.up_proj", "linear"), (0, "mlp.down_proj", "linear"), (1, "input_layernorm", "norm")],
)
def test_an_injected_operation_is_found_by_layer_name_and_kind_and_what_carries_it_on_is_not(layer, operation, kind):
    model = configurations.build("llama")
    module = model.get_submodule(f"model.layers.{layer}.{operation}")
    function = functional.linear if kind == "linear" else torch.mul
    weight, other = module.weight.detach(), module.weight.detach() * (1 + 2**-10)
    # As a library that has another kernel for fewer rows.
    module.forward = lambda x: function(x, weight if x.shape[1] == IDS.shape[1] else other)
    found = first(model)
    call = found.call
    assert (call.layer, call.operation, call.kind, found.on_equal_inputs) == (layer, operation, kind, True)
    assert found.function == function.__name__


def test_the_atlas_names_it_in_both_dtypes():
    with torch.inference_mode():
        found = invariance.first_operations("mixtral", "cpu", IDS)
    assert set(found) == {f"first {what}, {dtype}" for what in ("operation", "kind") for dtype in invariance.SWITCHED}
    assert set(found.values()).isdisjoint({"fails"})
