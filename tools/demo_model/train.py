"""Trains the built-in model on two CPU cores.

    python train.py --work DIR            # starts, or resumes from DIR/checkpoint.pt
    python train.py --work DIR --until medium   # stops when that phase ends
    python train.py --work DIR --init ../../crates/folio/assets/demo --phase third   # trains the committed weights on

Owns the curriculum, the optimiser and the checkpoint. It reads packed rows that `pack.py` wrote and never makes text.

Why it looks as it does:

- Two threads, one core each, pull micro-batches from one list. Splitting every matrix product over two cores instead
  costs half the speed as soon as anything else runs on the machine, because each product waits for the slower core.
- The forward and backward pass run in bf16 on a copy of the f32 weights; the optimiser works on the f32 weights.
- Everything that decides the next step (weights, optimiser, phase, step, read positions, random state) is in the
  checkpoint, so that a killed run goes on as if nothing had happened.
"""

import argparse
import copy
import csv
import os
import shutil
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from model import Config, Llama

SEED = 20261121
CHECKPOINT_EVERY_S = 100
LOG_EVERY = 10


@dataclass
class Phase:
    """`mix` names row files and their share of the micro-batches; a micro-batch has `micro` tokens, a step `micros` of them."""

    name: str
    steps: int
    mix: dict
    lr: tuple = (1e-3, 1e-3)
    micro: int = 2048
    micros: int = 2


