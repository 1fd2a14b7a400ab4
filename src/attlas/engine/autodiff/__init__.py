"""Gradients: what torch.autograd is given, and what it records itself."""
