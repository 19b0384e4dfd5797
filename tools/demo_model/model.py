"""The Llama architecture in plain torch, laid out for fast training on a CPU.

Owns the forward pass and the mapping of its weights to and from the Hugging Face names. It must never differ
from `transformers.LlamaForCausalLM` in what it computes: `export.py` checks that on every export.

Two things are fused that Hugging Face keeps apart, because small matrix products are slow on a CPU:
`q|k|v` in one product and `gate|up` in one product. `hf_state_dict` splits them again.
"""

from dataclasses import asdict, dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Config:
    vocab_size: int = 1024
    hidden: int = 192
    layers: int = 4
    heads: int = 6
    kv_heads: int = 2
    intermediate: int = 768
    rope_theta: float = 100000.0
    norm_eps: float = 1e-5
    context: int = 2048

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def as_dict(self) -> dict:
        return asdict(self)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        f = x.float()
        return (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


class CausalAttention(torch.autograd.Function):
    """softmax(q k^T / sqrt(d)) v under a causal mask, for training: torch's own kernel for the CPU takes two to three times as long.

    q [batch, heads, tokens, head_dim], k and v [batch, kv_heads, tokens, head_dim]; `chunk` query rows at a time, each against
    the keys up to its own end only. The heads that share keys are folded into the rows of one product.
    """

    @staticmethod
    def forward(ctx, q, k, v, chunk):
        b, h, t, d = q.shape
        kv = k.shape[1]
        q = (q * d**-0.5).reshape(b * kv, h // kv, t, d)
        k, v = k.reshape(b * kv, t, d), v.reshape(b * kv, t, d)
        hide = torch.full((chunk, chunk), float("-inf"), dtype=q.dtype).triu(1)
        out, kept = torch.empty_like(q), []
        for s in range(0, t, chunk):
            e = min(s + chunk, t)
            scores = torch.bmm(q[:, :, s:e].reshape(b * kv, -1, d), k[:, :e].transpose(1, 2))
            scores.view(b * kv, -1, e - s, e)[..., s:].add_(hide[: e - s, : e - s])
            p = torch.softmax(scores, -1)
            out[:, :, s:e] = torch.bmm(p, v[:, :e]).view(b * kv, -1, e - s, d)
            kept.append(p)
        ctx.save_for_backward(q, k, v, *kept)
        ctx.chunk, ctx.kv = chunk, kv
        return out.view(b, h, t, d)

    @staticmethod
    def backward(ctx, grad):
        q, k, v, *kept = ctx.saved_tensors
        n, g, t, d = q.shape
        grad = grad.reshape(q.shape)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for p, s in zip(kept, range(0, t, ctx.chunk)):
            e = min(s + ctx.chunk, t)
            up, qc = grad[:, :, s:e].reshape(n, -1, d), q[:, :, s:e].reshape(n, -1, d)
            dv[:, :e].baddbmm_(p.transpose(1, 2), up)
            ds = torch._softmax_backward_data(torch.bmm(up, v[:, :e].transpose(1, 2)), p, -1, p.dtype)
            dq[:, :, s:e] = torch.bmm(ds, k[:, :e]).view(n, g, e - s, d)
            dk[:, :e].baddbmm_(ds.transpose(1, 2), qc)
        out = (-1, g * ctx.kv, t, d), (-1, ctx.kv, t, d)
        return (dq * d**-0.5).view(out[0]), dk.view(out[1]), dv.view(out[1]), None


class Block(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.c = c
        kv = c.kv_heads * c.head_dim
        self.attn_norm = RMSNorm(c.hidden, c.norm_eps)
        self.qkv = nn.Linear(c.hidden, c.hidden + 2 * kv, bias=False)
        self.o = nn.Linear(c.hidden, c.hidden, bias=False)
        self.mlp_norm = RMSNorm(c.hidden, c.norm_eps)
        self.gate_up = nn.Linear(c.hidden, 2 * c.intermediate, bias=False)
        self.down = nn.Linear(c.intermediate, c.hidden, bias=False)

    def forward(self, x, cos, sin, cache=None):
        """x [batch, tokens, hidden]; cos, sin [tokens, head_dim]; cache, if any, holds earlier k and v."""
        c = self.c
        b, t, _ = x.shape
        kv = c.kv_heads * c.head_dim
        q, k, v = self.qkv(self.attn_norm(x)).split((c.hidden, kv, kv), dim=-1)
        q = rotate(q.view(b, t, c.heads, c.head_dim).transpose(1, 2), cos, sin)
        k = rotate(k.view(b, t, c.kv_heads, c.head_dim).transpose(1, 2), cos, sin)
        v = v.view(b, t, c.kv_heads, c.head_dim).transpose(1, 2)
        past = 0
        if cache is not None:
            past = cache.length
            k, v = cache.append(self, k, v)
        if cache is None and torch.is_grad_enabled():
            return self.rest(x, CausalAttention.apply(q, k, v, 64 if t <= 600 else 128))
        group = c.heads // c.kv_heads
        k = k[:, :, None].expand(-1, -1, group, -1, -1).reshape(b, c.heads, -1, c.head_dim)
        v = v[:, :, None].expand(-1, -1, group, -1, -1).reshape(b, c.heads, -1, c.head_dim)
        return self.rest(x, F.scaled_dot_product_attention(q, k, v, is_causal=past == 0 and t > 1))

    def rest(self, x, y):
        """What follows attention. y [batch, heads, tokens, head_dim]."""
        x = x + self.o(y.transpose(1, 2).reshape(x.shape))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Cache:
    """Keys and values of one sequence. Filled by one prompt, then one token at a time: longer steps would need a mask."""

    def __init__(self):
        self.length, self.kv = 0, {}

    def append(self, block, k, v):
        assert self.length == 0 or k.shape[2] == 1
        if id(block) in self.kv:
            old_k, old_v = self.kv[id(block)]
            k, v = torch.cat((old_k, k), dim=2), torch.cat((old_v, v), dim=2)
        self.kv[id(block)] = k, v
        return k, v


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-b, a), dim=-1) * sin).to(x.dtype)


