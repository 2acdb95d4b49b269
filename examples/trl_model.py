"""A tiny Llama over characters, with a tokenizer, for the examples of TRL: written as a user's model is."""

from pathlib import Path

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 -:=>"
SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}


def write_tiny_model(path: Path, hidden: int = 96) -> None:
    """Writes the model, random weights, and its tokenizer into a folder, as rank 0."""
    if dist.get_rank() == 0:
        vocabulary = {token: i for i, token in enumerate((*SPECIAL.values(), *CHARACTERS))}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        tokenizer.decoder = decoders.Fuse()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL).save_pretrained(path)
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=128,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=1,
        )
        LlamaForCausalLM(config).save_pretrained(path)
    dist.barrier()
