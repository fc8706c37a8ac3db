import pytest
from refusing import refusal

from kvreport.chapters.exact_caches import ExactCachesSettings
from kvreport.chapters.layer_drift import LayerDriftSettings
from kvreport.chapters.trainer_and_rollout import TrainerAndRolloutSettings
from kvreport.running import catalogue


@pytest.mark.parametrize(("values", "message"), [
    ({"n_samples": 0}, "n_samples"), ({"n_tokens": 1}, "n_tokens = 1: at least 2"), ({"dtypes": []}, "dtypes"),
    ({"dtypes": ["float8"]}, "float8"), ({"nosuch": 3}, "unknown parameter 'nosuch'"),
    ({"weights": "magic"}, "weights"), ({"n_samples": "many"}, "n_samples"),
])
def test_what_cannot_be_compared_is_refused_in_one_line(values, message):
    assert message in refusal(LayerDriftSettings.checked, **values)


def test_dtypes_may_come_as_a_string_and_under_their_short_names():
    assert LayerDriftSettings.checked(dtypes="bf16, fp32").dtypes == ("bfloat16", "float32")


def test_a_notebooks_own_names_are_not_parameters_but_unknown_ones_are():
    namespace = {"__name__": "__main__", "_i1": "x", "In": [], "Out": {}, "pytest": pytest, "f": len, "n_samples": 7}
    assert LayerDriftSettings.from_notebook(namespace).n_samples == 7
    assert "unknown parameter 'n_sample'" in refusal(LayerDriftSettings.from_notebook, namespace | {"n_sample": 7})


@pytest.mark.parametrize(("settings", "name"), [(ExactCachesSettings, "dtypes"), (TrainerAndRolloutSettings, "dtype")])
def test_dtypes_that_an_experiment_does_not_run_in_are_refused(settings, name):
    assert "'float64': Input should be" in refusal(settings.checked, **{name: "float64"})


# What no experiment can run, by the setting that asks for it; of `n_samples` the folder has fewer.
IMPOSSIBLE = {
    "device": "cuda:99", "model": "/nowhere", "second_model": "/nowhere", "reference_model": "/nowhere",
    "families": ["/nowhere"], "architectures": ["nosuch"], "corpus": "/nowhere", "n_tokens": 5000, "n_samples": 10_000,
    "prompt_tokens": 10_000,
}
# What an experiment does not read before it measures, or of which it takes so small a part that it can run.
UNREAD = {("first_bad_layer", "families"), ("greedy_paths", "corpus"), ("past_tables", "n_samples"),
          ("usage_factorial", "n_tokens")}
# Left out, as a whole, where their compiler's kernels or another program is not there.
ELSEWHERE = {"weights_or_cache", "beside_llama_cpp", "one_call", "engine_rollout"} | {
    name for name in catalogue.EXPERIMENTS if name.startswith("served_") and name != "served_transformers"
}


@pytest.mark.parametrize("name", sorted(set(catalogue.EXPERIMENTS) - ELSEWHERE))
def test_an_experiment_refuses_what_it_cannot_run_in_one_line_and_leaves_nothing(name, monkeypatch, runs, text_folder):
    # One experiment measures nothing where the trained model is not there; its refusals come before it reads it.
    monkeypatch.setattr("kvbook.models.packages.is_here", lambda family: True)
    experiment = catalogue.EXPERIMENTS[name]
    taken = set(experiment.settings.model_fields if experiment.fields is None else experiment.fields)
    for field in taken & set(IMPOSSIBLE):
        if (name, field) not in UNREAD:
            few = {"corpus": str(text_folder)} if field == "n_samples" and "corpus" in taken else {}
            given = few | {field: IMPOSSIBLE[field]}
            said = refusal(lambda given=given: experiment.run(experiment.settings.checked(**given)))
            assert "unknown parameter" not in said
    assert not runs.exists()
