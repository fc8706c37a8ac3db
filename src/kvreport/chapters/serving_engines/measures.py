"""Measures of the chapter on serving engines, then the sentences that they decide."""


from kvreport.chapters.serving_engines import rows as named
from kvreport.publishing.estimators import computed, counted, distinct, lacking, mean, share
from kvreport.publishing.measures import Measure, noted, of_model
from kvreport.publishing.rules import NONE, Bound

# Each way against the cold one, after the same prompts.
BITS = Measure(
    "share of prompts whose text and log-probabilities are bitwise those of a cold request", "text", "engine",
    "{:.0%}", rows="ways", by=("engine", "dtype", "way"), estimate=share("bits_equal", "text"),
)
TEXTS = BITS.alike(
    "share of prompts whose tokens are all equal to those of a cold request", share("texts_equal", "text")
)
MOVED = BITS.alike(
    "largest |Δ log p| (nats) against a cold request, up to the first other token", computed("max_abs", "max"), unit="",
    form="{:.2g}",
)
OVER_BATCH = MOVED.alike(
    "largest |Δ log p| of a way over that of a batch of eight",
    # Where neither moves a bit, the way moves nothing over the batch.
    counted(lambda rows, other: rows["max_abs"].max() / max(other["max_abs"].max(), 1e-12)),
    over=("way", named.BATCH), form="{:.1f}",
)
REUSED = MOVED.alike("most tokens that a request reused", computed("cached", "max"), form="{:.0f}")

# Cold requests against transformers in fp64, on the engine's own text.
ERROR = Measure(
    "mean |Δ log p| (nats) against fp64", "text", "engine", "{:.2g}", rows="cold", by=("engine", "dtype"),
    estimate=mean("error"),
)
ERROR_OVER_VLLM = ERROR.alike(
    "mean |Δ log p| against fp64, over that of vLLM",
    counted(lambda rows, other: rows["error"].mean() / other["error"].mean()), unit="", form="{:.0f}",
    over=("engine", "vLLM"),
)
WAY_ERROR = ERROR.alike(rows="tokens", by=("engine", "dtype", "way"))
ERROR_OVER_PARTS = ERROR_OVER_VLLM.alike(
    "mean |Δ log p| against fp64, over that of attention in parts", rows=WAY_ERROR.rows, by=WAY_ERROR.by,
    over=("way", named.UNFUSED),
)
KL = ERROR.alike("mean KL (nats) of fp64 from the engine, by its 20 likeliest tokens", mean("kl_fp64"))

# Engine against engine.
PAIR_TEXTS = Measure(
    "share of prompts whose tokens are equal", "text", "engines", "{:.0%}", rows="engines", by=("engines",),
    estimate=share("texts_equal", "text"),
)
PAIR_MOVED = PAIR_TEXTS.alike("mean |Δ log p| (nats)", mean("mean_abs"), form="{:.2g}")

# Facts for the prose.
MODEL = noted("served_llama_cpp", "models", 0, "name")
PROMPTS = Measure("prompts", rows="cold", estimate=distinct("sample"), form="{:,.0f}")

# Facts for checks.
OTHER_TEXTS = MOVED.alike("prompts after which a token differs from cold", lacking("texts_equal"), form="{:.0f}")
PAIR_OTHER_TEXTS = PAIR_TEXTS.alike("prompts after which tokens differ", lacking("texts_equal"), unit="", form="{:.0f}")
OTHER_BITS = OTHER_TEXTS.alike("prompts after which a bit differs from the cold answer", lacking("bits_equal"))
_SERVERS = "vLLM", "llama.cpp", "OpenVINO GenAI"
_FAR = Bound(4, "ours", "the bound of `kvbook scores`", "ratio")
_HALF, _TENFOLD = Bound(0.5, "ours", "half a nat"), Bound(10, "ours", "ten times", "ratio")
_REUSE = {"way": named.WARM, "dtype": named.FP32}
_VLLM, _OPENVINO = OTHER_BITS.where(engine="vLLM"), OVER_BATCH.where(**_REUSE, engine="OpenVINO GenAI")
_WITH_AMX = OTHER_TEXTS.where(engine="vLLM", dtype=named.BF16, way=named.WARM)
_FUSED = ERROR_OVER_PARTS.where(engine="llama.cpp", dtype=named.FP32, way=named.COLD)
STATEMENTS = {
    "a-repeat-is-exact": of_model(OTHER_BITS.where(way=named.AGAIN), "at most", NONE),
    "vllm-is-exact": of_model(_VLLM, "at most", NONE, on="Zen 3"),
    "vllm-reuses-exactly-in-fp32": of_model(_VLLM.where(**_REUSE), "at most", NONE),
    "vllm-writes-other-texts-with-amx": of_model(_WITH_AMX, "above", NONE, on="Intel"),
    "reuse-moves-two-engines": of_model(OTHER_BITS.where(**_REUSE, engine=_SERVERS[1:]), "above", NONE),
    "vllm-in-fp32-is-closest": of_model(ERROR_OVER_VLLM.where(dtype=named.FP32, engine=_SERVERS), "above", _TENFOLD),
    "reuse-writes-the-same-tokens": of_model(OTHER_TEXTS.where(**_REUSE), "at most", NONE),
    "reuse-moves-no-more-than-a-batch": of_model(OVER_BATCH.where(way=named.WARM, engine=_SERVERS[:2]), "below", _FAR),
    "reuse-moves-but-no-batch-does": of_model(_OPENVINO, "above", _FAR, on="Intel"),
    "speculation-tells-other-numbers": of_model(MOVED.where(way=named.SPECULATION, engine="llama.cpp"), "above", _HALF),
    "fusion-is-most-of-an-error": of_model(_FUSED, "above", Bound(2, "ours", "most of it", "ratio")),
    "engines-agree-in-fp32": of_model(PAIR_OTHER_TEXTS, "at most", NONE),
}
