"""Static and dynamic caches: the decode loop, the one-row form, bytes, and what is made of the rows."""

import re
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import small_models
import torch
from made_up import changed, on, published, run_of, with_rows
from refusing import refusal

from kvbook.measuring import caches, decoding, large_pages, memory
from kvbook.measuring.decoding import Decoder, Way
from kvreport.chapters.static_cache import StaticCacheSettings, kinds, measures, speed, step_times, tables
from kvreport.chapters.static_cache import rows as chapter_rows
from kvreport.chapters.static_cache.rows import STEP
from kvreport.publishing import documents
from kvreport.publishing import found as found_in
from kvreport.running import catalogue

IDS, N_NEW = torch.tensor([[5, 17, 200, 31, 8]]), 8


def written(model, way: Way, **options) -> list[int]:
    decoder = Decoder(model, way, IDS.shape[1] + N_NEW, **options)
    with closing(decoder), torch.inference_mode():
        tokens = [decoder.start(IDS)]
        while len(tokens) < N_NEW:
            tokens.append(decoder.step(tokens[-1]))
    return [token.item() for token in tokens]


def generated(model) -> list[int]:
    return small_models.generated(model, IDS, N_NEW, pad_token_id=2).sequences[0, IDS.shape[1] :].tolist()


@pytest.fixture
def freshly_compiled(llama):
    """Make the small model anew, and let the compiler begin anew: hooks left on the shared model forbid graphs."""
    model = type(llama)(llama.config)
    model.load_state_dict(llama.state_dict())
    torch.compiler.reset()
    yield model.eval().requires_grad_(False)
    torch.compiler.reset()


@pytest.mark.parametrize("cache", ["none", "dynamic", "static"])
def test_the_eager_loop_writes_what_generate_writes(llama, cache):
    assert written(llama, Way(cache)) == generated(llama)


def test_a_loop_that_shows_the_empty_room_to_the_model_is_caught(llama, monkeypatch):
    monkeypatch.setattr(Decoder, "_mask", lambda *_: None)
    assert written(llama, Way("static")) != generated(llama)


@pytest.mark.parametrize("way", [Way("dynamic", True), Way("static", True, True, True)], ids=str)
def test_one_graph_serves_all_layers_and_writes_the_same_tokens(freshly_compiled, way, monkeypatch):
    # More layers take longer to compile, and show no more.
    monkeypatch.setattr(decoding, "MOST_TOGETHER", 2)
    if not way.one_row:
        # Its machine code takes a C++ compiler eight seconds; that of the other way is made, and runs.
        monkeypatch.setattr(decoding.torch, "compile", partial(torch.compile, backend="aot_eager"))
    before = speed.graphs_compiled()
    assert written(freshly_compiled, way) == generated(freshly_compiled)
    # One for the groups of layers, one for the head; a length that varies may cost one more.
    n_layers = freshly_compiled.config.num_hidden_layers
    assert 2 <= speed.graphs_compiled() - before <= 3 < n_layers
    assert 1 < decoding.together(n_layers) < n_layers, "one group would show nothing, nor would one layer a group"


@pytest.mark.parametrize(("n_layers", "size"), [(30, 5), (12, 4), (32, 4), (28, 4), (1, 1), (7, 1), (2, 2)])
def test_layers_are_compiled_in_equal_groups_of_five_at_most(n_layers, size):
    assert decoding.together(n_layers) == size


def test_a_static_cache_is_used_again_from_its_beginning_and_none_is_resumed_that_was_not_filled(llama):
    decoder = Decoder(llama, Way("static"), 16)
    with torch.inference_mode():
        first, second = (decoder.start(IDS).item() for _ in range(2))
    assert first == second
    assert caches.length(decoder.cache) == IDS.shape[1]
    with pytest.raises(ValueError, match="call start"):
        Decoder(llama, Way("dynamic"), 16).resume(IDS)


