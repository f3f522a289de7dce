"""Do the rows of a data set fit what positions the model has?

A model with a table of positions fails inside its embedding, in the middle of the
training, at the first row that is longer. One with rotary positions computes any,
but has learned nothing about those beyond its context.
"""

from __future__ import annotations

from typing import Any

from dslaunch.core.errors import ConfigError

ROW_MULTIPLE = 8  # what collate pads rows to, in tokens

# transformers 5.24: no position is looked up anywhere, or the table grows with the row.
_ANY_LENGTH = frozenset(
    ("bloom", "inkling_text", "inkling2_text", "inkling2_loop_text", "jamba", "kimi_linear", "nemotron_h",
     "rwkv", "xlnet", "zamba")
)  # fmt: skip
_GROWING_TABLE = frozenset(("xglm",))
_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len")


def check_context(model_config: Any, width: int, *, longest_sample: int | None = None) -> str | None:
    """Refuse rows that the model's table of positions is too short for; a note where it only may do worse.

    ``model_config``: a transformers config. ``width``: tokens of the widest row,
    padding included (:func:`row_width`). ``longest_sample``: tokens of the longest
    sample where rows are packed, as positions begin anew with each; default ``width``.

    Returns None where all is well. Raises ConfigError naming ``data.max_length``
    and the limit.
    """
    config = model_config.get_text_config()
    limit = next((n for n in (getattr(config, key, None) for key in _LIMITS) if _is_limit(n)), None)
    if limit is None or config.model_type in _ANY_LENGTH:
        return None
    if not (_computes_positions(config) or config.model_type in _GROWING_TABLE):
        if width <= limit:
            return None
        raise ConfigError(
            f"the data has rows of {width} tokens, but the model ({config.model_type}) has "
            f"a fixed table of {limit} positions: data.max_length must be at most {limit}",
            hint=f"set data.max_length: {_longest_allowed(limit)}",
        )
    longest = width if longest_sample is None else longest_sample
    if longest <= limit:
        return None
    return (
        f"samples of up to {longest} tokens are longer than the model's context of {limit}: "
        f"it has learned nothing about positions beyond (data.max_length)"
    )


def row_width(longest_row: int) -> int:
    """How wide the batch with the longest row is, in tokens: the next multiple that rows are padded to."""
    return -(-longest_row // ROW_MULTIPLE) * ROW_MULTIPLE


def _computes_positions(config: Any) -> bool:
    """Rotary positions, by what configs call their settings; GPT-J's and CodeGen's come from a table."""
    return any(
        name.startswith(("rope_", "rotary_emb", "rotary_pct")) and value
        for name, value in vars(config).items()
    )


def _is_limit(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _longest_allowed(limit: int) -> int:
    return max(limit // ROW_MULTIPLE * ROW_MULTIPLE, 2)
