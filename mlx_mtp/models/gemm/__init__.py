"""Which operation computes a layer's product, by its number of rows, and how that is decided."""
