"""The kernel for products summed in fp32: one order of addition, and what happens where it cannot be compiled."""

import copy
import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvbook import fingerprint, native
from kvbook.exact import fp32_products, verify
from kvbook.runs import threads


@pytest.fixture
def times():
    found = fp32_products.kernel(torch.float32)
    assert found, "this machine has no compiler of C++ (Debian: apt-get install g++)"
    return found


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """Keep compiled kernels in a folder of the test's, and forget what was compiled before."""
    monkeypatch.setattr(native, "folder", lambda: tmp_path / "kernels")
    fp32_products.kernel.cache_clear()
    yield tmp_path / "kernels"
    fp32_products.kernel.cache_clear()


def operands(rows, inner, columns):
    generator = torch.Generator().manual_seed(inner)
    return torch.randn(rows, inner, generator=generator), torch.randn(columns, inner, generator=generator).t()


LAYOUTS = {
    "a layer's weight": lambda weight: weight, "columns side by side": lambda weight: weight.contiguous(),
    "every second column": lambda weight: torch.stack([weight, weight], 2).flatten(1)[:, ::2],
}


# In each shape of a tile with and without a rest; the last one's rows fill the cache.
SIZES = [*itertools.product((37,), (1, 15, 16, 1500), (1, 7, 300)), (300, 1536, 20)]


