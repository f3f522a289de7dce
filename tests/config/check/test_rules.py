"""Syntax, trainers, batch sizes, repairs and comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dslaunch.config.check import Target, check_config
from dslaunch.config.check.compare import compare_configs
from dslaunch.config.check.files import check_file, find_kind
from dslaunch.config.check.repair import repair_config, show_diff
from tests.config.check.test_mistakes import GOOD, MISTAKES, found, fp16, the, zero


def text_of(line: str) -> str:
    """A good config with one more line at its end."""
    return json.dumps(GOOD, indent=1)[:-2] + ",\n" + line + "\n}"


def codes(text: str, **target: Any) -> list[str]:
    return [f.code for f in check_config(text, Target(**target)).findings if f.severity != "info"]


class TestSyntax:
    def test_a_python_true_is_a_text(self) -> None:
        finding = the("bare-word", text_of('"wall_clock_breakdown": True,\n"dump_state": false'))
        assert finding.severity == "error"
        assert "the text 'True,'" in finding.message
        assert finding.fix == "write true"

    @pytest.mark.parametrize(
        ("line", "what"),
        [
            ("// a remark", "a comment"),
            ('"dump_state": false,', "a comma too many"),
            ("dump_state: false", "a key or text without double quotes"),
        ],
    )
    def test_what_strict_json_refuses(self, line: str, what: str) -> None:
        text = text_of(line) if ":" in line else text_of('"dump_state": false').replace("}", f"}}{line}\n", 1)
        relaxed = the("strict-json", text)
        assert relaxed.severity == "info" and relaxed.message.startswith(what)
        assert the("strict-json", text, reader="hf-trainer").severity == "error"

    def test_a_byte_order_mark(self) -> None:
        assert the("strict-json", "\ufeff" + json.dumps(GOOD), reader="accelerate").severity == "error"

    def test_windows_line_ends(self) -> None:
        assert the("line-ends", json.dumps(GOOD, indent=1).replace("\n", "\r\n")).severity == "info"

    def test_a_key_twice(self) -> None:
        finding = the("duplicate-key", text_of('"gradient_clipping": 0.5'))
        assert (finding.severity, finding.key) == ("error", "gradient_clipping")

    @pytest.mark.parametrize(
        "value", ["$BATCH", "${BATCH}", '"{{ batch }}"', '"$BATCH"', "BATCH_SIZE", '"<batch>"']
    )
    def test_a_placeholder(self, value: str) -> None:
        finding = the("placeholder", text_of(f'"steps_per_print": {value}'))
        assert (finding.severity, finding.key) == ("error", "steps_per_print")

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            (json.dumps(GOOD) + "\n```\n", "Markdown fence"),
            ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
            ("configs/zero2.json", "path of a config"),
            ('{"a": 1', "the text ends"),
            ('{% if x %}\n{"a": 1}', "template tag"),
            ("[1, 2]", "a list stands"),
            ('{"a":' * 50_000, "nested too deeply"),
        ],
    )
    def test_what_cannot_be_read(self, text: str, says: str) -> None:
        checked = check_config(text)
        assert not checked.readable
        (finding,) = checked.findings
        assert finding.code == "syntax" and says in finding.message

    def test_each_cause_has_its_own_place(self) -> None:
        text = '```json\n{"train_batch_size": $BS,\n"gradient_clipping": {{ clip }}}\n```\n'
        places = [(f.line, f.column, f.message.split(": ")[1]) for f in check_config(text).findings]
        assert places == [
            (1, 1, "a Markdown fence (```) stands in the file"),
            (2, 22, "the variable $BS was never filled in"),
            (3, 22, "the template tag {{ clip }} was never filled in"),
            (4, 1, "a Markdown fence (```) stands in the file"),
        ]


class TestTrainers:
    AUTO = GOOD | {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
    }

    def test_auto_is_for_the_trainers(self) -> None:
        text = json.dumps(self.AUTO)
        assert codes(text).count("auto") == 6
        assert "auto" not in codes(text, reader="hf-trainer")
        assert codes(text, reader="accelerate").count("auto") == 1, "accelerate fills in no betas"

    def test_auto_where_nobody_fills_it_in(self) -> None:
        finding = the("auto", zero(2, sub_group_size="auto"), reader="hf-trainer")
        assert "1000000000 in its place" in finding.message

    def test_a_number_beside_auto(self) -> None:
        config = GOOD | {"gradient_accumulation_steps": "auto"}
        finding = the("batch-beside-auto", json.dumps(config), reader="hf-trainer")
        assert (finding.severity, finding.key) == ("warning", "train_micro_batch_size_per_gpu")

    def test_what_becomes_of_auto_is_told(self) -> None:
        for key, then in [("tensorboard", "in its place"), ("aio", "trips over it")]:
            finding = the("auto", json.dumps({**GOOD, key: "auto"}))
            assert finding.severity == "error" and then in finding.message

    def test_accelerate_needs_a_zero_section(self) -> None:
        text = json.dumps({key: value for key, value in GOOD.items() if key != "zero_optimization"})
        assert the("unsharded", text, reader="accelerate").severity == "error"
        assert the("unsharded", text).severity == "info"

    def test_accelerate_writes_the_batch_sizes_itself(self) -> None:
        config = {k: v for k, v in GOOD.items() if not k.startswith(("train_", "gradient_acc"))}
        assert "batch-missing" in codes(json.dumps(config))
        assert "batch-missing" not in codes(json.dumps(config), reader="accelerate")


class TestBatch:
    def test_the_nearest_that_divide(self) -> None:
        config = {
            "train_batch_size": 256,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": None,
        }
        finding = the("batch", config, world_size=7)
        assert "(= 14)" in finding.message
        assert "252 (gradient_accumulation_steps 18) or 266 (gradient_accumulation_steps 19)" in str(
            finding.hint
        )
        assert "batch" not in codes(json.dumps(GOOD | config), world_size=8)

    def test_three_that_do_not_agree(self) -> None:
        finding = the("batch", {"train_batch_size": 10}, world_size=4)
        assert "world size 4 (= 4)" in finding.message

    def test_without_a_world_size_only_what_fits_none(self) -> None:
        config = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}
        assert "batch" in [f.code for f in found({"train_batch_size": 100, **config})]
        assert "batch" not in [f.code for f in found({"train_batch_size": 96, **config})]

    def test_tensor_parallel_ranks_see_the_same_data(self) -> None:
        config = {"train_batch_size": 4, "tensor_parallel": {"autotp_size": 2}}
        assert "batch" not in [f.code for f in found(config, world_size=8)]
        assert the("world-size", config, world_size=7).severity == "error"


@pytest.mark.parametrize("key", ["betas", "eps", "weight_decay"])
def test_a_null_that_the_optimizer_cannot_compare(key: str) -> None:
    block = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4, key: None}}}
    (finding,) = [f for f in check_config(json.dumps(GOOD | block)).findings if f.severity == "error"]
    assert (finding.code, finding.key) == ("type", f"optimizer.params.{key}")
    repaired = repair_config(json.dumps(GOOD | block), Target())
    assert repaired is not None
    assert json.loads(repaired.text)["optimizer"]["params"] == {"lr": 1e-4}


class TestRepair:
    def test_a_stage_in_quotes_hides_no_key_that_the_repair_removes(self) -> None:
        text = json.dumps(GOOD | {"zero_optimization": {"stage": "2", "stage3_max_live_parameters": 1000}})
        assert [f.code for f in found(text) if f.severity != "info"] == ["type", "ignored-at-stage"]

    @pytest.mark.parametrize(
        "config", [r[1] for r in MISTAKES if r[3] == "error"], ids=[r[0] for r in MISTAKES if r[3] == "error"]
    )
    def test_what_is_mended_stays_mended(self, config: dict[str, Any]) -> None:
        """No finding with a fix is left, no more is wrong than before, a second repair changes nothing."""
        text = json.dumps(GOOD | config)
        before = [f for f in check_config(text).findings if f.severity == "error"]
        repaired = repair_config(text, Target())
        assert repaired is not None
        assert not [f for f in repaired.left.findings if f.edits]
        assert len([f for f in repaired.left.findings if f.severity == "error"]) <= len(before)
        again = repair_config(repaired.text, Target())
        assert again is not None and again.text == repaired.text and not again.done

    @pytest.mark.parametrize(
        ("name", "meant", "mended"),
        [("learning_rate", "lr", True), ("adam_epsilon", "eps", True), ("adam_beta1", "betas", False)],
    )
    def test_another_trainers_name_of_an_optimizers_argument(
        self, name: str, meant: str, mended: bool
    ) -> None:
        text = json.dumps(GOOD | {"optimizer": {"type": "AdamW", "params": {name: 1e-4}}})
        finding = the("unknown-key", text)
        assert (finding.hint, bool(finding.edits)) == (f"did you mean {meant}?", mended)

    def test_the_usual_ones(self) -> None:
        config = {
            **fp16(enabled="true", fp16=True, initial_scale_power=32),
            **zero(3, cpu_offload=True, stage3_prefetch_bucket_size=15099494.4),
            "gradient_clipping": None,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "max_grad_norm": 0.5}},
        }
        text = json.dumps({k: v for k, v in (GOOD | config).items() if v is not None})
        repaired = repair_config(text, Target())
        assert repaired is not None
        value = json.loads(repaired.text)
        assert value["fp16"] == {"enabled": True, "initial_scale_power": 32}
        assert value["zero_optimization"] == {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "stage3_prefetch_bucket_size": 15099494,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
        assert value["gradient_clipping"] == 0.5
        assert value["optimizer"]["params"] == {"lr": 1e-4}
        assert not [f for f in repaired.left.findings if f.severity != "info"]

    def test_scale_keys_leave_bf16(self) -> None:
        repaired = repair_config(json.dumps(GOOD | {"bf16": {"enabled": True, "loss_scale": 0}}), Target())
        assert repaired is not None and json.loads(repaired.text)["bf16"] == {"enabled": True}

    def test_the_batch_sizes_are_left_to_the_user(self) -> None:
        repaired = repair_config(json.dumps(GOOD | {"train_batch_size": 10}), Target(world_size=4))
        assert repaired is not None and json.loads(repaired.text)["train_batch_size"] == 10

    def test_nothing_to_mend_changes_no_byte(self) -> None:
        text = json.dumps(GOOD, indent=3)
        repaired = repair_config(text, Target())
        assert repaired is not None and repaired.text == text
        assert show_diff(text, repaired.text, "a.json") == ""

    def test_numbers_keep_their_form(self) -> None:
        text = '{"train_batch_size": 8, "gradient_clipping": 1.0, "dump_state": "true",'
        text += '"a": {"b": [2.0, 3, 1e9]},'
        text += '"x": 1.0, "x": "y", "z": [[1.0]], "z": 3}'
        repaired = repair_config(text, Target())
        assert repaired is not None
        assert '"gradient_clipping": 1.0' in repaired.text
        assert json.loads(repaired.text)["a"]["b"] == [2.0, 3, 1000000000]
        assert "3," in repaired.text and "2.0," in repaired.text

    def test_comments_stay_where_nothing_is_wrong(self) -> None:
        text = "// mine\n" + json.dumps(GOOD)
        repaired = repair_config(text, Target())
        assert repaired is not None and repaired.text == text
        strict = repair_config(text, Target("hf-trainer"))
        assert strict is not None and json.loads(strict.text) == json.loads(json.dumps(GOOD))

    def test_what_cannot_be_read_is_not_mended(self) -> None:
        assert repair_config("{", Target()) is None


class TestCompare:
    def test_defaults_and_old_names_mean_the_same(self) -> None:
        a = {"zero_optimization": {"stage": 2, "cpu_offload": True}, "gradient_clipping": 1.0, "_note": "a"}
        b = {
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "bf16": {"enabled": False},
        }
        assert compare_configs(a, b) == []

    def test_a_difference_in_effect(self) -> None:
        left_out, written = zero(2), zero(2, overlap_comm=False)
        assert compare_configs(left_out, written) == []  # off at stage 2, on at stage 3
        assert [d.key for d in compare_configs(zero(3), zero(3, overlap_comm=False))] == [
            "zero_optimization.overlap_comm"
        ]
        (difference,) = compare_configs({"gradient_clipping": 0.5}, {})
        assert (difference.key, difference.a, difference.b) == ("gradient_clipping", 0.5, 1)
        assert [d.key for d in compare_configs({"zero_optimization": True}, {})] == [
            "zero_optimization.stage"
        ]


HOSTS_MISSPELT = (
    "a lots=8\n", "# hosts\na lsots=8  # new\n", "a Slots=8\nb slots 8\n", "node1 slots:8\n",
    "node1 8\nnode2 8\n", "node1:8\nnode2:8\n", "node1\nnode2\n", "10.0.0.1 gpus=8\n",
    "node1 max_slots=8\n", "a slots=\n",
)  # fmt: skip


class TestFiles:
    @pytest.mark.parametrize(
        ("name", "text", "kind"),
        [
            ("a.json", "{}", "deepspeed-config"),
            ("a", '{"fp16": {}}', "deepspeed-config"),
            ("a", "// x\nfp16: {enabled: true}", "deepspeed-config"),
            ("a.json", "not a config", "deepspeed-config"),
            ("run.yaml", "model: a\n", "run-file"),
            ("-", "model: a/b\ndata: {train: x}\n", "run-file"),
            ("hosts", "a slots=8\nb slots=8\n", "hostfile"),
            ("job.sh", "#!/bin/bash\n#SBATCH -N 2\n", "batch-script"),
            ("job", "#PBS -l select=1\nhostname\n", "batch-script"),
            ("notes.txt", "hello there\n", "unknown"),
            # A hostfile as people mean it, whatever it is called.
            *(("-", text, "hostfile") for text in HOSTS_MISSPELT),
            ("hostfile", "alpha\nbeta\n", "hostfile"),
            ("-", "alpha\nbeta\n", "unknown"),
            ("-", "train_batch_size = 8\n", "unknown"),
            ("-", "train_batch_size: 8\n", "deepspeed-config"),
            # Scripts without #!, and with a directive that a space makes a comment.
            ("-", "export A=1\nsrun python train.py --deepspeed ds.json\n", "batch-script"),
            ("-", "# SBATCH -N 2\nsrun hostname\n", "batch-script"),
            ("-", "deepspeed is a library\n", "unknown"),
            ("job.slurm", "./run-it\n", "batch-script"),
            # JSON: a run file, one in fences.
            ("run.json", '{"model": "a/b", "data": {"train": "x"}}', "run-file"),
            ("-", 'Like this:\n```json\n{"train_batch_size": 8}\n```\n', "deepspeed-config"),
            ("-", "model: a/b\ndeepspeed: {zero_optimization: {stage: 2}}\n", "run-file"),
        ],
    )
    def test_the_kind_is_found_by_content(self, name: str, text: str, kind: str) -> None:
        assert find_kind(name, text) == kind

    @pytest.mark.parametrize("text", HOSTS_MISSPELT)
    def test_a_misspelt_hostfile_is_told_line_by_line(self, text: str) -> None:
        found = check_file("-", text.encode(), Target()).findings
        assert {finding.severity for finding in found} == {"error"}
        lines = [n for n, line in enumerate(text.splitlines(), 1) if not line.startswith("#")]
        assert [finding.line for finding in found] == lines

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (b"", "is empty"),
            (b"\xef\xbb\xbf\n", "is empty"),
            (b"PAR1abcd", "this is a parquet file, not a config"),
            (b"\x1f\x8b\x08\x00", "this is gzip, not a config"),
            (b"a\x00b", "this is a binary file, not a config"),
            ('{"a": 1}'.encode("utf-16"), "this is UTF-16 text, not a config"),
            (b"<html><body>404</body></html>", "this is HTML or XML (a download that failed?), not a config"),
            (b"import deepspeed\nx = 1\n", "this is a Python program, not a config"),
            (b'{"model_type": "llama", "hidden_size": 8}', "this is a model's config.json, not a config"),
            (b'{"schema_version": 1, "launch": {}}', "this is a recorded plan, not a config"),
            (b"hello\n", "neither a DeepSpeed config nor a run file, a hostfile or a batch script"),
            (b"\xe4\xf6", "not UTF-8 text"),
        ],
    )
    def test_what_is_none_of_them_is_told_in_words(self, data: bytes, message: str) -> None:
        checked = check_file("-", data, Target())
        assert ([f.message for f in checked.findings], checked.kind, checked.readable) == (
            [message],
            "unknown",
            False,
        )

    def test_a_directive_with_a_space_is_a_comment(self) -> None:
        (finding,) = check_file("-", b"#!/bin/bash\n# SBATCH -N 2\nsrun hostname\n", Target()).findings
        assert (finding.code, finding.severity, finding.line) == ("commented-directive", "warning", 2)

    def test_a_hostfile_with_a_wrong_line(self) -> None:
        checked = check_file("hosts", b"a slots=8\nb slots=8 x\n", Target())
        (finding,) = checked.findings
        assert checked.kind == "hostfile"
        assert (finding.severity, finding.line, finding.column) == ("error", 2, 11)

    def test_a_count_with_something_behind_it(self) -> None:
        (finding,) = check_file("hosts", b"a slots=8\nb slots=8x\n", Target()).findings
        assert (finding.severity, finding.line, finding.hint) == ("error", 2, "write slots=8")

    def test_a_host_that_only_one_machine_knows(self) -> None:
        checked = check_file("hosts", b"localhost slots=8\nnode1 slots=8\n", Target())
        assert [finding.severity for finding in checked.findings] == ["warning"]

    def test_every_wrong_line_of_a_hostfile(self) -> None:
        text = b"a slots=8\nb slots=0\n# x\na slots=4\nc:8\nd lots=8\ne slots = 8\n"
        checked = check_file("hosts", text, Target())
        assert [(f.severity, f.line) for f in checked.findings] == [("error", n) for n in (2, 4, 5, 6, 7)]

    @pytest.mark.parametrize(
        ("hosts", "severity"),
        [
            ("node1 slots=8\nnode1.lab slots=8\n", "error"),
            ("10.0.0.1 slots=8\nnode1 slots=8\n", "info"),
            ("10.0.0.1 slots=8\n10.0.0.2 slots=8\n", None),
            ("node1.lab slots=8\r\nnode2.lab slots=8  # new\r\n", None),
            ("node1 slots=8\n", None),
        ],
    )
    def test_one_machine_under_two_names(self, hosts: str, severity: str | None) -> None:
        found = check_file("hosts", hosts.encode(), Target()).findings
        assert [finding.severity for finding in found] == ([severity] if severity else [])

    def test_no_host_at_all(self) -> None:
        (finding,) = check_file("hosts", b"a slots=0\n", Target()).findings
        assert (finding.line, finding.column) == (1, 9)

    def test_a_run_file(self) -> None:
        checked = check_file("run.yaml", b"model: a/b\ndata: {train: x/y}\ntrain_batchsize: 8\n", Target())
        assert checked.kind == "run-file"
        assert [(f.severity, f.line, f.key) for f in checked.findings] == [("error", 3, "train_batchsize")]

    def test_the_raw_keys_of_a_run_file(self) -> None:
        text = b"model: a/b\ndata: {train: x/y}\ntrain_batch_size: 8\ndeepspeed:\n"
        text += b"  zero_optimization:\n    stagee: 1\n  steps_per_print: 10\n"
        (finding,) = check_file("run.yaml", text, Target()).findings
        assert (finding.code, finding.line) == ("unknown-key", 6)
        assert finding.key == "deepspeed.zero_optimization.stagee"

    def test_the_example_of_the_repository(self) -> None:
        path = Path(__file__).resolve().parents[3] / "examples" / "quickstart.yaml"
        assert check_file(str(path), path.read_bytes(), Target()).findings == ()


class TestStage3:
    @pytest.mark.parametrize(
        ("optimizer", "needed"),
        [
            ({"type": "AdamW"}, 4),
            ({"type": "Lion"}, 3),
            ({"type": "SGD", "params": {"lr": 1, "momentum": 0.9}}, 3),
            ({"type": "SGD", "params": {"lr": 1}}, 2),
        ],
    )
    def test_buffers_on_nvme_hold_all_that_a_step_needs(self, optimizer: dict[str, Any], needed: int) -> None:
        def config(count: int) -> dict[str, Any]:
            offload = {"device": "nvme", "nvme_path": "/n", "buffer_count": count}
            untested = {"zero_allow_untested_optimizer": True}
            return {**zero(3, offload_optimizer=offload), **untested, "optimizer": optimizer}

        finding = the("needs", config(needed - 1))
        assert (finding.severity, finding.fix) == ("error", f"write {needed}")
        assert "needs" not in [f.code for f in found(config(needed))]

    @pytest.mark.parametrize("switch", ["pipeline_read", "pipeline_write"])
    @pytest.mark.parametrize(("count", "warned"), [(None, True), (7, True), (8, False), (3, False)])
    def test_a_pipeline_takes_the_buffers_of_two_sub_groups(
        self, switch: str, count: int | None, warned: bool
    ) -> None:
        offload = {"device": "nvme", "nvme_path": "/n", switch: True, "buffer_count": count}
        told = [f for f in found(zero(3, offload_optimizer=offload)) if f.severity == "warning"]
        keys = [f.key for f in told if f.code == "needs"]
        assert keys == ([f"zero_optimization.offload_optimizer.{switch}"] if warned else [])

    def test_hpz_has_no_second_copy_on_a_disk(self) -> None:
        for device, wrong in (("nvme", True), ("cpu", False)):
            offload = {"device": device, **({"nvme_path": "/n"} if wrong else {})}
            config = zero(3, zero_hpz_partition_size=2, offload_param=offload)
            codes = [(f.code, f.severity) for f in found(config) if f.key.endswith("zero_hpz_partition_size")]
            assert codes == ([("contradiction", "error")] if wrong else [])

    @pytest.mark.parametrize(
        ("kind", "params", "wrong"),
        [("AdamW", {}, False), ("SGD", {}, True), ("AdamW", {"torch_adam": True}, True)],
    )
    def test_a_part_of_the_optimizer_on_the_gpu(self, kind: str, params: dict[str, Any], wrong: bool) -> None:
        config = zero(3, offload_optimizer={"device": "cpu", "ratio": 0.5})
        config["optimizer"] = {"type": kind, "params": {"lr": 1e-4, **params}}
        config["zero_allow_untested_optimizer"] = True
        keys = [f.key for f in found(config) if f.code == "needs" and f.severity == "error"]
        assert ("zero_optimization.offload_optimizer.ratio" in keys) == wrong

    def test_hpz_divides_the_ranks(self) -> None:
        finding = the("world-size", zero(3, zero_hpz_partition_size=3), world_size=8)
        assert (finding.severity, finding.key) == ("error", "zero_optimization.zero_hpz_partition_size")
        for size, world in ((4, 8), (16, 8), (3, None), (1, 7)):
            findings = found(zero(3, zero_hpz_partition_size=size), world_size=world)
            assert "world-size" not in [f.code for f in findings]

    @pytest.mark.parametrize(("precision", "severity"), [("bf16", "warning"), ("fp16", "info")])
    def test_frozen_weights_that_become_zeros(self, precision: str, severity: str) -> None:
        name = "zero_quantized_nontrainable_weights"
        config = {**without_precision(zero(3, **{name: True})), precision: {"enabled": True}}
        finding = the("risky", config)
        assert (finding.severity, finding.key) == (severity, f"zero_optimization.{name}")
        assert ("quantize_nontrainable_params" in str(finding.hint)) == (precision == "fp16")
        assert "risky" not in [f.code for f in found(zero(3, **{name: False}))]

    @pytest.mark.parametrize(("precision", "sent"), [("bf16", None), ("bf16", "fp16"), ("fp16", None)])
    def test_bf16_gradients_that_a_kernel_takes_for_fp16(self, precision: str, sent: str | None) -> None:
        config = without_precision(zero(3, zero_quantized_gradients=True))
        config |= {precision: {"enabled": True}, "communication_data_type": sent}
        told = [f.severity for f in found(config) if f.code == "risky"]
        assert told == (["info"] if precision == "bf16" and sent is None else [])


def without_precision(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in ("bf16", "fp16")}
