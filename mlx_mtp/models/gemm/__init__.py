"""Decides which operation computes a layer's matrix product, by its number of rows."""