@pytest.mark.parametrize(("n", "inner", "columns"), SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_has_equal_bits_among_any_rows_columns_and_threads_and_in_any_layout(times, layout, n, inner, columns):
    (x, weight), bias = operands(n, inner, columns), torch.randn(columns)
    whole = times(x, weight, None)
    assert torch.equal(times(x, weight, bias), whole + bias), "added to the sum and rounded once"
    assert torch.allclose(whole.double(), x.double() @ weight.double(), atol=1e-4)
    matrix = LAYOUTS[layout](weight)
    for rows_at_once in (1, 2, 5, 37):
        assert torch.equal(torch.cat([times(part, matrix, None) for part in x.split(rows_at_once)]), whole)
    assert torch.equal(times(x, matrix[:, : columns // 2 + 1], None), whole[:, : columns // 2 + 1])
    with threads.using(3):
        assert torch.equal(times(x, matrix, None), whole)
    with ThreadPoolExecutor(3) as pool:
        assert all(torch.equal(each, whole) for each in pool.map(times, [x] * 3, [weight] * 3, [None] * 3))


def test_it_is_the_sum_that_its_source_says(times):
    """In Python: sixteen sums side by side, added in pairs."""
    x, weight = operands(1, 40, 1)
    lanes = [0.0] * 16
    for k in range(40):
        exact = torch.tensor(lanes[k % 16], dtype=torch.float64) + x[0, k].double() * weight[k, 0].double()
        lanes[k % 16] = exact.float().item()
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [(torch.tensor(lanes[i]) + torch.tensor(lanes[i + half])).item() for i in range(half)]
    assert times(x, weight, None).item() == lanes[0]


@pytest.mark.parametrize(("x", "weight", "bias", "said"), [
    (torch.zeros(2, 48), torch.zeros(96, 8), None, "cannot be multiplied"),
    (torch.zeros(2, 96), torch.zeros(96, 8), torch.zeros(4), "cannot be multiplied"),
    (torch.zeros(2, 96), torch.zeros(96, 8), torch.zeros(8, 1), "cannot be multiplied"),
    (torch.zeros(2, 16).bfloat16(), torch.zeros(16, 8), torch.zeros(8), "same dtype"),
    (torch.zeros(2, 16), torch.zeros(16, 8).bfloat16(), torch.zeros(8), "same dtype"),
    (torch.zeros(2, 16), torch.zeros(16, 8), torch.zeros(8).bfloat16(), "same dtype"),
])
def test_what_does_not_fit_is_refused_before_any_memory_is_read(times, x, weight, bias, said):
    with pytest.raises(RuntimeError, match=said):
        times(x, weight, bias)


@pytest.mark.parametrize("inner", [128, 576, 1536])
def test_its_error_is_below_that_of_one_sum(times, inner):
    x, weight = operands(16, inner, 192)
    exact, one = x.double() @ weight.double(), torch.zeros(16, 192)
    for k in range(inner):
        one = one + x[:, k : k + 1] * weight[k]
    ours, in_turn = ((found - exact).square().mean().sqrt() for found in (times(x, weight, None), one))
    assert ours < 0.5 * in_turn


NARROW = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_matrix_in_16_bits_gives_the_sums_of_its_copy_in_32_rounded_once(times, layout, dtype):
    narrow = fp32_products.kernel(dtype)
    for shape in ((1, 45, 17), (9, 576, 33), (37, 1500, 49), (1, 1500, 300), (5, 16, 1)):
        x, weight = (each.to(dtype) for each in operands(*shape))
        matrix, bias = LAYOUTS[layout](weight), torch.randn(shape[2]).to(dtype)
        for summand in (None, bias):
            wide = times(x.float(), matrix.float(), None if summand is None else summand.float())
            assert torch.equal(narrow(x, matrix, summand), wide.to(dtype))


@pytest.mark.parametrize("dtype", NARROW)
def test_where_16_bits_are_slow_a_model_has_equal_bits_by_this_kernel_however_it_is_fed(llama, ids, dtype, monkeypatch):
    # A processor without products in 16 bits.
    monkeypatch.setattr(fp32_products, "slow_in_16_bits", lambda dtype: True)
    used, kernel = set(), fp32_products.kernel
    monkeypatch.setattr(fp32_products, "kernel", lambda wanted: used.add(wanted) or kernel(wanted))
    assert all(found.equal_rows == found.rows for found in verify(copy.deepcopy(llama).to(dtype), ids))
    assert dtype in used


PROCESSORS = {
    # What it has, what oneDNN may use of it, and whether bf16 and fp16 are slow.
    "Zen 3": (("avx2",), "", True, True),
    "Zen 4": (("avx2", "avx512_bf16"), "", False, True),
    "Xeon with AMX": (("avx2", "avx512_bf16", "avx512_fp16"), "", False, False),
    "Xeon without AMX": (("avx2", "avx512_bf16", "avx512_fp16"), "AVX512_CORE_BF16", False, True),
    "Xeon without bf16": (("avx2", "avx512_bf16", "avx512_fp16"), "avx512_core", True, True),
    "Arm": ((), "", False, False),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_it_serves_16_bits_where_an_x86_processor_lacks_their_products(name, monkeypatch):
    features, limit, *expected = PROCESSORS[name]
    about = {"architecture": "x86_64" if features else "aarch64"}
    if features:
        about |= {each: each in features for each in ("avx2", "avx512_bf16", "avx512_fp16")}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: about)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert [fp32_products.slow_in_16_bits.__wrapped__(dtype) for dtype in NARROW] == expected
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert not any(map(fp32_products.slow_in_16_bits.__wrapped__, NARROW))


def test_only_products_on_a_cpu_in_fp32_and_in_slow_16_bits_are_its_own(times, monkeypatch):
    for is_slow in (False, True):
        monkeypatch.setattr(fp32_products, "slow_in_16_bits", lambda dtype, is_slow=is_slow: is_slow)
        assert fp32_products.kernel_for(torch.empty(2, 2)) is not None
        for dtype in NARROW:
            assert (fp32_products.kernel_for(torch.empty(2, 2, dtype=dtype)) is not None) == is_slow
        assert fp32_products.kernel_for(torch.empty(2, 2, dtype=torch.float64)) is None
        assert fp32_products.kernel_for(torch.empty(2, 2, device="meta")) is None


# Where a kernel adds up otherwise, by about a last digit.
HARMS = {
    "for many rows": lambda x, weight: len(x) > 4,
    "in the last row of a tile": lambda x, weight: (torch.arange(len(x)) == 3)[:, None],
    "in a wide matrix": lambda x, weight: weight.shape[1] > 8,
    "in the other layout": lambda x, weight: weight.stride(0) != 1,
    "where something is left over": lambda x, weight: x.shape[1] % 16 > 0 and len(x) > 1,
}


@pytest.mark.parametrize("dtype", [torch.float32, *NARROW])
@pytest.mark.parametrize("harm", HARMS)
def test_control_a_kernel_that_adds_up_otherwise_somewhere_is_not_used(harm, dtype):
    times, digit = fp32_products.kernel(dtype), 1e-6 if dtype == torch.float32 else 2**-7

    def harmed(x, weight, bias):
        return (times(x, weight, bias) * (1 + digit * HARMS[harm](x, weight))).to(dtype)

    assert fp32_products.holds(times, dtype)
    assert not fp32_products.holds(harmed, dtype)


@pytest.mark.slow
def test_it_is_compiled_once_and_then_loaded(own_folder, monkeypatch):
    # Optimized as it is elsewhere, it takes seconds.
    monkeypatch.setattr(native, "_FLAGS", ("-O0", *native._FLAGS[1:]))
    assert fp32_products.kernel(torch.float32) is not None
    (made,) = own_folder.iterdir()
    before = made.stat().st_mtime_ns
    fp32_products.kernel.cache_clear()
    assert fp32_products.kernel(torch.float32) is not None
    assert [made] == list(own_folder.iterdir())
    assert made.stat().st_mtime_ns == before


def compiler(script):
    """Return what makes a compiler of a shell script that is told where to write."""

    def lack(tmp_path, monkeypatch):
        tool = tmp_path / "compiler"
        tool.write_text(f'#!/bin/sh\nto="$(echo "$@" | sed \'s/.* -o //\')"\n{script}\n')
        tool.chmod(0o755)
        monkeypatch.setenv("CXX", str(tool))

    return lack


def folder_that_cannot_be(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(native, "folder", lambda: tmp_path / "file" / "kernels")


def processor_without_fused_products(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    monkeypatch.setattr(native.platform, "machine", lambda: "x86_64")


LACKS = {
    "no such compiler": lambda tmp_path, monkeypatch: monkeypatch.setenv("CXX", str(tmp_path / "none")),
    "none wanted": lambda tmp_path, monkeypatch: monkeypatch.setenv("CXX", ""),
    "a compiler that fails": compiler('echo half > "$to"; exit 1'),
    "a compiler that writes nonsense": compiler('echo nonsense > "$to"'),
    "a folder that cannot be": folder_that_cannot_be,
    "a processor without fused products": processor_without_fused_products,
}


@pytest.mark.parametrize("lack", LACKS)
def test_where_it_cannot_be_compiled_there_is_none_and_nothing_half_made(own_folder, tmp_path, monkeypatch, lack):
    LACKS[lack](tmp_path, monkeypatch)
    assert fp32_products.kernel(torch.float32) is None
    assert [path for path in own_folder.rglob("*") if path.is_dir()] == []


def test_without_a_compiler_a_model_has_equal_bits_however_it_is_fed(no_compiler, llama, ids):
    assert all(found.equal_rows == found.rows for found in verify(llama, ids))


@pytest.mark.parametrize("kind", ["cpp", "html", "tables.yaml"])
def test_another_kernel_or_table_makes_what_runs_on_it_another_run(tmp_path, monkeypatch, kind):
    monkeypatch.setitem(fingerprint.PACKAGES, "sample", tmp_path)
    (tmp_path / "products.py").touch()
    (tmp_path / f"products.{kind}").write_text("1\n")
    before = fingerprint.of_source(["sample.products"])
    (tmp_path / f"unrelated.{kind}").write_text("1\n")
    assert fingerprint.of_source(["sample.products"]) == before
    (tmp_path / f"products.{kind}").write_text("2\n")
    assert fingerprint.of_source(["sample.products"]) != before
