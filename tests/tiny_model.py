"""A language model for tests, made on the spot: a two-layer random Llama and a byte-level tokenizer.

It needs no network and, once transformers is imported, well under a second; vLLM serves it at one or two
milliseconds a step. It is fit for tests that compare tokens: its outputs vary, so a token that is lost,
doubled or given to the wrong request shows. That rests on the initializer range (random weights at the usual
0.02 repeat two tokens for ever); give each request a sampling seed of its own as well.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def make_tiny_model(folder: str | os.PathLike[str]) -> Path:
    """Write the model and its tokenizer into `folder`, unless they are there, and return the folder.

    The folder appears complete or not at all: it is written beside its place and renamed, so that two test
    processes may ask for the same one.
    """
    target = Path(folder)
    if (target / "config.json").exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        vocab_size = _save_tokenizer(draft)
        _save_model(draft, vocab_size)
        try:
            draft.rename(target)
        except OSError:
            # Another process may have been faster, and its model is the same one.
            if not (target / "config.json").exists():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _save_tokenizer(folder: Path) -> int:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<bos>", "<eos>", "<pad>"]
    vocab = {token: index for index, token in enumerate(special + alphabet)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", model_max_length=512
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return len(vocab)


def _save_model(folder: Path, vocab_size: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM's attention takes on a CPU
        max_position_embeddings=512,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        dtype="float32",  # equality tests need it: in bfloat16 another batch is now and then another token
    )
    with torch.random.fork_rng(devices=[]):  # the caller's random state is none of this module's business
        torch.manual_seed(20240229)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder, safe_serialization=True)
