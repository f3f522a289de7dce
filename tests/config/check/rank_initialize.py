"""One rank: which of the configs of a file the real deepspeed.initialize, or the first step, refuses.

And what it makes of a frozen weight under zero_quantized_nontrainable_weights: its kernels run on GPUs
alone; torch stands in for the one that quantises, in codes and scale.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import CUDAQuantizer

get_accelerator().is_fp16_supported = lambda: True  # the configs are for GPUs


def refusal(config: dict[str, Any]) -> str | None:
    """What is raised at start or in two steps; None where it trains."""
    model = torch.nn.Linear(8, 4)
    try:
        engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[
            0
        ]
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 8, dtype=model.weight.dtype)).float().square().mean())
            engine.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


class Kernel:
    Symmetric = 0

    def quantize(self, weights: torch.Tensor, groups: int, bits: int, kind: int) -> Any:
        rows = weights.reshape(groups, -1).float()
        scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-6) / 127
        return (rows / scale).round().to(torch.int8).reshape(weights.shape), scale


configs = json.loads(Path(sys.argv[1]).read_text())
verdicts = {name: refusal(config) for name, config in configs.items()}
print("verdicts:", json.dumps(verdicts))

CUDAQuantizer.quantizer_cuda_module = Kernel()
model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64, bias=False))
model[0].weight.requires_grad_(False)
deepspeed.initialize(
    model=model,
    model_parameters=[model[1].weight],
    config={
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True},
    },
)
codes: Any = model[0].weight.ds_tensor
assert codes.dtype == torch.int8 and codes.numel() == 64 * 64 and codes.ds_quant_scale.numel() == 1
print("codes that are not zero:", int(codes.count_nonzero()))
