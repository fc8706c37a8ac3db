"""The experiments of the chapter on static and dynamic caches."""

from kvreport.chapters.static_cache import (
    beside_llama_cpp,
    memory,
    memory_bandwidth,
    one_call,
    shapes,
    speed,
    step_budget,
    texts,
    weights_or_cache,
)

EXPERIMENTS = (
    speed.EXPERIMENT, memory_bandwidth.EXPERIMENT, memory.EXPERIMENT, shapes.EXPERIMENT, texts.EXPERIMENT,
    step_budget.EXPERIMENT, weights_or_cache.EXPERIMENT, beside_llama_cpp.EXPERIMENT, one_call.EXPERIMENT,
)
