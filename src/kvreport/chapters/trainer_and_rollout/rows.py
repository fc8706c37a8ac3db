"""The rows of the chapter on trainer and rollout by name; to read them takes no torch."""

from collections.abc import Mapping

import pandas as pd

from kvbook.runs.records import Run
from kvbook.scores import measures
from kvreport.publishing.wording import DTYPES

# The chapter's experiments and the revision of their rows.
EXPERIMENTS = {"rollout": 1, "rollout_ways": 1, "engine_rollout": 1, "policy_gradient": 1}

# Texts that are written together.
BATCH = 8
# Tokens of a chunk.
CHUNK = 64

# Columns of log-probabilities, each named for how it is computed: in the dtype of the rollout, unless it names another.
ROLLOUT, TRAINER, TRAINER_FP32 = "rollout", "trainer", "trainer_fp32"
SINGLE, CHUNKS, PADDED = "rollout_single", "rollout_chunks", "trainer_padded"
ROLLOUT_FP32, ROLLOUT_FP16, TRAINER_FP16, TRAINER_FP64 = "rollout_fp32", "rollout_fp16", "trainer_fp16", "trainer_fp64"
FP8, INT8, INT4 = "rollout_fp8", "rollout_int8", "rollout_int4"
# What another engine gave a token when it sampled it, and when it read the text as a prompt.
ENGINE, ENGINE_READ = "engine", "engine_read"
INVARIANT_ROLLOUT, INVARIANT_TRAINER = "rollout_invariant", "trainer_invariant"
# What follows a column's name where its last operations are in another precision.
FP32_HEAD, LOW_SOFTMAX = "_fp32_head", "_low_softmax"

# Sampling that changes the distribution from which a token is drawn.
TEMPERATURE, TOP_K, TOP_P = 0.7, 50, 0.9
COOLED, MASS_K, MASS_P, IN_K, IN_P = "rollout_cooled", "top_k_log_mass", "top_p_log_mass", "in_top_k", "in_top_p"

# Arms of the policy-gradient run: what samples, and what weighs the gradient.
CAP = 2
MATCHED, UNCORRECTED, CORRECTED, COARSE, FAULTY = ARMS = (
    "fp32, matched", "bf16 rollout, no correction", f"bf16 rollout, ratio up to {CAP}", "4-bit cache, no correction",
    f"fault: shifted by one token, ratio up to {CAP}",
)

# What is compared, as figures and tables show it; a rollout in fp16 has its own name for the first.
BF16, FP16, LOW, HEAD, FULL = "bf16 trainer", "fp16 trainer", "softmax not upcast", "LM head in fp32", "fp32 trainer"
ROUNDING = BF16, FP16, LOW, HEAD, FULL
SHIFTED = "log p shifted by one token"
# Of what another engine samples.
ENGINE_BF16, ENGINE_ITSELF = "vLLM, bf16 trainer", "vLLM, read again by vLLM"
# The same of the ways that score fewer tokens.
BOTH_FP16, BOTH_INVARIANT = "fp16", "bf16, row-invariant"
ROLLOUT_ERROR, TRAINER_ERROR = "bf16 rollout against fp64", "bf16 trainer against fp64"

# Tokens after which ratios of sequences are read, each twice as many as the ones before.
LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def pairs(rollout: Run) -> pd.DataFrame:
    """Lay out every comparison that the rollout's own rows allow: the log-ratio of each token."""
    rows = rollout.rows
    sampled, trainer = rows[ROLLOUT], rows[TRAINER]
    ratios = {
        BF16: trainer - sampled, LOW: rows[TRAINER + LOW_SOFTMAX] - rows[ROLLOUT + LOW_SOFTMAX],
        HEAD: rows[TRAINER + FP32_HEAD] - rows[ROLLOUT + FP32_HEAD], FULL: rows[TRAINER_FP32] - sampled,
        f"temperature {TEMPERATURE} not applied": trainer - rows[COOLED],
        f"top-k {TOP_K} not applied": (trainer - sampled + rows[MASS_K])[rows[IN_K] == 1],
        f"top-p {TOP_P} not applied": (trainer - sampled + rows[MASS_P])[rows[IN_P] == 1],
        # The injected fault: each token has the log-probability of the one before it.
        SHIFTED: (trainer.groupby([rows["sample"]]).shift(1) - sampled).dropna(),
    }
    return _long(rollout, ratios)


def ways(rollout_ways: Run) -> pd.DataFrame:
    """Lay out the comparisons of all ways, in the order of the figure: a trainer's log-probability less a rollout's."""
    sides = {
        "bf16, rollout in a batch of 8": (TRAINER, ROLLOUT), "bf16, rollout of one text": (TRAINER, SINGLE),
        f"bf16, cache read in chunks of {CHUNK}": (TRAINER, CHUNKS),
        "bf16, trainer in a padded batch": (PADDED, ROLLOUT), "bf16, no cache: batch against single": (PADDED, TRAINER),
        "bf16 rollout, fp32 trainer": (TRAINER_FP32, ROLLOUT),
        BOTH_FP16: (TRAINER_FP16, ROLLOUT_FP16), "fp32": (TRAINER_FP32, ROLLOUT_FP32),
        BOTH_INVARIANT: (INVARIANT_TRAINER, INVARIANT_ROLLOUT), "bf16, cache in int8": (TRAINER, INT8),
        "bf16, cache in fp8": (TRAINER, FP8), "bf16, cache in int4": (TRAINER, INT4),
        ROLLOUT_ERROR: (ROLLOUT, TRAINER_FP64), TRAINER_ERROR: (TRAINER, TRAINER_FP64),
    }
    rows = rollout_ways.rows
    ratios = {name: rows[trainer] - rows[rollout] for name, (trainer, rollout) in sides.items()}
    return _long(rollout_ways, ratios)


def _long(run: Run, ratios: Mapping[str, pd.Series]) -> pd.DataFrame:
    about, dtype = run.rows[["sample", "source", "position"]], DTYPES[run.about["settings"]["dtype"]]
    parts = {name.replace("bf16", dtype): about.loc[of.index].assign(log_ratio=of) for name, of in ratios.items()}
    table = pd.concat([part.assign(compared=name) for name, part in parts.items()], ignore_index=True)
    return table.assign(**{name: term(table["log_ratio"].to_numpy()) for name, term in measures.TERMS.items()})


def sequences(pairs: pd.DataFrame) -> pd.DataFrame:
    """Add log-ratios up over the first tokens of each text: all of them where it ends before."""
    pairs, by = pairs[pairs["compared"].isin((BF16, FP16, HEAD, FULL))], ["compared", "sample", "source"]
    parts = {
        length: pairs[pairs["position"] < length].groupby(by, sort=False)["log_ratio"].agg(["sum", "size"])
        for length in LENGTHS
    }
    return pd.concat(parts, names=["length"]).reset_index()


def engine(engine_rollout: Run) -> pd.DataFrame:
    """Lay out what a real engine sampled against a trainer, and against the engine itself."""
    rows = engine_rollout.rows
    sides = {ENGINE_BF16: TRAINER, "vLLM, fp32 trainer": TRAINER_FP32, ENGINE_ITSELF: ENGINE_READ}
    return _long(engine_rollout, {name: rows[side] - rows[ENGINE] for name, side in sides.items()})


def late(policy_gradient: pd.DataFrame) -> pd.DataFrame:
    """Keep the last quarter of the updates; a repetition is a unit, and its updates are the samples."""
    rows = policy_gradient[policy_gradient["update"] >= 0.75 * policy_gradient["update"].max()]
    return rows.assign(source=rows["repetition"], sample=rows["update"])
