"""Kernels: each folder holds naive.py (the law, readable PyTorch), fused.py (Triton) and op.py (torch.library) as they come to exist."""