CALLS = {"calls-256": 0.16, "calls-512": 0.34, "calls-1024": 0.04, "quiz-2048": 0.06, "quiz-1024": 0.06, "quiz-512": 0.03, "facts-512": 0.05, "facts-256": 0.03, "tasks-256": 0.12, "sums-256": 0.04, "mix-512": 0.03, "story-256": 0.04}
CALLS_LAST = {"calls-256": 0.13, "calls-512": 0.26, "calls-1024": 0.03, "quiz-2048": 0.17, "facts-2048": 0.02, "quiz-1024": 0.1, "quiz-512": 0.03, "facts-512": 0.06, "facts-256": 0.03, "tasks-256": 0.14, "sums-256": 0.05, "mix-512": 0.04, "story-256": 0.05}
CALLS_MORE = {"calls-256": 0.12, "calls-512": 0.2, "calls-1024": 0.03, "quiz-2048": 0.14, "quiz-1024": 0.12, "quiz-512": 0.05, "facts-1024": 0.07, "facts-512": 0.09, "facts-256": 0.03, "tasks-256": 0.09, "sums-256": 0.05, "mix-512": 0.04, "story-256": 0.04}
CALLS_WIDE = {"calls-256": 0.16, "calls-512": 0.3, "calls-1024": 0.04, "quiz-2048": 0.11, "quiz-1024": 0.09, "quiz-512": 0.03, "facts-1024": 0.03, "facts-512": 0.06, "facts-256": 0.03, "tasks-256": 0.09, "sums-256": 0.04, "mix-512": 0.03, "story-256": 0.03}
PHASES = [
    # Copying heads first: random tokens with a random period. A fixed period is learnt five times faster, but by position, and
    # what was learnt then does not carry over to any other distance.
    Phase("repeat64", 1060, {"repeat:64": 1.0}),
    Phase("repeat64-fine", 75, {"repeat:64": 1.0}, lr=(4e-4, 4e-4)),
    # Text: facts and questions close together, every other task, stories; still some of the above.
    Phase("short", 210, {"facts-256": 0.38, "mix-256": 0.24, "sums-256": 0.12, "story-256": 0.1, "repeat:64": 0.16}, lr=(7e-4, 7e-4), micro=1024, micros=6),
    Phase("short-more", 300, {"facts-256": 0.48, "mix-256": 0.22, "sums-256": 0.08, "story-256": 0.08, "repeat:64": 0.14}, lr=(7e-4, 7e-4), micro=1024, micros=4),
    Phase("medium", 190, {"facts-256": 0.22, "facts-512": 0.3, "mix-512": 0.2, "facts-1024": 0.14, "story-256": 0.06, "repeat:64": 0.08}, lr=(7e-4, 7e-4), micro=1024, micros=4),
    # The whole window.
    Phase("long", 175, {"facts-256": 0.14, "facts-512": 0.22, "mix-512": 0.2, "facts-1024": 0.18, "facts-2048": 0.12, "sums-256": 0.06, "story-256": 0.05, "repeat:64": 0.03}, lr=(8e-4, 5.5e-4), micro=1024, micros=4),
    Phase("anneal", 170, {"facts-256": 0.12, "facts-512": 0.2, "mix-512": 0.22, "facts-1024": 0.2, "facts-2048": 0.12, "sums-256": 0.06, "story-256": 0.08}, lr=(5.2e-4, 4e-5), micro=1024, micros=4),
    # The same once more, longer and with more of the other tasks.
    Phase("second", 130, {"facts-256": 0.12, "facts-512": 0.24, "mix-512": 0.2, "facts-1024": 0.16, "facts-2048": 0.1, "sums-256": 0.08, "story-256": 0.07, "repeat:64": 0.03}, lr=(6e-4, 6e-4), micro=1024, micros=4),
    Phase("third", 1500, {"facts-256": 0.12, "facts-512": 0.2, "tasks-256": 0.16, "sums-256": 0.08, "mix-512": 0.14, "facts-1024": 0.14, "facts-2048": 0.08, "story-256": 0.08}, lr=(7e-4, 7e-4), micro=1024, micros=4),
    # From here on Muon. Questions about facts far back, long rows, and every other task.
    Phase("fourth", 900, {"facts-256": 0.08, "quiz-512": 0.14, "quiz-1024": 0.14, "quiz-2048": 0.12, "facts-512": 0.06, "facts-1024": 0.06, "facts-2048": 0.03, "tasks-256": 0.15, "sums-256": 0.07, "mix-512": 0.07, "story-256": 0.08}, lr=(9e-4, 9e-4), micro=1024, micros=6),
    Phase("fifth", 1850, {"facts-256": 0.08, "quiz-512": 0.08, "quiz-1024": 0.14, "quiz-2048": 0.22, "facts-512": 0.08, "facts-1024": 0.06, "facts-2048": 0.05, "tasks-256": 0.14, "sums-256": 0.05, "mix-512": 0.05, "story-256": 0.05}, lr=(9e-4, 9e-4), micro=1024, micros=6),
    Phase("last", 1600, {"facts-256": 0.06, "quiz-512": 0.08, "quiz-1024": 0.12, "quiz-2048": 0.2, "facts-512": 0.08, "facts-1024": 0.06, "facts-2048": 0.05, "tasks-256": 0.2, "sums-256": 0.06, "mix-512": 0.04, "story-256": 0.05}, lr=(9e-4, 2e-5), micro=1024, micros=6),
    # Tools, from the weights that the above made; as much of everything else, so that nothing is forgotten.
    Phase("calls-begin", 40, CALLS, lr=(1e-4, 6e-4), micro=1024, micros=4),
    Phase("calls", 1351, CALLS, lr=(6e-4, 6e-4), micro=1024, micros=4),
    Phase("calls-last", 2400, CALLS_LAST, lr=(5.5e-4, 1e-5), micro=1024, micros=4),
    Phase("calls-more", 500, CALLS_MORE, lr=(2.5e-4, 5e-6), micro=1024, micros=4),
    # Tools again, in the phrasings of the grammars.
    Phase("calls-wide-begin", 40, CALLS_WIDE, lr=(5e-5, 5e-4), micro=1024, micros=4),
    Phase("calls-wide", 2300, CALLS_WIDE, lr=(5e-4, 5e-6), micro=1024, micros=4),
]


