"""A replay's report in words. Reads plain JSON values; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_SAMPLES_SHOWN = 6

Json = Mapping[str, Any]

_NEXT = {
    "weights": "the weights were broken before this step: start from a checkpoint or model without nan in it",
    "loss_scale": "nothing is wrong in the module: let the loss scale come down (loss_scale: dynamic, a lower"
    " initial_scale_power), or use precision bf16",
    "overflow": "use precision bf16 or fp32, or name the module in fp32_modules",
    "computation": "look at what this module computes out of the values above, and at the samples",
    "unknown": "use precision bf16 or fp32 and replay: if it is finite there, the module overflows fp16",
}


def describe(report: Json) -> list[str]:
    """The lines for a reader."""
    head = f"step {report['step']}, {report['precision']}, ZeRO stage {report['zero_stage']}"
    if report["precision"] == "fp16":
        head += f", loss scale {report['loss_scale']:g}"
    lines = [head, *_broken(report["broken_weights"])]
    findings = report["findings"]
    if not findings:
        return [*lines, "", *_nothing(report)]
    for number, finding in enumerate(findings):
        lines += ["", *(_finding(finding) if number == 0 else [_brief(finding)])]
    return lines


def headline(report: Json) -> str:
    """One line: what broke first, and where."""
    if not report["findings"]:
        return _nothing(report)[0]
    return _brief(report["findings"][0])


def _broken(weights: Sequence[Json]) -> list[str]:
    lines = []
    for weight in weights[:_SAMPLES_SHOWN]:
        at = f", first at {weight['first_bad']}" if weight["first_bad"] is not None else ""
        of = "" if weight["whole"] else " of one rank's share"
        tied = "".join(f", tied with {name}" for name in weight.get("tied", ()))
        lines.append(
            f"  broken weight: {weight['name']}{tied}{',' if tied else ''} holds {_bad(weight)}{of}{at}"
        )
    more = len(weights) - _SAMPLES_SHOWN
    return [*lines, f"  and {more} more"] if more > 0 else lines


def _nothing(report: Json) -> list[str]:
    if report["sums"]:
        first = report["sums"][0]
        return [
            "every micro-batch is finite by itself; what overflows is a sum of their gradients: that of"
            f" {first['parameter']} may reach {first['absmax_of_sum_at_most']:.4g}, the limit of fp16 is"
            f" {first['limit']:g}",
            f"next: {_NEXT['loss_scale']}",
        ]
    return ["nothing went inf or nan this time, with the same micro-batches, weights and random numbers"]


def _brief(finding: Json) -> str:
    where = f"rank {finding['rank']}, micro-batch {finding['micro_batch']}"
    text = f"{where}: first in the {finding['phase']}, in {_module(finding)}: {finding['what']}"
    parameter = finding["parameter"]
    if parameter is None or parameter in text:
        return text
    absmax = finding.get("parameter_absmax")
    reach = f", absmax {absmax:.4g}" if absmax is not None else ""
    return f"{text} (parameter {parameter}{reach})"


def _finding(finding: Json) -> list[str]:
    lines = [_brief(finding)]
    if finding["behind"]:
        lines.append(f"  in its own code, after {finding['behind']}")
    lines += [f"  samples  {text}" for text in _samples(finding)]
    if finding["position"] is not None:
        lines.append(f"  first at row {finding['position']['row']}, token {finding['position']['token']}")
    lines.append(f"  cause    {_cause(finding)}")
    lines += _reached(finding)
    if finding.get("anomaly"):
        lines.append(f"  autograd {finding['anomaly']}")
    lines.append("  around it")
    lines += [_row(row) for row in finding["trail"]]
    lines.append(f"next: {_NEXT[finding['cause']]}")
    return lines


def _reached(finding: Json) -> list[str]:
    """The first parameter that the fault came to, where it is another one than the blamed."""
    gradient = finding.get("first_gradient")
    if gradient is None or gradient["parameter"] == finding["parameter"]:
        return []
    return [f"  reaches  {gradient['parameter']} as the first parameter: its gradient holds {_bad(gradient)}"]


def _module(finding: Json) -> str:
    name = finding["module"] or "the model itself"
    return f"{name} ({finding['module_type']})" if finding["module_type"] else name


def _samples(finding: Json) -> list[str]:
    if finding["any_sample"]:
        return ["any: it breaks without them as well"]
    samples = finding["samples"]
    if not samples:
        return ["not known: the tensors of the micro-batch have no first dimension in common"]
    lines = [_sample(sample) for sample in samples[:_SAMPLES_SHOWN]]
    if len(samples) > _SAMPLES_SHOWN:
        lines.append(f"and {len(samples) - _SAMPLES_SHOWN} more")
    if finding["samples_together"]:
        lines.append("only together: no half of them breaks by itself")
    return lines


def _sample(sample: Json) -> str:
    if "where" not in sample:  # of a loop of one's own
        return f"row {sample['row']} of the micro-batch"
    tokens = f"tokens {sample['start']}-{sample['stop'] - 1}"
    return f"{sample['where']}: sample {sample['sample']}, row {sample['row']}, {tokens}"


def _cause(finding: Json) -> str:
    name, spread = finding["cause"], finding["range"]
    if name == "weights":
        return f"{finding['parameter']} holds nan or inf already"
    if name == "loss_scale":
        reaches = _reaches(finding["unscaled"]["range"])
        return f"the gradient overflows fp16 at this loss scale; at scale 1 it is finite{reaches}"
    if name == "overflow":
        limit = f", the limit of {spread['dtype']} is {spread['limit']:.5g}" if spread is not None else ""
        return f"it overflows: in fp32 the same is finite{_reaches(finding['fp32']['range'])}{limit}"
    if name == "computation":
        tried = " in fp32 as well" if finding.get("fp32", {}).get("breaks") else ""
        return f"what is computed is not finite{tried}: no precision or loss scale mends that"
    why = finding.get("fp32", {}).get("not_possible", "the parameters are partitioned")
    return f"an overflow of the precision or of the computation: fp32 could not be tried here ({why})"


def _reaches(spread: Json | None) -> str:
    return f" (absmax {spread['absmax']:.4g})" if spread is not None and spread["absmax"] is not None else ""


def _row(row: Json) -> str:
    mark = ">" if row["first"] else " "
    name = row["name"] if row["kind"] == "gradient of parameter" else row["module"] or "the model"
    what = (
        row["kind"]
        if row["kind"] == "gradient of parameter" or not row["name"]
        else f"{row['kind']} {row['name']}"
    )
    spread = (
        "nothing finite"
        if row["absmax"] is None
        else f"{row['min']:.4g} to {row['max']:.4g}, absmax {row['absmax']:.4g}"
    )
    state = "" if row["share_nonfinite"] == 0 else f", {_bad(row)} ({100 * row['share_nonfinite']:.3g} %)"
    return (
        f"  {mark} {name}: {what} {row['shape']} {row['dtype']} (limit {row['limit']:.4g}): {spread}{state}"
    )


def _bad(row: Json) -> str:
    parts = [f"{row[key]} {word}" for key, word in (("num_nan", "nan"), ("num_inf", "inf")) if row[key]]
    return " and ".join(parts)
