"""Runs in the environment of llama.cpp, without this book: its own server, until it is stopped."""

import json
import sys
import threading

import xllamacpp
from xllamacpp import common_speculative_type, ggml_type, llama_flash_attn_type


def main() -> None:
    """Serve what the one argument asks for."""
    asked = json.loads(sys.argv[1])
    params = xllamacpp.CommonParams()
    params.model.path, params.port, params.hostnames = asked["model"], asked["port"], ["127.0.0.1"]
    # Eight conversations at once, and no copies of old ones outside their places.
    params.n_parallel, params.n_ctx, params.cache_ram_mib = 8, 8 * 1024, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    kept = ggml_type.GGML_TYPE_F32 if asked["dtype"] == "float32" else ggml_type.GGML_TYPE_F16
    if asked["mode"] == "quantized cache":
        kept = ggml_type.GGML_TYPE_Q8_0
        params.flash_attn_type = llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.cache_type_k = params.cache_type_v = kept
    if asked["mode"] == "attention in parts":
        params.flash_attn_type = llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if asked["mode"] == "speculation":
        params.speculative.types = [common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        params.speculative.ngram_simple.size_n, params.speculative.ngram_simple.size_m = 3, 4
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
