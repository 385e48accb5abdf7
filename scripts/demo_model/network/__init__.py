"""Qwen3-Next and dense Qwen3.5 with an MTP head, in PyTorch, for training in packed rows."""
