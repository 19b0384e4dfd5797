"""Trains a small EAGLE-3 head for the built-in model, which is built in beside it: drafts of a head that was never trained are never right.

The text is what the model itself says to those who ask for stories, and conversations of all kinds with the answers that it learned. The head is unrolled on its own features as in the paper (arXiv 2503.01840): at step j a row is given
what the head made of the row before at step j - 1, and sees the model's features up to j rows back and its own of the last j.

    python tools/demo_model/eagle.py --out crates/folio/assets/demo-eagle3

Takes a quarter of an hour on one core. Needs torch, transformers and safetensors.
"""

import argparse
import json
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from generate import conversation, strip
from words import ANIMALS, JOBS, OBJECTS, TRAITS

MODEL = Path(__file__).resolve().parent.parent.parent / "crates/folio/assets/demo"
WIDTH, INNER, HEADS, KV_HEADS, DIM, DRAFT_VOCAB = 192, 640, 6, 2, 32, 896
# Stories that the model tells, conversations, and those of both at the end that nothing is learned from.
STORIES, CONVERSATIONS, HELD = 512, 3584, 64
TOKENS, BATCH, STEPS, EPOCHS = 144, 32, 3, 5


def conversations(tokenizer):
    """The first tokens of conversations, with the answers of the generator, which are what the model learned to say."""
    count = lambda text: len(tokenizer.encode(text, add_special_tokens=False))
    rng, told = random.Random("eagle"), []
    while len(told) < CONVERSATIONS:
        mode = rng.choice(["facts", "mixed", "document", "tasks", "tasks", "sums"])
        messages = conversation(rng, 2 * TOKENS, mode, count).messages
        ids = tokenizer.encode("<|begin|>" + "".join(f"<|{role}|>{strip(text)}<|end|>" for role, text, _ in messages), add_special_tokens=False)
        if len(ids) >= TOKENS:
            told.append(ids[:TOKENS])
    return torch.tensor(told)


def said_by_model(tokens, tokenizer):
    """Whether each token is an assistant's, its end included."""
    roles = {tokenizer.convert_tokens_to_ids(f"<|{role}|>"): role == "assistant" for role in ("system", "user", "assistant")}
    said = torch.zeros(tokens.shape)
    for row, ids in enumerate(tokens.tolist()):
        speaks = False
        for at, token in enumerate(ids):
            said[row, at] = float(speaks and token not in roles)
            speaks = roles.get(token, speaks)
    return said


def texts(model, tokenizer, generator):
    pick = lambda words: words[int(torch.randint(len(words), (1,), generator=generator))]
    asks = ["Tell me a story about a {a}.", "Tell me a story about a {a} and {n} hens.", "Tell me a story about a {t} {j}.", "Write a short story about a {a} and a {o}."]
    told = []
    for _ in range(0, STORIES, 64):
        prompts = [pick(asks).format(a=pick(ANIMALS), n=int(torch.randint(9, (1,), generator=generator)), t=pick(TRAITS), j=pick(JOBS), o=pick(OBJECTS)) for _ in range(64)]
        # Of one length, so that no row is padding: what is longer is cut at the front.
        ids = [tokenizer.encode(f"<|begin|><|user|>{prompt}<|end|><|assistant|>", add_special_tokens=False) for prompt in prompts]
        shortest = min(map(len, ids))
        ids = torch.tensor([row[-shortest:] for row in ids])
        with torch.no_grad():
            told.append(model.generate(ids, do_sample=True, temperature=0.8, max_new_tokens=TOKENS, min_new_tokens=TOKENS, eos_token_id=None, pad_token_id=1)[:, :TOKENS])
    return torch.cat(told)


def norm(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def rotary(length):
    angle = torch.arange(length)[:, None] / 100000.0 ** (torch.arange(0, DIM, 2) / DIM)
    return [f(angle).repeat(1, 2)[:, None] for f in [torch.cos, torch.sin]]


def rotate(x, rotation):
    cos, sin = (part[: x.shape[1]] for part in rotation)
    half = DIM // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class Head(torch.nn.Module):
    def __init__(self):
        super().__init__()
        shapes = {
            "fc.weight": (WIDTH, 3 * WIDTH),
            "midlayer.self_attn.q_proj.weight": (HEADS * DIM, 2 * WIDTH),
            "midlayer.self_attn.k_proj.weight": (KV_HEADS * DIM, 2 * WIDTH),
            "midlayer.self_attn.v_proj.weight": (KV_HEADS * DIM, 2 * WIDTH),
            "midlayer.self_attn.o_proj.weight": (WIDTH, HEADS * DIM),
            "midlayer.mlp.gate_proj.weight": (INNER, WIDTH),
            "midlayer.mlp.up_proj.weight": (INNER, WIDTH),
            "midlayer.mlp.down_proj.weight": (WIDTH, INNER),
            "midlayer.input_layernorm.weight": (WIDTH,),
            "midlayer.hidden_norm.weight": (WIDTH,),
            "midlayer.post_attention_layernorm.weight": (WIDTH,),
            "norm.weight": (WIDTH,),
            "lm_head.weight": (DRAFT_VOCAB, WIDTH),
        }
        start = lambda shape: torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * shape[1] ** -0.5
        self.names = list(shapes)
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(start(shape)) for shape in shapes.values()])

    def __getitem__(self, name):
        return self.weights[self.names.index(name)]

    def forward(self, embedded, features, rotation, before):
        """Logits and the features of the rows behind; `before`: (keys, values) of the steps before, to which this one's are added."""
        step, (rows, length) = len(before), embedded.shape[:2]
        w = lambda name: self["midlayer." + name + ".weight"]
        both = torch.cat([norm(embedded, w("input_layernorm")), norm(features, w("hidden_norm"))], -1)
        split = lambda name, heads: (both @ w("self_attn." + name).T).view(rows, length, heads, DIM)
        q, k, v = rotate(split("q_proj", HEADS), rotation), rotate(split("k_proj", KV_HEADS), rotation), split("v_proj", KV_HEADS)
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 2) for x in [k, v])
        before.append((k, v))
        # The model's features up to `step` rows back, then of each step the row that is as far behind as steps are left.
        at = torch.arange(length)
        scores = torch.einsum("brhd,bphd->bhrp", q, before[0][0]).masked_fill(at[None] > at[:, None] - step, float("-inf"))
        back = [lambda x, by=step - i: F.pad(x, (0, 0, 0, 0, by, 0))[:, :length] for i in range(1, step + 1)]
        own = [torch.einsum("brhd,brhd->bhr", q, shift(before[i][0])) for i, shift in zip(range(1, step + 1), back)]
        share = (torch.cat([scores, *[x[..., None] for x in own]], -1) / DIM ** 0.5).softmax(-1)
        out = torch.einsum("bhrp,bphd->brhd", share[..., :length], before[0][1])
        for i, shift in zip(range(1, step + 1), back):
            out = out + share[..., length + i - 1].transpose(1, 2)[..., None] * shift(before[i][1])
        x = features + out.reshape(rows, length, -1) @ w("self_attn.o_proj").T
        inner = norm(x, w("post_attention_layernorm"))
        x = x + (F.silu(inner @ w("mlp.gate_proj").T) * (inner @ w("mlp.up_proj").T)) @ w("mlp.down_proj").T
        return norm(x, self["norm.weight"]) @ self["lm_head.weight"].T, x


