"""A lazy matrix in a program that torch traces: products, statistics and cells, as operators of a graph if they can be.

Inside torch.compile each is one operator, which computes as outside. torch.export (outside of
`export_operators`), the transforms of torch.func and tensors without numbers get torch's own operations.
"""

from attlas.matrix.compiled.calls import cells, log_sum_exp, product, statistics, transposed_product

__all__ = ["cells", "log_sum_exp", "product", "statistics", "transposed_product"]
