"""One rank: parameters partitioned in fp32 are bf16 after ``set_dtypes``, with their values."""

from __future__ import annotations

import deepspeed
import torch

from dslaunch.train.dist import init_world, shutdown
from dslaunch.train.fp32_modules import set_dtypes


def main() -> None:
    init_world()
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = torch.nn.Linear(7, 5)
    assert model.weight.numel() == 0 and model.weight.ds_tensor.dtype == torch.float32
    parameters = list(model.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        before = [parameter.detach().clone() for parameter in parameters]
    set_dtypes(model, torch.bfloat16)
    with deepspeed.zero.GatheredParameters(parameters):
        for parameter, value in zip(parameters, before, strict=True):
            assert parameter.dtype == torch.bfloat16
            assert torch.equal(parameter, value.bfloat16())
    shutdown()


if __name__ == "__main__":
    main()
