"""Where things live: the artifact store, row-group sources, tokenizer files, and what runs the steps."""
