"""Modules as their constructors make them: torch's own, tiny Hugging Face models, and ones that look at values."""

from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.utils import parametrizations

Make = Callable[[], nn.Module]


def values() -> nn.Module:
    """Takes values from other weights, from numpy, from draws and from seeds of its own."""
    torch.manual_seed(3)
    first = nn.Linear(4, 4)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        second = nn.Linear(4, 4)
    third, count = nn.Linear(4, 4), int(torch.randint(1, 5, ()).item())
    rest = nn.Sequential(*[nn.Linear(4, 4) for _ in range(count)])
    shares = [share.item() for share in torch.linspace(0, 1, 5)]
    with torch.no_grad():
        third.weight.copy_(first.weight)
        rest[0].weight.copy_(torch.eye(4) * shares[2])  # type: ignore[operator]
        second.weight.data = torch.randn(4, 4)
        third.bias[1:3] = 0.5
        third.weight[:, 0] = 0
        third.weight.mul_(torch.tensor([1.0, 2, 3, 4]))
    first.weight.data.normal_(0, 0.02)
    if first.weight.abs().max() > 0.01:
        first.bias.data.fill_(3)
    nn.init.uniform_(second.bias, generator=torch.Generator().manual_seed(8))
    module = nn.ModuleList([first, second, third, rest])
    module.from_numpy = nn.Parameter(torch.from_numpy(numpy.arange(4.0)))
    module.register_buffer("mask", torch.tril(torch.ones(5, 5)).view(1, 1, 5, 5))
    module.register_buffer("positions", torch.arange(12).reshape(3, 4), persistent=False)
    module.tied = nn.Linear(4, 4)
    module.tied.weight = first.weight
    return module


def by_values() -> nn.Module:
    """Initialised by what the draws come to."""
    nets = [nn.Linear(8, 8) for _ in range(4)]
    nn.init.orthogonal_(nets[0].weight)
    nn.init.trunc_normal_(nets[1].weight, std=0.1)
    nn.init.sparse_(nets[2].weight, sparsity=0.3)
    return nn.Sequential(*nets, nn.Conv1d(4, 4, 3))


def norms() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(8, 8)), parametrizations.spectral_norm(nn.Linear(8, 8)),
        parametrizations.orthogonal(nn.Linear(8, 8)), nn.utils.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 8),
    )  # fmt: skip


def applied() -> nn.Module:
    net = nn.Sequential(nn.Embedding(9, 8, padding_idx=0), *[nn.Linear(8, 8) for _ in range(3)])
    return net.apply(
        lambda part: nn.init.xavier_normal_(part.weight) if isinstance(part, nn.Linear) else None
    )


TORCH: dict[str, Make] = {
    "transformer": lambda: nn.Transformer(16, 2, 2, 2, 32),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 4),
    "recurrent": lambda: nn.Sequential(nn.LSTM(8, 8, 2), nn.GRU(8, 8), nn.RNN(8, 8)),
    "convolutions": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 3, 3), nn.GroupNorm(1, 3)
    ),
    "mixed": lambda: nn.Sequential(
        nn.MultiheadAttention(8, 2), nn.Bilinear(3, 4, 5), nn.PReLU(), nn.EmbeddingBag(5, 6), nn.LayerNorm(4)
    ),
    "applied": applied,
    "norms": norms,
    "by values": by_values,
    "values": values,
    "converted": lambda: nn.TransformerEncoderLayer(8, 2, 16).double().to(torch.bfloat16),
}  # fmt: skip


def hugging_face() -> dict[str, Make]:
    """Architectures of every kind, by name; made from a configuration of two layers."""
    import transformers as hf

    size: dict[str, Any] = dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=100
    )
    both: dict[str, Any] = dict(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=100, pad_token_id=1, decoder_start_token_id=1,
    )  # fmt: skip
    gpt2 = hf.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=100, bos_token_id=1, eos_token_id=1)
    vision = {key: value for key, value in size.items() if key != "vocab_size"}
    return {
        "gpt2": lambda: hf.GPT2LMHeadModel(gpt2),
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**size)),
        "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**size)),
        "t5": lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=100, dropout_rate=0.0,
                        decoder_start_token_id=0)
        ),
        "bart": lambda: hf.BartForConditionalGeneration(hf.BartConfig(**both)),
        "vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(**vision, image_size=32, patch_size=8)),
        "swin": lambda: hf.SwinForImageClassification(
            hf.SwinConfig(image_size=32, patch_size=2, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4)
        ),
        "convnext": lambda: hf.ConvNextForImageClassification(
            hf.ConvNextConfig(depths=[1, 1, 1, 1], hidden_sizes=[8, 16, 16, 16])
        ),
        "mixtral": lambda: hf.MixtralForCausalLM(
            hf.MixtralConfig(**size, num_key_value_heads=2, num_local_experts=4)
        ),
        "mamba": lambda: hf.MambaForCausalLM(
            hf.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=100, state_size=8)
        ),
        "wav2vec2": lambda: hf.Wav2Vec2ForCTC(
            hf.Wav2Vec2Config(
                **{**size, "vocab_size": 32}, conv_dim=(16, 16), conv_kernel=(3, 3), conv_stride=(2, 2),
                num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2,
            )
        ),
        "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**size, num_key_value_heads=2)),
        "gemma": lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**size, num_key_value_heads=2, head_dim=16)),
        "rwkv": lambda: hf.RwkvForCausalLM(
            hf.RwkvConfig(hidden_size=32, num_hidden_layers=2, vocab_size=100, attention_hidden_size=32)
        ),
    }  # fmt: skip
