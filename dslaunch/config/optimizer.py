"""optimizer: section -> what DeepSpeed's JSON or our own constructor takes, and what cannot be.

ZeRO flattens the parameters. An optimizer that treats each element by itself does not notice;
one that looks at a tensor as a whole would silently become another one, and is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dslaunch.config.report import Report
from dslaunch.config.spec_optimizer import OptimizerSpec
from dslaunch.core.plan import OptimizerPlan, ParamGroupPlan, Precision

_ADAM: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
_WITH_ADAM = ("AdamW", "Adam", "Muon")
LR_WITH_ADAPTER, LR_WITHOUT = 2e-4, 2e-5


@dataclass(frozen=True)
class Kind:
    """What holds of one ``optimizer.type``.

    ``defaults``: the parameters that it takes, None where its own default is no number.
    ``lr_share``: of AdamW's usual rate; None where that says nothing. ``ours``: DeepSpeed's JSON
    cannot name it, so the worker makes it. ``untested``: DeepSpeed asks for
    zero_allow_untested_optimizer with it (runtime/zero/utils.py), though it is elementwise.
    """

    defaults: dict[str, Any]
    lr_share: float | None = 1.0
    ours: bool = False
    untested: bool = False
    elementwise: bool = True


KINDS: dict[str, Kind] = {
    "AdamW": Kind(_ADAM),
    "Adam": Kind(_ADAM),
    "SGD": Kind({"momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0}, untested=True),
    "Lion": Kind({"betas": (0.9, 0.99), "weight_decay": 0.0}, lr_share=0.1),
    "AdEMAMix": Kind(
        {**_ADAM, "betas": (0.9, 0.999, 0.9999), "alpha": 5.0, "t_alpha": None, "t_beta3": None}, ours=True
    ),
    "Adafactor": Kind({"beta2_decay": -0.8, "d": 1.0, "weight_decay": 0.0}, lr_share=None, elementwise=False),
    "Muon": Kind(
        {"momentum": 0.95, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0, "adam_lr": None},
        lr_share=None,
        elementwise=False,
    ),
    "AdamW8bit": Kind(_ADAM, ours=True),
    "PagedAdamW8bit": Kind(_ADAM, ours=True),
}


@dataclass(frozen=True)
class ChosenOptimizer:
    """The optimizer, and whether ZeRO must be told to accept it."""

    plan: OptimizerPlan
    allow_untested: bool


def resolve_optimizer(
    spec: OptimizerSpec, *, device_type: str, zero_stage: int, adapter: bool, report: Report
) -> ChosenOptimizer:
    """Fill in what was not given; problems (a parameter that the type does not take) go to ``report``."""
    kind = KINDS[spec.type]
    lr = _learning_rate(spec, kind, adapter, report)
    params: dict[str, Any] = {"lr": lr}
    for key, default in kind.defaults.items():
        value = getattr(spec.params, key)
        value = default if value is None else value
        if value is not None:
            params[key] = list(value) if isinstance(value, tuple) else value
    if spec.type in _WITH_ADAM:
        _add_adam_keys(params, spec, device_type, report)
    _check(spec, kind, params, report)
    if spec.type.startswith("Paged") and device_type == "cpu":
        message = f"optimizer.type {spec.type} pages GPU memory; on CPUs it would be AdamW8bit"
        report.fail("optimizer.type", message, "use AdamW8bit")
    ours = kind.ours or (spec.type == "Lion" and device_type == "cpu")
    if ours:
        why = (
            "DeepSpeed has Lion for GPUs only" if spec.type == "Lion" else "DeepSpeed's JSON has no such name"
        )
        report.reason("optimizer.made_by", why)
    elif spec.type == "Muon":
        why = "the JSON says Muon, and dslaunch's engine runs its own in the place of DeepSpeed's"
        report.reason("optimizer.made_by", why)
    plan = OptimizerPlan(
        type=spec.type,
        lr=lr,
        params=params,
        made_by="dslaunch" if ours else "deepspeed",
        no_decay=spec.no_decay,
        loraplus_lr_ratio=_loraplus(spec, adapter, report),
        groups=tuple(ParamGroupPlan(**dict(group)) for group in spec.groups),
    )
    allow = ours or (kind.untested and zero_stage > 0)
    if allow and zero_stage > 0 and not spec.type.endswith("8bit"):  # of those two there is more to say
        report.note(
            f"zero_allow_untested_optimizer is set, as DeepSpeed wants it for {spec.type}: it treats each "
            "element by itself, so ZeRO's shards do not change it"
        )
    return ChosenOptimizer(plan, allow_untested=allow)


def check_fit(
    plan: OptimizerPlan,
    *,
    zero_stage: int,
    precision: Precision,
    shards: bool,
    offload: str | None,
    report: Report,
) -> None:
    """Put into ``report`` why the optimizer cannot run at this stage, in this precision or offloaded.

    ``shards``: whether it gets flat shards, as it does in 16 bit at stage 0, which runs as stage 1.
    ``offload``: the device of offload_optimizer. The whole table is in docs/optimizers.md.
    """
    key, name = "optimizer.type", plan.type
    if name == "Muon":
        if offload is not None:
            report.fail(
                key,
                f"{key} Muon with offload_optimizer: its matrix products would run on the CPU",
                "leave offload_optimizer out, or use AdamW",
            )
    elif not KINDS[name].elementwise and shards:
        at = f"at ZeRO stage {zero_stage}" if zero_stage else f"in {precision}, which runs as ZeRO stage 1,"
        report.fail(
            key,
            f"{key} {name}: {at} it would get flat shards, not whole tensors, and be another optimizer",
            "use zero_optimization.stage 0 with precision fp32, or AdamW, or AdamW8bit to save memory",
        )
    if plan.made_by == "dslaunch" and offload == "nvme":
        report.fail(
            key,
            f"{key} {name}: DeepSpeed keeps on NVMe what its own optimizers have",
            "use AdamW, or zero_optimization.offload_optimizer: cpu",
        )
    if name.endswith("8bit"):
        _check_8bit(name, shards=shards, offload=offload, report=report)


def check_json_says_it_all(
    plan: OptimizerPlan,
    *,
    zero_stage: int,
    precision: Precision,
    clipping: float,
    report: Report,
) -> None:
    """For JSON that is printed: what a script of one's own cannot get from it, or would get wrong."""
    if plan.type == "Muon":
        _check_muon_of_deepspeed(zero_stage, precision, clipping, report)
    if plan.made_by == "dslaunch":
        report.fail(
            "optimizer.type",
            f"optimizer.type {plan.type}: no DeepSpeed JSON can name it"
            + (" for a CPU" if plan.type == "Lion" else "")
            + "; dslaunch's own worker makes it",
            "use AdamW here, or leave the section out and pass an optimizer to deepspeed.initialize",
        )
    for key, given in (
        ("groups", bool(plan.groups)),
        ("no_decay", bool(plan.no_decay)),
        ("loraplus_lr_ratio", plan.loraplus_lr_ratio is not None),
    ):
        if given:
            report.fail(
                f"optimizer.{key}",
                f"optimizer.{key}: DeepSpeed's JSON has no parameter groups; dslaunch's worker makes them",
                "remove it here, and give deepspeed.initialize the groups as model_parameters",
            )
    if plan.params.get("weight_decay") and plan.no_decay is None and not plan.groups:
        report.note(
            "DeepSpeed's JSON has no parameter groups: in a script of your own weight_decay"
            f" {plan.params['weight_decay']:g} is for norms and biases too, unless"
            " deepspeed.initialize gets groups as model_parameters"
        )


