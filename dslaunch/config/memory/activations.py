"""What a forward pass keeps for the backward pass, and what the logits take.

Exact for Llama-like decoders in transformers 5.24 (measured on four shapes in bf16 and fp32, see
docs/memory.md); an estimate for MLPs without gate, mixtures of experts and dropout. Symbols: T
tokens of a micro-batch, h hidden, i intermediate, a heads, k key-value heads, d head size, e bytes.
"""

from __future__ import annotations

from dslaunch.config.memory.items import BACKWARD, EXPERIENCE, FORWARD, LAYERS, LOSS, REFERENCE, Item
from dslaunch.config.memory.setup import Setup

_LORA_LINEARS = 7  # of a Llama layer
_MLP_TEMPORARIES = 3  # measured 1.6 to 2.8 times T x i x e
# (whose loss, precision is fp32) -> bytes for each logit at the end of forward, at the start of backward
_LOGITS = {
    ("transformers", False): (10, 12),
    ("transformers", True): (8, 12),
    ("dslaunch", False): (10, 20),
    ("dslaunch", True): (12, 20),
}


_HELD = {2: 6, 4: 8}  # bytes of a parameter -> of each logit, from its forward to its backward pass


def activation_items(setup: Setup) -> list[Item]:
    """The items of one micro-batch of full length."""
    dims, e = setup.model.dims, setup.bytes_each
    tokens = setup.tokens
    layer = layer_bytes(setup)
    ends = (
        tokens * (4 * dims.hidden + 4 + 2 * e * dims.hidden + 16) + 2 * setup.max_length * dims.head_dim * e
    )
    passes: tuple[str, ...] = (FORWARD, LOSS, LAYERS)
    if setup.runs_reference:
        passes = (FORWARD, REFERENCE, LOSS, LAYERS)
    if setup.gradient_checkpointing:
        kept = [
            Item("layer inputs (gradient checkpointing)", dims.layers * tokens * dims.hidden * e, passes),
            Item("one layer recomputed", layer, (LAYERS, BACKWARD)),
        ]
    else:
        kept = [
            Item("activations", (dims.layers - 1) * layer, passes),
            Item("activations of one layer", layer, (*passes, BACKWARD)),
        ]
    return [
        *kept,
        Item("activations before and after the layers", ends, passes),
        Item("gradients inside a layer", _MLP_TEMPORARIES * tokens * dims.intermediate * e, (LAYERS,)),
        *([] if setup.value_head else _logits(setup)),
    ]


def _logits(setup: Setup) -> list[Item]:
    forward, backward = _LOGITS[setup.loss, setup.precision == "fp32"]
    logits = setup.tokens * setup.model.dims.vocab
    items = [
        Item("logits and loss", forward * logits, (FORWARD,)),
        Item("logits and their gradients", backward * logits, (LOSS,)),
    ]
    if setup.runs_reference:
        # The reference runs while the graph of the policy holds its logits.
        items.append(
            Item("logits that the policy's loss needs", _HELD[setup.bytes_each] * logits, (REFERENCE,))
        )
        items.append(Item("logits of the reference", forward * logits, (REFERENCE,)))
    elif setup.task == "ppo":
        items.append(Item("logits of one model at a time", forward * logits, (EXPERIENCE,)))
    return items


def layer_bytes(setup: Setup) -> int:
    """Bytes that one layer keeps for the backward pass of a micro-batch without checkpointing."""
    dims, e = setup.model.dims, setup.bytes_each
    tokens, length = setup.tokens, setup.max_length
    hidden, query, keys = dims.hidden, dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
    mlp = (4 if dims.gated else 2) * dims.intermediate
    if setup.attention == "eager":
        each = e * (mlp + 4 * hidden + 4 * query) + 8 * hidden + 8
        each += dims.heads * length * (4 if e == 4 else 4 + e)
    else:
        masked = setup.mask and setup.attention == "sdpa"
        # With a mask sdpa repeats keys and values for every head, and each layer keeps the mask.
        each = e * (mlp + 4 * hidden + 2 * query + 2 * (query if masked else keys)) + 8 * hidden
        each += 4 * dims.heads + 8 + (length * e if masked else 0)
    if dims.qk_norm:
        each += (dims.heads + dims.kv_heads) * (dims.head_dim * (4 + e) + 4)
    if setup.method != "full":
        # The input of a frozen layer is not kept; that of lora_B is.
        each += _LORA_LINEARS * setup.lora_r * e - 2 * hidden * e
        if setup.lora_dropout:
            each += e * 4 * hidden + 6 * hidden + dims.intermediate
    return int(tokens * each)
