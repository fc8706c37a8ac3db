"""Operators of decode steps: each is listed with what row-invariant arithmetic does with it on a CPU and on a GPU."""

from pathlib import Path

import operators as listing
import pytest
import torch
from torchgen import gen
from torchgen.model import DispatchKey

from kvbook.exact import switch

LISTED = {line.split()[0]: line for line in listing.FILE.read_text("utf-8").splitlines()[1:]}


# Of some kinds of layer one: plain attention, a bias of its own, experts, a state-space model, both.
@pytest.mark.parametrize("name", ["llama", "mpt", "mixtral", "mamba", "falcon_h1"])
def test_every_operator_of_a_decode_step_is_listed_with_its_treatment(name):
    found = listing.called(name)
    assert found
    assert found <= LISTED.keys()
    for operator in found:
        on = [listing.treatment(operator, key) for key in ("CPU", "CUDA")]
        assert LISTED[operator].endswith(listing.line("", "", *on).lstrip())


def test_what_is_listed_as_replaced_is_what_the_switch_registers():
    tables = switch._replacements("CPU", frozenset(torch._C._dispatch_get_all_op_names()))
    for part, table in tables.items():
        assert {switch.part_of(operator, "CPU") for operator in table} == {part}


def test_no_operator_that_is_listed_is_refused_on_a_cpu_and_a_recurrent_network_is():
    assert not [name for name in LISTED if listing.treatment(name, "CPU") == listing.REFUSED]
    network = torch.nn.LSTM(2, 2, batch_first=True)
    called = listing.operators(network, lambda: network(torch.ones(1, 1, 2)))
    assert listing.REFUSED in {listing.treatment(operator, "CPU") for operator in called}


def on_a_gpu():
    """Read from torch's own list which operators have a kernel on a GPU, or one for all devices."""
    folder = Path(gen.__file__).with_name("packaged") / "ATen" / "native"
    listed, kernels = gen.parse_native_yaml(str(folder / "native_functions.yaml"), str(folder / "tags.yaml"))
    by_name = {str(each.func.name): each for each in listed}

    def has_one(name):
        each = by_name[str(by_name[name].structured_delegate or name)]
        return each.has_composite_kernel or kernels[DispatchKey.CUDA].has_kernel(each)

    return {f"aten::{name}": has_one(name) for name in by_name}


def test_torchs_own_list_has_a_kernel_on_a_gpu_for_every_operator_that_is_listed():
    known = on_a_gpu()
    assert not [name for name in LISTED if not known.get(name, True)]
    assert not known["aten::_scaled_dot_product_flash_attention_for_cpu"]


