"""One model computed by several processes: rank 0 leads, the others follow."""
