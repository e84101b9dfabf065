"""A byte-level GPT, small enough to train on one CPU core while you watch.

Shapes: B sequences in a batch, T bytes in a sequence, V bytes in the vocabulary, D = `d_model`, N = `num_heads`.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody reads at once)
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """The shape of the model; the defaults make 837k parameters."""

    vocab_size: int = 256  # bytes: no tokenizer to ship, and the loss is in nats per byte as it stands
    context: int = 128
    d_model: int = 128
    num_layers: int = 4
    num_heads: int = 4

    def __post_init__(self) -> None:
        if self.d_model % self.num_heads != 0:
            raise ValueError(
                f"d_model must be a multiple of num_heads, so that heads are equally wide; "
                f"got d_model={self.d_model}, num_heads={self.num_heads}"
            )


class Attention(nn.Module):
    """Causal self-attention over N heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=False)
        self.project = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] → [B, T, D]."""
        b, t, d = x.shape
        qkv = self.qkv(x).view(b, t, 3, self.num_heads, d // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, N, T, D/N]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.project(mixed.transpose(1, 2).reshape(b, t, d))
        return out


class MLP(nn.Module):
    """D → 4D → D, with a GELU between."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.expand = nn.Linear(config.d_model, 4 * config.d_model, bias=False)
        self.project = nn.Linear(4 * config.d_model, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] → [B, T, D]."""
        out: Tensor = self.project(F.gelu(self.expand(x)))
        return out


class TransformerBlock(nn.Module):
    """Attention, then MLP; each reads a normalised copy of the residual stream and adds to it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.d_model, bias=False)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.d_model, bias=False)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] → [B, T, D]."""
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class GPT(nn.Module):
    """A pre-norm transformer with learned positions. One matrix both embeds bytes and scores the next one."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.byte_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.position_embedding = nn.Embedding(config.context, config.d_model)
        self.blocks = nn.ModuleList(TransformerBlock(config) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.d_model, bias=False)
        self._initialize()

    def _initialize(self) -> None:
        """Every matrix ~ N(0, 0.02²); norms keep their ones. Those that write to the residual stream start smaller."""
        # 2·num_layers outputs are summed there: this keeps the stream's variance independent of the depth.
        residual_std = 0.02 / math.sqrt(2 * self.config.num_layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                nn.init.normal_(parameter, std=residual_std if name.endswith("project.weight") else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Score the byte after each position.

        Args:
            tokens: int64 [B, T], T ≤ context.
            targets: int64 [B, T], the byte that did follow; or None.

        Returns:
            logits [B, T, V], and the mean cross-entropy in nats per byte (a scalar; None without targets).
        """
        t = tokens.shape[1]
        if t > self.config.context:
            raise ValueError(
                f"sequences may hold at most context={self.config.context} bytes, got {t}; "
                f"shorten them or build the model with a larger context"
            )
        positions = torch.arange(t, device=tokens.device)
        x = self.byte_embedding(tokens) + self.position_embedding(positions)  # [B, T, D]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.final_norm(x), self.byte_embedding.weight)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build_model(seed: int, config: GPTConfig | None = None) -> GPT:
    """A new model: same seed, same weights to the bit. The caller's random state is unchanged."""
    with torch.random.fork_rng(devices=[]):
        # Only the CPU's generator: `torch.manual_seed` would also reseed accelerators, which are not forked here.
        torch.default_generator.manual_seed(seed)
        return GPT(config if config is not None else GPTConfig())
