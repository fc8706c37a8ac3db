"""The parameter set that runs every chapter on the trained model."""

from kvreport.running import planning


def test_the_trained_models_set_runs_every_chapter_on_it_but_the_one_that_trains_its_own(monkeypatch):
    default = {chapter.name: chapter.parameters for chapter in planning.plan()}
    chapters = [chapter for chapter in planning.plan("trained") if chapter.parameters != default[chapter.name]]
    asked = {chapter.name: chapter.values() for chapter in chapters}
    assert len(asked) >= 11
    alone = asked.pop("from_scratch")
    assert (alone["model"], alone["n_samples"]) == ("small", 8)
    for name, values in asked.items():
        assert (values["model"], values["weights"], values["device"]) == ("smollm2", "package", "cpu"), name
        # A server is asked each prompt in six ways.
        assert values.get("n_samples", 8) == (4 if name == "serving_engines" else 8), name
        # A second model is the same one, or a stand-in that a figure calls so.
        assert {values.get(key, "smollm2") for key in ("reference_model", "second_model", "text_model")} == {"smollm2"}
    # Control: the default build asks for nothing of the kind where the model has not been fetched.
    monkeypatch.setattr(planning.packages, "state", lambda: {"smollm2": None})
    assert "package" not in {chapter.values().get("weights") for chapter in planning.plan()}
