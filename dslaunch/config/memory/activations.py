"""What a forward pass keeps for the backward pass, and what the logits take.

Measured in transformers 5.24 for every family of ``architectures`` (benchmarks/activations.py, see
docs/memory.md); an estimate for others, and for dropout. Symbols: T tokens of a micro-batch, h
hidden, i intermediate, a heads, k key-value heads, d head size, e bytes.
"""

from __future__ import annotations

from dslaunch.config.memory.items import BACKWARD, EXPERIENCE, FORWARD, LAYERS, LOSS, REFERENCE, Item
from dslaunch.config.memory.setup import Setup

_RNG_STATE_BYTES = 5056  # of the CPU's generator, kept for each layer that is recomputed
_LORA_LINEARS = 7  # of a Llama layer
_MLP_TEMPORARIES = 3  # measured 1.6 to 2.8 times T x i x e
# (whose loss, precision is fp32) -> bytes for each logit at the end of forward, at the start of backward
_LOGITS = {
    ("transformers", False): (10, 12),
    ("transformers", True): (8, 12),
    ("dslaunch", False): (10, 20),
    ("dslaunch", True): (12, 20),
}


# family -> (hidden sizes, MLP widths) that a layer keeps for each token, and its LayerNorms
_LAYER_NORM = {"gpt2": (8, 5, 2), "gpt_neox": (10, 2, 2), "phi": (7, 5, 1)}
_GEMMA = ("gemma", "gemma2", "gemma3_text")
_HELD = {2: 6, 4: 8}  # bytes of a parameter -> of each logit, from its forward to its backward pass


def activation_items(setup: Setup) -> list[Item]:
    """The items of one micro-batch of full length."""
    dims, e = setup.model.dims, setup.bytes_each
    tokens = setup.tokens
    layer = layer_bytes(setup)
    norm = 8 if dims.family in _LAYER_NORM else 4 * dims.hidden + 4
    ends = tokens * (norm + 2 * e * dims.hidden + 16) + 2 * setup.max_length * dims.head_dim * e
    passes: tuple[str, ...] = (FORWARD, LOSS, LAYERS)
    if setup.runs_reference:
        passes = (FORWARD, REFERENCE, LOSS, LAYERS)
    if setup.gradient_checkpointing:
        kept = [
            Item(
                "layer inputs (gradient checkpointing)",
                dims.layers * kept_by_a_layer(setup) + _mask_bytes(setup),
                passes,
            ),
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
    forward, backward = _LOGITS[setup.loss, setup.precision == "fp32" or setup.fp32_head]
    if setup.model.dims.family == "gemma2":  # caps its logits: tanh keeps its result
        forward, backward = forward + setup.bytes_each, backward + setup.bytes_each
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


def kept_by_a_layer(setup: Setup) -> int:
    """What each further layer adds to what waits for the backward pass."""
    if setup.gradient_checkpointing:
        state = _RNG_STATE_BYTES if setup.device_type == "cpu" else 0
        return setup.tokens * setup.model.dims.hidden * setup.bytes_each + state
    return layer_bytes(setup)


def layer_bytes(setup: Setup) -> int:
    """Bytes that one layer keeps for the backward pass of a micro-batch without checkpointing."""
    dims, e = setup.model.dims, setup.bytes_each
    if dims.family in _LAYER_NORM:
        hidden, inner, norms = _LAYER_NORM[dims.family]
        each = e * (hidden * dims.hidden + inner * dims.intermediate) + 8 * norms + _scores(setup)
    else:
        each = e * (4 if dims.gated else 2) * dims.intermediate + _attention(setup) + _norms(setup)
        each += 2 * e * dims.experts_per_token * dims.hidden  # what each expert gets and gives
    if setup.method != "full":
        # The input of a frozen layer is not kept; that of lora_B is.
        each += _LORA_LINEARS * setup.lora_r * e - 2 * dims.hidden * e
        if setup.lora_dropout:
            each += e * 4 * dims.hidden + 6 * dims.hidden + dims.intermediate
    return int(setup.tokens * each)


def _backend(setup: Setup) -> str:
    """Gemma 2 caps its scores, for which sdpa has no kernel."""
    capped = setup.model.dims.family == "gemma2" and setup.attention == "sdpa"
    return "eager" if capped else setup.attention


def _mask_bytes(setup: Setup) -> int:
    """The masks that recomputed layers are handed again; Gemma 2 has one for each kind of layer."""
    if _backend(setup) == "flash" or not (setup.mask or _backend(setup) == "eager"):
        return 0
    kinds = 2 if setup.model.dims.family == "gemma2" else 1
    rows = setup.tokens // setup.max_length if setup.mask else 1
    return kinds * rows * setup.max_length**2 * setup.bytes_each


def _scores(setup: Setup) -> int:
    """Bytes for each token of what an attention backend keeps of its scores."""
    dims, e = setup.model.dims, setup.bytes_each
    if _backend(setup) != "eager":
        return 4 * dims.heads
    each = 4 if e == 4 else 4 + e
    return dims.heads * setup.max_length * (each + (e if dims.family == "gemma2" else 0))


def _attention(setup: Setup) -> int:
    """Bytes for each token from the normed input to the output's projection."""
    dims, e = setup.model.dims, setup.bytes_each
    query, keys = dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
    masked = setup.mask and _backend(setup) == "sdpa"
    if _backend(setup) == "eager":
        kept = 4 * query
    elif dims.family == "phi3":  # the values are a view that holds the whole of qkv
        kept = 4 * query + 3 * keys
    else:
        # With a mask sdpa repeats keys and values for every head, and each layer keeps the mask.
        kept = 2 * query + 2 * (query if masked else keys)
    each = e * kept + _scores(setup) + (setup.max_length * e if masked else 0)
    if dims.qk_norm:
        normed = 8 if dims.family in _GEMMA else 4 + e
        each += (dims.heads + dims.kv_heads) * (dims.head_dim * normed + 4)
    return each


def _norms(setup: Setup) -> int:
    """Bytes for each token of RMS norms in fp32 and of what goes into the linear layers after them."""
    dims, e = setup.model.dims, setup.bytes_each
    each = 4 * e * dims.hidden + 8 * dims.hidden + 8
    if dims.family in _GEMMA:  # which also multiply by their weight in fp32
        each += 2 * (4 - e) * dims.hidden
        each += (0 if dims.family == "gemma" else 2) * (8 * dims.hidden + 4)  # norms after the blocks
    return each
