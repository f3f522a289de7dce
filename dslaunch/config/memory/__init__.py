"""What a run takes in memory, item by item: on each device, on each host and on disk. No torch.

``model`` reads the parameters of a model, ``adapter`` adds those of LoRA, ``setup`` holds all that
the plan depends on, ``states`` and ``offload`` have the ZeRO formulas, ``activations`` what a
forward pass keeps, ``host`` host memory and disk, ``planner`` puts them together, ``alternatives``
ranks what else could be done, ``of_run`` makes a setup of a run.
"""
