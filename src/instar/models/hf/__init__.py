"""Interchange with transformers: GPT-2 and Llama, their config, tensors, tokenizers and folders."""
