"""Model families: one file each turns a Hugging Face config into a model specification."""
