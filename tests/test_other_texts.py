"""Other texts of other lengths give the same outcomes in two chapters: what a claim is called, and what a symptom is.

What these small models drift by depends on the processor, so the drift is made: a step of one row is off by a few
roundoffs, at every length or at some.
"""

import functools
from contextlib import contextmanager

import pytest

from kvbook import paths
from kvbook.measuring.roundoff import UNIT_ROUNDOFF
from kvbook.models import kept, loading
from kvreport.chapters.bug_or_rounding import rows, symptoms
from kvreport.chapters.bug_or_rounding.settings import BugOrRoundingSettings
from kvreport.chapters.layer_drift import by_layer, measures
from kvreport.chapters.layer_drift.settings import LayerDriftSettings
from kvreport.publishing import found as found_in
from kvreport.publishing.statements import check

# Seed and range of lengths; no length is in both.
ONE, OTHER = (0, "8-15"), (1, "17-30")
CLAIMS = ("coarser-is-worse", "grows-with-depth", "greedy-keeps-its-choice")
DRIFTS = "every-dtype-drifts"


@pytest.fixture(scope="module")
def corpus_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for index in range(24):
        (folder / f"{index:02}.py").write_text(
            "\n".join(f"def f{index}_{k}(x):\n    return x {'+-*/%'[(index + k) % 5]} {index * k}" for k in range(9))
        )
    return str(folder)


@pytest.fixture
def a_step_off(monkeypatch, tmp_path):
    """Let layers be off in a step of one row, each by twice the one before; by how much may depend on the length."""
    load = loading.load

    @contextmanager
    def off(by):
        @functools.wraps(load)
        def load_off(*args, **kwargs):
            loaded, held = load(*args, **kwargs), {}
            roundoff = UNIT_ROUNDOFF[loaded.dtype]

            def before(_module, args, kwargs):
                cache, ids = kwargs.get("past_key_values"), kwargs.get("input_ids", args[0] if args else None)
                held["tokens"] = ids.shape[-1] + (cache.get_seq_length() if cache is not None else 0)

            def after(index, states):
                return states * (1 + 2**index * by(held["tokens"], roundoff)) if states.shape[-2] == 1 else states

            if loaded.model.config.model_type == "llama":
                loaded.model.register_forward_pre_hook(before, with_kwargs=True)
                for index, layer in enumerate(loaded.model.model.layers):
                    layer.mlp.register_forward_hook(lambda *given, index=index: after(index, given[-1]))
            return loaded

        with monkeypatch.context() as patch:
            patch.setattr(loading, "load", load_off)
            # What was read or run before is without the step, which is in no hash.
            patch.setattr(kept, "_kept", {})
            patch.setattr(paths, "RUNS", tmp_path / "runs")
            yield

    return off


def verdicts(model, corpus_folder, draw) -> dict[str, str]:
    """Judge the claims on layer drift from a few texts."""
    seed, n_tokens = draw
    settings = LayerDriftSettings.checked(
        model=str(model), reference_model=str(model), corpus=corpus_folder, n_samples=12, n_tokens=n_tokens, seed=seed,
        dtypes="float32,bfloat16",
    )
    found = found_in.of_runs("layer_drift", {"layer_drift": by_layer.EXPERIMENT.run(settings)})
    verdicts = {claim: measures.CHECKS[claim](found).verdict for claim in CLAIMS}
    return verdicts | {DRIFTS: check(measures.STATEMENTS[DRIFTS], found).outcome}


def called(model, corpus_folder, draw) -> dict[tuple[str, str], str]:
    """Say of every symptom whether it is a bug; exact and rounding are told apart by the processor alone."""
    seed, n_tokens = draw
    settings = BugOrRoundingSettings.checked(
        model=str(model), families=(), corpus=corpus_folder, n_samples=2, n_tokens=n_tokens, seed=seed,
        dtypes="float64,float32",
    )
    found = found_in.of_runs("bug_or_rounding", {"bug_or_rounding": symptoms.EXPERIMENT.run(settings)})
    return {
        (row.document, row.symptom): {"exact": "sound", "rounding": "sound"}.get(row.kind, row.kind)
        for row in found["verdicts"].itertuples()
    }


def changed(one: dict, other: dict) -> list:
    """List what has another outcome, and what one of the two lacks."""
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]


def test_claims_on_layer_drift_are_judged_alike_on_other_texts_and_lengths(llama_folder, corpus_folder, a_step_off):
    with a_step_off(lambda tokens, roundoff: 2 * roundoff):
        one, other = (verdicts(llama_folder, corpus_folder, draw) for draw in (ONE, OTHER))
    assert changed(one, other) == []
    assert one[DRIFTS] == "holds"


def test_control_drift_at_some_lengths_alone_is_judged_otherwise_at_others(llama_folder, corpus_folder, a_step_off):
    # As a kernel that works in blocks does it: off where a block is full.
    with a_step_off(lambda tokens, roundoff: 2 * roundoff * (tokens % 16 == 0)):
        fixed, drawn = (verdicts(llama_folder, corpus_folder, draw) for draw in ((0, 16), OTHER))
    assert fixed[DRIFTS] == "holds"
    assert DRIFTS in changed(fixed, drawn)


@pytest.mark.slow
def test_symptoms_are_called_alike_on_other_texts_and_lengths(llama_folder, corpus_folder, a_step_off):
    one, other = (called(llama_folder, corpus_folder, draw) for draw in (ONE, OTHER))
    assert changed(one, other) == []
    assert set(one.values()) == {"bug", "sound"}
    # Control: a bug that only longer texts show changes what they are called.
    with a_step_off(lambda tokens, roundoff: 0.01 * (tokens > 16)):
        other = called(llama_folder, corpus_folder, OTHER)
    assert (rows.ISSUE, rows.DRIFT) in changed(one, other)
