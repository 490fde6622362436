"""Between text and token ids: tokenizers, detokenisation piece by piece, chat templates."""
