"""Text and tokens: tokenizer, templates, detokenizer, parsing of answers. No HTTP."""