def test_a_model_of_another_build_is_refused_with_what_to_do_and_decodes_whole(gpt2):
    assert "scope=model" in refusal(lambda: Decoder(gpt2, Way("static"), 16))
    assert written(gpt2, Way("static"), scope="model") == generated(gpt2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("part", [slice(0, 48), slice(4, 52), slice(0, 96, 2)])
def test_the_one_row_product_is_the_product_also_of_a_part_of_a_tensor(dtype, bias, part):
    torch.manual_seed(0)
    linear, row = torch.nn.Linear(48, 32, bias=bias).to(dtype), torch.randn(1, 1, 96, dtype=dtype)[..., part]
    with torch.no_grad():
        exact = torch.nn.functional.linear(row.double(), linear.weight.double(), linear.bias.double() if bias else None)
        got = decoding.one_row_linear(linear, row)
        assert got.dtype == dtype
        assert torch.allclose(got.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
        linear.weight[0, 0] += 1
        assert not torch.allclose(decoding.one_row_linear(linear, row).double(), exact, rtol=2 * torch.finfo(dtype).eps)


def test_the_one_query_attention_is_the_attention_and_refuses_two_queries():
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 6, 1, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    mask = torch.zeros(1, 1, 1, 9)
    mask[..., 6:] = float("-inf")
    stock = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    got, _ = decoding.one_query_attention(None, query, key, value, mask)
    assert torch.allclose(got.transpose(1, 2), stock, atol=1e-6)
    unmasked, _ = decoding.one_query_attention(None, query, key, value, None)
    assert not torch.allclose(unmasked.transpose(1, 2), stock, atol=1e-2)
    with pytest.raises(ValueError, match="written for one"):
        decoding.one_query_attention(None, torch.randn(1, 6, 2, 8), key, value, None)


def test_the_one_row_form_is_taken_back_even_after_an_error(llama):
    before, inside = llama.config._attn_implementation, decoding.one_row(llama)
    inside.__enter__()
    assert llama.config._attn_implementation == decoding.ATTENTION
    # False: the error goes on to whoever is to hear of it.
    assert inside.__exit__(RuntimeError, RuntimeError("inside"), None) is False
    assert llama.config._attn_implementation == before
    assert not any("forward" in module.__dict__ for module in llama.modules())


def test_large_pages_hold_the_weights_while_they_are_used_and_are_left_even_after_an_error(llama):
    weight = llama.model.embed_tokens.weight
    before, copies = weight.data_ptr(), large_pages.LargePages(llama)
    used = copies.used()
    with torch.inference_mode():
        expected = llama(IDS).logits
        used.__enter__()
        assert weight.data_ptr() != before
        assert torch.equal(llama(IDS).logits, expected)
        # They are what is computed with.
        weight[IDS[0, 0]] += 1
        assert not torch.equal(llama(IDS).logits, expected)
        assert used.__exit__(RuntimeError, RuntimeError("inside"), None) is False
        assert weight.data_ptr() == before
        assert torch.equal(llama(IDS).logits, expected)
    assert copies.n_bytes >= sum(each.nbytes for each in llama.parameters())


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
    given, before = switch.exists() and "[never]" not in switch.read_text(), held()
    kept = large_pages.empty(64 << 20).fill_(1)
    assert kept.data_ptr() % large_pages.PAGE == 0
    assert (held() - before > 16 << 10) == given


def test_the_peak_is_that_of_the_work_alone_even_where_it_reuses_memory_freed_before():
    def fill(pieces: int, mib: int = 8) -> list[torch.Tensor]:
        return [torch.ones(mib << 18) for _ in range(pieces)]

    # A larger piece before must not be remembered: that is what a counter that is never reset does.
    fill(1, 400)
    # The first pieces freed make the C library keep pieces of this size; the last of the others holds a hole below it
    # open, which stays resident and which it would fill first.
    fill(3)
    *hole, last = fill(60)
    del hole
    _, nothing = memory.peak(lambda: None, torch.device("cpu"))
    _, some = memory.peak(lambda: fill(1, 200)[0].sum(), torch.device("cpu"))
    assert last.numel() == 8 << 18
    assert 190 << 20 < some - nothing < 300 << 20


# What is made of rows.


def timed(uncached: str = "0.02 + 4e-4 * step") -> found_in.Found:
    """Put known seconds into five published repeats, each of which takes a hundredth longer than the one before."""
    found = next(iter(published("static_cache").values()))
    known = with_rows(found, static_speed=found["static_speed"].query("repeat < 5"))
    for where, seconds in {
        "phase == 'prefill'": "0.03", "phase == 'whole'": "5", "phase == 'decode'": "0.025",
        "phase == 'decode' and cache == 'none'": uncached, "one_row == 1 and phase == 'decode'": "0.01",
        "large_pages == 1 and phase == 'decode'": "0.008",
    }.items():
        known = changed(known, "static_speed", where, seconds=f"({seconds}) * (1 + 0.01 * repeat)")
    return known


def found_of(**runs: pd.DataFrame) -> found_in.Found:
    """Return what the chapter finds in these rows, by experiment."""
    return found_in.of_runs("static_cache", {name: run_of(rows) for name, rows in runs.items()})


def test_speeds_are_steps_over_their_seconds():
    table = tables.speeds(timed()).set_index(chapter_rows.WAY)["speed"]
    assert table[("loop", "static", 1, 1, 0)].value == pytest.approx(100 / 1.02)
    assert table[("loop", "static", 1, 1, 1)].value == pytest.approx(125 / 1.02)
    assert table[("loop", "static", 1, 1, 0)].high == pytest.approx(100)
    # Without a cache a few lengths stand for all: the mean of a straight line is its middle.
    assert table[("loop", "none", 0, 0, 0)].high == pytest.approx(1 / (0.02 + 4e-4 * 100))
    assert table[("generate", "dynamic", 0, 0, 0)].high == pytest.approx(40)


def test_against_generate_counts_the_prefill_on_both_sides():
    (found,) = measures.OVER_GENERATE(timed())
    assert found.estimate.value == pytest.approx(200 / (199 * 0.008 + 0.03) / 40)


def test_growth_is_found_where_it_is_and_not_where_it_is_not():
    found = timed()["growth"].groupby("cache")["growth"]
    assert found.median()["none"] == pytest.approx(100 * 4e-4 / 0.0204, rel=0.02)
    assert found.min()["dynamic"] <= 0 <= found.max()["dynamic"]


def test_what_the_document_published_is_compared_as_it_stands():
    # By hand: 26 / 21 and 31 / 27 tokens a second; 9 s in the table against 8.03 s of a later call.
    gains = measures.PUBLISHED_AHEAD.table(found_of()).set_index("device")["estimate"]
    expected = {"L4": 0, "T4": 26 / 21 - 1, "A100": 31 / 27 - 1}
    assert gains.map(lambda one: one.value).to_dict() == pytest.approx(expected)
    assert measures.PUBLISHED_EQUAL(found_of()) == "L4"
    (spread,) = measures.PUBLISHED_SPREAD(found_of())
    assert spread.estimate.value == pytest.approx(9 / 8.03 - 1)


def test_the_crossover_is_where_the_lines_cross():
    # 0.02 + 4e-4 * step = 0.025 at step 12.5, after the seven tokens of the prompt.
    said = re.fullmatch(r"from (\d+) tokens on", measures.CROSSOVER(timed()))
    assert int(said[1]) == pytest.approx(20, abs=1)
    assert measures.CROSSOVER(timed("0.01")) == "at no length measured"
    assert measures.CROSSOVER(timed("0.03 + 4e-4 * step")) == "already at the shortest length measured, 8 tokens"


def test_the_limit_is_bandwidth_over_bytes():
    read = pd.DataFrame({"kernel": ["sum", "copy"], "repeat": 0, "n_bytes": [4e9, 8e9], "seconds": [0.2, 0.2]})
    used = pd.DataFrame({"cache": ["static"], "n_tokens": 200, "weights_bytes": 3e8, "kv_bytes": 2e8})
    assert tables.limit(found_of(memory_bandwidth=read, static_memory=used)) == pytest.approx(100)


def test_the_parts_of_a_step_add_up_to_the_profiled_step():
    for found in (found for found in published("static_cache").values() if found["limit"] is not None):
        table = tables.budget(found).set_index("part")
        for pages, of in found["step_budget"].groupby("pages"):
            *parts, profiled, step = (one.value for one in table[pages])
            assert sum(parts) == pytest.approx(profiled, rel=0.02)
            assert step == pytest.approx(1e3 * of.loc[of["part"] == STEP, "seconds"].median())


def test_where_the_cache_takes_over_is_found_in_bytes_and_in_time():
    found = next(iter(published("static_cache").values()))
    of = {"weights_bytes": "1000", "kv_bytes": "batch * context", "seconds": "0.01 + 1e-6 * batch * context"}
    straight = changed(found, "weights_or_cache", **of)
    (as_many,) = measures.CACHE_IS_WEIGHTS.where(dtype="bfloat16", batch=16)(straight)
    assert as_many.estimate.value == pytest.approx(1000 / 16)
    # 10 ms + 16 us a token is twice its value at 128 tokens where 16 us x tokens = 10 ms + 2 x 2.048 ms: at 881.
    assert measures.DOUBLED(straight) == "at about 880 tokens"
    assert measures.DOUBLED(changed(found, "weights_or_cache", seconds="0.01")).startswith("never up to ")


def test_divergences_name_the_first_other_token_and_its_margin():
    tokens, margins = {"none": [1, 2, 3], "dynamic": [1, 2, 3], "static": [1, 9, 3]}, [1.0, 0.01, 1.0]
    about = {"dtype": "bfloat16", "logits_rms": 2.0}
    rows = pd.DataFrame(
        about | {"cache": cache, "step": step, "text": f" {token}", "token": token, "margin": margins[step]}
        for cache, ids in tokens.items() for step, token in enumerate(ids)
    )
    table = chapter_rows.divergences(rows).set_index(["against", "cache"])
    assert np.isnan(table.loc[("none", "dynamic"), "step"])
    assert table.loc[("none", "static"), ["step", "margin"]].tolist() == [1, 0.01]
    assert table["tied"].tolist() == [None, False, False]
    # A tie on the other side counts as well.
    tied = rows.assign(margin=rows["margin"].where((rows["cache"] != "static") | (rows["step"] != 1), 0.0))
    assert chapter_rows.divergences(tied)["tied"].tolist() == [None, True, True]


def test_what_compiles_nothing_is_no_first_call_and_configurations_are_no_sample():
    # Control: where every configuration compiles, each is told.
    every = changed(timed(), "static_speed", "phase == 'compile'", graphs="compiled", seconds="25 / (1 + step)")
    firsts = measures.FIRST(every)
    assert len(firsts) == 5
    # The first of them, step 1, over the median of the later ones.
    assert firsts[-1].estimate.value == pytest.approx(12.5 / (0.008 * 1.02))
    fewer = changed(every, "static_speed", "large_pages == 1", graphs="0")
    assert [one.units for one in measures.FIRST(fewer)] == [1] * 4


def test_beside_what_was_compiled_the_documents_version_is_told():
    found = on(next(iter(published("static_cache").values())), {"device": "cpu"})
    here = measures.CHECKS["dynamic-not-compilable"](found).here
    assert "a few layers compiled as one graph, without CUDA graphs" in here
    assert documents.published("notebook-static")["versions"]["transformers"] in here


def test_the_documents_own_ids_are_fed_and_another_prompt_is_cut_anew(settings):
    document = documents.published("notebook-static")
    assert kinds.inputs(settings.model_copy(update={"prompt": document["prompt"]}))["ids"] == document["prompt_ids"]
    assert kinds.inputs(settings)["ids"] != document["prompt_ids"]


@pytest.fixture(scope="module")
def settings(llama_folder):
    return StaticCacheSettings.checked(
        model=str(llama_folder), text_model=str(llama_folder), dtype="float32", n_new_tokens=6, n_repeats=2,
        prompt="def f(x):",
    )


def test_where_torch_cannot_compile_one_line_says_what_it_takes(monkeypatch):
    def fails(*_):
        raise OSError

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=fails))
    said = refusal(speed._start_compiler, torch.device("cpu"))
    assert said.startswith("torch cannot compile here (OSError): ")
    assert "apt-get install g++" in said


