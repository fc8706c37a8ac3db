"""The chapter on trainer and rollout: whether on-policy learning is on-policy."""

from kvbook.settings import Count, HalfDType, Settings, Text, at_least


class TrainerAndRolloutSettings(Settings):
    """Settings of the chapter on trainer and rollout.

    Attributes
    ----------
    corpus : str
        ``"stdlib"``, ``"english"``, ``"chat"`` or a folder of text files, of which the prompts are the beginnings.
        The policy gradient trains a stand-in, which has learnt from Python source.
    n_samples : int
        Prompts; eight are continued in one batch.
    prompt_tokens : int
        Tokens of each.
    new_tokens : int
        Tokens that are sampled after each; fewer where the text ends.
    n_runs : int
        Repetitions of each arm of the policy-gradient run, which trains a stand-in.
    n_updates : int
        Updates of each.
    dtype : {"bfloat16", "float16"}
        In which the rollout is computed, and the trainer that matches it.
    """

    corpus: Text = "stdlib"
    n_samples: Count = 8
    prompt_tokens: at_least(2) = 48
    new_tokens: at_least(2) = 64
    n_runs: Count = 1
    n_updates: Count = 2
    dtype: HalfDType = "bfloat16"