def repeat_rows(rng, rows, length, vocab):
    """Random tokens with a random period; weight 1 from the second period on."""
    ids = np.empty((rows, length + 1), np.int64)
    w = np.zeros((rows, length + 1), np.float32)
    for r in range(rows):
        period = int(rng.integers(6, length // 2 + 1))
        seq = rng.integers(0, vocab, period)
        ids[r] = np.tile(seq, length // period + 2)[: length + 1]
        w[r, period + 1 :] = 1.0
    return ids, w


def recall_rows(rng, rows, length, vocab):
    """Keys of two tokens with values of one to four, among random filler; later the keys again: weight 1 on the values."""
    ids = rng.integers(0, vocab, (rows, length + 1))
    w = np.zeros((rows, length + 1), np.float32)
    for r in range(rows):
        pairs = [rng.integers(0, vocab, 2 + int(rng.integers(1, 5))) for _ in range(length // 24)]
        half = length // 2
        for at, which in zip(range(0, half - 6, half // len(pairs)), rng.permutation(len(pairs))):
            ids[r, at : at + len(pairs[which])] = pairs[which]
        at = half
        while at + 6 <= length + 1:
            pair = pairs[int(rng.integers(len(pairs)))]
            ids[r, at : at + len(pair)] = pair
            w[r, at + 2 : at + len(pair)] = 1.0
            at += len(pair) + int(rng.integers(0, 3))
    return ids, w


RANDOM_ROWS = {"repeat": repeat_rows, "recall": recall_rows}


class Rows:
    """Packed rows of one file: `NAME.ids` u16 and `NAME.w` u8 (weight times 100), read in order, again from the start when used up."""

    def __init__(self, folder: Path, name: str):
        self.width = int(name.rsplit("-", 1)[1]) + 1
        self.ids, self.w = folder / f"{name}.ids", folder / f"{name}.w"

    def read(self, start, rows):
        have = os.path.getsize(self.w) // self.width
        index = (start + np.arange(rows)) % have
        ids = np.memmap(self.ids, np.uint16, "r").reshape(-1, self.width)
        w = np.memmap(self.w, np.uint8, "r")[: have * self.width].reshape(-1, self.width)
        return ids[index].astype(np.int64), w[index].astype(np.float32) / 100


class Muon:
    """Muon for the matrices inside the blocks, AdamW for the rest (embedding and norms). Fused products are taken apart first.

    The update of a matrix is its momentum with all singular values made about one (Jordan et al. 2024), scaled by
    0.2 sqrt(max(rows, columns)) so that AdamW's rates fit (Liu et al. 2025, arXiv 2502.16982).
    """

    def __init__(self, model, threads):
        c = model.c
        kv = c.kv_heads * c.head_dim
        self.views = []  # (parameter, first row, rows)
        for block in model.blocks:
            for p, parts in ((block.qkv.weight, (c.hidden, kv, kv)), (block.o.weight, (c.hidden,)), (block.gate_up.weight, (c.intermediate, c.intermediate)), (block.down.weight, (c.hidden,))):
                at = 0
                for rows in parts:
                    self.views.append((p, at, rows))
                    at += rows
        inside = {id(p) for p, _, _ in self.views}
        rest = [p for p in model.parameters() if id(p) not in inside]
        self.adam = torch.optim.AdamW([{"params": [p for p in rest if p.dim() == 2], "weight_decay": 0.02}, {"params": [p for p in rest if p.dim() != 2], "weight_decay": 0.0}], lr=1e-3, betas=(0.9, 0.98), fused=True)
        self.momentum = [torch.zeros(rows, p.shape[1]) for p, _, rows in self.views]
        self.threads = threads

    @staticmethod
    def orthogonal(m):
        """m [n, rows, columns], rows <= columns: five Newton-Schulz steps."""
        x = m / (m.norm(dim=(1, 2), keepdim=True) + 1e-7)
        for _ in range(5):
            a = x @ x.transpose(1, 2)
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
        return x

    @torch.no_grad()
    def step(self, lr, beta=0.95, decay=0.05):
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        shapes = {}
        for i, (p, at, rows) in enumerate(self.views):
            g = p.grad[at : at + rows]
            self.momentum[i].mul_(beta).add_(g)
            u = g + beta * self.momentum[i]
            shapes.setdefault((min(u.shape), max(u.shape)), []).append((i, u.T if u.shape[0] > u.shape[1] else u))
        todo = [group[s : s + 4] for _, group in sorted(shapes.items(), key=lambda x: -x[0][0] * x[0][1]) for s in range(0, len(group), 4)]
        lock = threading.Lock()

        def worker():
            while True:
                with lock:
                    if not todo:
                        return
                    group = todo.pop(0)
                with torch.no_grad():
                    for (i, u), o in zip(group, self.orthogonal(torch.stack([u for _, u in group]))):
                        p, at, rows = self.views[i]
                        w = p[at : at + rows]
                        w.mul_(1 - lr * decay).add_(o if o.shape == w.shape else o.T, alpha=-lr * 0.2 * max(w.shape) ** 0.5)

        together(worker, self.threads)

    def state_dict(self):
        return {"adam": self.adam.state_dict(), "momentum": self.momentum}

    def load_state_dict(self, saved):
        self.adam.load_state_dict(saved["adam"])
        for m, s in zip(self.momentum, saved["momentum"]):
            m.copy_(s)


def together(work, threads):
    """Runs `work` in `threads` threads; the first error of any is raised here."""
    failed = []

    def guarded():
        try:
            work()
        except BaseException as error:
            failed.append(error)

    all_ = [threading.Thread(target=guarded) for _ in range(threads)]
    for t in all_:
        t.start()
    for t in all_:
        t.join()
    if failed:
        raise failed[0]


class Trainer:
    def __init__(self, work: Path, threads: int):
        self.work, self.threads = work, threads
        torch.manual_seed(SEED)
        self.model = Llama(Config())
        self.half = copy.deepcopy(self.model).to(torch.bfloat16)
        self.half.cos, self.half.sin = self.model.cos, self.model.sin
        self.opt = Muon(self.model, threads)
        self.rng = np.random.default_rng(SEED)
        self.state = {"phase": PHASES[0].name, "step": 0, "global_step": 0, "tokens": 0, "seconds": 0.0, "read": {}}
        self.path = work / "checkpoint.pt"
        if self.path.exists():
            self.load()
        self.rows = {}
        self.lock = threading.Lock()
        self.stop = False
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "stop", True))  # save after this step, then end

    def load(self):
        saved = torch.load(self.path, weights_only=False)
        self.model.load_state_dict(saved["model"])
        if "momentum" in saved["opt"]:  # else a run of the time when AdamW moved every weight
            self.opt.load_state_dict(saved["opt"])
        self.rng.bit_generator.state = saved["rng"]
        self.state = saved["state"]
        if self.state["phase"] not in [p.name for p in PHASES]:  # the curriculum grew since: go on with the first new phase
            new = [p.name for p in PHASES if not (self.work / f"end-{p.name}.pt").exists()]
            self.state["phase"], self.state["step"] = (new[0] if new else "done"), 0

    def go_on_after(self, log):
        """Counts on from the last line of the run that made the first weights, where its log is there."""
        lines = list(csv.DictReader(open(log))) if log.exists() else []
        if lines:
            last = lines[-1]
            self.state |= {"global_step": int(last["global_step"]), "tokens": int(last["tokens"]), "seconds": float(last["seconds"])}

    def save(self):
        tmp = self.path.with_suffix(".tmp")
        torch.save(
            {
                "config": self.model.c.as_dict(),
                "model": self.model.state_dict(),
                "opt": self.opt.state_dict(),
                "rng": self.rng.bit_generator.state,
                "state": self.state,
            },
            tmp,
        )
        os.replace(tmp, self.path)

    def batch(self, phase):
        """The micro-batches of one step, long ones first so that the two threads end together."""
        names, share = list(phase.mix), np.array(list(phase.mix.values()))
        out = []
        for _ in range(phase.micros):
            name = names[self.rng.choice(len(names), p=share / share.sum())]
            if ":" in name:
                kind, length = name.split(":")[0], int(name.split(":")[1])
                out.append(RANDOM_ROWS[kind](self.rng, phase.micro // length, length, self.model.c.vocab_size))
                continue
            rows = self.rows.setdefault(name, Rows(self.work / "rows", name))
            start, count = self.state["read"].get(name, 0), max(1, phase.micro // (rows.width - 1))
            out.append(rows.read(start, count))
            self.state["read"][name] = start + count
        return sorted(out, key=lambda b: -b[0].shape[1])

    def step(self, phase, lr):
        with torch.no_grad():
            torch._foreach_copy_(list(self.half.parameters()), list(self.model.parameters()))
        todo = [(torch.from_numpy(i), torch.from_numpy(w)) for i, w in self.batch(phase)]
        total = sum(w[:, 1:].sum() for _, w in todo)
        tokens = sum(i[:, 1:].numel() for i, _ in todo)
        grads = [torch.zeros_like(p) for p in self.model.parameters()]
        seen = [0.0, 0, 0]

        def worker():
            while True:
                with self.lock:
                    if not todo:
                        return
                    ids, w = todo.pop(0)
                loss, count, right = self.half.loss(ids, w)
                g = torch.autograd.grad(loss / total, list(self.half.parameters()))
                with self.lock:
                    torch._foreach_add_(grads, [x.float() for x in g])
                    seen[0] += loss.item()
                    seen[1] += count
                    seen[2] += right

        together(worker, self.threads)
        for p, g in zip(self.model.parameters(), grads):
            p.grad = g
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.opt.step(lr)
        return seen[0] / total.item(), seen[2] / max(1, seen[1]), norm.item(), tokens

    def run(self, until):
        names = [p.name for p in PHASES]
        log = open(self.work / "loss.csv", "a", newline="")
        out = csv.writer(log)
        if log.tell() == 0:
            out.writerow(["global_step", "phase", "step", "tokens", "seconds", "loss", "accuracy", "lr", "grad_norm"])
        saved = last = time.time()
        sums, count = np.zeros(3), 0
        while self.state["phase"] != "done":
            phase = PHASES[names.index(self.state["phase"])]
            s = self.state["step"]
            warm = min(1.0, (self.state["global_step"] + 1) / 50)
            lr = warm * (phase.lr[0] + (phase.lr[1] - phase.lr[0]) * s / phase.steps)
            loss, accuracy, norm, tokens = self.step(phase, lr)
            now = time.time()
            sums, count = sums + (loss, accuracy, norm), count + 1
            st = self.state
            st["step"], st["global_step"], st["tokens"] = s + 1, st["global_step"] + 1, st["tokens"] + tokens
            st["seconds"] += now - last
            last = now
            if count == LOG_EVERY:
                l, a, n = sums / count
                out.writerow([st["global_step"], phase.name, s + 1, st["tokens"], f"{st['seconds']:.1f}", f"{l:.4f}", f"{a:.4f}", f"{lr:.2e}", f"{n:.3f}"])
                log.flush()
                rate = st["tokens"] / st["seconds"]
                print(f"{phase.name} {s + 1}/{phase.steps}  loss {l:.3f}  right {a:.3f}  norm {n:.2f}  {st['tokens'] / 1e6:.2f} M tokens  {rate:.0f}/s", flush=True)
                sums, count = np.zeros(3), 0
            ended = st["step"] >= phase.steps
            if self.stop:
                self.save()
                return
            if ended:
                at = names.index(phase.name) + 1
                st["phase"], st["step"] = (names[at], 0) if at < len(names) else ("done", 0)
            if ended or now - saved > CHECKPOINT_EVERY_S:
                self.save()
                saved = time.time()
            if ended:
                shutil.copy(self.path, self.work / f"end-{phase.name}.pt")
                if until == phase.name:
                    return


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--work", type=Path, required=True, help="folder for rows, checkpoints and the log")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--until", help="stop after this phase")
    p.add_argument("--phase", help="jump to the start of this phase")
    p.add_argument("--init", type=Path, help="exported folder to take the first weights from, when there is no checkpoint yet")
    p.add_argument("--pid-file", type=Path)
    a = p.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    if a.pid_file:
        a.pid_file.write_text(f"{os.getpid()}\n")
    torch.set_num_threads(1)
    trainer = Trainer(a.work, a.threads)
    if a.init and not trainer.path.exists():
        from export import load_exported

        trainer.model.load_state_dict(load_exported(a.init).state_dict())
        trainer.go_on_after(a.work / "loss.csv")
    if a.phase:
        trainer.state["phase"], trainer.state["step"] = a.phase, 0
    trainer.run(a.until)


if __name__ == "__main__":
    main()
