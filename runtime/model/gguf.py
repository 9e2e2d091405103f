"""A GGUF file turned, once, into a Hugging Face folder: config.json, model.safetensors, tokenizer and chat template.

The `gguf` package reads and dequantizes. The tokenizer is built here with `tokenizers`, because transformers' own
conversion ignores `tokenizer.ggml.pre`, the rule by which text is split before merging. Weights are written as
bfloat16, those of quantized linear layers also as the file's own codes, or anew in int8 (`--quantization gguf`). The
folder appears whole or not at all.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from runtime.model.config import ConfigError
from runtime.model.quantized import BLOCKS, GROUP, Quantized, from_blocks, quantize
from runtime.model.weights import CODES, save_codes

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = CONTRACTIONS + (r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
PRE_TOKENIZERS = {  # tokenizer.ggml.pre → (digits one by one, the pattern of a word)
    "default": (False, GPT2),
    "gpt-2": (False, GPT2),
    "smollm": (True, GPT2),
    "llama-bpe": (False, LLAMA3),
    "qwen2": (False, LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")),
}
CONTROL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
Progress = Callable[[Iterator[Any], int], Iterator[Any]]


def convert(file: Path, folder: Path, progress: Progress = lambda tensors, total: tensors) -> None:
    """Write `folder` from `file`. Raises `ConfigError` for a broken file or a kind that is not supported."""
    try:
        reader = GGUFReader(file)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # the reader raises whatever its parsing runs into
        raise ConfigError(f"{file} is not a GGUF file that can be read: {error!r}") from None
    config = hf_config(fields, {tensor.name for tensor in reader.tensors})
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        _write(part, reader, fields, config, progress)
        _place(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _place(part: Path, folder: Path) -> None:
    """Give `part` its name, unless another process was first. An earlier version's folder, without codes, gives way."""
    with open(folder.parent / f".{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / CODES).exists():
            return
        if folder.exists():
            os.rename(folder, part / "earlier")  # goes with what is left of the part
        new = part / "new"
        new.mkdir()
        for file in [one for one in part.iterdir() if one.is_file()]:
            os.rename(file, new / file.name)
        os.rename(new, folder)


def hf_config(fields: dict[str, Any], tensors: set[str]) -> dict[str, Any]:
    """The `config.json` that the file's metadata amount to."""
    kind = fields.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise ConfigError(f"GGUF architecture {kind} is not supported; supported are {', '.join(ARCHITECTURES)}")

    def get(name: str, default: Any = None) -> Any:
        value = fields.get(f"{kind}.{name}", default)
        if value is None:
            raise ConfigError(f"the GGUF file lacks {kind}.{name}")
        return value

    heads, hidden = get("attention.head_count"), get("embedding_length")
    config = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": get("attention.key_length", hidden // heads),
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base", 10_000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "bfloat16",
    }
    scaling = fields.get(f"{kind}.rope.scaling.type", "none")
    if scaling != "none":
        config["rope_scaling"] = {"rope_type": scaling, "factor": get("rope.scaling.factor")}
        if scaling == "yarn":
            config["rope_scaling"]["original_max_position_embeddings"] = get("rope.scaling.original_context_length")
    return config


