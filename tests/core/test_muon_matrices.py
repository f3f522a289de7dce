"""The rule is DeepSpeed's own, which sets a flag on each parameter of a model."""

from __future__ import annotations

from types import SimpleNamespace

from dslaunch.core.muon_matrices import is_muon_matrix


def test_equal_to_what_deepspeed_flags() -> None:
    import deepspeed
    import torch
    from deepspeed.runtime.config import MUON_OPTIMIZER

    shapes = {
        "embed_tokens": (6, 4), "Embedding": (6, 4), "lm_head": (6, 4), "q_proj": (4, 4),
        "experts": (2, 4, 4), "norm": (4,), "score": (1, 4), "lm_head_bias": (6,), "scale": (),
    }  # fmt: skip
    model = torch.nn.Module()
    for name, shape in shapes.items():
        model.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))
    config = SimpleNamespace(optimizer_name=MUON_OPTIMIZER, optimizer_params={})
    deepspeed.set_optimizer_flags(config, model)
    flagged = {name for name, p in model.named_parameters() if p.use_muon}  # type: ignore[attr-defined]
    assert flagged == {name for name, shape in shapes.items() if is_muon_matrix(name, shape)}
    assert flagged == {"q_proj", "experts", "score"}