def _check_muon_of_deepspeed(stage: int, precision: Precision, clipping: float, report: Report) -> None:
    """F11: DeepSpeed's own orthogonalises gradients as it reduces them, ahead of clipping and unscaling."""
    key = "optimizer.type"
    ours = "; dslaunch's worker and its `initialize` run one of their own"
    if precision != "fp32":
        report.fail(
            key,
            f"{key} Muon in {precision}: DeepSpeed keeps its momentum in {precision}, of gradients that are"
            f" neither clipped nor free of the loss scale{ours}",
            "use precision fp32, or AdamW",
        )
    elif stage == 3:
        report.fail(
            key,
            f"{key} Muon at ZeRO stage 3: DeepSpeed's is not tested here{ours}",
            "use stage 2, or AdamW",
        )
    elif stage and clipping:
        report.fail(
            "gradient_clipping" if report.given("gradient_clipping") else key,
            f"gradient_clipping {clipping:g} with Muon at ZeRO stage {stage}: DeepSpeed clips its update"
            f" after it was orthogonalised, by a norm that is not the gradient's{ours}",
            "set gradient_clipping: 0, or zero_optimization.stage 0, where the gradient is clipped",
        )
    elif stage:
        report.note(
            f"Muon at ZeRO stage {stage}: DeepSpeed's get_global_grad_norm() is the norm of its updates,"
            " not of gradients"
        )


