"""Which modules a pattern means."""

import pytest

from dslaunch.core.errors import ConfigError
from dslaunch.core.module_patterns import match_modules, modules_of, preview

_LAYERS = [f"layers.{i}.{part}" for i in range(11) for part in ("input_layernorm", "self_attn.q_proj")]
_NAMES = [f"model.{name}.weight" for name in ("embed_tokens", *_LAYERS, "norm")]
LLAMA = modules_of([*_NAMES, "lm_head.weight"])


def test_modules_of_parameters_are_all_that_hold_one() -> None:
    assert modules_of(["a.b.weight", "a.b.bias", "c.weight", "bare"]) == ["a", "a.b", "c"]


@pytest.mark.parametrize(
    ("pattern", "count", "first"),
    [
        ("*norm*", 12, "model.layers.0.input_layernorm"),
        ("norm", 1, "model.norm"),
        ("lm_head", 1, "lm_head"),
        ("input_layernorm", 11, "model.layers.0.input_layernorm"),
        ("layers.1", 1, "model.layers.1"),
        ("*.layers.1", 1, "model.layers.1"),
        ("*layers.1*", 2, "model.layers.1"),  # and layers.10; what lies inside of them counts with them
        ("model.layers.?.self_attn", 10, "model.layers.0.self_attn"),
        ("*", 2, "model"),
    ],
)
def test_what_a_pattern_means(pattern: str, count: int, first: str) -> None:
    (names,) = match_modules(LLAMA, [pattern], "fp32_modules").values()
    assert (len(names), names[0]) == (count, first)


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [("*nrom*", "did you mean norm"), ("lm_haed", "did you mean lm_head"), ("Q", "its modules are called")],
)
def test_a_pattern_that_means_nothing_is_an_error(pattern: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        match_modules(LLAMA, ["lm_head", pattern], "fp32_modules")
    assert caught.value.message == f"fp32_modules: {pattern!r} matches no module of the model"
    assert hint in str(caught.value.hint)


def test_a_preview_shows_the_first_three() -> None:
    assert preview({"norm": ("a.norm",), "*": ("a", "b", "c", "d")}) == [
        ("norm", "1 module", "a.norm"),
        ("*", "4 modules", "a, b, c, ..."),
    ]
