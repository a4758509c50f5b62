"""Write a weight-less model folder (configuration and a trained-on-nothing tokenizer) for `--load-format dummy`.

    python scripts/vllm_cpu/random_model.py FOLDER [--hidden 128 --layers 2 --heads 4 --kv-heads 2 --vocab 2048]

Run it with the Python beside `vllm`: it needs the `tokenizers` package. Texts mean nothing; time, memory and
scheduling are those of a model of that shape.
"""

from __future__ import annotations

import argparse
import json
import random
import string
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(
    folder: Path, *, hidden: int, layers: int, heads: int, kv_heads: int, vocab: int, positions: int
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, vocab, positions)
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **tokens,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps(tokens))


def write_tokenizer(folder: Path, vocab: int, positions: int) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    draw = random.Random(0)
    words = ["".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 9))) for _ in range(1500)]
    corpus = [" ".join(draw.choices(words, k=200)) for _ in range(200)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": positions,
        "eos_token": SPECIAL[0],
        "pad_token": SPECIAL[0],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for name, default in [
        ("hidden", 128),
        ("layers", 2),
        ("heads", 4),
        ("kv-heads", 2),
        ("vocab", 2048),
        ("positions", 4096),
    ]:
        parser.add_argument(f"--{name}", type=int, default=default)
    write_model(**vars(parser.parse_args()))
