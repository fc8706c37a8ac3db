"""Recorded runs: whole, as they were made, in their place, once, and fit to be published."""

import gzip
import json
import shutil

import pytest
from refusing import refusal

from kvbook import fingerprint
from kvbook.runs import machine, privacy, recording, records

MACHINE = machine.of_processor(1) | {"device_name": "Some CPU, 1 thread"}


def make(settings=None, rows=({"x": 1.5, "text": "a, b\nc"}, {"x": 2.5, "text": ""}), **more) -> records.Run:
    made_of = {
        "settings": settings or {"model": "llama", "n_samples": 2}, "source": "0" * 64,
        "models": [{"name": "llama", "weights": "stand-in"}], "machine": MACHINE,
    }
    return records.run("layer_drift", made_of | more, lambda w: w.append("u", rows), note={"commit": "abc"})


def test_a_recorded_run_lies_under_its_experiment_device_model_and_hash_and_verifies(data):
    run = make()
    rows, folder = (run.folder / "rows.csv").read_bytes(), recording.record(run.folder)
    assert folder == data / "recorded" / "layer_drift" / f"some-cpu-1-thread__llama__{run.hash[:8]}"
    assert gzip.decompress((folder / "rows.csv.gz").read_bytes()) == rows
    assert sorted(file.name for file in folder.iterdir()) == ["rows.csv.gz", "run.json"]
    assert not run.folder.exists()
    assert recording.verify() == (1, [])


def test_the_machine_that_rows_do_not_depend_on_need_not_be_named(data):
    made_of = {"settings": {}, "source": "0" * 64}
    run = records.run("seams", made_of, lambda w: w.append("u", [{"x": 1}]), note={"commit": "abc"})
    assert recording.record(run.folder).name == f"any__none__{run.hash[:8]}"


def test_a_run_is_recorded_once(data):
    run = make()
    copy = shutil.copytree(run.folder, data / "copy")
    recording.record(run.folder)
    assert "recorded already" in refusal(recording.record, copy)
    assert copy.is_dir()


def write(file, content):
    if file.exists():
        file.chmod(0o644)
    file.write_bytes(content)


def edit(folder, change):
    content = json.loads((folder / "run.json").read_text())
    change(content)
    write(folder / "run.json", json.dumps(content).encode())


def edited_rows(folder):
    file = records.rows_file(folder)
    pack = gzip.compress if file.suffix == ".gz" else bytes
    with records.open_rows(folder) as rows:
        write(file, pack(rows.read().replace(b"1.5", b"1.4")))


def ragged(folder, text=b"a"):
    write(folder / "rows.csv", b"x,text\n1.4,%b\n2.5\n" % text)
    edit(folder, lambda content: content.update(rows_sha256=fingerprint.of_file(folder / "rows.csv")))


FAULTS = {
    "edited rows": (edited_rows, "rows.csv was edited"),
    "rows that do not count up": (lambda f: edit(f, lambda c: c.update(rows=7)), "has 2 rows, and run.json says 7"),
    "a row that is too short": (ragged, "row 2 has 1 fields, the header has 2"),
    "one below quotation marks": (lambda f: ragged(f, b'"a,\nb"'), "row 2 has 1 fields, the header has 2"),
    "other settings": (lambda f: edit(f, lambda c: c["settings"].update(n_samples=3)), "run.json was edited"),
    "no machine": (lambda f: edit(f, lambda c: c.pop("machine")), "run.json was edited"),
    "no commit": (lambda f: edit(f, lambda c: c.pop("commit")), "commit: Field required"),
    "a time of day alone": (lambda f: edit(f, lambda c: c.update(started="12:00")), "started"),
    "half a run.json": (lambda f: write(f / "run.json", b"{"), "run.json"),
    "no rows": (lambda f: (f / "rows.csv").unlink(), "holds no rows.csv"),
    "nothing": (lambda f: [file.unlink() for file in f.iterdir()], "holds no run"),
    "uncommitted code": (lambda f: edit(f, lambda c: c.update(commit="abc+")), "uncommitted changes"),
}


@pytest.mark.parametrize(("harm", "message"), FAULTS.values(), ids=FAULTS)
def test_a_run_that_is_not_whole_or_was_edited_or_made_by_unknown_code_is_not_recorded(data, harm, message):
    run = make()
    harm(run.folder)
    assert message in refusal(recording.record, run.folder)
    assert recording.recorded() == []
    assert run.folder.is_dir()


def test_an_unfinished_run_is_not_recorded(data):
    run = make()
    partial = run.folder.rename(run.folder.with_name(run.folder.name + ".partial"))
    assert "not finished" in refusal(recording.record, partial)


