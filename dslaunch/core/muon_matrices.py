"""Which parameters Muon takes for matrices; the others get AdamW."""

from __future__ import annotations

from collections.abc import Sequence

NOT_MATRICES = ("embed", "lm_head")  # DeepSpeed's rule, by the name of the parameter


def is_muon_matrix(name: str, shape: Sequence[int]) -> bool:
    """Source: DeepSpeed, ``deepspeed/__init__.py set_optimizer_flags``."""
    return len(shape) >= 2 and not any(part in name.lower() for part in NOT_MATRICES)
