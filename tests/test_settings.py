import pytest

from kvbook.errors import UserError
from kvreport.chapters.layer_drift.settings import LayerDriftSettings
from kvreport.running import catalogue


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n_samples": 0}, "n_samples"),
        ({"n_tokens": 1}, "n_tokens"),
        ({"dtypes": []}, "dtypes"),
        ({"dtypes": ["float8"]}, "float8"),
        ({"nosuch": 3}, "unknown parameter 'nosuch'"),
        ({"weights": "magic"}, "weights"),
        ({"n_samples": "many"}, "n_samples"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(values, message):
    with pytest.raises(UserError, match=message) as error:
        LayerDriftSettings.checked(**values)
    assert "\n" not in str(error.value)


def test_dtypes_may_come_as_a_string_and_under_their_short_names():
    assert LayerDriftSettings.checked(dtypes="bf16, fp32").dtypes == ("bfloat16", "float32")


def test_a_notebooks_own_names_are_not_parameters_but_unknown_ones_are():
    namespace = {"__name__": "__main__", "_i1": "x", "In": [], "Out": {}, "pytest": pytest, "f": len, "n_samples": 7}
    assert LayerDriftSettings.from_notebook(namespace).n_samples == 7
    with pytest.raises(UserError, match="unknown parameter 'n_sample'"):
        LayerDriftSettings.from_notebook(namespace | {"n_sample": 7})


# What no experiment can run, by the setting that asks for it; the context of the model is 64 tokens.
IMPOSSIBLE = {
    "device": "cuda:99", "model": "/nowhere", "second_model": "/nowhere", "reference_model": "/nowhere",
    "families": ["/nowhere"], "corpus": "/nowhere", "n_samples": 99, "n_tokens": 65,
}
# What an experiment does not read before it measures.
UNREAD = {("past_tables", "n_samples"), ("first_bad_layer", "families"), ("greedy_paths", "corpus")}
# Left out, as a whole, where their compiler's kernels or another program is not there.
ELSEWHERE = {"weights_or_cache", "beside_llama_cpp"}


@pytest.mark.parametrize("name", sorted(set(catalogue.EXPERIMENTS) - ELSEWHERE))
def test_an_experiment_refuses_what_it_cannot_run_in_one_line_before_it_begins(name, llama_folder, text_folder):
    experiment = catalogue.EXPERIMENTS[name]
    known = experiment.settings.model_fields
    small = {"model": str(llama_folder), "corpus": str(text_folder), "n_tokens": 12, "n_samples": 3}
    if "from_scratch" in experiment.settings.__module__:
        # It trains models of its own.
        small = {}
    small = {field: value for field, value in small.items() if field in known}
    experiment.inputs(experiment.settings.checked(**small))
    for field in set(known if experiment.fields is None else experiment.fields) & set(IMPOSSIBLE):
        if (name, field) not in UNREAD:
            with pytest.raises(UserError) as caught:
                experiment.inputs(experiment.settings.checked(**small | {field: IMPOSSIBLE[field]}))
            assert "\n" not in str(caught.value)
