"""Kinds of weights that are made of other weights: sums, stacks, products, and diagonals."""
