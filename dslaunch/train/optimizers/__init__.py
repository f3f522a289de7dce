"""Optimizers that DeepSpeed's JSON cannot name, and the parameter groups of all of them.

Each keeps its states in tensors of the parameter's own shape, in fp32: ZeRO hands over one flat
shard as the parameter, and DeepSpeed's checkpoints know a state by that shape.
"""

from dslaunch.train.optimizers.build import build_optimizer, build_torch_optimizer
from dslaunch.train.optimizers.groups import Groups, parameter_groups

__all__ = ["Groups", "build_optimizer", "build_torch_optimizer", "parameter_groups"]
