"""Matrices of linear attention layers: cells carried from key to query through the layer's state."""