def test_the_chapters_rows_are_what_the_eager_ways_give(settings, monkeypatch):
    monkeypatch.setattr(speed, "ways", lambda _: [Way(cache) for cache in chapter_rows.KINDS])
    monkeypatch.setattr(step_times, "_N", 1 << 16)
    # It takes a quarter of a second, and peaks have a test of their own.
    monkeypatch.setattr(memory, "_hand_back_free_memory", lambda: None)
    started = []
    monkeypatch.setattr(speed, "_start_compiler", started.append)
    # Not those whose one way is compiled.
    asked = ("static_speed", "memory_bandwidth", "static_memory", "static_shapes")
    results = found_in.of_runs("static_cache", {name: catalogue.EXPERIMENTS[name].run(settings) for name in asked})
    run = results.runs["static_speed"]
    # Once, before anything is compiled; and not for a run that is there.
    assert speed.EXPERIMENT.run(settings).hash == run.hash
    assert started == [torch.device("cpu")]
    assert set(run.rows["phase"]) == {"load", "compile", "prefill", "decode", "whole", "head"}
    (head,) = measures.HEAD_COPY(results)
    assert 0 < head.estimate.value < 1e3 * run.rows["seconds"].sum()
    # `generate` and the loop take turns, in an order that moves on by one with every repeat.
    begun = run.rows[run.rows["phase"].isin(["whole", "prefill"]) & (run.rows["cache"] != "none")]
    first, second = (list(zip(part["engine"], part["cache"], strict=True)) for _, part in begun.groupby("repeat"))
    assert second == first[1:] + first[:1]
    cached = run.rows[(run.rows["phase"] == "decode") & (run.rows["cache"] != "none")]
    assert (cached.groupby(["cache", "repeat"]).size() == 5).all()
    # All ways in fp32 at this size: one text.
    assert cached.groupby("step")["token"].nunique().max() == 1
    used = results["static_memory"]
    assert (used["kv_bytes"] == used["predicted_bytes"]).all()
    held = results["static_shapes"].groupby("cache")["kv_bytes"].agg(["size", "max"])
    assert held["size"].tolist() == [5, 5, 5]
    # A room that is too large costs bytes.
    assert held.loc["static", "max"] > held.loc["dynamic", "max"] > 0 == held.loc["none", "max"]
    assert tables.limit(results) > 0


@pytest.mark.parametrize("experiment", [speed.EXPERIMENT, kinds.TEXTS])
def test_a_text_that_the_model_cannot_hold_is_refused(settings, experiment):
    assert "context" in refusal(lambda: experiment.run(settings.model_copy(update={"n_new_tokens": 100})))
    # Four of the tokens are written while bytes are counted, behind a prompt of the others.
    assert "than or equal to 5" in refusal(settings.checked, n_new_tokens=4)
