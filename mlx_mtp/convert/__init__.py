"""Gives a checkpoint its MTP head back."""
