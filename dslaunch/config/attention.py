"""model.attn_implementation: which backend ``auto`` means and why, and what cannot run."""

from __future__ import annotations

from typing import NamedTuple

from dslaunch.config.facts import Facts, ModelAttention
from dslaunch.config.hosts import ResolvedHosts
from dslaunch.config.report import Report
from dslaunch.config.spec import RunSpec
from dslaunch.core.plan import Attention, Precision

KEY = "model.attn_implementation"
FLASH_NEEDS = 80  # sm_80: FlashAttention 2 has no kernels for older devices


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# model_type of causal models that transformers 5.24 cannot run with a backend (their ``_supports_sdpa``,
# ``_supports_flash_attn``, ``_supports_flex_attn``); a test compares them with the classes.
WITHOUT_SDPA = _names("""
    big_bird bigbird_pegasus bloom cpmant deepseek_v4 falcon_mamba flint gemma2 git got_ocr2 gpt_neo
    gpt_neox_japanese gpt_oss granite_swa granitemoe_swa hy_v4 inkling2_loop_text inkling2_text mamba mamba2
    megatron-bert mimo_v2_flash mpt mvp openai-gpt prophetnet reformer rembert roformer rwkv trocr vaultgemma
    xglm xlm xlnet xlstm
    """)
WITHOUT_FLASH = _names("""
    axk2 big_bird bigbird_pegasus bloom blt cpmant deepseek_v32 deepseek_v4 doge dots3_note dots3_note_text
    falcon_mamba gemma3 gemma4 gemma4_unified git glm_moe_dsa got_ocr2 gpt_neox_japanese hy_v4
    inkling2_loop_text inkling2_text inkling_text llama4 llama4_text mamba mamba2 megatron-bert
    minimax_m3_vl_text mllama mpt mvp openai-gpt prophetnet qwen4_exp qwen4_exp_text reformer rembert roformer
    rwkv trocr xglm xlm xlnet xlstm
    """)
WITHOUT_FLEX = _names("""
    aria_text axk2 bailing_hybrid bamba big_bird bigbird_pegasus bloom blt cohere_compass_text cpmant
    deepseek_v32 deepseek_v4 dots3_note dots3_note_text falcon falcon_h1 falcon_mamba gemma4_assistant
    gemma4_unified_assistant git glm_moe_dsa got_ocr2 gpt2 gpt_bigcode gpt_neo gpt_neox_japanese hy_v4
    inkling2_loop_text inkling2_text jamba kimi_linear lara_mini mamba mamba2 megatron-bert mimo_v2_flash
    minimax_m3_vl_text moss_transcribe_diarize mpt mvp olmo_hybrid olmoe openai-gpt persimmon prophetnet
    qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp qwen4_exp_text reformer rembert
    roformer rwkv stablelm trocr xglm xlm xlnet xlstm zamba
    """)


class Chosen(NamedTuple):
    """A backend, and why."""

    value: Attention
    reason: str


def choose_attention(spec: RunSpec, precision: Precision, hosts: ResolvedHosts, facts: Facts) -> Chosen:
    """What ``spec`` asks for, or what ``auto`` means for this model, data and these devices.

    sdpa has flash kernels of its own; FlashAttention's is better where samples are packed, since sdpa
    then needs a mask of all pairs of tokens.
    """
    asked, model = spec.model.attn_implementation, facts.model_attention
    if asked != "auto":
        return Chosen(asked, "as written")
    if model.type in WITHOUT_SDPA:
        return Chosen("eager", f"transformers has no sdpa for {model.type}")
    if not spec.data.packing:
        return Chosen("sdpa", "data.packing is off")
    hindrance = flash_hindrance(model, precision, hosts) or _not_installed(hosts, facts)
    if hindrance:
        return Chosen("sdpa", f"no flash_attention_2 for packed samples: {hindrance}")
    why = "samples are packed, flash-attn is installed, and every GPU is sm_80 or newer"
    return Chosen("flash_attention_2", why)


def resolve_attention(
    spec: RunSpec, precision: Precision, hosts: ResolvedHosts, facts: Facts, report: Report
) -> Attention:
    """The backend, its reason and, where it was written and cannot run, the problem in ``report``."""
    asked, model = spec.model.attn_implementation, facts.model_attention
    chosen = choose_attention(spec, precision, hosts, facts)
    if asked == "auto":
        usual = chosen.value == "sdpa" and not report.given(KEY)
        report.reason(KEY, chosen.reason, "default" if usual else "derived")
    elif why := _hindrance(asked, model, precision, hosts):
        instead = "eager" if model.type in WITHOUT_SDPA else "sdpa"
        report.fail(KEY, f"{KEY} {asked}: {why}", f"use {instead}, or leave it to auto")
    return chosen.value


def _hindrance(
    asked: Attention, model: ModelAttention, precision: Precision, hosts: ResolvedHosts
) -> str | None:
    if asked == "flash_attention_2":
        return flash_hindrance(model, precision, hosts)
    if asked == "flex_attention":
        return _flex_hindrance(model, hosts)
    return _no_backend("sdpa", model, WITHOUT_SDPA) if asked == "sdpa" else None


def flash_hindrance(model: ModelAttention, precision: Precision, hosts: ResolvedHosts) -> str | None:
    """Why flash attention does not run there; None where nothing speaks against it."""
    if hosts.device_type == "cpu":
        return "it does not run on a CPU"
    if precision == "fp32":
        return "it computes in bf16 and fp16 only, and precision is fp32"
    for device in hosts.devices or ():
        if device.arch.startswith("sm_") and int(device.arch.removeprefix("sm_")) < FLASH_NEEDS:
            return f"it needs compute capability 8.0, and {device} has less"
    return _no_backend("flash attention", model, WITHOUT_FLASH)


def _flex_hindrance(model: ModelAttention, hosts: ResolvedHosts) -> str | None:
    if hosts.device_type == "cpu":
        return "it has no backward pass on a CPU"
    if model.dropout:
        return f"it has no dropout, and the model's config.json has attention_dropout {model.dropout:g}"
    return _no_backend("flex attention", model, WITHOUT_FLEX)


def _no_backend(name: str, model: ModelAttention, without: frozenset[str]) -> str | None:
    return f"transformers has no {name} for {model.type}" if model.type in without else None


def _not_installed(hosts: ResolvedHosts, facts: Facts) -> str | None:
    if hosts.devices is None:
        return "the devices are not known"
    if not all(device.arch.startswith("sm_") for device in hosts.devices):
        return "not every device is known to have it"
    if not all(host.name in facts.local_names for host in hosts.topology.hosts):
        return "whether flash-attn is installed on the other hosts is not known"
    return None if facts.flash_attn else "flash-attn is not installed"
