"""A random tiny Llama with a real fast tokenizer and a chat template, made on the spot."""

from __future__ import annotations

from pathlib import Path

BOS, EOS, PAD, IM_START = "<s>", "<|im_end|>", "<pad>", "<|im_start|>"

# ChatML, the shape most small instruct models use. No <s>: the template owns the text.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_TEXT = """\
The harbour master counts the boats at dawn and writes the number in a green book.
What is the capital of the island? The capital of the island is Port Evening.
Who keeps the lighthouse? An old woman keeps the lighthouse with her two dogs.
user assistant system: please answer in one short sentence, then stop.
Seven bridges cross the river; the longest of them is closed in winter.
def add(first, second): return first + second  # 0123456789
"""


def make_tiny_tokenizer(vocab_size: int = 384, *, chat_template: str | None = CHAT_TEMPLATE):  # type: ignore[no-untyped-def]
    """A byte-level BPE tokenizer trained on a few sentences: any text encodes and decodes exactly.

    At most ``vocab_size`` tokens (>= 260: 256 bytes and 4 special tokens). bos ``<s>``,
    eos ``<|im_end|>``, pad ``<pad>``, and ``<|im_start|>``. Adds no special token by itself.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    assert vocab_size >= 260
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD, IM_START],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_TEXT.splitlines(), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[IM_START],
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def make_tiny_model_dir(
    path: Path,
    *,
    vocab_size: int = 384,
    layers: int = 2,
    hidden: int = 64,
    tie: bool = True,
    seed: int = 0,
    chat_template: str | None = CHAT_TEMPLATE,
) -> Path:
    """Save a random Llama and its tokenizer into ``path`` (made if missing); returns ``path``.

    The same arguments give the same weights. fp32, ``hidden`` wide (a multiple of 32),
    4 heads with 2 key-value heads, context 2048. The process's RNG state is left alone.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tiny_tokenizer(vocab_size, chat_template=chat_template)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=tie,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path, safe_serialization=True)
    tokenizer.save_pretrained(path)
    return path


def make_tiny_gguf(path: Path, model_dir: Path) -> Path:
    """Save the model and tokenizer of :func:`make_tiny_model_dir` as a .gguf file; returns ``path``.

    Readers turn rows of q_proj and k_proj around, as files of real models have them otherwise.
    """
    import json

    import gguf
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (kind.from_pretrained(model_dir) for kind in (AutoModelForCausalLM, AutoTokenizer))
    config = model.config
    file = gguf.GGUFWriter(str(path), "llama")
    file.add_context_length(config.max_position_embeddings)
    file.add_embedding_length(config.hidden_size)
    file.add_block_count(config.num_hidden_layers)
    file.add_feed_forward_length(config.intermediate_size)
    file.add_head_count(config.num_attention_heads)
    file.add_head_count_kv(config.num_key_value_heads)
    file.add_layer_norm_rms_eps(config.rms_norm_eps)
    file.add_vocab_size(config.vocab_size)
    file.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    vocabulary = tokenizer.get_vocab()
    names = sorted(vocabulary, key=vocabulary.__getitem__)
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("gpt-2")
    file.add_token_list(names)
    file.add_token_types([3 if name in (BOS, EOS, PAD, IM_START) else 1 for name in names])
    core = json.loads(tokenizer.backend_tokenizer.to_str())
    file.add_token_merges([" ".join(pair) for pair in core["model"]["merges"]])
    file.add_bos_token_id(tokenizer.bos_token_id)
    file.add_eos_token_id(tokenizer.eos_token_id)
    file.add_pad_token_id(tokenizer.pad_token_id)
    file.add_chat_template(tokenizer.chat_template)
    called = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        module, _, part = name.rpartition(".")
        file.add_tensor(f"{called.get_name(module)}.{part}", tensor.float().numpy())
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path
