"""Static and dynamic caches: the decode loop, the one-row form, bytes, and what is made of the rows."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from planted import MACHINE, Judged, run_of, with_runs
from torch._dynamo.utils import counters

from kvbook.errors import UserError
from kvbook.measuring import caches, decoding, large_pages, memory, onerow
from kvbook.measuring.decoding import Decoder, Way
from kvbook.measuring.estimates import Estimate
from kvreport.chapters.static_cache import measures, memory_bandwidth, shapes, speed, tables
from kvreport.chapters.static_cache import rows as chapter_rows
from kvreport.chapters.static_cache import texts as written_texts
from kvreport.chapters.static_cache.results import EXPERIMENTS
from kvreport.chapters.static_cache.rows import (
    CALLS,
    GENERATE,
    KERNELS_OF_HEAD,
    KERNELS_OF_LAYERS,
    OURS,
    PROFILED,
    STEP,
    THEIRS,
)
from kvreport.chapters.static_cache.settings import StaticCacheSettings
from kvreport.publishing import documents
from kvreport.publishing import found as found_in
from kvreport.publishing.found import Found
from kvreport.publishing.statements import check

IDS = torch.tensor([[5, 17, 200, 31, 8]])
N_NEW = 8


def written(model, way: Way, **options) -> list[int]:
    decoder = Decoder(model, way, IDS.shape[1] + N_NEW, **options)
    try:
        with torch.inference_mode():
            tokens = [decoder.start(IDS)]
            while len(tokens) < N_NEW:
                tokens.append(decoder.step(tokens[-1]))
    finally:
        decoder.close()
    return [token.item() for token in tokens]


def generated(model) -> list[int]:
    output = model.generate(
        IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=N_NEW, min_new_tokens=N_NEW, do_sample=False,
        pad_token_id=2,
    )
    return output[0, IDS.shape[1] :].tolist()


@pytest.fixture
def untouched(llama):
    """Make the small model anew: hooks of one that was asked for hidden states would break its graphs."""
    model = type(llama)(llama.config)
    model.load_state_dict(llama.state_dict())
    return model.eval().requires_grad_(False)


@pytest.fixture
def freshly_compiled():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("cache", ["none", "dynamic", "static"])
def test_the_eager_loop_writes_what_generate_writes(llama, cache):
    assert written(llama, Way(cache)) == generated(llama)


def test_a_loop_that_shows_the_empty_room_to_the_model_is_caught(llama, monkeypatch):
    monkeypatch.setattr(Decoder, "_mask", lambda *_: None)
    assert written(llama, Way("static")) != generated(llama)


@pytest.mark.parametrize(
    "way", [Way("dynamic", True), Way("static", True), Way("static", True, True), Way("static", True, True, True)],
    ids=str,
)
def test_one_graph_serves_all_layers_and_writes_the_same_tokens(untouched, way, freshly_compiled, monkeypatch):
    # More layers take longer to compile, and show no more.
    monkeypatch.setattr(decoding, "MOST_TOGETHER", 2)
    before = counters["stats"]["unique_graphs"]
    assert written(untouched, way) == generated(untouched)
    made = counters["stats"]["unique_graphs"] - before
    # One for the groups of layers, one for the head; a length that varies may cost one more.
    n_layers = untouched.config.num_hidden_layers
    assert 2 <= made <= 3 < n_layers
    assert 1 < decoding.together(n_layers) < n_layers, "one group would show nothing, nor would one layer a group"


@pytest.mark.parametrize(("n_layers", "size"), [(30, 5), (12, 4), (32, 4), (28, 4), (1, 1), (7, 1), (2, 2)])
def test_layers_are_compiled_in_equal_groups_of_five_at_most(n_layers, size):
    assert decoding.together(n_layers) == size


def test_a_static_cache_is_used_again_from_its_beginning(llama):
    decoder = Decoder(llama, Way("static"), 16)
    with torch.inference_mode():
        first, second = ([decoder.start(IDS).item()] for _ in range(2))
    assert first == second
    assert caches.length(decoder.cache) == IDS.shape[1]


def test_a_cache_cannot_be_stood_behind_without_filling_it(llama):
    with pytest.raises(ValueError, match="call start"):
        Decoder(llama, Way("dynamic"), 16).resume(IDS)


def test_a_model_of_another_build_is_refused_with_what_to_do(gpt2):
    with pytest.raises(UserError, match="scope=model"):
        Decoder(gpt2, Way("static"), 16)


def test_a_model_of_another_build_decodes_whole(gpt2):
    assert written(gpt2, Way("static"), scope="model") == generated(gpt2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_the_one_row_product_is_the_product(dtype, bias):
    torch.manual_seed(0)
    linear = torch.nn.Linear(48, 32, bias=bias).to(dtype)
    row = torch.randn(1, 1, 48, dtype=dtype)
    with torch.no_grad():
        exact = torch.nn.functional.linear(row.double(), linear.weight.double(), linear.bias.double() if bias else None)
        got = onerow.one_row_linear(linear, row)
        assert got.dtype == dtype
        assert torch.allclose(got.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
        linear.weight[0, 0] += 1
        assert not torch.allclose(onerow.one_row_linear(linear, row).double(), exact, rtol=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("cut", [slice(4, 12), slice(0, 16, 2)])
def test_the_one_row_product_of_a_part_of_a_tensor_is_that_parts(cut):
    module, tensor = torch.nn.Linear(8, 3), torch.randn(1, 1, 16)
    with torch.inference_mode():
        assert torch.allclose(onerow.one_row_linear(module, tensor[..., cut]), module(tensor[..., cut]), atol=1e-6)


def test_the_one_query_attention_is_the_attention():
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 6, 1, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    mask = torch.zeros(1, 1, 1, 9)
    mask[..., 6:] = float("-inf")
    stock = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    got, _ = onerow.one_query_attention(None, query, key, value, mask)
    assert torch.allclose(got.transpose(1, 2), stock, atol=1e-6)
    unmasked, _ = onerow.one_query_attention(None, query, key, value, None)
    assert not torch.allclose(unmasked.transpose(1, 2), stock, atol=1e-2)


def test_the_one_query_attention_refuses_two_queries():
    with pytest.raises(ValueError, match="written for one"):
        onerow.one_query_attention(
            None, torch.zeros(1, 2, 2, 4), torch.zeros(1, 2, 2, 4), torch.zeros(1, 2, 2, 4), None
        )


def test_the_one_row_form_is_taken_back_even_after_an_error(llama):
    before = llama.config._attn_implementation
    switch = onerow.one_row(llama)
    switch.__enter__()
    assert llama.config._attn_implementation == onerow.ATTENTION
    # False: the error goes on to whoever is to hear of it.
    assert switch.__exit__(RuntimeError, RuntimeError("inside"), None) is False
    assert llama.config._attn_implementation == before
    assert not any("forward" in module.__dict__ for module in llama.modules())


def test_large_pages_hold_the_weights_while_they_are_used(llama):
    weight = llama.model.embed_tokens.weight
    before, copies = weight.data_ptr(), large_pages.LargePages(llama)
    with torch.inference_mode():
        expected = llama(IDS).logits
        with copies.used():
            assert weight.data_ptr() != before
            assert torch.equal(llama(IDS).logits, expected)
            # They are what is computed with.
            weight[IDS[0, 0]] += 1
            assert not torch.equal(llama(IDS).logits, expected)
            weight[IDS[0, 0]] -= 1
    assert weight.data_ptr() == before
    assert copies.n_bytes >= sum(each.nbytes for each in llama.parameters())


def test_large_pages_are_left_even_after_an_error(llama):
    before = llama.model.embed_tokens.weight.data_ptr()
    with pytest.raises(RuntimeError, match="inside"), large_pages.LargePages(llama).used():
        raise RuntimeError("inside")
    assert llama.model.embed_tokens.weight.data_ptr() == before


def test_a_system_without_large_pages_computes_with_the_weights_where_they_are(llama, monkeypatch):
    monkeypatch.setattr(large_pages, "asked_for", lambda: False)
    copies, weight = large_pages.LargePages(llama), llama.model.embed_tokens.weight
    before = weight.data_ptr()
    with copies.used():
        assert weight.data_ptr() == before
    assert copies.n_bytes == 0


def test_memory_that_asks_for_large_pages_has_them_where_the_system_gives_them():
    def held() -> int:
        return int(re.search(r"AnonHugePages:\s+(\d+)", Path("/proc/self/smaps_rollup").read_text())[1])

    switch = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    given = switch.exists() and "[never]" not in switch.read_text()
    before = held()
    kept = large_pages.empty(64 << 20).fill_(1)
    assert kept.data_ptr() % large_pages.PAGE == 0
    assert (held() - before > 16 << 10) == given


def test_a_room_that_is_too_large_costs_bytes(llama):
    cache = caches.make("static", llama.config, 4 * IDS.shape[1])
    with torch.inference_mode():
        llama(IDS, past_key_values=cache)
    assert memory.cache_bytes(cache) == 4 * IDS.shape[1] * memory.kv_bytes_per_token(llama.config, torch.float32)


def test_the_peak_is_that_of_the_work_alone():
    def hold(mib: int) -> None:
        torch.ones(mib << 18).sum()

    # A first and larger piece must not be remembered: that is what a counter that is never reset does.
    hold(400)
    _, nothing = memory.peak(lambda: None, torch.device("cpu"))
    _, some = memory.peak(lambda: hold(200), torch.device("cpu"))
    assert 190 << 20 < some - nothing < 300 << 20


def test_work_that_reuses_memory_freed_before_needs_it_all_the_same():
    def fill(pieces: int) -> list[torch.Tensor]:
        return [torch.ones(8 << 18) for _ in range(pieces)]

    # The first pieces freed make the C library keep pieces of this size; the last of the others holds a hole below it
    # open, which stays resident and which it would fill first.
    fill(3)
    *hole, last = fill(60)
    del hole
    device = torch.device("cpu")
    _, nothing = memory.peak(lambda: None, device)
    _, some = memory.peak(lambda: torch.ones(200 << 18).sum(), device)
    assert last.numel() == 8 << 18
    assert some - nothing > 190 << 20


# What is made of rows.

ABOUT = {"model": "m", "weights": "random", "dtype": "bfloat16"}


def made_rows(
    seconds: dict[tuple[str | int, ...], tuple[float, float]], generate: dict[str, float] | None = None,
    graphs: int = 0, repeats: int = 3, last: int = 200,
) -> pd.DataFrame:
    """Make rows of known times: of each way a step's seconds at the start, and its growth."""
    rows = [speed._row(Way("none"), 0, chapter_rows.LOAD, 0, 0, 1.5) | {"engine": "", "cache": ""}]
    for cache, rate in (generate or {"none": 10, "dynamic": 40, "static": 38}).items():
        for repeat in range(repeats):
            row = speed._row(Way(cache), repeat, chapter_rows.WHOLE, 0, 7, 200 / rate * (1 + 0.01 * repeat))
            rows.append(row | {"engine": chapter_rows.GENERATE, "n_steps": 200, "graphs": graphs * (cache == "static")})
    for (cache, compiled, one_row, *pages), (start, slope) in seconds.items():
        way = Way(cache, bool(compiled), bool(one_row), pages == [1])
        for step in (1, 2):
            first = 5.0 if compiled and step == 1 else start
            rows.append(speed._row(way, -1, chapter_rows.COMPILE, step, 7 + step, first, 1, 2 * compiled * (step == 1)))
        for repeat in range(repeats):
            if cache != "none":
                rows.append(speed._row(way, repeat, chapter_rows.PREFILL, 0, 7, 0.03, 1))
            for step in range(1, last, last // 10 if cache == "none" else 1):
                took = (start + slope * step) * (1 + 0.01 * repeat)
                rows.append(speed._row(way, repeat, chapter_rows.DECODE, step, 7 + step, took, 1))
    return pd.DataFrame([ABOUT | row for row in rows])


TIMES = {
    ("none", 0, 0): (0.02, 4e-4),
    ("dynamic", 0, 0): (0.025, 0.0),
    ("static", 0, 0): (0.025, 0.0),
    ("none", 1, 0): (0.018, 3e-4),
    ("dynamic", 1, 0): (0.02, 0.0),
    ("static", 1, 0): (0.02, 0.0),
    ("static", 1, 1): (0.01, 0.0),
    ("static", 1, 1, 1): (0.008, 0.0),
}


@pytest.fixture
def rows() -> pd.DataFrame:
    return made_rows(TIMES)


def found_of(**runs: pd.DataFrame) -> Found:
    """Give what the chapter finds in these rows, by experiment."""
    return found_in.of_runs("static_cache", {name: run_of(rows) for name, rows in runs.items()})


def told(measure: measures.Measure, rows: pd.DataFrame) -> list[Estimate]:
    return [one.estimate for one in measure(found_of(static_speed=rows))]


def test_speeds_are_steps_over_their_seconds(rows):
    table = tables.speeds(found_of(static_speed=rows)).set_index(
        ["engine", "cache", "compiled", "one_row", "large_pages"]
    )["speed"]
    assert table[("loop", "static", 1, 1, 0)].value == pytest.approx(100 / 1.01)
    assert table[("loop", "static", 1, 1, 1)].value == pytest.approx(125 / 1.01)
    assert table[("loop", "static", 1, 1, 0)].high == pytest.approx(100)
    # Without a cache a few lengths stand for all: the mean of a straight line is its middle.
    assert table[("loop", "none", 0, 0, 0)].high == pytest.approx(1 / (0.02 + 4e-4 * 91), rel=1e-2)
    assert table[("generate", "dynamic", 0, 0, 0)].high == pytest.approx(40)


def test_a_single_run_is_given_no_range(rows):
    once = rows[(rows["engine"] != GENERATE) | (rows["cache"] != "none") | (rows["repeat"] == 0)]
    written, before = (
        tables.speed_grid(tables.speeds(found_of(static_speed=each)), 125).set_index("way")["tokens/s"]
        for each in (once, rows)
    )
    assert written["generate, none"] == "10.0"
    # Controls: of several runs there is a range, also of the others here.
    assert before["generate, none"] == "9.9 [9.8 to 10.0]"
    assert written.drop("generate, none").str.contains(" to ").all()


def test_against_generate_counts_the_prefill_on_both_sides(rows):
    (found,) = told(measures.OVER_GENERATE, rows)
    # Each repeat of a step is longer by as much as one of `generate`; the prefill is not.
    assert found.low == pytest.approx(200 / (199 * 0.008 + 0.03) / 40, rel=1e-3)


def test_growth_is_found_where_it_is_and_not_where_it_is_not(rows):
    found = found_of(static_speed=rows)["growth"].groupby("cache")["growth"]
    assert found.median()["none"] == pytest.approx(100 * 4e-4 / 0.0204, rel=0.02)
    assert found.min()["dynamic"] <= 0 <= found.max()["dynamic"]


def test_what_the_document_published_is_compared_as_it_stands():
    # By hand: 26 / 21 and 31 / 27 tokens a second; 9 s in the table against 8.03 s of a later call.
    gains = measures.PUBLISHED_AHEAD.table(found_of()).set_index("device")["estimate"]
    assert gains.map(lambda one: one.value).to_dict() == pytest.approx(
        {"L4": 0, "T4": 26 / 21 - 1, "A100": 31 / 27 - 1}
    )
    assert measures.PUBLISHED_EQUAL(found_of()) == "L4"
    (spread,) = measures.PUBLISHED_SPREAD(found_of())
    assert spread.estimate.value == pytest.approx(9 / 8.03 - 1)


def test_the_crossover_is_where_the_lines_cross(rows):
    # 0.02 + 4e-4 * step = 0.025 at step 12.5, seven tokens behind the prompt.
    def said_of(rows: pd.DataFrame) -> str:
        return measures.CROSSOVER(found_of(static_speed=rows))

    said = re.fullmatch(r"from (\d+) tokens on", said_of(rows))
    assert int(said[1]) == pytest.approx(20, abs=1)
    never = made_rows(TIMES | {("none", 0, 0): (0.01, 0.0)})
    assert said_of(never) == "at no length measured"
    always = made_rows(TIMES | {("none", 0, 0): (0.03, 4e-4)})
    assert re.fullmatch(r"already at the shortest length measured, \d+ tokens", said_of(always))


def test_the_limit_is_bandwidth_over_bytes():
    read = pd.DataFrame({"kernel": ["sum", "copy"], "repeat": 0, "n_bytes": [4e9, 8e9], "seconds": [0.2, 0.2]})
    used = pd.DataFrame({"cache": ["static"], "n_tokens": [200], "weights_bytes": [3e8], "kv_bytes": [2e8]})
    assert tables.limit(found_of(memory_bandwidth=read, static_memory=used)) == pytest.approx(100)


def budget_rows(milliseconds: dict[str, dict[str, float]]) -> pd.DataFrame:
    return pd.DataFrame(
        ABOUT | {"pages": pages, "repeat": repeat, "part": part, "seconds": 1e-3 * ms * (1 + 0.001 * repeat)}
        for pages, parts in milliseconds.items()
        for repeat in range(5)
        for part, ms in parts.items()
    )


PARTS = {STEP: 14.0, PROFILED: 15.0, KERNELS_OF_LAYERS: 10.0, KERNELS_OF_HEAD: 2.0, CALLS: 1.0}
SLOWER = {STEP: 21.0, KERNELS_OF_LAYERS: 13.0, PROFILED: 18.0}
BUDGET = budget_rows({"usual": PARTS | SLOWER, "large": PARTS})
# A gain from large pages of 1.05 to 1.47, by repeat, around the 1.25 of `TIMES`.
OVERLAPPING = BUDGET.assign(
    seconds=BUDGET["seconds"] * (0.7 + 0.07 * BUDGET["repeat"]).where(BUDGET["pages"] == "usual", 1.0)
)


def test_the_parts_of_a_step_add_up_to_the_profiled_step():
    read = pd.DataFrame({"n_bytes": [1e9], "seconds": [1.0]})
    used = pd.DataFrame([held("static", weights_bytes=7e6, kv_bytes=2e6)])
    found = tables.budget(found_of(step_budget=BUDGET, memory_bandwidth=read, static_memory=used))["large"]
    *parts, profiled, step = (one.value for one in found)
    assert parts == pytest.approx([8, 4, 1, 2], rel=0.01)
    assert sum(parts) == pytest.approx(profiled, rel=0.01)
    assert step == pytest.approx(14, rel=0.01)


def beside_rows(theirs: float) -> pd.DataFrame:
    """Make steps of 14 ms, and others of so many."""
    return pd.DataFrame(
        ABOUT | {"repeat": repeat, "program": program, "n_steps": 5, "step_s": 1e-3 * ms * (1 + 0.001 * repeat)}
        for program, ms in ((OURS, 14.0), (THEIRS, theirs))
        for repeat in range(5)
    )


def context_rows(per_token: float) -> pd.DataFrame:
    """Make steps of ten milliseconds, and so many microseconds for each token of each sequence."""
    return pd.DataFrame(
        ABOUT
        | {
            "dtype": dtype, "batch": batch, "context": context, "step": step, "weights_bytes": 1000,
            "kv_bytes": batch * context, "seconds": 0.01 + 1e-6 * per_token * batch * context,
        }
        for dtype in ("float32", "float16", "bfloat16")
        for batch in (1, 16)
        for context in (128, 1024, 4096)
        for step in range(3)
    )


CONTEXTS = context_rows(per_token=1)


def test_where_the_cache_takes_over_is_found_in_bytes_and_in_time():
    found = found_of(weights_or_cache=CONTEXTS)
    (as_many,) = measures.CACHE_IS_WEIGHTS.where(dtype="bfloat16", batch=16)(found)
    assert as_many.estimate.value == pytest.approx(1000 / 16)
    # 10 ms + 16 us a token is twice its value at 128 tokens where 16 us x tokens = 10 ms + 2 x 2.048 ms: at 881.
    assert measures.DOUBLED(found) == "at about 880 tokens"
    assert measures.DOUBLED(found_of(weights_or_cache=context_rows(per_token=0))) == "never up to 4,096 tokens"


def text_rows(tokens: dict[str, list[int]], margins: list[float]) -> pd.DataFrame:
    return pd.DataFrame(
        ABOUT | {"cache": cache, "step": step, "text": f" {token}", "token": token, "margin": margins[step],
            "logits_rms": 2.0}
        for cache, ids in tokens.items()
        for step, token in enumerate(ids)
    )


def test_partings_name_the_first_other_token_and_its_margin():
    rows = text_rows({"none": [1, 2, 3], "dynamic": [1, 2, 3], "static": [1, 9, 3]}, [1.0, 0.01, 1.0])
    table = chapter_rows.partings(run_of(rows)).set_index(["against", "cache"])
    assert np.isnan(table.loc[("none", "dynamic"), "step"])
    assert table.loc[("none", "static"), ["step", "margin"]].tolist() == [1, 0.01]
    assert table["tied"].tolist() == [None, False, False]
    # A tie on the other side counts as well.
    tied = rows.assign(margin=rows["margin"].where((rows["cache"] != "static") | (rows["step"] != 1), 0.0))
    assert chapter_rows.partings(run_of(tied))["tied"].tolist() == [None, True, True]


def held(cache: str, **values) -> dict:
    return {
        "cache": cache, "n_tokens": 200, "weights_bytes": 2**28, "predicted_bytes": 2**22, "before_bytes": 2**29,
    } | values


MEMORY = pd.DataFrame(
    [held("none", kv_bytes=0, peak_bytes=2**29), held("dynamic", kv_bytes=2**22, peak_bytes=2**29),
     held("static", kv_bytes=2**22, peak_bytes=2**29)]
)


def shape_rows(prompt: int = 7, grows: int = 1) -> pd.DataFrame:
    rows = []
    for step in range(5):
        length = prompt + grows * step
        rows.append({"cache": "none", "step": step, "fed": f"1x{length}", "kv_bytes": 0})
        for cache, places in (("dynamic", length), ("static", 1024)):
            rows.append(
                {
                    "cache": cache, "step": step, "fed": "1x1", "keys_shape": f"1x3x{places}x64", "first_dimension": 1,
                    "cached_tokens": length, "kv_bytes": 23040 * places,
                }
            )
    return pd.DataFrame(rows)


TEXTS = text_rows({"none": [1, 2], "dynamic": [1, 2], "static": [1, 9]}, [1.0, 0.01])


ALIKE = text_rows({"none": [1, 2], "dynamic": [1, 9], "static": [1, 9]}, [1.0, 0.01])


DRAWN = [{"weights": "random", "parameters": 134_515_008}]


def results_of(
    rows: pd.DataFrame, device="cpu", memory=MEMORY, shapes=None, texts=TEXTS, models=DRAWN, budget=None, contexts=None,
    beside=None, device_name="a processor",
) -> Found:
    machine = MACHINE | {"device_name": device_name}
    found = found_of(
        memory_bandwidth=pd.DataFrame({"n_bytes": [4e9], "seconds": [0.2]}),
        static_memory=memory,
        static_shapes=shape_rows() if shapes is None else shapes,
        static_texts=texts,
        step_budget=BUDGET if budget is None else budget,
        weights_or_cache=CONTEXTS if contexts is None else contexts,
        beside_llama_cpp=beside_rows(theirs=16.0) if beside is None else beside,
    )
    return with_runs(found, static_speed=run_of(rows, settings={"device": device}, models=models, machine=machine))


def outcome(name: str, **given) -> str:
    """Hold a statement against made rows."""
    rows = made_rows(given.pop("seconds", TIMES), given.pop("generate", None), given.pop("graphs", 0), repeats=5)
    # Whatever processor it speaks of: made rows are of none.
    return check(replace(measures.STATEMENTS[name], on=""), results_of(rows, **given)).outcome


COMPILED_LATE = {("static", 1, 0): (0.04, 0.0)}
CONTRARY = {
    "cache-pays": {"seconds": TIMES | {("none", 0, 0): (0.01, 0.0)}},
    "static-alone": {"seconds": TIMES | {("static", 0, 0): (0.05, 0.0)}},
    "static-compiled": {"seconds": TIMES | COMPILED_LATE},
    "one-row-pays": {"seconds": TIMES | {("static", 1, 1): (0.02, 0.0)}},
    "large-pages-pay": {"seconds": TIMES | {("static", 1, 1, 1): (0.012, 0.0)}},
    "runs-disagree-on-pages": {"budget": OVERLAPPING},
    "kernels-take-most": {"budget": budget_rows({"large": PARTS | {KERNELS_OF_LAYERS: 1.0}})},
    "large-pages-save-kernels": {"budget": budget_rows({"usual": PARTS | {PROFILED: 18.0}, "large": PARTS})},
    "cache-outgrows-weights": {"contexts": context_rows(per_token=0.1)},
    "one-sequence-hardly-grows": {"contexts": context_rows(per_token=10)},
    "one-sequence-in-fp16-grows-on-amd": {"contexts": CONTEXTS},
    "faster-than-generate": {"generate": {"none": 10, "dynamic": 90, "static": 38}},
    "faster-than-llama-cpp": {"beside": beside_rows(theirs=12.0)},
    "below-the-limit": {"memory": MEMORY.assign(weights_bytes=2**31)},
    "generate-compiles-nothing": {"graphs": 2},
    "cached-steps-hardly-grow": {"seconds": TIMES | {("dynamic", 0, 0): (0.025, 4e-4)}},
    "room-is-held": {"shapes": shape_rows().assign(kv_bytes=1)},
    "full-is-full": {"memory": MEMORY.assign(kv_bytes=[0, 2**22, 2**23])},
    "len-is-the-batch": {"shapes": shape_rows().assign(first_dimension=7)},
    "fp32-texts-are-equal": {"texts": TEXTS.assign(dtype="float32")},
    "bf16-texts-differ": {"texts": ALIKE},
}


@pytest.mark.parametrize(("threads", "said"), [(1, "CPU, 1 thread"), (2, "CPU, 2 threads")])
def test_ours_beside_the_published_speeds_names_the_threads(threads, said):
    rows = made_rows(TIMES, None, 0, repeats=5)
    results = results_of(rows)
    about = results.runs["static_speed"].about
    about["machine"] = about["machine"] | {"threads": threads}
    assert any(str(cell).endswith(said) for cell in tables.beside_published(results).to_numpy().ravel())


def test_every_statement_of_ours_has_its_negative_control():
    # Graphs that are compiled late have a test of their own below.
    assert set(CONTRARY) == set(measures.STATEMENTS) - {"dynamic-compiles"}


@pytest.mark.parametrize("name", CONTRARY)
def test_a_statement_holds_on_rows_made_for_it_and_fails_on_others(name):
    texts = pd.concat([ALIKE.assign(dtype="float32"), TEXTS])
    agreeing = {"memory": MEMORY.assign(weights_bytes=2**20), "texts": texts}
    if name == "one-sequence-in-fp16-grows-on-amd":
        agreeing["contexts"] = context_rows(per_token=10)
    assert outcome(name, **agreeing) == "holds"
    assert outcome(name, **agreeing | CONTRARY[name]) == "fails"


def verdicts_on(seconds=TIMES, generate=None, graphs=0, repeats=5, last=200, **others) -> Judged:
    return Judged(measures.CHECKS, results_of(made_rows(seconds, generate, graphs, repeats, last), **others))


def test_what_a_cpu_can_say_of_the_document():
    assert {claim: verdict.verdict for claim, verdict in verdicts_on().items()} == {
        "cache-speeds-up": "reproduced in kind",
        "linear-time": "reproduced",
        "static-faster": "not run",
        "static-slower-cpu": "reproduced in kind",
        "static-slower-t4": "not run",
        "dynamic-not-compilable": "refuted in kind",
        "compiled-by-itself": "not run",
        # Each configuration was compiled once.
        "first-call-slow": "undecided",
        "static-more-memory": "reproduced",
        "shapes": "reproduced",
    }


FASTER = TIMES | {("static", d, 0): (0.005, 0.0) for d in (0, 1)} | {("static", 1, 1, d): (0.005, 0.0) for d in (0, 1)}
OTHERWISE = {
    "cache-speeds-up": ({"seconds": TIMES | {("none", 0, 0): (0.005, 0.0)}}, "refuted in kind"),
    "linear-time": ({"shapes": shape_rows().assign(fed="1x9")}, "refuted"),
    "linear-time, where nothing is saved": ({"shapes": shape_rows().assign(fed="1x1")}, "undecided"),
    "static-faster": ({"device": "cuda", "seconds": TIMES | {("static", 1, 0): (0.001, 0.0)}}, "plausible cause"),
    # A static cache that is five times as fast without any compilation is its own cause.
    "static-faster, by itself": ({"device": "cuda", "seconds": FASTER}, "reproduced in kind"),
    # Compiling does next to nothing: the one-row form must not be taken for it.
    "static-faster, only the form": (
        {"device": "cuda", "seconds": TIMES | {("static", 1, 0): (0.025, 0.0)}}, "undecided",
    ),
    "static-slower-cpu": ({"generate": {"none": 10, "dynamic": 40, "static": 50}}, "refuted in kind"),
    "static-slower-cpu, on another device": ({"device": "cuda"}, "not run"),
    "static-slower-t4": ({"device": "cuda", "device_name": "Tesla T4"}, "reproduced in kind"),
    "compiled-by-itself": ({"device": "cuda", "graphs": 3}, "reproduced in kind"),
    "compiled-by-itself, which it is not": ({"device": "cuda"}, "refuted in kind"),
    "shapes": ({"shapes": shape_rows(grows=2)}, "refuted"),
    "shapes, of another prompt": ({"shapes": shape_rows(prompt=11)}, "refuted"),
    "static-more-memory": ({"shapes": shape_rows().assign(kv_bytes=1)}, "refuted"),
}


@pytest.mark.parametrize("claim", OTHERWISE)
def test_other_rows_give_another_verdict(claim):
    other, word = OTHERWISE[claim]
    assert verdicts_on(**other)[claim.partition(",")[0]].verdict == word


def test_another_models_heads_are_not_held_against_the_documents_shapes():
    rows = shape_rows()
    other = rows.assign(keys_shape=rows["keys_shape"].str.replace("1x3x", "1x2x", regex=False))
    assert verdicts_on(shapes=other)["shapes"].verdict == "not run"


def test_what_compiles_nothing_is_no_first_call_and_configurations_are_no_sample():
    rows = made_rows(TIMES)
    found = rows["large_pages"] == 1
    rows.loc[found, "graphs"] = 0
    evidence = measures.CHECKS["first-call-slow"].measure(results_of(rows)).found[measures.FIRST]
    assert len(evidence) == 4
    assert {one.units for one in evidence} == {1}
    # Control: where every configuration compiles, each is told.
    assert len(measures.CHECKS["first-call-slow"].measure(results_of(made_rows(TIMES))).found[measures.FIRST]) == 5


def test_a_statement_about_another_version_is_judged_of_todays_and_says_which():
    check = measures.CHECKS["dynamic-not-compilable"]
    said = check(results_of(made_rows(TIMES))).here
    assert said.count("today") >= 1
    assert documents.published("notebook-static")["versions"]["transformers"] in said
    assert "today" in check.rule.text()


def test_a_graph_for_every_length_is_not_called_compilable():
    rows = made_rows(TIMES)
    late = (rows["cache"] == "dynamic") & (rows["compiled"] == 1) & (rows["step"] == 150)
    rows.loc[late, "graphs"] = 1
    claim = measures.CHECKS["dynamic-not-compilable"]
    assert claim(results_of(rows)).verdict == "undecided"
    assert check(measures.STATEMENTS["dynamic-compiles"], results_of(rows)).outcome == "fails"
    assert outcome("dynamic-compiles") == "holds"
    assert "a few layers compiled as one graph, without CUDA graphs" in claim(results_of(rows)).here


def test_the_documents_own_ids_are_fed_and_another_prompt_is_cut_anew(settings):
    document = documents.published("notebook-static")
    posted = settings.model_copy(update={"prompt": document["prompt"]})
    assert shapes.inputs(posted)["ids"] == document["prompt_ids"]
    assert shapes.inputs(settings)["ids"] != document["prompt_ids"]


@pytest.fixture(scope="module")
def settings(llama_folder):
    return StaticCacheSettings.checked(
        model=str(llama_folder), text_model=str(llama_folder), dtype="float32", n_new_tokens=6, n_repeats=2,
        prompt="def f(x):",
    )


@pytest.mark.slow
def test_the_chapter_runs_on_a_local_folder(settings, monkeypatch):
    # The kernels of this size compile as slowly as any: one compiled way is enough here.
    monkeypatch.setattr(speed, "ways", lambda _: [Way("none"), Way("dynamic"), Way("static"), Way("static", True)])
    monkeypatch.setattr(decoding, "MOST_TOGETHER", 1)
    monkeypatch.setattr(memory_bandwidth, "_N", 1 << 16)
    started = []
    monkeypatch.setattr(speed, "_start_compiler", started.append)
    # Not those whose one way would be compiled anew.
    asked = ("static_speed", "memory_bandwidth", "static_memory", "static_shapes")
    runs = {each.name: each.run(settings) for each in EXPERIMENTS if each.name in asked}
    results = found_in.of_runs("static_cache", runs)
    run = runs["static_speed"]
    # Once, before anything is compiled; and not for a run that is there.
    assert speed.EXPERIMENT.run(settings).hash == run.hash
    assert started == [torch.device("cpu")]
    assert set(run.rows["phase"]) == {"load", "compile", "prefill", "decode", "whole", "head"}
    (head,) = measures.HEAD_COPY(results)
    assert 0 < head.estimate.value < 1e3 * run.rows["seconds"].sum()
    # `generate` and the loop take turns, in an order that moves on by one with every repeat.
    begun = run.rows[run.rows["phase"].isin(["whole", "prefill"]) & (run.rows["cache"] != "none")]
    orders = [
        list(zip(part["engine"], part["cache"], part["compiled"], strict=True)) for _, part in begun.groupby("repeat")
    ]
    assert len(orders) == 2
    assert orders[1] == orders[0][1:] + orders[0][:1]
    cached = run.rows[(run.rows["phase"] == "decode") & (run.rows["cache"] != "none")]
    assert (cached.groupby(["cache", "compiled", "repeat"]).size() == 5).all()
    # All ways in fp32 at this size: one text.
    assert cached.groupby("step")["token"].nunique().max() == 1
    used = results["static_memory"]
    assert (used["kv_bytes"] == used["predicted_bytes"]).all()
    assert len(results["static_shapes"]) == 15
    assert tables.limit(results) > 0


@pytest.mark.parametrize("experiment", [speed, written_texts])
def test_a_text_that_the_model_cannot_hold_is_refused(settings, experiment):
    with pytest.raises(UserError, match="context"):
        experiment.EXPERIMENT.run(settings.model_copy(update={"n_new_tokens": 100}))


def test_only_what_measures_time_asks_for_the_whole_machine():
    assert {e.name for e in EXPERIMENTS if e.needs_the_machine} == {
        "static_speed", "memory_bandwidth", "step_budget", "weights_or_cache", "beside_llama_cpp"
    }
