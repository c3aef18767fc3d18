"""What comes with a tokenizer of transformers: special tokens, and what surrounds a text."""
