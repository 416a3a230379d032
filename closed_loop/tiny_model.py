"""Write the configuration and tokenizer of a tiny Llama: `python tiny_model.py DIRECTORY`, by the Python that SGLang
runs on.

There are no weights: `--load-format dummy` draws them. Over its vocabulary of 512 such a model ends by EOS after some
500 tokens, and early or late as chance has it, which is what the loads need. tokenizers and transformers write the
files, so that they fit the release that reads them.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from pathlib import Path

VOCABULARY = 512
CONTEXT = 8192
SPECIAL = ("<s>", "</s>", "<pad>")
HEADS, KV_HEADS, LAYERS, HIDDEN = 4, 2, 2, 64


def main(directory: Path) -> None:
    """Write everything that SGLang needs in a model's folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(inspect.getsource(argparse).splitlines(), trainer)
    begin, end, pad = SPECIAL
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=begin, eos_token=end, pad_token=pad, model_max_length=CONTEXT
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    fast.save_pretrained(str(directory))
    ids = {"bos_token_id": 0, "eos_token_id": 1}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "max_position_embeddings": CONTEXT,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        **ids,
        "pad_token_id": 2,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    (directory / "generation_config.json").write_text(json.dumps(ids), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