LATER = {
    "edited rows": (edited_rows, "rows.csv was edited"),
    "half a file": (lambda f: write(f / "rows.csv.gz", (f / "rows.csv.gz").read_bytes()[:-9]), "gz cannot be read"),
    "rows that are no archive": (lambda f: write(f / "rows.csv.gz", b"x\n1\n"), "rows.csv.gz cannot be read"),
    "another date": (lambda f: edit(f, lambda c: c.update(finished="2020-01-01T00:00:00+00:00")), "after it was"),
    "another place": (lambda f: f.rename(f.with_name("some-gpu__llama__" + f.name[-8:])), "should be"),
    "a further file": (lambda f: (f / "notes.txt").write_text(""), "does not belong there: notes.txt"),
    "a copy": (lambda f: shutil.copytree(f, f.with_name("other__llama__" + f.name[-8:])), "once more"),
}


@pytest.mark.parametrize(("harm", "message"), LATER.values(), ids=LATER)
def test_what_is_done_to_a_recorded_run_is_found(data, harm, message):
    folder = recording.record(make().folder)
    assert recording.verify() == (1, [])
    harm(folder)
    _, faults = recording.verify()
    assert any(message in fault for fault in faults), faults


PRIVATE = {
    "a home folder": ({"settings": {"model": "/home/jo/checkpoints/x"}}, "an absolute path"),
    "a folder of one's own": ({"settings": {"corpus": "~jo/texts"}}, "an absolute path"),
    "Windows": ({"settings": {"model": r"C:\Users\jo\x"}}, "path of Windows"),
    "an address": ({"corpus": {"corpus": "x", "by": "jo@example.org"}}, "e-mail"),
    "a token": ({"settings": {"model": "hf_" + "a1B2" * 8}}, "token of the hub"),
    "a token in a row": ({"rows": [{"text": "use hf_" + "a1B2" * 8}]}, "token of the hub in rows.csv"),
    "a password": ({"rows": [{"text": "see https://jo:pass@example.org/x"}]}, "URL with a password in rows.csv"),
    "a secret of this environment": ({"rows": [{"text": "a canary-sings-here b"}]}, "value of AWS_SECRET_ACCESS_KEY"),
}


@pytest.mark.parametrize(("values", "message"), PRIVATE.values(), ids=PRIVATE)
def test_what_names_a_person_or_holds_a_secret_is_not_recorded(data, monkeypatch, values, message):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-sings-here")
    said = refusal(recording.record, make(**values).folder)
    assert message in said
    assert not any(secret in said for secret in ("canary", "a1B2"))
    assert recording.recorded() == []


def test_control_ordinary_words_are_not_taken_for_private_ones():
    for text in (
        "meta-llama/Llama-3.1-8B", "tokens/s", "AMD EPYC, 2 threads", "checkpoints/mine", "and/or", "1e-3",
        "https://example.org/a/b", "2026-11-20T11:42:36+00:00", "past_key_values @ layer 3",
    ):
        assert privacy.owner_in(text) == []
        assert privacy.secrets_in(text, {"HF_TOKEN": "short", "TOKEN_FILE": "/tokens/s"}) == []


# Joined here, so that nobody who looks for secrets in this repository finds these.
SECRETS = {
    "a token of the hub": ["hf_" + "a1B2" * 4],
    "an access key": ["AKI" + "A" + "1B2C" * 4, "ASI" + "A" + "1B2C" * 4],
    "a token of a code host": [
        *(f"gh{kind}_" + "a1B2" * 5 for kind in "pousr"), "github_" + "pat_" + "a1B2" * 5, "glp" + "at-" + "a1B2" * 4,
    ],
    "an API key": ["s" + "k-" + "a1B2" * 5],
    "a URL with a password": ["ftp://" + "jo:" + "pass" + "@example.org"],
    "a private key": ["-----BEGIN " + "PRIVATE KEY", "-----BEGIN OPENSSH " + "PRIVATE KEY"],
}


def test_a_secret_of_every_form_is_found_among_other_words():
    assert set(SECRETS) == set(privacy._SECRETS), "each form has examples"
    for kind, examples in SECRETS.items():
        for secret in examples:
            assert privacy.secrets_in(f"1,2\nwords: {secret} and more\n", {}) == [kind]


def test_a_run_is_found_by_the_first_digits_of_its_hash(data):
    one, other = make(), make(settings={"model": "gpt2"})
    assert recording.find(one.hash[:8]) == one.folder
    assert recording.find(str(other.folder)) == other.folder
    for wrong in ("ffff0000", "nosuch", "/nowhere/at/all"):
        assert "no finished run" in refusal(recording.find, wrong)


def test_the_command_line_records_and_verifies(data, kvbook_here, refused):
    done = kvbook_here("record", make().folder)
    (folder,) = recording.recorded()
    assert (done.returncode, done.stdout) == (0, f"recorded in {folder}\n"), done.stderr
    assert kvbook_here("records", "verify").stdout == "1 recorded runs, 0 faults\n"
    edited_rows(folder)
    done = kvbook_here("records", "verify")
    assert done.returncode == 1
    assert "rows.csv was edited" in done.stdout
    refused("record", "nosuch")


@pytest.mark.slow
def test_all_runs_that_this_book_has_recorded_verify():
    _, faults = recording.verify()
    assert faults == []
