"""A real but tiny base model for tests: a random two-layer Llama and a byte-level tokenizer, as a model folder.

Not responsible for quality: the weights are random (seeded), so outputs are arbitrary but deterministic.
"""

from __future__ import annotations

from pathlib import Path

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def make_tiny_model(
    folder: Path,
    *,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    context_length: int = 256,
    tie_word_embeddings: bool = True,
    seed: int = 0,
) -> Path:
    """Write a Llama of random float32 weights and its tokenizer to `folder`; returns `folder`.

    The vocabulary has 259 entries: three special tokens (ids 0..2, end of sequence 2), then the 256 bytes.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = write_tokenizer(folder)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context_length,
        tie_word_embeddings=tie_word_embeddings,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        # The usual initial scale (0.02) makes a hidden size of 32 nearly linear and all logits nearly equal.
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.normal_(0.0, 0.25)
    model.save_pretrained(folder, safe_serialization=True)
    return folder


def write_tokenizer(folder: Path) -> int:
    """Write a byte-level BPE without merges (one token per byte) and a ChatML template; returns the vocabulary size."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    symbols = [*SPECIAL_TOKENS, *sorted(ByteLevel.alphabet())]
    tokenizer = Tokenizer(BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = CHATML
    fast.save_pretrained(folder)
    return len(symbols)
