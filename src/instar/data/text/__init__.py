"""Text as training data: corpora, tokenizers, token shards, Hugging Face data sets, streams."""
