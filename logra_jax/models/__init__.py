"""Language models: decoder family, Hugging Face directories, tokenizer, packages."""
