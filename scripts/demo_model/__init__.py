"""The recipe of the bundled demo models: their text, tokenizer, training and figures."""
