"""Between text and token ids: tokenizers, chat templates in a sandbox, incremental detokenization, stop strings."""