def losses(head, table, rotation, tokens, said_by, tapped, logits, ids):
    """Of each step: the loss, and the share of rows whose best token is the model's, of rows that are for the model's own tokens."""
    # Row s has token s + 1 and the features of s; what it says is the model's row s + 1.
    target = logits[:, 1:]
    features, before, out = tapped @ head["fc.weight"].T, [], []
    features = features[:, :-1]
    embedded = table[tokens[:, 1:]]
    own = F.pad(said_by[:, 2:], (0, 1))
    for step in range(STEPS):
        said, following = head(embedded, features, rotation, before)
        keep = slice(step, None)
        share = target[:, keep][..., ids].softmax(-1)
        mean = lambda rows: (rows * own[:, keep]).sum() / own[:, keep].sum()
        loss = mean(-(share * said[:, keep].log_softmax(-1)).sum(-1))
        right = mean((ids[said[:, keep].argmax(-1)] == target[:, keep].argmax(-1)).float())
        out.append((loss, float(right)))
        # Each row's features are what the row before it made.
        features = F.pad(following, (0, 0, 1, 0))[:, :-1]
    return out


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(MODEL)
    # Mixed, so that both are among those held out.
    tokens = torch.cat([texts(model, tokenizer, generator), conversations(tokenizer)])
    tokens = tokens[torch.randperm(len(tokens), generator=generator)]
    said_by = said_by_model(tokens, tokenizer)
    print("texts", tuple(tokens.shape), flush=True)
    layers = model.config.num_hidden_layers
    taps = [2, layers // 2, layers - 3]
    tapped, logits = [], []
    for part in tokens.split(64):
        with torch.no_grad():
            out = model(part, output_hidden_states=True, use_cache=False)
        tapped.append(torch.cat([out.hidden_states[tap] for tap in taps], -1).half())
        logits.append(out.logits.half())
    tapped, logits = torch.cat(tapped), torch.cat(logits)
    ids = torch.bincount(tokens.flatten(), minlength=model.config.vocab_size).topk(DRAFT_VOCAB).indices.sort().values
    head, table, rotation = Head(), model.get_input_embeddings().weight.detach(), rotary(TOKENS)
    learned, held = len(tokens) - HELD, slice(len(tokens) - HELD, None)
    optimizer = torch.optim.AdamW(head.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=EPOCHS * (learned // BATCH))
    for epoch in range(EPOCHS):
        order = torch.randperm(learned, generator=generator)
        for part in order.split(BATCH):
            if len(part) < BATCH:
                continue
            steps = losses(head, table, rotation, tokens[part], said_by[part], tapped[part].float(), logits[part].float(), ids)
            loss = sum(0.8 ** at * loss for at, (loss, _) in enumerate(steps))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            steps = losses(head, table, rotation, tokens[held], said_by[held], tapped[held].float(), logits[held].float(), ids)
        print(epoch, [(round(float(loss), 3), round(right, 3)) for loss, right in steps], flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    tensors = {name: head[name].detach().to(torch.bfloat16).contiguous() for name in head.names}
    tensors["d2t"] = ids - torch.arange(DRAFT_VOCAB)
    tensors["t2d"] = torch.zeros(model.config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    save_file(tensors, args.out / "model.safetensors")
    config = dict(architectures=["LlamaForCausalLMEagle3"], model_type="llama", num_hidden_layers=1, hidden_act="silu", hidden_size=WIDTH,
                  intermediate_size=INNER, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=DIM, rms_norm_eps=1e-5,
                  rope_theta=100000.0, max_position_embeddings=2048, vocab_size=model.config.vocab_size, draft_vocab_size=DRAFT_VOCAB,
                  tie_word_embeddings=False, torch_dtype="bfloat16")
    (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
