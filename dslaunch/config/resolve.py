"""LoadedSpec + facts -> RunPlan: every value resolved, each with its reason and source. Pure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from dslaunch.config.engine_plan import resolve_engine
from dslaunch.config.facts import Facts
from dslaunch.config.hosts import ResolvedHosts, choose_via
from dslaunch.config.load import LoadedSpec
from dslaunch.config.origins import build_origins
from dslaunch.config.paths import check_data_file, check_hub_id, fail_missing
from dslaunch.config.render import render_ds_config
from dslaunch.config.report import Report
from dslaunch.config.run_settings import resolve_settings
from dslaunch.config.secrets import check_env
from dslaunch.config.spec import AdapterSpec, DataSourceSpec, RunSpec
from dslaunch.core.model_path import ModelKind, is_gguf
from dslaunch.core.plan import (
    IMAGE_RUNTIMES,
    AdapterPlan,
    ContainerPlan,
    DataPlan,
    DataSource,
    LaunchPlan,
    ModelPlan,
    RunPlan,
    Via,
    WatchPlan,
)
from dslaunch.core.topology import master_fault


def resolve(
    loaded: LoadedSpec[RunSpec], *, facts: Facts, run_dir: Path, cwd: Path, python: str, default_name: str
) -> tuple[RunPlan, tuple[str, ...]]:
    """The plan, and notes for the user.

    ``run_dir`` and ``cwd`` are absolute; ``python`` is the ranks' interpreter
    unless the run file names one. Raises ConfigErrors with all problems at once.
    """
    report = Report(loaded, notes=list(loaded.notes))
    plan = resolve_into(report, facts, run_dir=run_dir, cwd=cwd, python=python, default_name=default_name)
    report.raise_if_any()
    assert plan is not None
    return build_origins(plan, report), tuple(report.notes)


def resolve_into(
    report: Report,
    facts: Facts,
    *,
    run_dir: Path,
    cwd: Path,
    python: str,
    default_name: str,
    hosts: ResolvedHosts | None = None,
) -> RunPlan | None:
    """The plan of ``report.loaded`` without its origins; None where a problem went to ``report``.

    ``hosts``: in place of those of its cluster section.
    """
    loaded, engine = report.loaded, resolve_engine(report, facts, hosts)
    parts = _Parts(report, facts)
    model, data, interpreter = parts.model(), parts.data(), parts.interpreter(python)
    adapter = _adapter(loaded.spec.adapter, report)
    settings = resolve_settings(report, facts, engine)
    check_env(loaded.spec.launch, report)
    _check_master(report, facts, engine[1] if engine else None)
    ds_config = {}
    if engine is not None and loaded.spec.engine == "deepspeed":
        ds_config = render_ds_config(engine[0], report, facts, engine[1].devices)
        if loaded.spec.deepspeed or loaded.spec.deepspeed_template:
            from dslaunch.config.passthrough import check_for_worker

            check_for_worker(ds_config, report)
    if engine is None or report.problems:
        return None
    noise = loaded.spec.neftune_noise_alpha
    return RunPlan(
        name=loaded.spec.name or default_name,
        task=loaded.spec.task,
        engine=loaded.spec.engine,
        torch_autocast=engine[0].torch_autocast,
        seed=loaded.spec.seed,
        model=replace(
            model, attn_implementation=settings.attention, quantization_config=settings.quantization
        ),
        data=data,
        adapter=adapter,
        precision=engine[0].precision,
        fp16=engine[0].fp16,
        zero_stage=engine[0].zero_stage,
        gradient_clipping=engine[0].gradient_clipping,
        optimizer=engine[0].optimizer,
        batch=engine[0].batch,
        scheduler=settings.scheduler,
        num_train_epochs=settings.num_train_epochs,
        max_steps=settings.max_steps,
        output=settings.output,
        fp32_modules=loaded.spec.fp32_modules,
        neftune_noise_alpha=None if noise is None else float(noise),
        watch=WatchPlan(**dict(loaded.spec.watch)),
        allow_emulated_fp16=loaded.spec.allow_emulated_fp16,
        allow_untested_deepspeed=loaded.spec.allow_untested_deepspeed,
        launch=parts.launch(engine[1], run_dir=run_dir, cwd=cwd, python=interpreter),
        ds_config=ds_config,
        deepspeed_template=parts.template(),
        origins={},
    )


class _Parts:
    """The sections of the plan that depend on paths."""

    def __init__(self, report: Report, facts: Facts) -> None:
        self.report = report
        self.spec: RunSpec = report.loaded.spec
        self.facts = facts

    def model(self) -> ModelPlan:
        spec = self.spec.model
        fact = self.facts.paths["model.path"]
        kind: ModelKind = "hub"
        path = spec.path
        if fact.kind == "directory":
            kind, path = "directory", fact.absolute
            if fact.fault is not None:
                hint = "it must be a Hugging Face model directory, a hub id or a .gguf file"
                self.report.fail("model.path", f"model.path: {path} {fact.fault}", hint)
        elif fact.kind == "file" and is_gguf(spec.path):
            kind, path = "gguf", fact.absolute
        elif fact.kind == "file":
            self.report.fail(
                "model.path",
                f"model.path: {spec.path} is a file, but not a .gguf one",
                "give the directory that holds config.json, or a .gguf file",
            )
        else:
            check_hub_id("model.path", spec.path, fact, self.report)
        if kind != "hub" and spec.revision is not None:
            self.report.fail("model.revision", "model.revision has no effect on a local model", "remove it")
        self.report.reason("model.kind", {"hub": "no such path here: a hub id"}.get(kind, f"{path} is there"))
        return ModelPlan(
            path=path,
            kind=kind,
            revision=spec.revision,
            tokenizer=self.hub_or_directory("model.tokenizer", spec.tokenizer),
            chat_template=self.existing_file("model.chat_template", spec.chat_template),
            trust_remote_code=spec.trust_remote_code,
            allow_pickle=spec.allow_pickle,
            gradient_checkpointing=spec.gradient_checkpointing is True,  # auto is settled by now
            new_tokens=tuple(dict.fromkeys(spec.new_tokens)),
        )

    def data(self) -> DataPlan:
        spec = self.spec.data
        train = tuple(self.source(f"data.train[{i}]", source) for i, source in enumerate(spec.train))
        evaluated = tuple(self.source(f"data.eval[{i}]", source) for i, source in enumerate(spec.eval))
        if not train:
            self.report.fail("data.train", "data.train is empty", "give at least one source")
        weighted = [source.weight is not None for source in spec.train]
        if any(weighted) and not all(weighted):
            key = f"data.train[{weighted.index(False)}]"
            self.report.fail(
                key, f"{key} has no weight, but other sources have one", "weight all sources, or none"
            )
        for i, source in enumerate(spec.eval):
            if source.weight is not None:
                key = f"data.eval[{i}].weight"
                self.report.fail(key, f"{key}: held-out data is not mixed", "remove weight")
        cache = self.facts.paths.get("data.cache_dir")
        return DataPlan(
            train=train,
            eval=evaluated,
            max_length=spec.max_length,
            packing=spec.packing,
            max_dropped_fraction=spec.max_dropped_fraction,
            shuffle=spec.shuffle,
            cache_dir=cache.absolute if cache else None,
        )

    def source(self, key: str, spec: DataSourceSpec) -> DataSource:
        fact = self.facts.paths[f"{key}.path"]
        if fact.kind == "missing":
            check_hub_id(f"{key}.path", spec.path, fact, self.report)
            kind: Literal["file", "directory", "hub"] = "hub"
        else:
            kind = fact.kind
            check_data_file(f"{key}.path", spec.path, fact, self.report)
        path = spec.path if kind == "hub" else fact.absolute
        if kind == "file" and self.report.given(f"{key}.split"):
            self.report.fail(f"{key}.split", f"{key}.split has no effect on a file", "remove split")
        return DataSource(path=path, kind=kind, split=spec.split, weight=spec.weight, format=spec.format)

    def hub_or_directory(self, key: str, text: str | None) -> str | None:
        if text is None:
            return None
        fact = self.facts.paths[key]
        if fact.kind == "missing":
            check_hub_id(key, text, fact, self.report)
            return text
        if fact.kind == "file":
            self.report.fail(key, f"{key}: {text} is a file", "give the directory that holds it")
        return fact.absolute

    def existing_file(self, key: str, text: str | None) -> str | None:
        if text is None:
            return None
        fact = self.facts.paths[key]
        if fact.kind != "file":
            fail_missing(key, f"file {text}", fact, self.report)
        return fact.absolute

    def template(self) -> str | None:
        fact = self.facts.paths.get("deepspeed_template")
        return fact.absolute if fact else None

    def interpreter(self, default: str) -> str:
        """The ranks' Python: a path is an absolute file, a bare name stays for PATH to find."""
        text = self.spec.launch.python
        if self.spec.launch.container is not None:  # a path leads to a file of the image
            return text or "python3"
        if text is None:
            return default
        return self.existing_file("launch.python", text) or text if "/" in text else text

    def container(self) -> ContainerPlan | None:
        spec = self.spec.launch.container
        if spec is None:
            return None
        needed, other = ("image", "name") if spec.runtime in IMAGE_RUNTIMES else ("name", "image")
        for key, wrong in (
            (needed, getattr(spec, needed) is None),
            (other, getattr(spec, other) is not None),
        ):
            if wrong:
                what = "is missing" if key == needed else f"is not for {spec.runtime}"
                hint = f"{spec.runtime} takes {needed}" + (
                    ", of a running container" if needed == "name" else ""
                )
                self.report.fail(f"launch.container.{key}", f"launch.container.{key} {what}", hint)
        where = self.facts.paths.get("launch.container.image")
        return ContainerPlan(**{**spec.model_dump(), **({"image": where.absolute} if where else {})})

    def launch(self, hosts: ResolvedHosts, *, run_dir: Path, cwd: Path, python: str) -> LaunchPlan:
        spec, cluster = self.spec.launch, self.spec.cluster
        where = self.facts.paths.get("launch.cwd")
        via = _via(spec.via, hosts, self.facts, self.report)
        if spec.container is not None and spec.container.runtime == "pyxis" and via != "slurm":
            hint = "start it in a Slurm job (via: slurm), or take apptainer, docker or podman"
            message = f"launch.container: pyxis is a part of srun, and hosts are reached by {via}"
            self.report.fail("launch.container.runtime", message, hint)
        plan_file = str(run_dir / "plan.json")
        return LaunchPlan(
            argv=(python, "-m", "dslaunch.train.worker", "--plan", plan_file),
            topology=hosts.topology,
            run_dir=str(run_dir),
            cwd=where.absolute if where else str(cwd),
            via=via,
            container=self.container(),
            device_type=hosts.device_type,
            devices=hosts.gpu_names,
            master_addr=cluster.master_addr,
            master_port=cluster.master_port,
            env=dict(spec.env),
            secret_env=spec.secret_env,
            failure_grace_s=float(spec.failure_grace_s),
            checkpoint_grace_s=float(spec.checkpoint_grace_s),
            host_timeout_s=float(spec.host_timeout_s),
            ddp_timeout_s=float(spec.ddp_timeout_s),
            max_restarts=spec.max_restarts,
            spare_hosts=hosts.spares if spec.max_restarts else (),
        )


def _check_master(report: Report, facts: Facts, hosts: ResolvedHosts | None) -> None:
    """``hosts``: None where it is not known which they are."""
    addr = report.loaded.spec.cluster.master_addr
    several = hosts is not None and hosts.topology.num_nodes > 1 and choose_via(hosts, facts)[0] != "local"
    if addr is not None and (fault := master_fault(addr, meet_elsewhere=several)):
        report.fail("cluster.master_addr", f"cluster.master_addr: {fault[0]}", fault[1])


def _via(asked: Literal["auto"] | Via, hosts: ResolvedHosts, facts: Facts, report: Report) -> Via:
    if asked != "auto":
        return asked
    via, reason = choose_via(hosts, facts)
    report.reason("launch.via", reason)
    if via != "local":
        report.note(f"launch.via {via}: {reason}")
    return via


def _adapter(spec: AdapterSpec | None, report: Report) -> AdapterPlan | None:
    if spec is None:
        report.reason("adapter", "no adapter section: the whole model is trained", "default")
        return None
    values = dict(spec)
    values["lora_alpha"] = float(spec.lora_alpha)
    return AdapterPlan(**values)
