"""Tokenization, incremental detokenization, stop strings and chat templates.

`tokenizer.load_tokenizer` reads a Hugging Face folder or a GGUF file. `detokenizer.Detokenizer` turns a
growing list of token ids into text. `chat.render_chat` writes a conversation as a prompt.
"""