def _check_8bit(name: str, *, shards: bool, offload: str | None, report: Report) -> None:
    if name.startswith("Paged") and offload is not None:
        report.fail(
            "optimizer.type",
            f"optimizer.type {name}: it pages its states out of GPU memory, and offload_optimizer"
            " has them in the host's already",
            "use AdamW8bit, or leave offload_optimizer out",
        )
    across = "; ZeRO's flat shards have blocks that lie across tensors" if shards else ""
    report.note(
        f"{name} keeps its running averages in 8 bits, not in fp32, in blocks of 256 elements{across}:"
        " updates differ from AdamW's by about a percent"
    )


def _learning_rate(spec: OptimizerSpec, kind: Kind, adapter: bool, report: Report) -> float:
    usual = LR_WITH_ADAPTER if adapter else LR_WITHOUT
    if spec.lr is not None:
        return spec.lr
    if kind.lr_share is None:
        report.fail(
            "optimizer.lr",
            f"optimizer.lr is missing: the usual rates of AdamW mean nothing to {spec.type}",
            "set it; usual are 1e-2 for Adafactor and 2e-2 for Muon (with adam_lr beside it)",
        )
        return usual
    share = "" if kind.lr_share == 1.0 else f"{kind.lr_share:g} of that of AdamW, "
    report.reason(
        "optimizer.lr", f"{share}usual for {'an adapter' if adapter else 'a whole model'}", "default"
    )
    return usual if kind.lr_share == 1.0 else float(f"{usual * kind.lr_share:.6g}")


def _loraplus(spec: OptimizerSpec, adapter: bool, report: Report) -> float | None:
    if spec.loraplus_lr_ratio is not None and not adapter:
        key = "optimizer.loraplus_lr_ratio"
        report.fail(key, f"{key} is for the B matrices of an adapter, and there is none", "remove it")
    return spec.loraplus_lr_ratio


def _add_adam_keys(params: dict[str, Any], spec: OptimizerSpec, device_type: str, report: Report) -> None:
    if spec.type == "Adam":
        params["adam_w_mode"] = False
        report.reason("optimizer.params.adam_w_mode", "without it DeepSpeed runs Adam as AdamW")
    if spec.params.torch_adam is not None:
        params["torch_adam"] = spec.params.torch_adam
    elif device_type == "cpu":
        params["torch_adam"] = True
        report.reason(
            "optimizer.params.torch_adam",
            "on a CPU DeepSpeed would compile its own Adam for a minute or more",
        )


def _check(spec: OptimizerSpec, kind: Kind, params: dict[str, Any], report: Report) -> None:
    takes = {*kind.defaults, *(("torch_adam",) if spec.type in _WITH_ADAM else ())}
    for key in type(spec.params).model_fields:
        if getattr(spec.params, key) is not None and key not in takes:
            report.fail(
                f"optimizer.params.{key}",
                f"optimizer.params.{key}: {spec.type} does not take it",
                f"{spec.type} takes {', '.join(sorted(takes))}",
            )
    if "betas" in params and len(params["betas"]) != len(kind.defaults["betas"]):
        report.fail(
            "optimizer.params.betas",
            f"optimizer.params.betas has {len(params['betas'])} numbers;"
            f" {spec.type} takes {len(kind.defaults['betas'])}",
            f"such as {list(kind.defaults['betas'])}",
        )
    if params.get("nesterov") and (params["momentum"] == 0 or params["dampening"] != 0):
        report.fail(
            "optimizer.params.nesterov",
            "optimizer.params.nesterov needs momentum > 0 and dampening 0",
            "set optimizer.params.momentum, such as 0.9",
        )
    for index, group in enumerate(spec.groups):
        if group.lr is None and group.weight_decay is None:
            name = f"optimizer.groups[{index}]"
            report.fail(name, f"{name} sets nothing for what it matches", "give it an lr or a weight_decay")
