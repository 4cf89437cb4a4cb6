"""GGUF files: one file with the config, the tokenizer, the chat template and the tensors."""
