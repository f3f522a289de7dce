"""fp32_modules with the real DeepSpeed on two ranks, against float64; and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dslaunch.core.errors import ConfigError, EnvironmentNotReady
from dslaunch.train.fp32_modules import Fp32Modules, cast, set_dtypes
from tests.train import rotary_models
from tests.train.case_results import CaseResults, run_case_ranks

UPDATES = ("0 bf16 accumulation", "1 fp16 offload", "2 fp16 tied", "3 bf16 offload", "3 fp16 sub-groups")
# Of a gradient that went through 16-bit layers: their rounding, which is 8 times finer in fp16.
FP32 = 5e-7  # some roundings of fp32; bf16 would be off by 4e-3, fp16 by 5e-4
TOLERANCE = {"bf16": 0.04, "fp16": 0.005}


@pytest.fixture(scope="module")
def ranks(ops_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> CaseResults:
    return run_case_ranks("tests.train.ranks_fp32_modules", tmp_path_factory.mktemp("fp32"), 2)


@pytest.mark.parametrize("case", UPDATES)
def test_their_weights_are_fp32_in_forward_and_get_the_right_updates(ranks: CaseResults, case: str) -> None:
    """No weight of the file is a 16-bit number: they arrive exactly and are computed with."""
    stage, precision = case.split()[:2]
    for rank in (0, 1):
        result = ranks.of_rank(rank, f"update/{case}")
        assert len(result["wide"]) == 4
        low = "torch.bfloat16" if precision == "bf16" else "torch.float16"
        others = {dtype for name, dtype in result["dtypes"].items() if name not in result["wide"]}
        assert others == {low}, stage
        assert {result["dtypes"][name] for name in result["wide"]} == {"torch.float32"}
        assert result["starts exactly"]
        assert len(result["forward"]) >= 3 and all(result["forward"].values())
        assert result["is master"] and result["not 16-bit"]
        assert max(result["rotary"]) < FP32
        assert max(result["update error"].values()) < TOLERANCE[precision]
        assert max(result["other errors"].values()) < TOLERANCE[precision]


def test_stages_train_the_same(ranks: CaseResults) -> None:
    losses = {ranks[f"update/{case}"]["loss"] for case in ("1 fp16 offload", "3 fp16 sub-groups")}
    assert len(losses) == 1


@pytest.mark.parametrize("case", ["0 bf16", "3 fp16"])
def test_saving_and_loading_goes_on_as_if_nothing_had_been(ranks: CaseResults, case: str) -> None:
    result = ranks[f"resume/{case}"]
    assert result["resumed"] == result["straight"]
    assert result["dtypes"] == ["torch.float32"]


def test_an_adapter_in_them_is_fp32_and_frozen_ones_stay_as_in_the_file(ranks: CaseResults) -> None:
    result = ranks["lora/3"]
    assert set(result["dtypes"].values()) == {"torch.float32", "torch.bfloat16"}
    for name, dtype in result["dtypes"].items():
        wide = "norm" in name or "lm_head" in name
        assert dtype == ("torch.float32" if wide else "torch.bfloat16"), name
    assert result["moved"] and all(result["moved"].values())
    assert result["kept"] and all(result["kept"].values())
    assert result["norms are the file's"]


@pytest.mark.parametrize("name", rotary_models.NAMES)
def test_rotary_tables_are_fp32_in_every_precision_also_under_zero_init(
    ranks: CaseResults, name: str
) -> None:
    """zero.Init makes every new tensor 16-bit: with such tables stage 3 would train another model."""
    for rank in (0, 1):
        tables = ranks.of_rank(rank, f"rotary/{name}")
        assert list(tables) == ["bf16 2", "bf16 3", "fp16 2", "fp16 3"]
        for case, errors in tables.items():
            assert max(errors) < FP32, case


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.norm = torch.nn.LayerNorm(4)


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"fp32_modules: '\*nrom\*' matches no module") as caught:
        Fp32Modules(Net(), ["*nrom*"])
    assert "norm" in str(caught.value.hint)
    net = Net()
    with pytest.raises(ConfigError, match="every trained parameter lies in them"):
        Fp32Modules(net, ["*"]).groups(net.parameters())
    net.norm.weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ConfigError, match=r"norm\.weight is quantised"):
        Fp32Modules(net, ["norm"])


def test_groups_keep_their_options_and_begin_with_16_bit() -> None:
    net = Net()
    given = [{"params": [net.norm.weight, net.first.weight], "lr": 3.0}, {"params": [net.norm.bias]}]
    groups = list(Fp32Modules(net, ["norm"]).groups(given))
    assert [group["params"] for group in groups] == [[net.first.weight], [net.norm.weight], [net.norm.bias]]
    assert [group.get("lr") for group in groups] == [3.0, 3.0, None]


def test_a_cast_that_is_not_undone_is_noticed() -> None:
    """As if another DeepSpeed asked for the parameters before it casts them."""
    net = Net()
    fp32 = Fp32Modules(net, ["norm"])
    with (
        pytest.raises(EnvironmentNotReady, match="made 2 parameters of fp32_modules 16-bit"),
        fp32.admitted(),
    ):
        net.bfloat16()


class Router(torch.nn.Module):
    """Uses its gate's weight without calling the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(4, 2, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden, self.gate.weight)


class Routed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(3, 4)
        self.router = Router()

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> torch.Tensor:
        result: torch.Tensor = self.router(self.embedding(input_ids))
        return result


def test_weights_that_are_used_past_the_border_are_refused() -> None:
    def check(pattern: str) -> None:
        model = Routed()
        fp32 = Fp32Modules(model, [pattern])
        set_dtypes(model, torch.bfloat16, fp32.parameters)
        fp32.add_borders(torch.bfloat16)
        fp32.check_forward(model, torch.device("cpu"))

    check("router")
    with pytest.raises(ConfigError, match=r"fp32_modules router\.gate: fp32 and 16 bit meet") as caught:
        check("gate")
    assert "name the module around them" in str(caught.value.hint)


def test_upstream_knows_one_dtype(ranks: CaseResults) -> None:
    """F16: when this fails, DeepSpeed keeps two dtypes apart by itself and the cure can go."""
    result = ranks["upstream"]
    assert result["after stage 2"] == ["torch.bfloat16"]
    assert result["stage 3"] == "AssertionError"


def test_only_floating_tensors_are_cast_wherever_they_are() -> None:
    value = {"x": (torch.ones(1), [torch.ones(1, dtype=torch.int64)]), "y": None}
    found = cast(value, torch.bfloat16)
    assert found["x"][0].dtype == torch.bfloat16 and found["x"][1][0].dtype == torch.int64
    assert found["y"] is None and isinstance(found["x"], tuple)
