"""Operators on tensors, one package each.

A package holds the public functions (``__init__.py``), their plain PyTorch implementation
(``reference.py``), the ``torch.library`` operators with their gradients (``custom_op.py``) and the
kernels behind them: Numba for a CPU (``cpu.py``) and Triton for a GPU (``triton.py``).
"""
