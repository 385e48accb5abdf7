"""Giving a checkpoint its MTP head back."""
