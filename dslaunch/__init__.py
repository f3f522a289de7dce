"""dslaunch: from a run file to a DeepSpeed config, a launch and a trained model."""

__version__ = "0.1.0"