def _write(part: Path, reader: GGUFReader, fields: dict[str, Any], config: dict[str, Any], progress: Progress) -> None:
    weights: dict[str, torch.Tensor] = {}
    coded: dict[str, Quantized] = {}
    for tensor in progress(iter(reader.tensors), len(reader.tensors)):
        name = _hf_name(tensor.name)
        if name is None:
            continue
        weights[name] = _tensor(tensor, name, config)
        head = name == ("model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight")
        if head or "_proj." in name:
            codes = _codes(tensor, name, config)
            if codes is not None:
                coded["lm_head.weight" if head else name] = codes
    save_file(weights, part / "model.safetensors", metadata={"format": "pt"})
    save_codes(part, coded)
    (part / "config.json").write_text(json.dumps(config, indent=1))
    build_tokenizer(fields).save(str(part / "tokenizer.json"))
    names = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token"}
    tokens = fields["tokenizer.ggml.tokens"]
    ids = {name: fields.get(f"tokenizer.ggml.{key}_token_id") for key, name in names.items()}
    settings = {name: tokens[token] for name, token in ids.items() if token is not None}
    if "tokenizer.chat_template" in fields:
        settings["chat_template"] = fields["tokenizer.chat_template"]
    (part / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def _hf_name(name: str) -> str | None:
    """The checkpoint's name of a GGUF tensor; None for derived ones."""
    if name.startswith("rope_freqs"):
        return None
    stem, _, kind = name.rpartition(".")
    prefix = ""
    if stem.startswith("blk."):
        _, layer, stem = stem.split(".", 2)
        prefix = f"model.layers.{layer}."
    if stem not in NAMES:
        raise ConfigError(f"GGUF tensor {name} is none of a Llama-family model's")
    return f"{prefix}{NAMES[stem]}.{kind}"


def _tensor(tensor: Any, name: str, config: dict[str, Any]) -> torch.Tensor:
    kind = GGMLQuantizationType(tensor.tensor_type).name
    if kind not in KINDS:
        raise ConfigError(f"GGUF tensor {tensor.name} is {kind}; supported are {', '.join(KINDS)}")
    values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
    order = _order(len(values), name, config)
    return (values if order is None else values[order]).to(torch.bfloat16)


def _codes(tensor: Any, name: str, config: dict[str, Any]) -> Quantized | None:
    """The file's own codes; those of kinds that the kernels do not know anew in int8; None of unquantized tensors."""
    kind = GGMLQuantizationType(tensor.tensor_type).name
    if kind in ("F32", "F16", "BF16") or tensor.shape[0] % GROUP or not tensor.name.endswith(".weight"):
        return None
    if kind in BLOCKS:
        found = from_blocks(kind, torch.from_numpy(np.array(tensor.data)))
    else:
        found = quantize(torch.from_numpy(dequantize(tensor.data, tensor.tensor_type)), 8)
    order = _order(found.shape[0], name, config)
    return found if order is None else found.rows(order)


def _order(rows: int, name: str, config: dict[str, Any]) -> torch.Tensor | None:
    """llama.cpp interleaves the two halves of each head's rotation; the checkpoint has them one after the other."""
    if config["architectures"] != ["LlamaForCausalLM"] or not (".q_proj" in name or ".k_proj" in name):
        return None
    heads = config["num_attention_heads" if ".q_proj" in name else "num_key_value_heads"]
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()


def build_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """The file's tokenizer. Raises `ConfigError` for a kind that is not supported."""
    kind = fields.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(fields)
    elif kind == "llama":
        tokenizer = _sentence_piece(fields)
    else:
        raise ConfigError(f"GGUF tokenizer {kind} is not supported; gpt2 and llama are")
    tokens = fields["tokenizer.ggml.tokens"]
    types = fields.get("tokenizer.ggml.token_type", [1] * len(tokens))
    tokenizer.add_tokens(
        [
            AddedToken(tokens[n], special=types[n] == CONTROL, normalized=False)
            for n in range(len(tokens))
            if types[n] in (CONTROL, USER_DEFINED)
        ]
    )
    if fields.get("tokenizer.ggml.add_bos_token", kind == "llama"):
        bos = fields["tokenizer.ggml.bos_token_id"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer


def _byte_level(fields: dict[str, Any]) -> Tokenizer:
    pre = fields.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise ConfigError(f"GGUF pre-tokenizer {pre} is not supported; supported are {', '.join(PRE_TOKENIZERS)}")
    vocabulary = {token: n for n, token in enumerate(fields["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
    single_digits, pattern = PRE_TOKENIZERS[pre]
    digits = [pre_tokenizers.Digits(individual_digits=True)] if single_digits else []
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, split, plain])
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentence_piece(fields: dict[str, Any]) -> Tokenizer:
    """SentencePiece BPE: merges are every split of a piece into two, in the order of the pieces' scores."""
    tokens, scores = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.scores"]
    vocabulary = {token: n for n, token in enumerate(tokens)}
    merges = [
        (scores[n], n, (token[:cut], token[cut:]))
        for n, token in enumerate(tokens)
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    merges.sort(key=lambda merge: (-merge[0], merge[1]))
    unknown = tokens[fields.get("tokenizer.ggml.unknown_token_id", 0)]
    pairs = [pair for _, _, pair in merges]
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = [normalizers.Prepend("▁")] if fields.get("tokenizer.ggml.add_space_prefix", True) else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer
