"""One clear line for what went wrong: messages that new users stumbled over."""

import pytest

from kvbook.diagnosis import tokenizer_boundary
from kvbook.errors import UserError
from kvbook.models import corpus, loading


def test_a_corpus_without_one_text_that_is_long_enough_does_not_advise_no_samples():
    tokenizer = loading.tokenizer("llama")
    with pytest.raises(UserError, match="lower n_tokens, or name longer texts") as caught:
        list(corpus.samples("stdlib", tokenizer, 1, 10**9))
    assert "at most 0" not in str(caught.value)


def test_a_prefix_that_ends_in_a_space_shows_the_token_that_the_space_becomes():
    lines, status = tokenizer_boundary.check("llama", "Once upon a ", "time")
    assert status == 1
    assert "ends with ''" not in "\n".join(lines)
    assert "alone the prefix ends with" in "\n".join(lines)


def test_names_of_the_command_line_are_told_apart_by_case_with_a_hint(kvbook_here):
    done = kvbook_here("atlas", "Moshi")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "did you mean moshi?" in done.stderr


def test_cost_without_a_model_says_that_one_is_missing(kvbook_here):
    done = kvbook_here("models", "cost")
    assert done.returncode == 2
    assert "MODEL" in done.stdout + done.stderr
