"""Run as one rank: the type of the stage in a bare checkpoint state and in ours; prints JSON."""

from __future__ import annotations

import json
import sys

import deepspeed
import torch

from dslaunch.train.dist import init_world, shutdown
from dslaunch.train.engine.cures import name_the_stage_in_checkpoints


def main() -> None:
    init_world()
    found = {}
    for stage in (1, 2, 3):
        config = {
            "train_batch_size": 1,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        }
        model = torch.nn.Linear(4, 4)
        engine = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[0]
        bare = type(engine.optimizer.state_dict()["zero_stage"]).__name__
        name_the_stage_in_checkpoints(engine)
        value = engine.optimizer.state_dict()["zero_stage"]
        found[str(stage)] = [bare, type(value).__name__, value]
    shutdown()
    print(json.dumps(found), file=sys.stdout)


if __name__ == "__main__":
    main()
