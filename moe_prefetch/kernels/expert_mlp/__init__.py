"""The gated expert FFN, and the layer made of it."""