class Llama(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.c = c
        self.embed = nn.Embedding(c.vocab_size, c.hidden)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = RMSNorm(c.hidden, c.norm_eps)
        inv = 1.0 / c.rope_theta ** (torch.arange(0, c.head_dim, 2).float() / c.head_dim)
        angle = torch.outer(torch.arange(c.context).float(), inv)
        angle = torch.cat((angle, angle), dim=-1)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                scale = (2 * c.layers) ** -0.5 if name.endswith(("o.weight", "down.weight")) else 1.0
                nn.init.normal_(p, std=0.02 * scale if "embed" in name else scale * p.shape[1] ** -0.5 * 0.6)

    def hidden_states(self, ids, cache=None):
        past = 0 if cache is None else cache.length
        x = self.embed(ids)
        cos, sin = (t[past : past + ids.shape[1]] for t in (self.cos, self.sin))
        for block in self.blocks:
            x = block(x, cos, sin, cache)
        if cache is not None:
            cache.length += ids.shape[1]
        return self.norm(x)

    def forward(self, ids, cache=None):
        return F.linear(self.hidden_states(ids, cache), self.embed.weight)

    def loss(self, ids, weights):
        """Sum of weighted cross entropy of ids[:, 1:] given ids[:, :-1], and tokens counted and right (weight 1 and up)."""
        h = self.hidden_states(ids[:, :-1])
        target, w = ids[:, 1:].reshape(-1), weights[:, 1:].reshape(-1)
        keep = w.nonzero().squeeze(1)
        logits = F.linear(h.reshape(-1, self.c.hidden)[keep], self.embed.weight).float()
        target, w = target[keep], w[keep]
        each = F.cross_entropy(logits, target, reduction="none")
        with torch.no_grad():
            full = w >= 1
            right = (logits.argmax(-1) == target)[full].sum().item()
        return (each * w).sum(), full.sum().item(), right
