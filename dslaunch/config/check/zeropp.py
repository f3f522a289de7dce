"""ZeRO++: a second copy of the weights in each group of ranks, and what travels quantised."""

from __future__ import annotations

from dslaunch.config.check.context import PARENT, Checker


def check_zeropp(checker: Checker) -> None:
    """What stops DeepSpeed, and what trains something else than was meant; stage 3 alone."""
    if checker.stage != 3:
        return
    _check_secondary(checker)
    _check_frozen(checker)
    _check_gradients(checker)


def _check_secondary(checker: Checker) -> None:
    path, world = (PARENT, "zero_hpz_partition_size"), checker.target.world_size
    size = checker.get(*path)
    if not isinstance(size, int) or size <= 1:
        return
    if checker.offload("offload_param") == "nvme":
        checker.report(
            "contradiction",
            "error",
            path,
            "the second copy cannot lie on an nvme: DeepSpeed stops at start",
            "set offload_param.device to cpu, or leave this out",
        )
    if world is not None and world % min(size, world):
        checker.report(
            "world-size",
            "error",
            path,
            f"{size} does not divide the world size {world}: DeepSpeed stops",
            "set it to the ranks of one host",
        )


def _check_frozen(checker: Checker) -> None:
    """partition_parameters.py copies the weights into the codes of an empty tensor, without a scale.

    In fp16 a script can have them quantised later (stage3.py, quantize_nontrainable_params).
    """
    name, later = "zero_quantized_nontrainable_weights", checker.precision == "fp16"
    if checker.on(PARENT, name):
        how = "freeze them after that and call engine.optimizer.quantize_nontrainable_params()"
        checker.report(
            "risky",
            "info" if later else "warning",
            (PARENT, name),
            "weights that are frozen before ZeRO shards them become zeros: DeepSpeed copies them into 8-bit"
            " integers as they are",
            how if later else "leave it out: only in fp16 can they be quantised afterwards",
        )


def _check_gradients(checker: Checker) -> None:
    """coalesced_collectives.py hands them to a kernel that takes every number for fp16 (read)."""
    name = "zero_quantized_gradients"
    sent_as_fp16 = checker.get("communication_data_type") in ("fp16", "float16")
    if checker.on(PARENT, name) and checker.precision == "bf16" and not sent_as_fp16:
        checker.report(
            "risky",
            "info",  # on one host nothing is quantised
            (PARENT, name),
            "with bf16 and several hosts DeepSpeed's kernel takes the bits of bf16 gradients for fp16",
            "leave it out",
        )
